"""What several test files share: a clock, children, strategies, a naive model of the store."""

import math
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import traceback
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st

import criomem

ROOT = Path(__file__).resolve().parent.parent
CANARY = "zqcanary"  # stands in every trap; no error may repeat it
START = 1_700_000_000.0
LIMIT = 1_048_576  # bytes of a value
NAME_LIMIT = 512  # bytes of a namespace or key


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, now=START):
        self.now = now

    def __call__(self):
        return self.now

    @property
    def ms(self):
        return int(self.now * 1000)

    def advance(self, secs):
        self.now += secs


# What has nothing to do with where the store is kept is tried in one kind alone.
in_memory = pytest.mark.parametrize("store", ["memory"], indirect=True)
in_a_file = pytest.mark.parametrize("store", ["file"], indirect=True)

# ---- Children -----------------------------------------------------------------------------------


def child_env(**extra):
    """The environment of every child process: the root first, so that it imports this very file."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random", **extra}


def child(source, *arguments, **options):
    """Start *source* as a program of its own, pipes open, warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(source), *map(str, arguments)]
    options.setdefault("env", child_env())
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, **{**pipes, **options})


def finish(*processes, timeout=60):
    """Wait for children and give what the last one printed; a failure of any is the test's."""
    said = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "(it hung)"
        said.append((process.returncode, out, err))
    for code, out, err in said:
        assert code == 0, f"a child ended with {code}:\n{out}\n{err}"
    return said[-1][1].strip()


def run_child(source, *arguments, **options):
    return finish(child(source, *arguments, **options))


# ---- Files --------------------------------------------------------------------------------------


def raw(path):
    """A plain connection to the file, as another program would open it."""
    return closing(sqlite3.connect(path, isolation_level=None, timeout=10))


def family(path):
    """The file with its log and its index of the log, those that exist."""
    return [p for p in (Path(f"{path}{end}") for end in ("", "-wal", "-shm")) if p.exists()]


def contents(path):
    return {p.name: p.read_bytes() for p in family(path)}


def is_in_file(path, word):
    return [p.name for p in family(path) if word.encode() in p.read_bytes()]


# ---- Errors -------------------------------------------------------------------------------------


@contextmanager
def refused(kind=None):
    """The block raises *kind* (ValidationError), and no part of the error tells content."""
    with pytest.raises(kind or criomem.ValidationError) as caught:
        yield caught
    told = "".join(traceback.format_exception(caught.value))
    assert CANARY not in told, "the error repeats content"
    assert CANARY not in repr(vars(caught.value))


# ---- Values -------------------------------------------------------------------------------------


def exact(value):
    """A form of a JSON value in which only equal values of the same types are equal."""
    if isinstance(value, dict):
        assert type(value) is dict
        return ("dict", sorted((repr(key), exact(item)) for key, item in value.items()))
    if isinstance(value, list):
        assert type(value) is list
        return ("list", [exact(item) for item in value])
    return (type(value).__name__, repr(value))


def nested(depth, leaf=None):
    """*depth* lists inside each other."""
    value = [] if leaf is None else [leaf]
    for _ in range(depth - 1):
        value = [value]
    return value


any_text = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    [
        "\ud83d\ude00",
        "a\ud800",
        "\udc00\ud83d",
        "\x00",
        "a\x00b",
        "\ue000",
        "\ufffe",
        "\u2028",
        "\x7f",
    ]
)
any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)

# ---- The model ----------------------------------------------------------------------------------

VOCABULARY = [
    "kiwi",
    "mango",
    "tulip",
    "cobalt",
    "quartz",
    "walnut",
    "falcon",
    "yonder",
    "2024",
    "9",
]
OPTIONAL = ("label", "description", "tags", "metadata")


def plain_words(value):
    """The words of a value whose texts are lower-case words and blanks."""
    if isinstance(value, dict):
        return plain_words(list(value)) | plain_words(list(value.values()))
    if isinstance(value, list):
        return set().union(*map(plain_words, value)) if value else set()
    if isinstance(value, bool) or value is None:
        return set()
    return set(re.findall(r"[a-z0-9]+", str(value)))


