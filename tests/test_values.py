"""Hostile values: each comes back exactly or is refused before any lock; the next call works."""

import collections
import datetime
import decimal
import enum
import json
import sys

import pytest
from helpers import CANARY, any_json, any_text, exact, in_a_file, in_memory, nested, raw, refused
from hypothesis import example, given

import criomem

# ---- The traps ----------------------------------------------------------------------------------


def _cycle(kind):
    value = kind()
    if kind is list:
        value.append(value)
    else:
        value["k"] = [value]
    return value


class _Foreign:
    def __repr__(self):
        return CANARY


TEXTS = {
    "empty": "",
    "nul": f"{CANARY}\x00evil",
    "only nul": "\x00",
    "lone high surrogate": f"{CANARY}\ud800",
    "lone low surrogate": f"\udc00{CANARY}",
    "paired surrogates": f"{CANARY}\ud83d\ude00",
    "reversed surrogates": f"{CANARY}\ude00\ud83d",
    "a real emoji": f"{CANARY} 🙂",
    "control": f"{CANARY}\x01\x1b\x7f\x85",
    "line separators": f"{CANARY}\u2028\u2029\r\n",
    "byte order mark": f"\ufeff{CANARY}",
    "non-characters": f"{CANARY}\uffff\ufdd0\U0010ffff",
    "private use": f"\ue000{CANARY}\uf8ff",
    "joiners": f"{CANARY}\u200d\u200b\u202e",
    "combining": f"{CANARY}\u0301\u0301\u0301",
    "quote": f"{CANARY}'\"`\\",
    "sql": f"'; DROP TABLE item; -- {CANARY}",
    "like": f"%_{CANARY}*?[a]",
    "json path": f"$.a.b[0].{CANARY}",
    "json text": f'{{"a": "{CANARY}"}}',
    "null word": "null",
    "true word": "true",
    "number word": "1",
    "fts column": f"body:{CANARY}",
    "fts operators": f"{CANARY} AND NOT OR NEAR(a b) ^a -x + {{b}}:a *",
    "fts quote": f'"{CANARY}',
    "hyphen": f"pre-{CANARY}",
    "dotted": f"20.04.{CANARY}",
    "blank": "   ",
    "long": CANARY * 40,
}
NUMBERS = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "2**63": 2**63,
    "-2**63": -(2**63),
    "2**64+1": 2**64 + 1,
    "2**70": 2**70,
    "4,300 digits": 10**4299,
    "5,000 digits": 10**5000,
    "minus zero": -0.0,
    "least float": 5e-324,
    "most float": sys.float_info.max,
    "2**53+1": 2**53 + 1,
    "one": 1,
    "one as float": 1.0,
    "true": True,
    "false": False,
}
NOT_JSON = {
    "number key": {1: CANARY},
    "none key": {None: CANARY},
    "true key": {True: CANARY},
    "tuple key": {(1, 2): CANARY},
    "bytes key": {b"k": CANARY},
    "1 and '1'": {1: "a", "1": "b"},
    "set": {CANARY},
    "frozenset": frozenset({CANARY}),
    "bytes": CANARY.encode(),
    "bytearray": bytearray(b"x"),
    "memoryview": memoryview(b"x"),
    "datetime": datetime.datetime(2025, 1, 1),
    "date": datetime.date(2025, 1, 1),
    "decimal": decimal.Decimal("1.5"),
    "complex": 1j,
    "object": _Foreign(),
    "class": _Foreign,
    "function": print,
    "generator": (n for n in ()),
    "range": range(3),
    "ellipsis": ...,
    "circular list": _cycle(list),
    "circular dict": _cycle(dict),
    "101 deep": nested(101),
    "2,000 deep": nested(2_000),
    "foreign inside": {"a": [1, {"b": _Foreign()}], "c": CANARY},
}
SHAPES = {
    "dotted key": {"a.b": 1, 'a"b': 2, "$": 3, "": 4},
    "nul key": {f"{CANARY}\x00": 1},
    "surrogate key": {"\ud800": 1, "\ud83d\ude00": 2, "😀": 3},
    "100 deep": nested(100),
    "none": None,
    "empty list": [],
    "empty dict": {},
    "empties": {"": [{}, []]},
}
TRAPS = {**TEXTS, **NUMBERS, **NOT_JSON, **SHAPES}
CANNOT = {"nan", "infinity", "minus infinity", "5,000 digits", *NOT_JSON}  # as a value

