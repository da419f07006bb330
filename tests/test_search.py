"""Search by words: what matches, in which order, exactly, under every filter and any query."""

import itertools
import json
import math
import random
import re
import string
import sys

import pytest
from helpers import (
    VOCABULARY,
    Clock,
    Model,
    any_text,
    apply,
    filters,
    in_memory,
    keys,
    operations,
    queries,
    raw,
    refused,
    rounded,
    share,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import criomem


def scores(items):
    return {item["key"]: round(item["score"], 6) for item in items}


# ---- Words: what finds what ---------------------------------------------------------------------

FINDS = [
    # text, queries that find it whole
    (
        "walnut",
        ["walnut", "Walnut", "WALNUT", " walnut ", "walnut!", "(walnut)", '"walnut"', "walnut\x00"],
    ),
    ("favorite_color", ["favorite", "color", "favorite_color", "favoriteColor", "favorite-color"]),
    ("favorite_color", ["favorite.color", "color favorite", "FAVORITE_COLOR", "favoritecolor"]),
    ("favoriteColor", ["favorite", "color", "favorite_color", "favoriteColor", "favoritecolor"]),
    ("favorite-color", ["favorite", "color", "favorite_color", "favoriteColor", "favoritecolor"]),
    ("favorite.color", ["favorite", "color", "favorite_color", "favoriteColor", "favoritecolor"]),
    ("parseHTMLPage", ["parse", "parsehtmlpage", "parseHTMLPage"]),
    ("it's John's book", ["book", "john", "John's", "it's John's book"]),
    ("C++ and C# v2.0", ["c++", "C#", "c", "v2"]),
    ("POL-358", ["pol-358", "POL 358", "358", "pol358", "POL358"]),
    ("version 20.04", ["20.04", "04", "version 20"]),
    ("crème brûlée", ["creme brulee", "CRÈME", "brulee", "brûle\u0301e"]),
    ("creme brulee", ["crème", "brûlée"]),
    ("Straße", ["strasse", "STRASSE", "straße"]),
    ("Strasse", ["straße", "Straẞe"]),
    ("ﬁnance", ["finance", "Finance", "ﬁnance"]),
    ("\uff21\uff22\uff23 \uff11\uff12", ["abc", "12"]),
    ("Αθήνα ΟΔΟΣ", ["αθηνα", "ΑΘΗΝΑ", "οδος", "οδός"]),
    ("Привет МИР", ["привет", "мир"]),
    ("Việt Nam", ["viet nam", "việt"]),
    ("İstanbul", ["istanbul", "ISTANBUL"]),
    ("Ångström ²", ["angstrom", "2"]),
    ("شكرا جزيلا", ["شكرا", "جزيلا"]),
    ("שלום", ["שלום"]),
    # the light English stemmer
    ("allergies", ["allergy", "Allergies"]),
    ("allergy", ["allergies"]),
    ("colors", ["color"]),
    ("color", ["colors"]),
    ("walking", ["walk", "walked", "walks"]),
    ("walk", ["walking", "walked"]),
    ("quickly", ["quick"]),
    ("cache", ["caching", "cached", "caches"]),
    ("stories", ["story"]),
    ("running", ["runs", "run"]),
    # stop words fall out of a query, not out of the text
    ("the color of the car", ["what is the color", "the car"]),
    ("The Who", ["the who", "The", "who"]),
    ("to be or not to be", ["to be or not to be", "to be"]),
    # scripts without spaces, and Hangul
    ("记忆是智能体的核心", ["记忆", "智能体", "核心", "心", "是智能", "记忆是智能体的核心"]),
    ("私は東京に住んでいます", ["東京", "京に", "東", "住んで", "いま", "ます"]),
    ("AIメモリ検索", ["ai", "メモリ", "検索", "メ"]),
    ("한국어 메모리에서", ["메모리", "한국", "국어", "메", "리에서"]),
    ("ສະບາຍດີ", ["ສະ", "ບາຍ"]),
    ("𠀀𠀁𠀂", ["𠀀", "𠀁𠀂"]),
    ("हिन्दी में", ["हिन्दी", "में"]),
    ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
    # numbers, and what is inside a value
    ({"age": 42, "height": 1.5}, ["42", "age", "height", "age 42"]),
    ({"pets": [{"name": "Rex"}, "walnut"]}, ["rex", "pets", "name", "pets walnut rex"]),
    (["a", ["walnut", {"falcon": None}]], ["walnut", "falcon"]),
    (2024, ["2024"]),
    (-17, ["17"]),
]
MISSES = [
    ("walnut", ["wal", "nut", "and", "wallnut", "-", "*"]),
    ("walnut", ["wal*", "w?lnut", "%", "_"]),
    ("favorite_color", ["favoritecolour", "orite", "ecol"]),
    ("东京", ["京东", "北京"]),
    ("東京。大阪", ["京大", "京阪"]),
    ("हिन्दी", ["हद", "हन्द", "हिन्दा"]),
    ("की", ["का", "क"]),
    ("แมว", ["วแ", "มแ"]),
    ("한국어", ["어한", "국한"]),
    (True, ["true", "1"]),
    (None, ["null", "none"]),
    ("the walnut", ["the falcon", "what is the falcon"]),
]


@in_memory
@pytest.mark.parametrize(("text", "asked"), FINDS, ids=[f"{n}" for n in range(len(FINDS))])
def test_a_query_finds_the_text_whole(store, text, asked):
    store.remember("a", "target", text)
    store.remember("a", "other", "something else")
    for query in asked:
        found = scores(store.search("a", query))
        assert found.get("target") == 1.0, (text, query)
        assert "other" not in found, (text, query)


@in_memory
@pytest.mark.parametrize(("text", "asked"), MISSES, ids=[f"{n}" for n in range(len(MISSES))])
def test_a_query_does_not_find_the_text(store, text, asked):
    store.remember("a", "target", text)
    for query in asked:
        assert store.search("a", query) == [], (text, query)


UNSPACED = [
    "记忆是智能体的核心能力",
    "ひらがなカタカナ東京都",
    "สวัสดีชาวโลก",
    "ສະບາຍດີຊາວໂລກ",
    "សួស្តីពិភពលោក",
    "မင်္ဂလာပါ",
    "안녕하세요세계",
]


@in_memory
@pytest.mark.parametrize("text", UNSPACED)
def test_every_piece_of_one_to_three_characters_is_found(store, text):
    store.remember("a", "target", text)
    for size in (1, 2, 3, 4, len(text)):
        for start in range(len(text) - size + 1):
            piece = text[start : start + size]
            if not any(char.isalpha() for char in piece):
                continue  # vowel signs alone are no word
            assert scores(store.search("a", piece)) == {"target": 1.0}, ascii(piece)


cjk = st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FA5), min_size=1, max_size=12)
hangul = st.text(st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3), min_size=1, max_size=12)