def is_inside(namespace, scope, recursive=True):
    return (
        namespace == scope
        or (recursive and not scope)
        or (recursive and namespace.startswith(scope + "/"))
    )


def _kind(value):
    return "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def _equal(stored, operand):
    if isinstance(stored, list):
        return any(_equal(one, operand) for one in stored)
    return stored is not None and _kind(stored) == _kind(operand) and stored == operand


def _compare(stored, operand, test):
    if isinstance(stored, list):
        return any(_compare(one, operand, test) for one in stored)
    return (
        stored is not None and _kind(stored) == _kind(operand) != "bool" and test(stored, operand)
    )


OPERATORS = {
    "$eq": _equal,
    "$ne": lambda stored, operand: not _equal(stored, operand),
    "$in": lambda stored, operand: any(_equal(stored, one) for one in operand),
    "$nin": lambda stored, operand: not any(_equal(stored, one) for one in operand),
    "$gt": lambda stored, operand: _compare(stored, operand, lambda a, b: a > b),
    "$gte": lambda stored, operand: _compare(stored, operand, lambda a, b: a >= b),
    "$lt": lambda stored, operand: _compare(stored, operand, lambda a, b: a < b),
    "$lte": lambda stored, operand: _compare(stored, operand, lambda a, b: a <= b),
}
TIMES = {
    "gte": lambda a, b: a >= b,
    "gt": lambda a, b: a > b,
    "lte": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
}


def passes_tags(tags, asked):
    asked = {"$in": asked} if isinstance(asked, list) else asked
    tests = {
        "$in": lambda names: any(name in tags for name in names),
        "$all": lambda names: all(name in tags for name in names),
        "$nin": lambda names: not any(name in tags for name in names),
    }
    return all(tests[name](operand) for name, operand in asked.items())


def passes_metadata(metadata, asked):
    for field, test in asked.items():
        if not isinstance(test, dict):
            test = {"$in": test} if isinstance(test, list) else {"$eq": test}
        stored = metadata.get(field)
        if not all(OPERATORS[name](stored, operand) for name, operand in test.items()):
            return False
    return True