POSITIONS = {
    "value": lambda store, trap: store.remember("a", "trap", trap),
    "value inside": lambda store, trap: store.remember("a", "trap", {"deep": [trap]}),
    "namespace": lambda store, trap: store.remember(trap, "trap", 1),
    "key": lambda store, trap: store.remember("a", trap, 1),
    "label": lambda store, trap: store.remember("a", "trap", 1, label=trap),
    "description": lambda store, trap: store.remember("a", "trap", 1, description=trap),
    "tag": lambda store, trap: store.remember("a", "trap", 1, tags=[trap]),
    "tags": lambda store, trap: store.remember("a", "trap", 1, tags=trap),
    "metadata": lambda store, trap: store.remember("a", "trap", 1, metadata=trap),
    "metadata value": lambda store, trap: store.remember("a", "trap", 1, metadata={"m": trap}),
    "metadata list": lambda store, trap: store.remember("a", "trap", 1, metadata={"m": [trap]}),
    "metadata key": lambda store, trap: store.remember("a", "trap", 1, metadata=_keyed(trap)),
    "ttl": lambda store, trap: store.remember("a", "trap", 1, ttl_secs=trap),
    "updated label": lambda store, trap: store.update("a", "k", label=trap),
    "updated tag": lambda store, trap: store.update("a", "k", tags=[trap]),
    "updated metadata": lambda store, trap: store.update("a", "k", metadata={"m": trap}),
    "batch": lambda store, trap: store.remember_many(trap),
    "item of a batch": lambda store, trap: store.remember_many([trap]),
    "import": lambda store, trap: store.import_items(trap),
    "item of an import": lambda store, trap: store.import_items([trap]),
}
READS = {
    "recalled namespace": lambda store, trap: store.recall(trap, "k"),
    "recalled key": lambda store, trap: store.recall("a", trap),
    "searched namespace": lambda store, trap: store.search(trap),
    "query": lambda store, trap: store.search("a", trap),
    "weighted query": lambda store, trap: store.search("", trap, mode="weighted"),
    "tag filter": lambda store, trap: store.search("a", tags=[trap]),
    "tags filter": lambda store, trap: store.search("a", tags=trap),
    "none of the tags": lambda store, trap: store.search("a", "walnut", tags={"$nin": [trap]}),
    "tag operator": lambda store, trap: store.search("a", tags=_keyed(trap, ["t"])),
    "metadata filter": lambda store, trap: store.search("a", metadata=trap),
    "filter field": lambda store, trap: store.search("a", metadata=_keyed(trap)),
    "filter operand": lambda store, trap: store.search("a", "walnut", metadata={"m": trap}),
    "filter list": lambda store, trap: store.search("a", metadata={"m": {"$in": [trap]}}),
    "filter range": lambda store, trap: store.search("a", metadata={"m": {"$gte": trap}}),
    "filter operator": lambda store, trap: store.search("a", metadata={"m": _keyed(trap)}),
    "created": lambda store, trap: store.search("a", created=trap),
    "modified bound": lambda store, trap: store.search("a", modified={"gte": trap}),
    "zone": lambda store, trap: store.search("a", created="today", timezone=trap),
    "mode": lambda store, trap: store.search("a", "walnut", mode=trap),
    "order_by": lambda store, trap: store.search("a", order_by=trap),
    "order": lambda store, trap: store.search("a", order=trap),
    "min_score": lambda store, trap: store.search("a", "walnut", min_score=trap),
    "after": lambda store, trap: store.search("a", after=trap),
    "limit": lambda store, trap: store.search("a", limit=trap),
    "offset": lambda store, trap: store.search("a", "walnut", offset=trap),
    "prefix": lambda store, trap: store.namespaces(trap),
    "depth": lambda store, trap: store.namespaces(depth=trap),
    "export": lambda store, trap: list(store.export(trap)),
    "forgotten key": lambda store, trap: store.forget("a", trap),
}


def _keyed(trap, value=1):
    """The trap as the key of a dict, where it can be one."""
    try:
        return {trap: value}
    except TypeError:
        return {repr(type(trap)): value}


def attempt(call, store, trap):
    """True when the call was taken, False when it was refused as the contract has it."""
    try:
        call(store, trap)
    except criomem.ValidationError as error:
        refusal = error
    else:
        return True
    assert refusal.code == "invalid_value"
    assert CANARY not in str(refusal)
    return False


@pytest.fixture
def seeded(store):
    store.remember("a", "k", "walnut", tags=["t"], metadata={"m": 1})
    return store


@in_memory
@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_as_a_value_comes_back_exactly_or_is_refused(seeded, trap):
    value = TRAPS[trap]
    for form in (value,) if trap == "100 deep" else (value, [value], {"k": 1, "trap": value}):
        if trap in CANNOT:
            with refused():
                seeded.remember("a", "trap", form)
            assert seeded.recall("a", "trap") is None
        else:
            seeded.remember("a", "trap", form)
            assert exact(seeded.recall("a", "trap")["value"]) == exact(form)
            assert len(seeded.search("a")) == 2
    assert seeded.recall("a", "k")["value"] == "walnut"