@given(st.lists(cjk | hangul, min_size=1, max_size=4), st.data())
def test_any_piece_of_random_han_or_hangul_is_found(runs, data):
    run = data.draw(st.sampled_from(runs))
    start = data.draw(st.integers(0, len(run) - 1))
    piece = run[start : start + data.draw(st.integers(1, 3))]
    with criomem.Storage() as store:
        store.remember("a", "target", data.draw(st.sampled_from([" ", "。", "x", "-"])).join(runs))
        assert scores(store.search("a", piece)) == {"target": 1.0}


ascii_words = st.lists(
    st.text(string.ascii_letters + string.digits, min_size=1, max_size=70), min_size=1, max_size=6
)


@given(ascii_words, st.sampled_from([" ", "_", "-", ".", ", ", "/", "\n", "\x00"]))
def test_every_text_is_found_whole_by_itself_and_by_each_of_its_words(words, separator):
    text = separator.join(words)
    with criomem.Storage() as store:
        store.remember("a", "target", text)
        for query in (text, *words):
            assert scores(store.search("a", query)) == {"target": 1.0}, query


@given(any_text)
def test_any_text_with_a_letter_finds_itself(text):
    with criomem.Storage() as store:
        store.remember("a", "target", text)
        found = store.search("a", text)
        if not text.strip():
            assert keys(found) == ["target"]
            assert "score" not in found[0]
        else:
            wanted = {"target": 1.0} if any(map(str.isalnum, text)) else {}
            assert scores(found) == wanted


def test_a_word_is_found_in_key_value_label_and_description_and_nowhere_else(store):
    store.remember("a", "walnut", 1)
    store.remember("a", "in value", {"x": ["walnut"]})
    store.remember("a", "in dict key", {"walnut": None})
    store.remember("a", "in label", 1, label="walnut")
    store.remember("a", "in description", 1, description="a walnut")
    store.remember("a", "in tag", 1, tags=["walnut"])
    store.remember("a", "in metadata", 1, metadata={"walnut": "walnut"})
    store.remember("walnut", "in namespace", 1)
    found = ["in description", "in label", "in dict key", "in value", "walnut"]
    assert keys(store.search("", "walnut")) == found


def test_the_query_drops_stop_words_before_stemming(store):
    store.remember("a", "k", "wills")
    store.remember("a", "other", "testament")
    assert scores(store.search("a", "wills testament")) == {"k": 0.5, "other": 0.5}


