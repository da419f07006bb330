"""Filters: tags, metadata and times as SQL, date phrases, and the checks of what is stored."""

from __future__ import annotations

import datetime
import enum
import json
import operator
import sqlite3
import sys
import types
from collections import OrderedDict

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import criomem
from criomem import ValidationError

UTC = datetime.UTC
CHICAGO, SAO_PAULO, CAIRO = "America/Chicago", "America/Sao_Paulo", "Africa/Cairo"
ZONES = ["UTC", CHICAGO, SAO_PAULO, CAIRO, "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia"]
DAY = 86_400_000
FIRST, END = -62_135_596_800_000, 253_402_300_800_000


def ms(text: str) -> int:
    """Milliseconds of an ISO text in UTC."""
    moment = datetime.datetime.fromisoformat(text).replace(tzinfo=UTC)
    return (moment - datetime.datetime(1970, 1, 1, tzinfo=UTC)) // datetime.timedelta(
        milliseconds=1
    )


def iso(at_ms: int) -> str:
    """The shortest ISO text of a time in UTC; "end" after the year 9999."""
    if at_ms == END:
        return "end"
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=at_ms)
    text = moment.isoformat(timespec="milliseconds")
    return text.removesuffix(".000").removesuffix(":00").removesuffix("T00:00")


def phrase(text: str, now: str = "2025-05-14T15:30:20.250", zone: str = "UTC") -> tuple[str, str]:
    start, end = criomem._date_range(text, criomem._zone(zone), ms(now))
    return iso(start), iso(end)


def where(now: str = "2025-05-14T15:30:20.250", **options: object) -> criomem._Where:
    return criomem._filters(now_ms=ms(now), **options)