@in_a_file
@pytest.mark.parametrize("position", POSITIONS)
def test_no_trap_in_a_write_breaks_the_store(seeded, position):
    for name, trap in TRAPS.items():
        before = seeded.stats()["items"]
        taken = attempt(POSITIONS[position], seeded, trap)
        assert taken or seeded.stats()["items"] == before, name
        seeded.remember("a", "k", "walnut", tags=["t"])
        assert [item["key"] for item in seeded.search("a", "walnut", tags=["t"])] == ["k"], name
    assert seeded.check() == []


@in_memory
@pytest.mark.parametrize("position", READS)
def test_no_trap_in_a_read_breaks_the_store(seeded, position):
    for name, trap in TRAPS.items():
        attempt(READS[position], seeded, trap)
        assert len(seeded.search("a", "walnut")) == 1, name


@pytest.mark.parametrize("position", POSITIONS)
def test_what_is_refused_is_refused_before_the_lock(locked_out, position):
    with criomem.Storage() as free:
        free.remember("a", "k", "walnut")
        wanted = {name for name in TRAPS if not attempt(POSITIONS[position], free, TRAPS[name])}
    told = set()
    for name, trap in TRAPS.items():
        try:
            POSITIONS[position](locked_out, trap)
        except criomem.ValidationError:
            told.add(name)
        except criomem.StorageError:
            pass  # taken, and then it met the lock
        else:
            assert position in ("batch", "import"), f"{name} was written beside the lock"
    assert told == wanted
    assert told


def test_the_lock_is_really_held_where_refusals_are_tested(locked_out):
    with refused(criomem.StorageError):
        locked_out.remember("a", "k", 1)
    for bad in CANNOT:
        with refused():
            locked_out.remember("a", "k", TRAPS[bad])


@in_memory
@pytest.mark.parametrize("trap", TEXTS)
def test_a_text_that_names_take_comes_back_exactly_in_every_name(seeded, trap):
    text = TEXTS[trap]
    for position, read in {
        "key": lambda: seeded.recall("a", text)["key"],
        "namespace": lambda: seeded.recall(text, "trap")["namespace"],
        "tag": lambda: seeded.recall("a", "trap")["tags"][0],
        "metadata value": lambda: seeded.recall("a", "trap")["metadata"]["m"],
        "metadata key": lambda: next(iter(seeded.recall("a", "trap")["metadata"])),
        "label": lambda: seeded.recall("a", "trap").get("label", ""),
        "description": lambda: seeded.recall("a", "trap").get("description", ""),
    }.items():
        if attempt(POSITIONS[position], seeded, text):
            assert exact(read()) == exact(text), position
    if not any(word in trap for word in ("nul", "surrogate", "control", "line", "empty", "long")):
        assert attempt(POSITIONS["key"], seeded, text)
        assert attempt(POSITIONS["tag"], seeded, text)
        assert seeded.search("a", tags=[text])[0]["tags"] == [text]
        assert attempt(POSITIONS["metadata key"], seeded, text)
        assert seeded.search("a", metadata={text: 1})[0]["metadata"] == {text: 1}
        assert attempt(POSITIONS["metadata value"], seeded, text)
        assert seeded.search("a", metadata={"m": text})[0]["metadata"] == {"m": text}


# ---- Round trips --------------------------------------------------------------------------------


@given(any_json)
@example("\ud83d\ude00")
@example({"\ud83d\ude00": "😀", "😀": "\ud83d\ude00"})
@example(["\\ud83d\\ude00", "\ud83d", "\ude00"])
@example([-0.0, 0.0, 0, False, 1, 1.0, True, 10**400, -(10**400)])
@example({"a\x00": ["\x00", {"": None}]})
def test_any_json_value_comes_back_exactly(value):
    with criomem.Storage() as store:
        store.remember("a", "k", value)
        assert exact(store.recall("a", "k")["value"]) == exact(value)
        assert exact(store.search("a")[0]["value"]) == exact(value)
        copied = [json.loads(json.dumps(record)) for record in store.export()]
        assert store.check() == []
    with criomem.Storage() as store:
        assert store.import_items(copied) == 1
        assert store.check() == []


@given(any_text, any_text)
def test_any_text_may_stand_anywhere_or_is_refused(text, other):
    with criomem.Storage() as store:
        store.remember("a", "k", [text, other], metadata={"m": 1})
        for call in POSITIONS.values():
            attempt(call, store, text)
        for call in READS.values():
            attempt(call, store, text)
        for mode in ("keyword", "weighted"):
            for item in store.search("", f"walnut {text} {other}", mode=mode):
                assert 0 < item["score"] <= 1
        assert store.check() == []