def test_stop_words_do_not_count_in_the_score(store):
    store.remember("a", "k", "color")
    assert scores(store.search("a", "what is the color of a car")) == {"k": 0.5}


def test_a_doubled_word_of_a_query_counts_once(store):
    store.remember("a", "k", "walnut")
    assert scores(store.search("a", "walnut Walnut WALNUTS falcon")) == {"k": 0.5}


@in_memory
@pytest.mark.parametrize(
    "text",
    ["!", "!!! ???", "🙂", "\u200b", "-_-", "\x00", "\ud800", "'\"", "…", "%", "*", "\u0301"],
)
@pytest.mark.parametrize("mode", ["keyword", "weighted"])
def test_a_query_without_a_letter_or_digit_finds_nothing(store, text, mode):
    store.remember("a", "k", f"walnut {text} falcon")
    store.remember("a", text if text.isprintable() else "odd", text)
    assert store.search("a", text, mode=mode) == []


@in_memory
@pytest.mark.parametrize("text", [None, "", " ", "\t\n", "\u00a0", "\u3000"])
@pytest.mark.parametrize("mode", [None, "keyword", "weighted"])
def test_no_text_finds_everything_newest_first_without_a_score(store, text, mode):
    for key in ("one", "two", "three"):
        store.remember("a", key, key)
    store.remember("a", "one", "again")
    found = store.search("a", text, mode=mode)
    assert keys(found) == ["one", "three", "two"]
    assert not any("score" in item for item in found)


# ---- Limits of words ----------------------------------------------------------------------------


def test_a_query_counts_its_first_128_distinct_words(store):
    filler = [f"filler{n}" for n in range(200)]
    store.remember("a", "k", "walnut")
    assert scores(store.search("a", " ".join([*filler[:127], "walnut"]))) == {
        "k": round(1 / 128, 6)
    }
    assert store.search("a", " ".join([*filler[:128], "walnut"])) == []
    assert store.search("a", " ".join([*filler[:128], *filler[:100], "walnut"])) == []
    assert keys(store.search("a", " ".join(["filler0"] * 500 + ["walnut"]))) == ["k"]


@in_memory
@pytest.mark.parametrize("mode", ["keyword", "weighted"])
def test_a_query_of_ten_thousand_words_is_answered(store, mode):
    store.remember("a", "k", "filler7 walnut")
    assert keys(store.search("a", " ".join(f"filler{n}" for n in range(10_000)), mode=mode)) == [
        "k"
    ]
    assert store.search("a", "x" * 1_000_000, mode=mode) == []


def test_a_word_counts_its_first_64_characters(store):
    store.remember("a", "long", "x" * 70)
    store.remember("a", "other", "x" * 63)
    assert keys(store.search("a", "x" * 64)) == ["long"]
    assert keys(store.search("a", "x" * 64 + "z" * 9)) == ["long"]
    assert keys(store.search("a", "x" * 63)) == ["other"]
    assert keys(store.search("a", "x" * 40_000)) == ["long"]


def test_a_row_counts_its_first_20_000_terms(store):
    store.remember("a", "in", " ".join([*(f"q{n}z" for n in range(19_900)), "walnut"]))
    store.remember("a", "out", " ".join([*(f"q{n}z" for n in range(20_100)), "walnut"]))
    assert keys(store.search("a", "walnut")) == ["in"]
    assert keys(store.search("a", "q19800z")) == ["out", "in"]
    store.remember("a", "out", "walnut")
    assert keys(store.search("a", "walnut")) == ["out", "in"]
    assert store.search("a", "q20050z") == []


def test_a_mebibyte_of_han_is_stored_and_found(store):
    store.remember("a", "k", "".join(chr(0x4E00 + n % 20_000) for n in range(300_000)))
    assert keys(store.search("a", "\u4e00\u4e01")) == ["k"]
    assert store.forget("a", "k") is True
    assert store.search("a", "\u4e00\u4e01") == []


# ---- Hostile queries ----------------------------------------------------------------------------

HOSTILE = [
    '"', '""', "'", "it's", '"walnut', 'walnut"', "walnut AND", "AND", "OR", "NOT", "a AND b",
    "NEAR(", "NEAR(a b)", "*", "walnut*", "(", ")", "(walnut", "^walnut", "-walnut", "+", "a+b",
    "body:walnut", "{body}:walnut", "item:x", "20.04", "%", "_", "walnut OR 1=1",
    "'; DROP TABLE item; --", "\\", "walnut\\", "\x00", "walnut\x00falcon", ";",
    "SELECT * FROM item", "a\ud800b", "\ud83d\ude00", "\ue000walnut", "\ue000", "?", "?1", ":p",
    "@p", "$p", "--", "/*", "walnut NOT falcon", "fts:", "rank", "rowid:1", "[a]", "{", "}", "#",
    "~", "`", "|", "&", "walnut & falcon",
]  # fmt: skip