class Model:
    """The store as dicts and lists, every rule the slow way."""

    def __init__(self, clock):
        self.clock = clock
        self.rows = {}  # (namespace, key) -> row
        self.writes = 0
        self.stamp = 0

    def _written(self, row, namespace, key):
        self.writes += 1
        self.stamp = max(self.stamp, self.clock.ms)
        row |= {"namespace": namespace, "key": key, "seq": self.writes, "updated_at_ms": self.stamp}
        self.rows[namespace, key] = row

    def live(self):
        now = max(self.stamp, self.clock.ms)
        return {
            name: row
            for name, row in self.rows.items()
            if row.get("expires_at_ms") is None or row["expires_at_ms"] > now
        }

    def _expiry(self, ttl_secs):
        now = max(self.stamp, self.clock.ms)
        return None if ttl_secs is None else now + int(ttl_secs * 1000)

    def remember(self, namespace, key, value, *, ttl_secs=None, **attributes):
        old = self.live().get((namespace, key))
        row = {"value": value, "expires_at_ms": self._expiry(ttl_secs), **attributes}
        now = max(self.stamp, self.clock.ms)
        row["created_at_ms"] = old["created_at_ms"] if old else now
        row["id"] = old["id"] if old else self.writes + 1
        self._written(row, namespace, key)

    def update(self, namespace, key, **changes):
        row = dict(self.live()[namespace, key])
        if "ttl_secs" in changes:
            row["expires_at_ms"] = self._expiry(changes.pop("ttl_secs"))
        self._written(row | changes, namespace, key)

    def forget(self, namespace, key):
        return self.rows.pop((namespace, key), None) is not None

    def forget_all(self, namespace):
        gone = [name for name in self.live() if is_inside(name[0], namespace)]
        self.rows = {k: row for k, row in self.rows.items() if not is_inside(k[0], namespace)}
        return len(gone)

    @staticmethod
    def words(row):
        texts = (row["key"], row["value"], row.get("label"), row.get("description"))
        return set().union(*map(plain_words, texts))

    @staticmethod
    def record(row, score=None):
        record = {
            k: row[k] for k in ("namespace", "key", "value", "created_at_ms", "updated_at_ms")
        }
        record |= {k: row[k] for k in ("expires_at_ms", *OPTIONAL) if row.get(k)}
        return record if score is None else {**record, "score": score}

    def weights(self, words):
        """Rarity over every row of the index, expired ones too."""
        frequency = Counter(word for row in self.rows.values() for word in self.words(row))
        n = len(self.rows)
        return {w: math.log(1 + (n - frequency[w] + 0.5) / (frequency[w] + 0.5)) for w in words}

    def passes(self, row, asked):
        tests = (
            asked.get("tags") is None or passes_tags(row.get("tags") or [], asked["tags"]),
            asked.get("metadata") is None
            or passes_metadata(row.get("metadata") or {}, asked["metadata"]),
            *(TIMES[k](row["created_at_ms"], v) for k, v in (asked.get("created") or {}).items()),
            *(TIMES[k](row["updated_at_ms"], v) for k, v in (asked.get("modified") or {}).items()),
        )
        return all(tests)

    def search(self, namespace, text=None, limit=10, *, offset=0, mode="keyword", **asked):
        words = None if text is None or not text.strip() else plain_words(text)
        weights = (
            self.weights(words) if words and mode == "weighted" else dict.fromkeys(words or (), 1)
        )
        total = sum(weights.values())
        found = []
        for row in self.live().values():
            if not is_inside(row["namespace"], namespace, asked.get("recursive", True)):
                continue
            if not self.passes(row, asked):
                continue
            hits = (words or set()) & self.words(row)
            score = None if words is None else sum(weights[w] for w in hits) / total if hits else 0
            if score is None or (hits and score >= asked.get("min_score", 0)):
                found.append((score, row))
        found.sort(key=lambda pair: (pair[0] or 0, pair[1]["seq"]), reverse=True)
        chosen = found[offset:] if limit is None else found[offset : offset + limit]
        return [self.record(row, score) for score, row in self._ordered(chosen, asked)]

    @staticmethod
    def _ordered(chosen, asked):
        keys = {
            "created": lambda pair: (pair[1]["created_at_ms"], pair[1]["id"]),
            "modified": lambda pair: (pair[1]["updated_at_ms"], pair[1]["seq"]),
        }
        order_by = asked.get("order_by", "relevance")
        if order_by in keys:
            chosen = sorted(chosen, key=keys[order_by], reverse=True)
        return chosen[::-1] if asked.get("order") == "asc" else chosen


def keys(items):
    return [item["key"] for item in items]


def rounded(records):
    """Records with scores cut to nine digits: shares may be computed in another order."""
    return [{**r, "score": round(r["score"], 9)} if "score" in r else r for r in records]