class _Text(str):
    __slots__ = ()


class _Whole(int):
    def __str__(self):
        return "not json"

    __repr__ = __str__


class _Real(float):
    def __repr__(self):
        return "not json"


class _Colour(enum.Enum):
    RED = "red"


class _Name(str, enum.Enum):  # noqa: UP042 (the older spelling is the trap)
    RED = "red"


class _Level(enum.IntEnum):
    HIGH = 3


_Pair = collections.namedtuple("_Pair", "x y")


@in_memory
@pytest.mark.parametrize(
    ("given_value", "wanted"),
    [
        ((1, (2, "a")), [1, [2, "a"]]),
        (_Pair(1, [2]), [1, [2]]),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.defaultdict(list, k=[1]), {"k": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (_Text("text"), "text"),
        ({_Text("key"): _Text("text")}, {"key": "text"}),
        (_Whole(7), 7),
        (_Real(1.5), 1.5),
        (_Name.RED, "red"),
        ({_Name.RED: _Name.RED}, {"red": "red"}),
        (_Level.HIGH, 3),
        ([True, _Level.HIGH], [True, 3]),
    ],
    ids=ascii,
)
def test_subclasses_come_back_as_their_base_types(store, given_value, wanted):
    store.remember("a", "k", given_value)
    assert exact(store.recall("a", "k")["value"]) == exact(wanted)


def test_a_plain_enum_is_no_json_value(store):
    with refused():
        store.remember("a", "k", _Colour.RED)


def test_a_subclass_of_float_that_is_not_a_number_is_refused(store):
    for value in (_Real("nan"), [_Real("inf")], {"k": _Real("-inf")}):
        with refused():
            store.remember("a", "k", value)


def test_a_value_that_is_shared_is_no_cycle(store):
    shared = ["x"]
    store.remember("a", "k", {"one": shared, "two": [shared, shared]})
    assert store.recall("a", "k")["value"] == {"one": ["x"], "two": [["x"], ["x"]]}


def test_a_value_whose_own_code_fails_is_refused_or_raises_its_error_and_writes_nothing(store):
    class Liar(dict):
        def items(self):
            raise ZeroDivisionError

        __iter__ = keys = items

    with pytest.raises((criomem.ValidationError, ZeroDivisionError)):
        store.remember("a", "k", [1, Liar(a=1)])
    assert store.recall("a", "k") is None
    store.remember("a", "k", 1)


# ---- Errors tell no content ---------------------------------------------------------------------


def test_no_error_repeats_what_was_to_be_stored(store):
    secret = CANARY
    calls = [
        lambda: store.remember("a", "k", {secret: {secret}}),
        lambda: store.remember("a", "k", [secret, float("nan")]),
        lambda: store.remember("a", "k", {secret: 1, 2: secret}),
        lambda: store.remember("a", "k", secret * 200_000),
        lambda: store.remember("a", "k", 1, label=secret * 200),
        lambda: store.remember("a", "k", 1, label=[secret]),
        lambda: store.remember("a", "k", 1, tags=[secret + "\x00"]),
        lambda: store.remember("a", "k", 1, tags=[secret, 5]),
        lambda: store.remember("a", "k", 1, metadata={"m": secret * 200}),
        lambda: store.remember("a", "k", 1, metadata={"m": {secret: 1}}),
        lambda: store.remember("a", secret + "\ud800", 1),
        lambda: store.remember(secret + "//", "k", 1),
        lambda: store.remember("a", "k", 1, ttl_secs=secret),
        lambda: store.remember_many([{"namespace": "a", "key": "k", "value": {secret}}]),
        lambda: store.search("a", metadata={"m": {"$gt": [secret]}}),
        lambda: store.search("a", tags={"$in": [secret, 5]}),
    ]
    for call in calls:
        with refused():
            call()
    with refused(criomem.DuplicateError):
        store.remember("a", secret, secret)
        store.remember("a", secret, secret, if_absent=True)
    with refused(criomem.NotFoundError):
        store.update("a", secret * 2, label=secret)


def test_a_value_broken_in_the_file_is_a_storage_error_that_tells_nothing(path):
    with criomem.Storage(path) as store:
        store.remember("a", "k", [CANARY])
        store.remember("a", "good", 1)
    with raw(path) as other:
        other.execute("UPDATE item SET value = substr(value, 1, length(value) - 1) WHERE key = 'k'")
    with criomem.Storage(path) as store:
        with refused(criomem.StorageError):
            store.recall("a", "k")
        assert store.recall("a", "good")["value"] == 1
        assert CANARY not in " ".join(store.check())