@pytest.mark.parametrize("mode", ["keyword", "weighted"])
@pytest.mark.parametrize("size", [3, 60])
def test_no_query_means_anything_to_sql_or_the_word_index(store, mode, size):
    texts = ["walnut", "falcon b", "a", "and or not near", "1 4 20 p rank", "select drop from", "x"]
    store.remember_many(
        {"namespace": "a", "key": f"{n}-", "value": texts[n % len(texts)]} for n in range(size)
    )
    for query in HOSTILE:
        said = set(re.findall(r"[a-z0-9]+", query.lower()))
        for item in store.search("a", query, limit=None, mode=mode):
            assert said & {*re.findall(r"[a-z0-9]+", item["value"]), *item["key"].split("-")}, query
    assert len(store.search("a", "walnut NOT falcon", limit=None)) >= len(
        store.search("a", "walnut", limit=None)
    )
    assert len(store.search("a", limit=None)) == size


@given(any_text | st.lists(st.sampled_from([*HOSTILE, "walnut"]), max_size=5).map(" ".join))
def test_no_query_raises_for_its_spelling(text):
    with criomem.Storage() as store:
        store.remember("a", "k", "walnut falcon and or not near body")
        store.remember("b", "k", text)
        for namespace in ("", "a", "b"):
            for mode in ("keyword", "weighted"):
                for item in store.search(namespace, text, mode=mode):
                    assert not text.strip() or 0 < item["score"] <= 1


@in_memory
@pytest.mark.parametrize("wrong", [5, b"walnut", ["walnut"], {"text": "walnut"}, True, 1.5])
def test_a_query_that_is_no_text_is_refused(store, wrong):
    with refused():
        store.search("a", wrong)


# ---- Exactness ----------------------------------------------------------------------------------


def without(kind):
    """A function that leaves operations of that kind out of a history."""
    return lambda history: [operation for operation in history if operation[0] != kind]


def filled(history, clock):
    """A store and a model with the same history."""
    store, model = criomem.Storage(clock=clock), Model(clock)
    for operation in history:
        apply(store, model, operation)
    return store, model


@given(operations, st.lists(st.tuples(queries, filters), min_size=1, max_size=6))
def test_search_equals_a_naive_search_under_every_filter(history, asked):
    store, model = filled(history, Clock())
    with store:
        for query, given_filters in asked:
            question = {**query, **given_filters}
            assert rounded(store.search(**question)) == rounded(model.search(**question)), question
        assert store.check() == []


@given(operations.map(without("advance")), st.lists(queries, min_size=1, max_size=5))
def test_search_inside_a_transaction_equals_a_naive_search(history, asked):
    clock = Clock()
    model = Model(clock)
    with criomem.Storage(clock=clock) as store:
        with store.transaction():
            for operation, question in zip(history, itertools.cycle(asked), strict=False):
                apply(store, model, operation)
                assert rounded(store.search(**question)) == rounded(model.search(**question))
        for question in asked:
            assert rounded(store.search(**question)) == rounded(model.search(**question))
        assert store.check() == []


def without_expiry(operation):
    """The operation without a time to live: what expired and what was pruned weighs otherwise."""
    *start, last = operation
    if isinstance(last, dict):
        last = {name: value for name, value in last.items() if name != "ttl_secs"}
    return (*start, last)


@given(
    operations.map(lambda history: list(map(without_expiry, history))),
    st.lists(st.tuples(queries, filters)),
)
def test_weighted_search_equals_the_formula(history, asked):
    store, model = filled(history, Clock())
    with store:
        for query, given_filters in asked:
            question = {**query, **given_filters, "mode": "weighted"} | {"min_score": 0.0}
            whole = {
                **question,
                "limit": None,
                "offset": 0,
                "order_by": "relevance",
                "order": "desc",
            }
            assert_weighted(store, model, whole)
            ranked = store.search(**whole)
            end = None if question["limit"] is None else question["offset"] + question["limit"]
            page = store.search(
                **{**whole, "limit": question["limit"], "offset": question["offset"]}
            )
            assert page == ranked[question["offset"] : end]
            assert sorted(keys(store.search(**question))) == sorted(keys(page))