def share(part):
    """The profile's number of examples divided by *part*, for a property that is slow to try."""
    return max(10, settings.default.max_examples // part)


# ---- Strategies of the model --------------------------------------------------------------------

NAMESPACES = ["users", "users/4", "users/42", "users/4/deep", "user", "users-x", "other/4"]
some_words = st.lists(st.sampled_from(VOCABULARY), max_size=5).map(" ".join)
some_value = (
    some_words
    | st.lists(some_words | st.sampled_from([2024, 9, None, True]), max_size=3)
    | st.dictionaries(st.sampled_from(VOCABULARY), some_words, max_size=2)
)
some_scalar = st.sampled_from(["red", "blue", "1", 1, 1.0, 0, 2.5, -3, True, False, 2**53 + 1, ""])
some_tags = st.lists(st.sampled_from(["t1", "t2", "t3"]), unique=True, min_size=1)
some_metadata = st.dictionaries(
    st.sampled_from(["a", "b", "x.y", 'q"']),
    some_scalar | st.lists(st.sampled_from(["red", "blue", "1"]), max_size=3),
    min_size=1,
    max_size=3,
)
attributes = st.fixed_dictionaries(
    {},
    optional={
        "label": st.sampled_from(VOCABULARY),
        "description": some_words.filter(bool),
        "tags": some_tags,
        "metadata": some_metadata,
        "ttl_secs": st.sampled_from([1, 2.5, 60]),
    },
)
names = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(["kiwi", "k1", "k2", "k3"]))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("remember"), names, some_value, attributes),
        st.tuples(st.just("remember"), names, some_value, attributes),
        st.tuples(st.just("update"), names, attributes),
        st.tuples(st.just("forget"), names),
        st.tuples(st.just("forget_all"), st.sampled_from(NAMESPACES)),
        st.tuples(st.just("advance"), st.sampled_from([0.5, 1, 2, 30])),
    ),
    max_size=25,
)
_same_kind = (
    st.lists(st.sampled_from(["red", "blue", "1", "zz"]), min_size=1, max_size=3)
    | st.lists(st.sampled_from([0, 1, 1.0, 2.5, 2**53]), min_size=1, max_size=3)
    | st.lists(st.booleans(), min_size=1, max_size=2)
)
_range = st.sampled_from(["red", "a", 1, 0, 2.5, 2**53, -1])
some_test = (
    some_scalar
    | _same_kind
    | st.dictionaries(st.sampled_from(["$eq", "$ne"]), some_scalar, min_size=1)
    | st.dictionaries(st.sampled_from(["$in", "$nin"]), _same_kind, min_size=1)
    | st.dictionaries(
        st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), _range, min_size=1, max_size=1
    )
)
_moments = st.integers(0, 40).map(lambda secs: int(START * 1000) + secs * 1000)
some_times = st.builds(
    lambda low, high, start, end: {low: start, high: end} if end else {low: start},
    st.sampled_from(["gte", "gt"]),
    st.sampled_from(["lte", "lt"]),
    _moments,
    st.none() | _moments,
)
filters = st.fixed_dictionaries(
    {},
    optional={
        "tags": some_tags
        | st.dictionaries(st.sampled_from(["$in", "$all", "$nin"]), some_tags, min_size=1),
        "metadata": st.dictionaries(
            st.sampled_from(["a", "b", "x.y", 'q"', "absent"]), some_test, min_size=1, max_size=2
        ),
        "created": some_times,
        "modified": some_times,
        "recursive": st.booleans(),
        "min_score": st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    },
)
queries = st.fixed_dictionaries(
    {
        "namespace": st.sampled_from(["", *NAMESPACES, "nowhere"]),
        "text": st.none()
        | st.just(" ")
        | st.lists(st.sampled_from(VOCABULARY), min_size=1).map(" ".join),
        "limit": st.none() | st.integers(0, 6),
        "offset": st.integers(0, 4),
        "order_by": st.sampled_from(["relevance", "created", "modified"]),
        "order": st.sampled_from(["asc", "desc"]),
    }
)


def apply(store, model, operation):
    """Do one operation to both; they agree on what it answers."""
    kind, *arguments = operation
    if kind == "remember":
        (name, value, given) = arguments
        store.remember(*name, value, **given)
        model.remember(*name, value, **given)
    elif kind == "update":
        (name, changes) = arguments
        if name not in model.live():
            with pytest.raises(criomem.NotFoundError):
                store.update(*name, **changes)
        else:
            store.update(*name, **changes)
            model.update(*name, **changes)
    elif kind == "forget":
        (name,) = arguments
        there = name in model.live()
        assert store.forget(*name) is there
        if there:
            model.forget(*name)
    elif kind == "forget_all":
        assert store.forget_all(*arguments) == model.forget_all(*arguments)
    else:
        model.clock.advance(*arguments)