class Rows:
    """A table with the columns that filters read."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:")
        self.db.execute(
            "CREATE TABLE item(id INTEGER PRIMARY KEY, tags, metadata, created_at_ms INTEGER,"
            " updated_at_ms INTEGER)"
        )

    def add(self, *, tags=None, metadata=None, created: int = 0, modified: int = 0) -> None:
        tags = None if tags is None else json.dumps(tags)
        metadata = None if metadata is None else json.dumps(metadata, ensure_ascii=False)
        self.db.execute(
            "INSERT INTO item(tags, metadata, created_at_ms, updated_at_ms) VALUES (?, ?, ?, ?)",
            (tags, metadata, created, modified),
        )

    def found(self, condition: criomem._Where) -> list[int]:
        """Which rows pass, counted from 0."""
        sql = f"SELECT id - 1 FROM item WHERE {condition.sql or 'true'} ORDER BY id"  # noqa: S608 - what is under test
        return [number for (number,) in self.db.execute(sql, condition.params)]


@pytest.fixture
def rows():
    table = Rows()
    yield table
    table.db.close()


@pytest.fixture(scope="module")
def shared():
    """One table for all examples of a property, emptied by each."""
    table = Rows()
    yield table
    table.db.close()


def passes(asked: object, *stored: object, rows: Rows) -> list[object]:
    """Which of the *stored* values of a field pass the filter *asked*; ... stands for no field."""
    for value in stored:
        rows.add(metadata={} if value is ... else {"f": value})
    return [stored[number] for number in rows.found(where(metadata={"f": asked}))]


# ---- Date phrases --------------------------------------------------------------------------------

# Now is Wednesday, 14 May 2025, 15:30:20.250 UTC.
PHRASES = {
    "today": ("2025-05-14", "2025-05-15"),
    "yesterday": ("2025-05-13", "2025-05-14"),
    "this week": ("2025-05-12", "2025-05-19"),
    "last week": ("2025-05-05", "2025-05-12"),
    "this month": ("2025-05-01", "2025-06-01"),
    "last month": ("2025-04-01", "2025-05-01"),
    "this quarter": ("2025-04-01", "2025-07-01"),
    "last quarter": ("2025-01-01", "2025-04-01"),
    "this year": ("2025-01-01", "2026-01-01"),
    "last year": ("2024-01-01", "2025-01-01"),
    "last 1 week": ("2025-05-07T15:30:20.250", "2025-05-14T15:30:20.251"),
    "past week": ("2025-05-07T15:30:20.250", "2025-05-14T15:30:20.251"),
    "past month": ("2025-04-14T15:30:20.250", "2025-05-14T15:30:20.251"),
    "past year": ("2024-05-14T15:30:20.250", "2025-05-14T15:30:20.251"),
    "last hour": ("2025-05-14T14:30:20.250", "2025-05-14T15:30:20.251"),
    "last day": ("2025-05-13T15:30:20.250", "2025-05-14T15:30:20.251"),
    "last 5 minutes": ("2025-05-14T15:25:20.250", "2025-05-14T15:30:20.251"),
    "past 36 hours": ("2025-05-13T03:30:20.250", "2025-05-14T15:30:20.251"),
    "last 30 days": ("2025-04-14T15:30:20.250", "2025-05-14T15:30:20.251"),
    "last 2 weeks": ("2025-04-30T15:30:20.250", "2025-05-14T15:30:20.251"),
    "last 3 months": ("2025-02-14T15:30:20.250", "2025-05-14T15:30:20.251"),
    "last 2 years": ("2023-05-14T15:30:20.250", "2025-05-14T15:30:20.251"),
    "0 days ago": ("2025-05-14", "2025-05-15"),
    "1 day ago": ("2025-05-13", "2025-05-14"),
    "3 days ago": ("2025-05-11", "2025-05-12"),
    "2 weeks ago": ("2025-04-28", "2025-05-05"),
    "5 months ago": ("2024-12-01", "2025-01-01"),
    "2 quarters ago": ("2024-10-01", "2025-01-01"),
    "1 year ago": ("2024-01-01", "2025-01-01"),
    "3 hours ago": ("2025-05-14T12:00", "2025-05-14T13:00"),
    "40 minutes ago": ("2025-05-14T14:50", "2025-05-14T14:51"),
    "2025": ("2025-01-01", "2026-01-01"),
    "2025-03": ("2025-03-01", "2025-04-01"),
    "2025-03-14": ("2025-03-14", "2025-03-15"),
    "March": ("2025-03-01", "2025-04-01"),
    "May": ("2025-05-01", "2025-06-01"),
    "June": ("2024-06-01", "2024-07-01"),
    "December": ("2024-12-01", "2025-01-01"),
    "March 2025": ("2025-03-01", "2025-04-01"),
    "Dec 2024": ("2024-12-01", "2025-01-01"),
    "March 14 2025": ("2025-03-14", "2025-03-15"),
    "March 14, 2025": ("2025-03-14", "2025-03-15"),
    "14 March 2025": ("2025-03-14", "2025-03-15"),
    "4 July 2024": ("2024-07-04", "2024-07-05"),
    "February 29 2024": ("2024-02-29", "2024-03-01"),
    "Q1 2025": ("2025-01-01", "2025-04-01"),
    "Q4 2024": ("2024-10-01", "2025-01-01"),
    "2025-03-14T10:20:30Z": ("2025-03-14T10:20:30", "2025-03-14T10:20:30.001"),
    "2025-03-14T10:20:30.123456+02:00": ("2025-03-14T08:20:30.123", "2025-03-14T08:20:30.124"),
    "2025-03-14 10:20": ("2025-03-14T10:20", "2025-03-14T10:20:00.001"),
    "since 2025-03": ("2025-03-01", "end"),
    "since last week": ("2025-05-05", "end"),
    "since March 14, 2025": ("2025-03-14", "end"),
    "before yesterday": ("0001-01-01", "2025-05-13"),
    "after 2025-03-14": ("2025-03-15", "end"),
    "after Q1 2025": ("2025-04-01", "end"),
    "between March and April": ("2025-03-01", "2025-05-01"),
    "between 2025-01-05 and 2025-01-05": ("2025-01-05", "2025-01-06"),
    "2024 to yesterday": ("2024-01-01", "2025-05-14"),
    "14 March 2025 to 3 days ago": ("2025-03-14", "2025-05-12"),
    "9999": ("9999-01-01", "end"),
    "last 999999999999999999 days": ("0001-01-01T15:30:20.250", "2025-05-14T15:30:20.251"),
    "999999999999 years ago": ("0001-01-01", "0001-01-01T00:00:00.001"),
    "before 0001": ("0001-01-01", "0001-01-01T00:00:00.001"),
    "after 9999": ("9999-12-31T23:59:59.999", "end"),
}


@pytest.mark.parametrize("text", PHRASES)
def test_a_phrase_means_its_range_of_the_calendar(text):
    assert phrase(text) == PHRASES[text]


@pytest.mark.parametrize("text", ["  LAST \t 30\n  DAYS ", "Last 30 Days", "last 30 days"])
def test_case_and_extra_white_space_are_ignored(text):
    assert phrase(text) == PHRASES["last 30 days"]


ON_OTHER_DAYS = {
    "Monday is the first day of its week": ("this week", "2025-05-12T00:00", "2025-05-12"),
    "Sunday is the last day of its week": ("this week", "2025-05-18T23:59:59.999", "2025-05-12"),
    "a week may begin in the year before": ("this week", "2025-01-01T12:00", "2024-12-30"),
    "a quarter begins with its first month": ("this quarter", "2025-10-01T00:00", "2025-10-01"),
    "a quarter ends with its third month": ("this quarter", "2025-12-31T23:59", "2025-10-01"),
    "last quarter may lie in the year before": ("last quarter", "2025-02-10T00:00", "2024-10-01"),
    "last month may lie in the year before": ("last month", "2025-01-31T12:00", "2024-12-01"),
    "a month ago from day 31 is its last day": (
        "past month",
        "2025-03-31T12:00",
        "2025-02-28T12:00",
    ),
    "a month ago in a leap year": ("past month", "2024-03-31T12:00", "2024-02-29T12:00"),
    "a year ago from a leap day": ("past year", "2024-02-29T12:00", "2023-02-28T12:00"),
    "yesterday may be a leap day": ("yesterday", "2024-03-01T12:00", "2024-02-29"),
    "a month has begun on its first instant": ("March", "2025-03-01T00:00", "2025-03-01"),
    "a month has not begun just before": ("March", "2025-02-28T23:59:59.999", "2024-03-01"),
}


@pytest.mark.parametrize("case", ON_OTHER_DAYS)
def test_a_range_begins_where_the_calendar_says(case):
    text, now, start = ON_OTHER_DAYS[case]
    assert phrase(text, now)[0] == start


IN_ZONES = {
    "March has the summer offset at its end": (
        *(CHICAGO, "March 2025", "2025-05-14T12:00"),
        ("2025-03-01T06:00", "2025-04-01T05:00"),
    ),
    "a day in spring has 23 hours": (
        *(CHICAGO, "today", "2025-03-09T18:00"),
        ("2025-03-09T06:00", "2025-03-10T05:00"),
    ),
    "a day in autumn has 25 hours": (
        *(CHICAGO, "2025-11-02", "2025-11-20T18:00"),
        ("2025-11-02T05:00", "2025-11-03T06:00"),
    ),
    "yesterday is the local one": (
        *(CHICAGO, "yesterday", "2025-03-10T04:59"),
        ("2025-03-08T06:00", "2025-03-09T06:00"),
    ),
    "a day ago across the change keeps the local hour": (
        *(CHICAGO, "last 1 day", "2025-03-09T18:00"),
        ("2025-03-08T19:00", "2025-03-09T18:00:00.001"),
    ),
    "24 hours ago across the change are 24 hours": (
        *(CHICAGO, "last 24 hours", "2025-03-09T18:00"),
        ("2025-03-08T18:00", "2025-03-09T18:00:00.001"),
    ),
    "no time at all ago in the repeated hour": (
        *(CHICAGO, "last 0 days", "2025-11-02T07:30"),
        ("2025-11-02T07:30", "2025-11-02T07:30:00.001"),
    ),
    "a day begins at one where midnight is skipped": (
        *(SAO_PAULO, "2018-11-04", "2018-12-01T12:00"),
        ("2018-11-04T03:00", "2018-11-05T02:00"),
    ),
    "a day ends before a skipped midnight": (
        *(SAO_PAULO, "2018-11-03", "2018-12-01T12:00"),
        ("2018-11-03T03:00", "2018-11-04T03:00"),
    ),
    "a day whose last hour is repeated has 25 hours": (
        *(SAO_PAULO, "2018-02-17", "2018-12-01T12:00"),
        ("2018-02-17T02:00", "2018-02-18T03:00"),
    ),
    "a skipped midnight in Cairo": (
        *(CAIRO, "today", "2024-04-26T12:00"),
        ("2024-04-25T22:00", "2024-04-26T21:00"),
    ),
    "a day that a zone left out has but an instant": (
        *("Pacific/Apia", "2011-12-30", "2012-02-01T12:00"),
        ("2011-12-30T10:00", "2011-12-30T10:00:00.001"),
    ),
    "an hour is that of the local clock": (
        *("Asia/Kolkata", "1 hours ago", "2025-05-14T10:10"),
        ("2025-05-14T08:30", "2025-05-14T09:30"),
    ),
    "an instant without a zone is local": (
        *(CHICAGO, "2025-03-14T10:20:30", "2025-05-14T12:00"),
        ("2025-03-14T15:20:30", "2025-03-14T15:20:30.001"),
    ),
    "an instant with a zone keeps it": (
        *(CHICAGO, "2025-03-14T10:20:30Z", "2025-05-14T12:00"),
        ("2025-03-14T10:20:30", "2025-03-14T10:20:30.001"),
    ),
}


@pytest.mark.parametrize("case", IN_ZONES)
def test_days_are_those_of_the_zone(case):
    zone, text, now, expected = IN_ZONES[case]
    assert phrase(text, now, zone) == expected


def test_a_month_in_chicago_is_echoed_to_the_millisecond():
    condition = where(created="March 2025", timezone=CHICAGO)
    expected = {"gte": "2025-03-01T06:00:00.000Z", "lt": "2025-04-01T05:00:00.000Z"}
    assert condition.echo == {"created": expected}


UNKNOWN = [
    *(
        "",
        "   ",
        "soon",
        "tomorrow",
        "last",
        "last -1 days",
        "last ten days",
        "days ago",
        "2025-13",
    ),
    *("2025-02-30", "2025-3-1", "0000", "0000-05", "March 0000", "Q5 2025", "Q1", "Q1 0000"),
    *("March 14", "March 32 2025", "14 March 14 2025", "Mars 2025", "0 March 2025", "25"),
    *("since", "since since 2025", "between 2025", "between 2024 and", "2024 to", "2024 to soon"),
    *("2025-03-14T25:00", "2025-03-14T10:20:30+99:00", "2025-03-14T", "\u0662\u0660\u0662\u0665"),
    *("today; DROP TABLE item", "\x00", "\ud800", "last " + "9" * 5000 + " days", "a " * 500),
]


@pytest.mark.parametrize("text", UNKNOWN, ids=[ascii(text)[:40] for text in UNKNOWN])
@pytest.mark.parametrize("field", ["created", "modified"])
def test_an_unknown_phrase_is_refused_with_the_accepted_forms(field, text):
    with pytest.raises(ValidationError, match="last or past 30 days") as caught:
        where(**{field: text})
    assert field in str(caught.value)
    assert "DROP" not in str(caught.value)


@pytest.mark.parametrize("text", ["2025 to 2024", "between today and yesterday", "2025 to 2024-12"])
def test_a_range_that_ends_before_it_begins_is_refused(text):
    with pytest.raises(ValidationError, match="ends before it begins"):
        where(created=text)


@pytest.mark.parametrize(
    "zone",
    ["America/Nowhere", "", "../etc/passwd", "/etc/passwd", "America", "a\0b", "\ud800", 5, None],
)
def test_an_unknown_zone_is_refused_even_if_no_date_needs_it(zone):
    with pytest.raises(ValidationError, match="timezone must be an IANA name"):
        where(timezone=zone)


def test_utc_needs_no_zone_data_and_another_zone_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zoneinfo", None)
    assert (
        where(created="2025", timezone="utc").echo["created"]["gte"] == "2025-01-01T00:00:00.000Z"
    )
    with pytest.raises(ValidationError, match="tzdata"):
        where(timezone=CHICAGO)


SIMPLE_PHRASES = st.one_of(
    st.sampled_from(
        ["today", "yesterday", "March", "Dec", "Q3 2019", "2024-02-29", "0001", "9999"]
    ),
    st.builds("{} {}".format, st.sampled_from(["this", "last"]), st.sampled_from(["week", "year"])),
    st.builds(
        "{} {} {}{}".format,
        st.sampled_from(["last", "past"]),
        st.integers(0, 400) | st.integers(0, 10**17),
        st.sampled_from(["minute", "hour", "day", "week", "month", "quarter", "year"]),
        st.sampled_from(["", "s"]),
    ),
    st.builds(
        "{} {}s ago".format, st.integers(0, 10**6), st.sampled_from(["hour", "day", "month"])
    ),
    st.dates().map(str),
    st.datetimes(timezones=st.none() | st.just(UTC)).map(lambda moment: moment.isoformat()),
)
PHRASE = SIMPLE_PHRASES | st.builds(
    "{} {}".format, st.sampled_from(["since", "before", "after"]), SIMPLE_PHRASES
)
NOW = st.integers(0, 4_102_444_800_000) | st.integers(FIRST - DAY, END + DAY)


@settings(deadline=None)
@given(PHRASE, st.sampled_from(ZONES), NOW)
@example("2011-12-30", "Pacific/Apia", 1_300_000_000_000)
@example("today", "Pacific/Apia", END)
@example("past year", SAO_PAULO, FIRST)
def test_every_range_is_whole_milliseconds_half_open_and_not_empty(text, zone, now_ms):
    start, end = criomem._date_range(text, criomem._zone(zone), now_ms)
    assert type(start) is type(end) is int
    assert FIRST <= start < end <= END


@settings(deadline=None)
@given(st.dates(datetime.date(1975, 1, 1), datetime.date(2090, 1, 1)), st.sampled_from(ZONES))
def test_days_follow_each_other_without_gap_or_overlap_and_hold_their_own_hours(date, zone):
    tz = criomem._zone(zone)
    start, end = criomem._date_range(str(date), tz, 0)
    following = criomem._date_range(str(date + datetime.timedelta(days=1)), tz, 0)
    assume(end - start > 1)  # a day that the zone left out
    assert following[0] == end
    for inside in (start, (start + end) // 2, end - 1):
        moment = datetime.datetime.fromtimestamp(inside // 1000, UTC).astimezone(tz)
        assert moment.date() == date


# ---- Range objects -------------------------------------------------------------------------------

RANGE_OBJECTS = {
    "gte of a day is its start": ({"gte": "2025-03-14"}, {"gte": "2025-03-14"}),
    "gt of a day is its end": ({"gt": "2025-03-14"}, {"gte": "2025-03-15"}),
    "lt of a day is its start": ({"lt": "2025-03-14"}, {"lt": "2025-03-14"}),
    "lte of a day is its end": ({"lte": "2025-03-14"}, {"lt": "2025-03-15"}),
    "lte of a month is its end": ({"lte": "2025-02"}, {"lt": "2025-03-01"}),
    "a year": ({"gte": "2024", "lte": "2024"}, {"gte": "2024-01-01", "lt": "2025-01-01"}),
    "gte of an instant": ({"gte": "2025-03-14T10:00Z"}, {"gte": "2025-03-14T10:00"}),
    "gt of an instant": ({"gt": "2025-03-14T10:00:00Z"}, {"gte": "2025-03-14T10:00:00.001"}),
    "lte of an instant": ({"lte": "2025-03-14T10:00:00Z"}, {"lt": "2025-03-14T10:00:00.001"}),
    "lt of an instant": ({"lt": "2025-03-14T10:00:00+02:00"}, {"lt": "2025-03-14T08:00"}),
    "milliseconds": ({"gte": 0, "lt": 1000}, {"gte": "1970-01-01", "lt": "1970-01-01T00:00:01"}),
    "a datetime in UTC": (
        {"gte": datetime.datetime(2025, 3, 14, 10, 0, 0, 500_900, tzinfo=UTC)},
        {"gte": "2025-03-14T10:00:00.500"},
    ),
    "a datetime without a zone": (
        {"gt": datetime.datetime(2025, 3, 14, 10)},
        {"gte": "2025-03-14T10:00:00.001"},
    ),
    "a date": ({"lte": datetime.date(2025, 3, 14)}, {"lt": "2025-03-15"}),
    "far before the calendar": ({"gte": -(10**30)}, {}),
    "far after the calendar": ({"lt": 10**30}, {}),
    "nothing lies there": ({"gte": 10**30}, {"gte": "9999-12-31T23:59:59.999"}),
}


@pytest.mark.parametrize("case", RANGE_OBJECTS)
def test_a_range_object_is_echoed_as_a_half_open_range(case):
    asked, expected = RANGE_OBJECTS[case]
    assert where(modified=asked).echo == {
        "modified": {side: criomem._iso(ms(text)) for side, text in expected.items()}
    }


@pytest.mark.parametrize(
    ("bound", "start"),
    [
        ("2025-03-09", "2025-03-09T06:00"),
        ("2025-03-09T12:00", "2025-03-09T17:00"),
        (datetime.datetime(2025, 3, 9, 12), "2025-03-09T17:00"),
        (datetime.datetime(2025, 3, 9, 12, tzinfo=UTC), "2025-03-09T12:00"),
        (datetime.datetime(2025, 11, 2, 1, 30, fold=0), "2025-11-02T06:30"),
        (datetime.datetime(2025, 11, 2, 1, 30, fold=1), "2025-11-02T07:30"),
        (datetime.datetime.max, "9999-12-31T23:59:59.999"),
        (datetime.datetime.min, None),
    ],
    ids=["day", "text", "datetime", "aware", "first of two", "second of two", "last", "first"],
)
def test_what_has_no_zone_is_in_the_zone_given(bound, start):
    zone = "Asia/Tokyo" if start is None else CHICAGO
    echo = where(created={"gte": bound}, timezone=zone).echo["created"]
    assert echo == ({} if start is None else {"gte": criomem._iso(ms(start))})


def test_a_datetime_alone_is_that_millisecond_and_a_date_that_day():
    moment = datetime.datetime(2025, 3, 14, 10, tzinfo=UTC)
    assert where(created=moment).echo == where(created=moment.isoformat()).echo
    assert where(created=moment.date()).echo == where(created="2025-03-14").echo


BAD_RANGES = {
    "empty": ({}, "created must not be empty"),
    "both lower bounds": ({"gt": 1, "gte": 1}, "gte or gt, not both"),
    "both upper bounds": ({"lt": 1, "lte": 1}, "lte or lt, not both"),
    "an unknown key": ({"from": 1}, "gte, gt, lte, lt"),
    "a key with a dollar sign": ({"$gte": 1}, "use gte"),
    "a key in capitals": ({"LT": 1}, "use lt"),
    "a key of another type": ({5: 1}, "gte, gt, lte, lt"),
    "None": ({"gte": None}, "created.gte"),
    "a bool": ({"gte": True}, "created.gte"),
    "a float": ({"lt": 1.5}, "created.lt"),
    "a phrase": ({"lt": "yesterday"}, "created.lt"),
    "no such day": ({"lt": "2025-02-30"}, "created.lt"),
    "a number alone": (5, "created must be a date phrase"),
    "a list": (["2025"], "created must be a date phrase"),
}


@pytest.mark.parametrize("case", BAD_RANGES)
def test_a_bad_range_object_is_refused_by_name(case):
    asked, message = BAD_RANGES[case]
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")) as caught:
        where(created=asked)
    assert caught.value.code == "invalid_value"


def test_created_and_modified_read_their_own_columns(rows):
    for created, modified in ((10, 10), (10, 30), (30, 30)):
        rows.add(created=created, modified=modified)
    assert rows.found(where(created={"lt": 20})) == [0, 1]
    assert rows.found(where(modified={"gte": 20})) == [1, 2]
    assert rows.found(where(created={"lt": 20}, modified={"gte": 20})) == [1]
    assert rows.found(where(created={"gte": 10, "lt": 10})) == []
    assert rows.found(where(created={"gte": 10, "lte": 10})) == [0, 1]


def test_a_rolling_range_holds_this_millisecond_and_not_the_next(rows):
    now = "2025-05-14T15:30:20.250"
    for distance in (-DAY - 1, -DAY, 0, 1):
        rows.add(created=ms(now) + distance)
    assert rows.found(where(now, created="last 1 days")) == [1, 2]


# ---- Tags ----------------------------------------------------------------------------------------

TAGGED = [
    None,
    [],
    ["a"],
    ["b"],
    ["a", "b"],
    ["a", "b", "c"],
    ["A"],
    ["a%"],
    ['"x"', "é", "\U0001f600"],
]
TAG_FILTERS = {
    "a list means any of": (["a", "c"], [2, 4, 5]),
    "a tuple is a list": (("b",), [3, 4, 5]),
    "in": ({"$in": ["b"]}, [3, 4, 5]),
    "all": ({"$all": ["a", "b"]}, [4, 5]),
    "all with doubles": ({"$all": ["a", "a"]}, [2, 4, 5]),
    "all of more than a row can hold": ({"$all": [f"t{i}" for i in range(100)]}, []),
    "none of": ({"$nin": ["a"]}, [0, 1, 3, 6, 7, 8]),
    "operators add up": ({"$in": ["a"], "$all": ["b"], "$nin": ["c"]}, [4]),
    "no pattern": (["%"], []),
    "a percent sign is itself": (["a%"], [7]),
    "quotes and other scripts": ({"$all": ['"x"', "é", "\U0001f600"]}, [8]),
    "very many": ([f"t{i}" for i in range(5_000)] + ["c"], [5]),
}


@pytest.mark.parametrize("case", TAG_FILTERS)
def test_tags_are_compared_as_they_are(rows, case):
    asked, expected = TAG_FILTERS[case]
    for tags in TAGGED:
        rows.add(tags=tags)
    assert rows.found(where(tags=asked)) == expected


BAD_TAG_FILTERS = {
    "an empty list": ([], "tags must not be an empty list"),
    "an empty object": ({}, "tags must not be empty"),
    "an empty list in an operator": ({"$in": ["a"], "$nin": []}, r"tags\.\$nin must not be"),
    "an unknown operator": ({"$any": ["a"]}, r"tags takes only \$in, \$all, \$nin"),
    "an operator without its sign": ({"in": ["a"]}, r"use \$in"),
    "a bare string": ("abc", "tags must be a list of strings, not str"),
    "a bare string in an operator": ({"$in": "abc"}, r"tags\.\$in must be a list"),
    "None in a list": (["a", None], r"tags\[1\] must be a string, not NoneType"),
    "a number": ([5], r"tags\[0\] must be a string, not int"),
    "an empty tag": ([""], r"tags\[0\] must have 1 to 256 characters"),
    "a control character": (["a\0x"], r"tags\[0\] has a control character"),
    "a lone surrogate": (["\ud800"], r"tags\[0\] has a control character or a lone surrogate"),
}


@pytest.mark.parametrize("case", BAD_TAG_FILTERS)
def test_a_bad_tag_filter_is_refused_by_name(case):
    asked, message = BAD_TAG_FILTERS[case]
    with pytest.raises(ValidationError, match=message):
        where(tags=asked)


# ---- Metadata ------------------------------------------------------------------------------------

VALUES = [..., 1, 1.0, True, False, 0, "1", "true", "a", "b", ["a", "c"], [], "", -2, 2.5]
METADATA_FILTERS = {
    "an integer finds its float": (1, [1, 1.0]),
    "a float finds its integer": (1.0, [1, 1.0]),
    "zero is not False": (0, [0]),
    "minus zero is zero": (-0.0, [0]),
    "True is not one": (True, [True]),
    "False is not zero": ({"$eq": False}, [False]),
    "a digit is not a number": ("1", ["1"]),
    "true as text": ("true", ["true"]),
    "an empty string": ("", [""]),
    "an element of a list": ("a", ["a", ["a", "c"]]),
    "any of": (["b", "c"], ["b", ["a", "c"]]),
    "any of numbers": ({"$in": [1, 2.5]}, [1, 1.0, 2.5]),
    "any of bools": ([True, False], [True, False]),
    "not equal": ({"$ne": "a"}, [..., 1, 1.0, True, False, 0, "1", "true", "b", [], "", -2, 2.5]),
    "not True": ({"$ne": True}, [v for v in VALUES if v is not True]),
    "not a number": ({"$nin": [1, 0]}, [v for v in VALUES if type(v) is bool or v not in (0, 1)]),
    "greater": ({"$gt": 0}, [1, 1.0, 2.5]),
    "greater or equal": ({"$gte": 1.0}, [1, 1.0, 2.5]),
    "less": ({"$lt": 0.5}, [0, -2]),
    "between": ({"$gt": -5, "$lte": 0}, [0, -2]),
    "text after": ({"$gte": "a"}, ["true", "a", "b", ["a", "c"]]),
    "text before": ({"$lt": "a"}, ["1", ""]),
    "an element in the range": ({"$gt": "b", "$lt": "d"}, [["a", "c"]]),
    "operators add up": ({"$in": ["a", "b"], "$ne": "b"}, ["a", ["a", "c"]]),
    "both at once": ({"$eq": "a", "$nin": ["c"]}, ["a"]),
    "a number and a string": ({"$gt": 0, "$lt": "z"}, []),
}


@pytest.mark.parametrize("case", METADATA_FILTERS)
def test_metadata_is_compared_by_type_and_value(rows, case):
    asked, expected = METADATA_FILTERS[case]
    found = passes(asked, *VALUES, rows=rows)
    assert [(type(value), value) for value in found] == [(type(v), v) for v in expected]


@pytest.mark.parametrize("big", [2**53, 2**53 + 1, 2**63 - 1, -(2**63), -(2**53) - 1])
def test_large_integers_and_floats_compare_exactly(rows, big):
    stored = [big, big - 1 if big > 0 else big + 1, float(big)]
    assert passes(big, *stored, rows=rows) == [value for value in stored if value == big]
    for sign, compare in (("$gt", operator.gt), ("$lte", operator.le)):
        condition = where(metadata={"f": {sign: float(big)}})
        assert rows.found(condition) == [i for i, v in enumerate(stored) if compare(v, float(big))]


ODD_NAMES = [
    "a.b",
    'say "hi"',
    "$.a",
    "a[0]",
    "é",
    "a\\b",
    "' OR 1=1 --",
    "\U0001f600",
    "$eq",
    ":x",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_field_name_is_only_ever_a_name(rows, name):
    for other in [*ODD_NAMES, "a"]:
        rows.add(metadata={other: "x" if other == name else "y"})
    assert rows.found(where(metadata={name: "x"})) == [ODD_NAMES.index(name)]
    assert len(rows.found(where(metadata={name: {"$ne": "x"}}))) == len(ODD_NAMES)


def test_fields_add_up_and_a_row_without_metadata_has_no_field(rows):
    for metadata in (None, {}, {"a": 1}, {"a": 1, "b": "x"}, {"b": "x"}):
        rows.add(metadata=metadata)
    assert rows.found(where(metadata={"a": 1, "b": "x"})) == [3]
    assert rows.found(where(metadata={"a": {"$ne": 1}, "b": {"$nin": ["x"]}})) == [0, 1]
    assert rows.found(where(metadata={})) == [0, 1, 2, 3, 4]


def test_the_largest_filter_runs(rows):
    rows.add(metadata={})
    every = {
        "$ne": 1,
        "$nin": [1, 2],
        "$gt": 0,
        "$gte": 0,
        "$lt": 9,
        "$lte": 9,
        "$eq": 3,
        "$in": [3],
    }
    asked = {f"f{i}": every for i in range(64)}
    tags = {"$in": ["a"], "$all": ["b"], "$nin": ["c"]}
    assert rows.found(where(metadata=asked, tags=tags, created="2025", modified="2025")) == []


BAD_METADATA_FILTERS = {
    "no mapping": ([1], "metadata must be a flat dict, not list"),
    "None": ({"kind": None}, r"metadata\['kind'\] must be a string, number or bool, not NoneType"),
    "an empty list": ({"kind": []}, r"metadata\['kind'\] must be a list of one value or more"),
    "an empty object": ({"kind": {}}, r"metadata\['kind'\] must not be empty"),
    "an unknown operator": ({"kind": {"$like": "x"}}, r"metadata\['kind'\] takes only \$eq"),
    "an operator without its sign": ({"kind": {"gte": 5}}, r"use \$gte"),
    "None in an operator": ({"kind": {"$ne": None}}, r"metadata\['kind'\]\.\$ne must be"),
    "None in a list": ({"kind": ["a", None]}, r"metadata\['kind'\]\[1\] must be"),
    "strings and numbers": ({"kind": ["a", 1]}, "all strings, all numbers or all bools"),
    "bools and numbers": ({"kind": {"$in": [True, 1]}}, "all strings, all numbers or all bools"),
    "a list as one value": ({"kind": {"$eq": ["a"]}}, r"\.\$eq must be a string, number or bool"),
    "a value as a list": ({"kind": {"$in": "abc"}}, r"\.\$in must be a list"),
    "an empty list in an operator": ({"kind": {"$nin": []}}, r"\.\$nin must be a list of one"),
    "a range of bools": ({"kind": {"$gt": True}}, r"\.\$gt must be a number or a string, not bool"),
    "a range of lists": ({"kind": {"$lt": [1]}}, r"\.\$lt must be"),
    "NaN": ({"kind": float("nan")}, "NaN or infinite"),
    "infinity": ({"kind": {"$lt": float("inf")}}, "NaN or infinite"),
    "an integer beyond 64 bits": ({"kind": 2**63}, "beyond 64 bits"),
    "a control character": ({"kind": "a\0x"}, "control character"),
    "a nested list": ({"kind": [["a"]]}, r"metadata\['kind'\]\[0\] must be"),
    "bytes": ({"kind": b"x"}, "not bytes"),
    "a field that is no string": ({5: 1}, "field name"),
    "a field without a name": ({"": 1}, "field name"),
    "too many fields": ({f"f{i}": 1 for i in range(65)}, "at most 64 fields"),
}


@pytest.mark.parametrize("case", BAD_METADATA_FILTERS)
def test_a_bad_metadata_filter_is_refused_by_name(case):
    asked, message = BAD_METADATA_FILTERS[case]
    with pytest.raises(ValidationError, match=message):
        where(metadata=asked)


# ---- What is built -------------------------------------------------------------------------------


def test_no_filter_is_no_condition():
    assert where() == criomem._Where("", {}, (), {})


def test_nothing_that_was_given_stands_in_the_sql():
    secret = "canary"
    condition = where(
        tags={"$in": [secret], "$all": [secret], "$nin": [secret]},
        metadata={secret: {"$eq": secret, "$nin": [secret], "$gt": secret}},
        created={"gte": 424242},
        timezone="UTC",
    )
    assert secret not in condition.sql
    assert "424242" not in condition.sql
    assert all(f":{name}" in condition.sql for name in condition.params)


def test_another_table_has_its_own_columns_and_parameters():
    options = {"tags": ["a"], "metadata": {"f": 1}, "created": "2025"}
    item, thread = where(**options), where(table="thread", **options)
    assert "item" not in thread.sql
    assert "thread.tags" in thread.sql
    assert not item.params.keys() & thread.params.keys()


def test_an_error_never_tells_what_was_given():
    secret = "canary-5f3a"
    for options in (
        {"tags": {secret: ["a"]}},
        {"tags": [secret + "\0"]},
        {"tags": [secret * 100]},
        {"metadata": {"f": {secret: 1}}},
        {"metadata": {"f": secret * 200}},
        {"metadata": {"f": [secret, 1]}},
        {"metadata": {secret + "\0": 1}},
        {"created": secret},
        {"created": {secret: 1}},
        {"modified": {"gte": secret}},
        {"timezone": secret},
    ):
        with pytest.raises(ValidationError) as caught:
            where(**options)
        assert secret not in str(caught.value)


def test_only_what_must_be_there_narrows():
    condition = where(
        tags={"$in": ["a", "b"], "$all": ["c", "d"], "$nin": ["e"]},
        metadata={
            "eq": 1,
            "any": ["x", "y"],
            "ops": {"$eq": True, "$in": [True, False], "$ne": False, "$nin": [False]},
            "range": {"$gt": 5},
        },
        created="2025",
    )
    tag, field = criomem._tag_term, criomem._field_term
    assert condition.terms == (
        (tag("a"), tag("b")),
        (tag("c"),),
        (tag("d"),),
        (field("eq", 1),),
        (field("any", "x"), field("any", "y")),
        (field("ops", True),),
        (field("ops", True), field("ops", False)),
    )


def test_a_very_long_list_is_left_to_sql():
    assert where(tags=[f"t{i}" for i in range(1_001)]).terms == ()
    assert len(where(tags=[f"t{i}" for i in range(1_000)]).terms[0]) == 1_000


def test_terms_begin_with_private_characters_and_keep_kinds_apart():
    assert criomem._namespace_term("users/42")[0] == "\ue000"
    assert criomem._tag_term("users/42")[0] == "\ue001"
    terms = criomem._metadata_terms({"a": 1, "b": True, "c": "1", "d": ["x", "y", "x"], "e": []})
    assert len(terms) == len(set(terms)) == 5
    assert all(term[0] == "\ue002" and len(term) == 13 and term[1:].isalnum() for term in terms)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (0, -0.0, True),
        (2**53, float(2**53), True),
        (2**53 + 1, float(2**53), False),
        (10**18, 1e18, True),
        (1, True, False),
        (1, "1", False),
        (True, "True", False),
        (0.5, "0.5", False),
        ("a", "A", False),
    ],
)
def test_a_term_is_that_of_the_typed_value(one, other, same):
    assert (criomem._field_term("f", one) == criomem._field_term("f", other)) is same
    assert criomem._field_term("f", one) != criomem._field_term("g", one)


# ---- Properties against a plain model ------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 2),
    st.sampled_from([0.5, -0.0, 1.0, 2.0, 1e18, float(2**53)]),
    st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, -(2**63), 10**18]),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
)
STRINGS = st.sampled_from(["", "a", "b", "1", "true", "é", "z\U0001f600", "\uffee"]) | st.text(
    st.characters(exclude_categories=("Cc", "Cs")), max_size=4
)
SCALARS = NUMBERS | STRINGS | st.booleans()
FIELDS = st.sampled_from(["f", "g", "a.b", '"'])
STORED = st.dictionaries(FIELDS, SCALARS | st.lists(STRINGS, max_size=3), max_size=4)
LISTS = st.one_of(
    *(st.lists(kind, min_size=1, max_size=3) for kind in (NUMBERS, STRINGS, st.booleans()))
)
OPERATORS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["$eq", "$ne"], SCALARS),
        **dict.fromkeys(["$in", "$nin"], LISTS),
        **dict.fromkeys(["$gt", "$gte", "$lt", "$lte"], NUMBERS | STRINGS),
    },
).filter(bool)
ASKED = st.dictionaries(FIELDS, SCALARS | LISTS | OPERATORS, min_size=1, max_size=2)
COMPARE = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}


def kind(value: object) -> type:
    return float if type(value) is int else type(value)


def holds(stored: object, name: str, operand: object) -> bool:
    """One operator on one stored value (None where the field is missing)."""
    if name in ("$ne", "$nin"):
        return not holds(stored, {"$ne": "$eq", "$nin": "$in"}[name], operand)
    if name == "$in":
        return any(holds(stored, "$eq", each) for each in operand)
    if isinstance(stored, list):
        return any(holds(each, name, operand) for each in stored)
    if kind(stored) is not kind(operand):
        return False
    if isinstance(operand, str):
        stored, operand = stored.encode(), operand.encode()
    return COMPARE.get(name, operator.eq)(stored, operand)


def fits(stored: dict, asked: dict) -> bool:
    for field, condition in asked.items():
        if not isinstance(condition, dict):
            condition = {"$in" if isinstance(condition, list) else "$eq": condition}
        if not all(holds(stored.get(field), name, value) for name, value in condition.items()):
            return False
    return True


def narrowed(terms: list[str], condition: criomem._Where) -> bool:
    """Whether the index would offer a row with these *terms*."""
    return all(set(group) & set(terms) for group in condition.terms)


@settings(deadline=None)
@given(st.lists(STORED, min_size=1, max_size=8), ASKED)
def test_sql_finds_the_rows_of_the_model_and_the_terms_lose_none(shared, stored, asked):
    shared.db.execute("DELETE FROM item")
    for metadata in stored:
        shared.add(metadata=metadata)
    condition = where(metadata=asked)
    found = shared.found(condition)
    assert found == [i for i, metadata in enumerate(stored) if fits(metadata, asked)]
    assert all(narrowed(criomem._metadata_terms(stored[i]), condition) for i in found)


@settings(deadline=None)
@given(st.lists(STORED, min_size=1, max_size=8), SCALARS, LISTS)
def test_ne_and_nin_are_exactly_what_eq_and_in_are_not(shared, stored, value, values):
    shared.db.execute("DELETE FROM item")
    for metadata in stored:
        shared.add(metadata=metadata)
    for yes, no, operand in (("$eq", "$ne", value), ("$in", "$nin", values)):
        equal = shared.found(where(metadata={"f": {yes: operand}}))
        unequal = shared.found(where(metadata={"f": {no: operand}}))
        assert sorted(equal + unequal) == list(range(len(stored)))


TAGS = st.lists(st.sampled_from("abcdé"), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    st.lists(st.none() | st.lists(st.sampled_from("abcdé"), max_size=4), min_size=1, max_size=8),
    st.fixed_dictionaries({}, optional={"$in": TAGS, "$all": TAGS, "$nin": TAGS}).filter(bool),
)
def test_tag_filters_find_the_rows_of_the_model_and_the_terms_lose_none(shared, stored, asked):
    def fits_tags(tags: set[str]) -> bool:
        return (
            ("$in" not in asked or bool(tags & set(asked["$in"])))
            and tags >= set(asked.get("$all", ()))
            and not tags & set(asked.get("$nin", ()))
        )

    shared.db.execute("DELETE FROM item")
    for tags in stored:
        shared.add(tags=criomem._check_tags(tags))
    condition = where(tags=asked)
    found = shared.found(condition)
    assert found == [i for i, tags in enumerate(stored) if fits_tags(set(tags or ()))]
    terms = [[criomem._tag_term(tag) for tag in tags or ()] for tags in stored]
    assert all(narrowed(terms[i], condition) for i in found)


@settings(deadline=None)
@given(STORED)
def test_metadata_that_was_checked_is_equal_and_of_the_same_types(metadata):
    checked = criomem._check_metadata(metadata)
    assert json.dumps(checked) == json.dumps(metadata)
    assert checked is not metadata


# ---- What is stored ------------------------------------------------------------------------------


class Colour(str, enum.Enum):  # noqa: UP042 - the older kind, whose str() is not its value
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Degrees(float):
    pass


def test_tags_keep_their_order_and_lose_doubles():
    assert criomem._check_tags(None) is None
    assert criomem._check_tags([]) == []
    assert criomem._check_tags(("b", "a", "b")) == ["b", "a"]
    assert criomem._check_tags(["x"] * 100) == ["x"]
    assert len(criomem._check_tags([f"t{i}" for i in range(64)])) == 64
    assert criomem._check_tags(["漢" * 256]) == ["漢" * 256]


def test_subclasses_come_back_as_their_base_types():
    (tag,) = criomem._check_tags([Colour.RED])
    given_ = {
        Colour.RED: Colour.RED,
        "n": Level.HIGH,
        "x": Degrees(1.5),
        "l": (Colour.RED,),
        "b": True,
    }
    for mapping in (given_, OrderedDict(given_), types.MappingProxyType(given_)):
        checked = criomem._check_metadata(mapping)
        assert checked == {"red": "red", "n": 3, "x": 1.5, "l": ["red"], "b": True}
        assert type(checked) is dict
        assert [type(value) for value in checked.values()] == [str, int, float, list, bool]
        assert {type(text) for text in (tag, *checked, *checked["l"])} == {str}


def test_metadata_takes_the_edges_of_its_bounds():
    metadata = {
        "漢" * 170: "漢" * 1_024,
        "low": -(2**63),
        "high": 2**63 - 1,
        "list": ["x"] * 64,
        "none": [],
        "empty": "",
    }
    assert criomem._check_metadata(metadata) == metadata
    assert criomem._check_metadata({f"f{i}": i for i in range(64)}) == {
        f"f{i}": i for i in range(64)
    }
    assert criomem._check_metadata(None) is None


BAD_TAGS = {
    "a string": ("abc", "tags must be a list of strings, not str"),
    "a set": ({"a"}, "tags must be a list of strings, not set"),
    "a dict": ({"a": 1}, "tags must be a list of strings, not dict"),
    "too many": ([f"t{i}" for i in range(65)], "at most 64"),
    "too long": (["a" * 257], r"tags\[0\] must have 1 to 256 characters"),
    "empty": (["a", ""], r"tags\[1\] must have 1 to 256 characters"),
    "None": ([None], r"tags\[0\] must be a string"),
    "NUL": (["a\0"], "control character"),
    "a new line": (["a\nb"], "control character"),
    "a lone surrogate": (["\udc00"], "lone surrogate"),
}


@pytest.mark.parametrize("case", BAD_TAGS)
def test_bad_tags_are_refused_before_they_are_stored(case):
    tags, message = BAD_TAGS[case]
    with pytest.raises(ValidationError, match=message):
        criomem._check_tags(tags)


BAD_METADATA = {
    "a list": ([("a", 1)], "metadata must be a flat dict, not list"),
    "None": ({"f": None}, r"metadata\['f'\] must be a string, number or bool, not NoneType"),
    "a dict": ({"f": {"a": 1}}, "not dict"),
    "a list of numbers": ({"f": [1]}, r"metadata\['f'\]\[0\] must be a string, not int"),
    "a nested list": ({"f": [["a"]]}, r"metadata\['f'\]\[0\] must be a string, not list"),
    "a list too long": ({"f": ["x"] * 65}, "at most 64 strings"),
    "a string too long": ({"f": "x" * 1_025}, "0 to 1,024 characters"),
    "an element too long": ({"f": ["x" * 1_025]}, r"metadata\['f'\]\[0\] must have"),
    "an integer too large": ({"f": 2**63}, "64 bits"),
    "an integer too small": ({"f": -(2**63) - 1}, "64 bits"),
    "NaN": ({"f": float("nan")}, "NaN"),
    "infinity": ({"f": -float("inf")}, "NaN or infinite"),
    "bytes": ({"f": b"x"}, "not bytes"),
    "a date": ({"f": datetime.date(2025, 1, 1)}, "not date"),
    "NUL": ({"f": "a\0x"}, "control character"),
    "a surrogate in a list": ({"f": ["\ud800"]}, "surrogate"),
    "a bad field name": ({"a\0b": 1}, "field name"),
    "a long field name": ({"x" * 513: 1}, "field name"),
    "a field that is no string": ({1: 1}, "field name"),
    "too many fields": ({f"f{i}": 1 for i in range(65)}, "64 fields"),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata_is_refused_before_it_is_stored(case):
    metadata, message = BAD_METADATA[case]
    with pytest.raises(ValidationError, match=message):
        criomem._check_metadata(metadata)