def assert_weighted(store, model, question):
    """The same rows with the scores of the formula; equal scores newest first, others by score."""
    mine, wanted = store.search(**question), model.search(**question)

    def named(items):
        return {(i["namespace"], i["key"]): i.get("score") for i in items}

    assert named(mine) == pytest.approx(named(wanted), abs=2e-5), question
    place = {(row["namespace"], row["key"]): row["seq"] for row in model.rows.values()}
    order = [(i.get("score", 0), place[i["namespace"], i["key"]]) for i in mine]
    assert order == sorted(order, reverse=True), question


def test_rare_words_weigh_more_by_the_formula(store):
    for n in range(9):
        store.remember("a", f"common{n}", "walnut")
    store.remember("a", "rare", "falcon")
    store.remember("a", "newest", "walnut")
    common, rare = (math.log(1 + (11 - df + 0.5) / (df + 0.5)) for df in (10, 1))
    found = store.search("a", "walnut falcon", limit=None, mode="weighted")
    assert keys(found)[:2] == ["rare", "newest"]
    assert found[0]["score"] == pytest.approx(rare / (rare + common), abs=2e-5)
    assert found[1]["score"] == pytest.approx(common / (rare + common), abs=2e-5)
    assert keys(store.search("a", "walnut falcon", mode="keyword"))[0] == "newest"


def test_weights_count_the_whole_store_and_words_that_are_nowhere(store):
    store.remember("a", "k", "walnut")
    for n in range(5):
        store.remember("b", f"k{n}", "walnut")
    present, absent = (math.log(1 + (6 - df + 0.5) / (df + 0.5)) for df in (6, 0))
    (found,) = store.search("a", "walnut falcon", mode="weighted")
    assert found["score"] == pytest.approx(present / (present + absent), abs=2e-5)


def test_weights_count_expired_rows_until_they_are_pruned(store, clock):
    store.remember("a", "k", "walnut falcon")
    for n in range(5):
        store.remember("a", f"k{n}", "walnut", ttl_secs=1)
    clock.advance(1)

    def share(n, df_walnut):
        walnut, falcon = (math.log(1 + (n - df + 0.5) / (df + 0.5)) for df in (df_walnut, 1))
        tulip = math.log(1 + (n + 0.5) / 0.5)
        return (walnut + falcon) / (walnut + falcon + tulip)

    ask = {"namespace": "a", "text": "walnut falcon tulip", "mode": "weighted"}
    (before,) = store.search(**ask)
    assert before["score"] == pytest.approx(share(6, 6), abs=2e-5)
    store.prune()
    (after,) = store.search(**ask)
    assert after["score"] == pytest.approx(share(1, 1), abs=2e-5)


def test_weighted_ties_are_newest_first(store):
    for key in ("one", "two", "three"):
        store.remember("a", key, "walnut")
    store.remember("a", "one", "walnut")
    assert keys(store.search("a", "walnut", mode="weighted")) == ["one", "three", "two"]


# ---- Options ------------------------------------------------------------------------------------


@pytest.fixture
def ranked(store, clock):
    """Five facts; the score falls as the age grows, except for two of one score."""
    for key, text in {
        "e": "walnut",
        "d": "walnut falcon",
        "c": "walnut falcon tulip",
        "b": "walnut falcon tulip",
        "a": "walnut falcon tulip mango",
    }.items():
        store.remember("n", key, text)
        clock.advance(1)
    store.update("n", "d", label="touched")
    return store


ASK = "walnut falcon tulip mango"


@pytest.mark.parametrize("mode", ["keyword", "weighted"])
def test_pages_by_offset_are_pieces_of_the_whole(ranked, mode):
    whole = ranked.search("n", ASK, limit=None, mode=mode)
    assert keys(whole) == ["a", "b", "c", "d", "e"]
    for limit in range(7):
        for offset in range(7):
            page = ranked.search("n", ASK, limit=limit, offset=offset, mode=mode)
            assert page == whole[offset : offset + limit]
    assert ranked.search("n", ASK, limit=None, offset=2, mode=mode) == whole[2:]


def test_order_rearranges_the_rows_that_relevance_chose(ranked):
    assert keys(ranked.search("n", ASK, 3)) == ["a", "b", "c"]
    assert keys(ranked.search("n", ASK, 3, order="asc")) == ["c", "b", "a"]
    assert keys(ranked.search("n", ASK, 3, offset=1, order_by="created")) == ["b", "c", "d"]
    assert keys(ranked.search("n", ASK, 3, offset=1, order_by="created", order="asc")) == [
        "d",
        "c",
        "b",
    ]
    assert keys(ranked.search("n", ASK, 3, offset=1, order_by="modified")) == ["d", "b", "c"]
    assert keys(ranked.search("n", ASK, 3, offset=1, order_by="modified", order="asc")) == [
        "c",
        "b",
        "d",
    ]
    assert keys(ranked.search("n", limit=2, order_by="created")) == ["a", "d"]
    assert keys(ranked.search("n", limit=2, order="asc")) == ["a", "d"]


def test_rows_of_one_millisecond_keep_the_order_in_which_they_were_created(store):
    for key in ("one", "two", "three"):
        store.remember("a", key, "walnut")
    store.update("a", "one", label="touched")
    store.remember("a", "two", "walnut again")
    for text in (None, "walnut"):
        assert keys(store.search("a", text, order_by="created")) == ["three", "two", "one"]
        assert keys(store.search("a", text, order_by="created", order="asc"))[0] == "one"
        assert keys(store.search("a", text, order_by="modified")) == ["two", "one", "three"]


def test_min_score_leaves_out_what_scores_less(ranked):
    assert keys(ranked.search("n", ASK, min_score=0.75)) == ["a", "b", "c"]
    assert keys(ranked.search("n", ASK, min_score=0.76)) == ["a"]
    assert keys(ranked.search("n", ASK, min_score=1.0)) == ["a"]
    assert keys(ranked.search("n", ASK, min_score=0)) == ["a", "b", "c", "d", "e"]
    assert ranked.search("n", "walnut nowhere", min_score=0.6) == []


@pytest.mark.parametrize("mode", ["keyword", "weighted"])
def test_min_score_fills_its_page_from_further_down(ranked, mode):
    wanted = [item for item in ranked.search("n", ASK, None, mode=mode) if item["score"] >= 0.5]
    assert ranked.search("n", ASK, 2, offset=2, min_score=0.5, mode=mode) == wanted[2:4]


def test_recursive_false_means_this_namespace_alone(store):
    for namespace in ("users", "users/4", "users/42"):
        store.remember(namespace, namespace.replace("/", "-"), "walnut")
    for text in (None, "walnut"):
        assert keys(store.search("users", text, recursive=False)) == ["users"]
        assert keys(store.search("users/4", text, recursive=False)) == ["users-4"]
        assert keys(store.search("users/4", text)) == ["users-4"]
        assert store.search("user", text) == []
        assert len(store.search("users", text)) == len(store.search("", text)) == 3


@in_memory
@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "fuzzy"},
        {"mode": ""},
        {"mode": 5},
        {"order_by": "score"},
        {"order_by": None},
        {"order": "up"},
        {"order": None},
        {"min_score": "1"},
        {"min_score": float("nan")},
        {"min_score": None},
        {"limit": "all"},
        {"timezone": "Mars/Olympus"},
        {"after": 5},
        {"after": ["x"]},
    ],
    ids=repr,
)
def test_an_unknown_option_value_names_the_option(store, wrong):
    with refused() as caught:
        store.search("a", None if "after" in wrong else "walnut", **wrong)
    assert next(iter(wrong)) in str(caught.value)


@pytest.mark.parametrize("mode", ["semantic", "hybrid"])
def test_a_search_by_meaning_without_an_embedder_says_so(store, mode):
    with refused(criomem.CriomemError):
        store.search("a", "walnut", mode=mode)


# ---- Pages by keyset ----------------------------------------------------------------------------


def pages(store, limit, **asked):
    """All pages, each asked for after the last record of the one before."""
    after = None
    for _ in range(1000):
        page = store.search("a", limit=limit, after=after, **asked)
        if not page:
            return
        yield page
        after = page[-1]
    pytest.fail("the pages never end")


def joined(found):
    return [item["key"] for page in found for item in page]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_keyset_pages_join_to_the_whole(store, limit):
    for n in range(7):
        store.remember("a" if n % 2 else "a/b", f"k{n}", n, tags=["odd" if n % 2 else "even"])
    assert joined(pages(store, limit)) == [f"k{n}" for n in reversed(range(7))]
    assert joined(pages(store, limit, tags=["odd"])) == ["k5", "k3", "k1"]
    assert joined(pages(store, limit, recursive=False)) == ["k5", "k3", "k1"]


def test_keyset_pages_stay_right_while_others_write(store):
    for n in range(9):
        store.remember("a", f"k{n}", n)
    seen = []
    for n, page in enumerate(pages(store, 2)):
        seen += keys(page)
        store.remember("a", f"new{n}", n)
        if n == 1:
            store.forget("a", "k1")
            store.update("a", "k8", label="read already")
    assert seen == ["k8", "k7", "k6", "k5", "k4", "k3", "k2", "k0"]


def test_keyset_pages_of_one_store_go_on_in_another(file_store, path, clock):
    for n in range(9):
        file_store.remember("a", f"k{n}", n)
        clock.advance(1)
    with criomem.Storage(path, clock=clock) as other:
        first = file_store.search("a", limit=3)
        second = other.search("a", limit=3, after=json.loads(json.dumps(first[-1])))
        assert keys(second) == ["k5", "k4", "k3"]
        other.update("a", "k3", label="touched")
        third = file_store.search("a", limit=2, after=second[-1])
        assert keys(third) == ["k2", "k1"]
        file_store.forget("a", "k1")
        assert keys(other.search("a", after=third[-1])) == ["k0"]


def test_keyset_pages_go_on_after_the_last_record_was_touched_or_forgotten(store):
    for n in range(9):
        store.remember("a", f"k{n}", n)
    first = store.search("a", limit=3)
    store.update("a", first[-1]["key"], label="touched")
    second = store.search("a", limit=3, after=first[-1])
    assert keys(second) == ["k5", "k4", "k3"]
    store.forget("a", second[-1]["key"])
    assert keys(store.search("a", limit=3, after=second[-1])) == ["k2", "k1", "k0"]


# ---- Walls between namespaces -------------------------------------------------------------------


def index_terms(path):
    """Every term that stands in the word index, read past the library."""
    with raw(path) as other:
        tables = other.execute(
            "SELECT name FROM sqlite_master WHERE sql LIKE '%USING fts5(%' ORDER BY name"
        ).fetchall()
        terms = []
        for n, (table,) in enumerate(tables):
            other.execute(
                f"CREATE VIRTUAL TABLE temp.v{n} USING fts5vocab('main', '{table}', 'row')"
            )
            terms += [term for (term,) in other.execute(f"SELECT term FROM temp.v{n}")]  # noqa: S608 (a number)
    return terms


def test_a_text_made_of_the_index_terms_of_another_namespace_finds_nothing_there(file_store, path):
    victim = {"tags": ["secret"], "metadata": {"m": "x", "n": 1}}
    for n in range(40, 60):
        file_store.remember(f"users/{n}", "k", "walnut", **victim)
    terms = index_terms(path)
    assert "walnut" in terms
    assert len(terms) > 20
    for text in (" ".join(terms), "\n".join(terms), terms, dict.fromkeys(terms, "walnut")):
        file_store.remember("users/7", "forged", text, label=" ".join(terms)[:900])
        for n in range(40, 60):
            for query in ("walnut", " ".join(terms), *terms[:5], *terms[-25:]):
                found = file_store.search(f"users/{n}", query, limit=None)
                assert {item["namespace"] for item in found} <= {f"users/{n}"}
        assert {
            i["namespace"] for i in file_store.search("", "walnut", limit=None, tags=["secret"])
        } == {f"users/{n}" for n in range(40, 60)}
        assert file_store.search("users/7", "walnut", metadata={"m": "x"}) == []


def test_a_forged_query_reaches_no_other_namespace(file_store, path):
    for n in range(5):
        file_store.remember(f"users/{n}", "k", f"walnut falcon{n}", tags=["t"])
    for term in index_terms(path):
        for query in (term, f'"{term}"', f"walnut OR {term}", f"{term} falcon1"):
            for n in range(5):
                found = file_store.search(f"users/{n}", query, limit=None)
                assert {item["namespace"] for item in found} <= {f"users/{n}"}


@given(operations, st.lists(st.tuples(queries, filters), min_size=1, max_size=4))
@settings(max_examples=share(2))
def test_results_stay_exact_when_every_scope_term_collides(one_scope_term, history, asked):
    store, model = filled(history, Clock())
    with store:
        for query, given_filters in asked:
            question = {**query, **given_filters}
            assert rounded(store.search(**question)) == rounded(model.search(**question)), question


# ---- Every way of ranking gives what the plain union gives --------------------------------------

LIMITS = {
    "as they are": {},
    "scan alone": {"_SCAN_ROWS": 10**9},
    "union": {"_SCAN_ROWS": 0, "_SCAN_COST": 10**9},
    "tiers": {"_SCAN_ROWS": 0, "_SCAN_COST": 10**9, "_UNION_POSTINGS": 0},
    "late scan": {"_SCAN_ROWS": 0, "_SCAN_COST": 0, "_UNION_POSTINGS": 0, "_SPARE_ROWS": 1},
    "tiny": {"_SCAN_ROWS": 2, "_UNION_POSTINGS": 3, "_SAMPLE_POSTINGS": 2, "_SPARE_ROWS": 0},
    "blind": {"_SCAN_ROWS": 0, "_UNION_POSTINGS": 0, "_SAMPLE_POSTINGS": 1, "_SPARE_ROWS": 1},
}
WAYS = {
    "_scan at once",
    "_scan after a first step",
    *(
        f"{way} {place} the filter"
        for way in ("_stream", "_union", "_tiers")
        for place in ("before", "inside")
    ),
}


@pytest.fixture(params=LIMITS)
def limits(request, monkeypatch):
    for name, value in LIMITS[request.param].items():
        assert hasattr(criomem, name)
        monkeypatch.setattr(criomem, name, value)


@given(operations, st.lists(st.tuples(queries, filters), min_size=1, max_size=4))
@settings(max_examples=share(2))
def test_small_stores_rank_alike_whatever_the_limits_of_the_ranking(limits, history, asked):
    store, model = filled(history, Clock())
    with store:
        for query, given_filters in asked:
            question = {**query, **given_filters}
            assert rounded(store.search(**question)) == rounded(model.search(**question)), question


@pytest.fixture(scope="module")
def crowd():
    """A thousand and a half rows of common and rare words, some replaced, expired or forgotten."""
    pick = random.Random(20)
    clock = Clock()
    store, model = criomem.Storage(clock=clock), Model(clock)
    with store:
        for number in range(1600):
            words = pick.choices(
                VOCABULARY, [1 / (n + 1) ** 1.6 for n in range(len(VOCABULARY))], k=6
            )
            given_options = {
                "tags": [f"t{pick.randrange(40)}"],
                "metadata": {"a": pick.randrange(30), "b": pick.choice(["red", "blue"])},
                "ttl_secs": pick.choice([None, None, 1]),
            }
            namespace = pick.choice(
                ["users/4", "users/42", "users", "other/4"] if number % 200 else ["tiny"]
            )
            name = (namespace, f"k{number % 1500}")
            apply(store, model, ("remember", name, " ".join(words), given_options))
        for number in range(0, 1500, 17):
            for namespace in ("users/4", "other/4"):
                apply(store, model, ("forget", (namespace, f"k{number}")))
        clock.advance(1)
        yield store, model


def watched(call):
    """The result of *call*, and which ways of ranking it took."""
    taken, ranked_before = set(), False

    def profile(frame, event, argument):
        nonlocal ranked_before
        if event != "call" or frame.f_code.co_filename != criomem.__file__:
            return
        name = frame.f_code.co_name
        if name == "_scan":
            taken.add("_scan after a first step" if ranked_before else "_scan at once")
        elif name in ("_stream", "_union", "_tiers"):
            inside = frame.f_locals["filtered"]
            taken.add(f"{name} {'inside' if inside else 'before'} the filter")
        ranked_before = ranked_before or name == "_passing"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return call(), taken
    finally:
        sys.setprofile(before)


def some_questions(seed, count):
    pick = random.Random(seed)
    for _ in range(count):
        yield {
            "namespace": pick.choice(["", "users", "users/4", "tiny", "nowhere"]),
            "text": " ".join(pick.sample([*VOCABULARY, "absent"], pick.randint(1, 7))),
            "limit": pick.choice([1, 3, 10, 60, None]),
            "offset": pick.choice([0, 0, 2]),
            **pick.choice(
                [
                    {},
                    {},
                    {"tags": [f"t{pick.randrange(40)}"]},
                    {"tags": {"$nin": [f"t{n}" for n in range(pick.choice([5, 38]))]}},
                    {"metadata": {"a": {"$lt": pick.choice([1, 15])}, "b": "red"}},
                    {"metadata": {"a": {"$gte": 29}}},
                    {"metadata": {"a": [1, 2.0]}},
                    {"min_score": 0.5},
                    {"recursive": False},
                ]
            ),
        }


def test_a_crowd_ranks_alike_whatever_the_limits_of_the_ranking(crowd, limits):
    store, model = crowd
    for question in some_questions(1, 10):
        assert rounded(store.search(**question)) == rounded(model.search(**question)), question
        assert_weighted(store, model, {**question, "mode": "weighted", "limit": None, "offset": 0})


def test_every_way_of_ranking_is_taken(crowd, monkeypatch):
    store, model = crowd
    taken = set()
    for changed in LIMITS.values():
        with monkeypatch.context() as patch:
            for name, value in changed.items():
                patch.setattr(criomem, name, value)
            for question in some_questions(3, 25):
                found, ways = watched(lambda question=question: store.search(**question))
                assert rounded(found) == rounded(model.search(**question)), (question, ways)
                taken |= ways
    assert taken == WAYS
