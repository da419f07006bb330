"""Agent memory in one SQLite file."""

# ruff: noqa: S608 - SQL is joined from constants of this module; every operand is a parameter

from __future__ import annotations

import calendar
import contextlib
import contextvars
import datetime
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import random
import re
import sqlite3
import threading
import time
import unicodedata
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

__version__ = "0.1.0"

__all__ = [
    "BranchRecord",
    "CheckpointRecord",
    "CompactReport",
    "ConflictError",
    "CriomemError",
    "DuplicateError",
    "Item",
    "MessageRecord",
    "NotFoundError",
    "PruneCounts",
    "Retention",
    "Run",
    "RunInterruptedError",
    "SchemaError",
    "Stats",
    "Storage",
    "StorageError",
    "Thread",
    "ThreadBusyError",
    "ThreadRecord",
    "UnavailableError",
    "ValidationError",
]

# Limits of what may be stored. Each is named in the error that refuses more.
MAX_NAME_BYTES = 512
MAX_VALUE_BYTES = 1_048_576
MAX_VALUE_DEPTH = 100
MAX_LABEL_BYTES = 1_024
MAX_DESCRIPTION_BYTES = 16_384
MAX_STATE_BYTES = 16_777_216
MAX_TAGS = 64
MAX_TAG_CHARS = 256
MAX_FIELDS = 64
MAX_FIELD_CHARS = 1_024
MAX_TIME_MS = 253_402_300_799_999  # the last millisecond of the year 9999

# Limits of what search looks at.
MAX_QUERY_WORDS = 128
MAX_WORD_CHARS = 64
MAX_ROW_TERMS = 20_000

_log = logging.getLogger("criomem")


# ---- Errors --------------------------------------------------------------------------------------


class CriomemError(Exception):
    """Base of every error that this module raises; `code` is stable, the text says what to do.

    `details` holds the code and, where one argument is at fault, the `field`. No error carries
    content, a key or a secret.
    """

    code = "error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, str] = {"code": self.code} | ({"field": field} if field else {})


class ValidationError(CriomemError, ValueError):
    """An argument was not accepted; nothing was written and no lock was taken."""

    code = "invalid_value"


class NotFoundError(CriomemError, LookupError):
    """What was to be changed is not there."""

    code = "not_found"


class DuplicateError(CriomemError):
    """The id or key is taken."""

    code = "duplicate_id"


class ConflictError(CriomemError):
    """The data has moved on since it was read."""

    code = "conflict"


class ThreadBusyError(CriomemError):
    """Another run holds the thread, after `waited_secs` of waiting."""

    code = "thread_busy"

    def __init__(
        self, message: str, *, field: str | None = None, thread_id: str = "", waited_secs: float = 0
    ) -> None:
        super().__init__(message, field=field)
        self.thread_id = thread_id
        self.waited_secs = waited_secs


class RunInterruptedError(CriomemError):
    """The run lost its thread; nothing of the call was written."""

    code = "run_interrupted"


class StorageError(CriomemError):
    """The database failed, is closed or can't be used; `sqlite_error` is SQLite's name for it."""

    code = "storage_error"

    def __init__(
        self, message: str, *, field: str | None = None, sqlite_error: str | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.sqlite_error = sqlite_error


class SchemaError(StorageError):
    """The file was written by a newer version of this module."""

    code = "schema"


class UnavailableError(CriomemError, ImportError):
    """A part that this needs is not installed or not built; the message names it."""

    code = "unavailable"


_STORAGE_ADVICE = {
    sqlite3.SQLITE_BUSY: "another process holds the write lock; raise busy_timeout_secs",
    sqlite3.SQLITE_FULL: "the disk is full; free some space, the last write was rolled back",
    sqlite3.SQLITE_READONLY: "the file or its folder can't be written; check their rights",
    sqlite3.SQLITE_CANTOPEN: "the file can't be opened; check its folder and rights",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a backup",
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database",
    sqlite3.SQLITE_IOERR: "the disk failed or is full; the last write was rolled back",
}


def _storage_error(error: sqlite3.Error) -> StorageError:
    """The error that a caller sees for one of SQLite's: by its code, never by its text."""
    number = getattr(error, "sqlite_errorcode", 0)
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    advice = _STORAGE_ADVICE.get(number & 0xFF, "the database refused the statement")
    return StorageError(f"{advice} ({name})", sqlite_error=name)


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


# ---- Records and settings ------------------------------------------------------------------------


class Item(TypedDict):
    """One fact as it comes out; times are milliseconds since 1970 in UTC, unset fields absent."""

    namespace: str
    key: str
    value: Any
    created_at_ms: int
    updated_at_ms: int
    expires_at_ms: NotRequired[int]
    label: NotRequired[str]
    description: NotRequired[str]
    tags: NotRequired[list[str]]
    metadata: NotRequired[dict[str, Any]]
    score: NotRequired[float]


class ThreadRecord(TypedDict):
    """One thread as it comes out; `head` is a checkpoint's id, `saved_at_ms` moves with saves."""

    namespace: str
    id: str
    status: str
    running: bool
    head: int | None
    message_count: int
    created_at_ms: int
    saved_at_ms: int
    updated_at_ms: int
    label: NotRequired[str]
    tags: NotRequired[list[str]]
    metadata: NotRequired[dict[str, Any]]
    thread_of: NotRequired[str]
    ended_at_ms: NotRequired[int]


class MessageRecord(TypedDict):
    """One message as it comes out, with any other keys that it came with."""

    id: str
    role: str
    content: NotRequired[Any]
    created_at_ms: int
    updated_at_ms: int
    checkpoint: int
    name: NotRequired[str]
    tags: NotRequired[list[str]]
    metadata: NotRequired[dict[str, Any]]
    thread_id: NotRequired[str]
    namespace: NotRequired[str]
    score: NotRequired[float]


class CheckpointRecord(TypedDict):
    """One saved point of a thread; ids grow over the whole file."""

    id: int
    thread_id: str
    namespace: str
    parent: int | None
    created_at_ms: int
    message_count: int
    label: NotRequired[str]
    run_id: NotRequired[str]
    state: NotRequired[dict[str, Any]]
    messages: NotRequired[list[MessageRecord]]


class BranchRecord(TypedDict):
    """One line of checkpoints: its last, where it left the current branch, how many are its own."""

    head: int
    fork: int | None
    checkpoints: int
    current: bool
    created_at_ms: int
    saved_at_ms: int


class PruneCounts(TypedDict):
    """What `Storage.prune` did."""

    threads_deleted: int
    threads_busy: int
    checkpoints_deleted: int
    memory_items_deleted: int


class CompactReport(TypedDict):
    """What `Storage.compact` did, in bytes; `reason` says why deleted content may remain."""

    bytes_before: int
    bytes_after: int
    erased: bool
    reason: NotRequired[str]


class Stats(TypedDict):
    """What a store holds: rows of each kind, bytes on disk (or in memory), and how it runs."""

    items: int
    threads: int
    checkpoints: int
    messages: int
    vectors_stored: int
    audit_records: int
    bytes: int
    sealed: bool
    durable: bool
    vectors: str | None
    unerased: bool
    needs_reindex: bool
    sqlite_version: str


Progress = Callable[[int, int | None], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Rules that `Storage.prune` applies; without any, everything is kept.

    *thread_ttl_secs*: threads last saved that long ago or longer go. *keep_checkpoints*: of each
    thread the head and the n - 1 checkpoints before it stay, left branches go. *drop_branches*:
    left branches go, the current one stays whole.
    """

    thread_ttl_secs: float | None = None
    keep_checkpoints: int | None = None
    drop_branches: bool = False


# ---- Schema --------------------------------------------------------------------------------------
#
# An item and a message each have an `id` for life and a `seq`, the next number of the file's one
# counter, taken anew at every write. `seq` is the row id of the word index, so descending row ids
# are "newest first". `words` holds the row's distinct index terms, since an index without content
# wants them back to delete them, and small sets of rows are searched by scanning them.
#
# A thread is a tree of checkpoints; `thread.head` names the current one. Messages are stored once,
# in segments that branches share:
#
#     checkpoint   1 --- 2 --- 3 --- 4          head = 6: the current branch is 1, 2, 5, 6
#                          \
#                           5 --- 6 (head)      3 and 4 were left behind by a rewind to 2
#
#     segment A    [m0  m1  m2  m3]   live = 2  m2 and m3 belong to 3 and 4 only
#     segment B    (A, fork = 2)  [m2' m3']     live = 4: positions count from the thread's start
#
# A message is on the current branch when its position is below its segment's `live`, so a rewind
# changes a few segments and touches no message and no index row.

_APPLICATION_ID = 0x6372_696F  # "crio", in the file's header
_TOKENIZER_VERSION = 1

_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE meta(
             name TEXT PRIMARY KEY,
             value NOT NULL
           ) WITHOUT ROWID""",
        """CREATE TABLE counter(
             id INTEGER PRIMARY KEY CHECK (id = 1),
             seq INTEGER NOT NULL,         -- the last number given to a write
             at_ms INTEGER NOT NULL,       -- the last time stamp; none is ever earlier
             items INTEGER NOT NULL,       -- rows in item_words
             messages INTEGER NOT NULL,    -- rows in message_words
             unerased INTEGER NOT NULL     -- 1: deleted content may still be in the file
           )""",
        "INSERT INTO counter VALUES (1, 0, 0, 0, 0, 0)",
        """CREATE TABLE item(
             id INTEGER PRIMARY KEY AUTOINCREMENT,
             seq INTEGER NOT NULL UNIQUE,
             namespace TEXT NOT NULL,
             key TEXT NOT NULL,
             created_at_ms INTEGER NOT NULL,
             updated_at_ms INTEGER NOT NULL,
             expires_at_ms INTEGER,
             wants_vector INTEGER NOT NULL,
             key_name TEXT,                -- the encryption key that seals what follows
             label, description,
             tags,                         -- JSON array
             metadata,                     -- JSON object
             words TEXT NOT NULL,
             value NOT NULL,               -- JSON
             UNIQUE (namespace, key)
           )""",
        "CREATE INDEX item_expiry ON item(expires_at_ms) WHERE expires_at_ms IS NOT NULL",
        "CREATE TABLE item_vector(id INTEGER PRIMARY KEY REFERENCES item(id), vector NOT NULL)",
        "CREATE TABLE item_bits(id INTEGER PRIMARY KEY REFERENCES item(id), bits NOT NULL)",
        """CREATE VIRTUAL TABLE item_words USING fts5(
             terms, content='', detail=none, columnsize=0, tokenize=ascii)""",
        "CREATE VIRTUAL TABLE item_terms USING fts5vocab(item_words, row)",
        "CREATE VIRTUAL TABLE item_postings USING fts5vocab(item_words, instance)",
        """CREATE TABLE thread(
             id INTEGER PRIMARY KEY AUTOINCREMENT,
             seq INTEGER NOT NULL,         -- of the last write
             saved_seq INTEGER NOT NULL UNIQUE,
             namespace TEXT NOT NULL,
             name TEXT NOT NULL,           -- the caller's id
             thread_of TEXT,
             status TEXT NOT NULL,
             head INTEGER,                 -- checkpoint
             created_at_ms INTEGER NOT NULL,
             saved_at_ms INTEGER NOT NULL,
             updated_at_ms INTEGER NOT NULL,
             ended_at_ms INTEGER,
             key_name TEXT,
             label,
             tags,
             metadata,
             UNIQUE (namespace, name)
           )""",
        """CREATE INDEX thread_child ON thread(namespace, thread_of)
             WHERE thread_of IS NOT NULL""",
        """CREATE TABLE segment(
             id INTEGER PRIMARY KEY,
             thread INTEGER NOT NULL REFERENCES thread(id),
             parent INTEGER REFERENCES segment(id),
             fork INTEGER NOT NULL,        -- the position at which it leaves its parent
             live INTEGER NOT NULL         -- positions below this are on the current branch
           )""",
        "CREATE INDEX segment_thread ON segment(thread)",
        """CREATE TABLE message(
             id INTEGER PRIMARY KEY AUTOINCREMENT,
             seq INTEGER NOT NULL UNIQUE,
             segment INTEGER NOT NULL REFERENCES segment(id),
             position INTEGER NOT NULL,
             name TEXT NOT NULL,           -- the caller's id
             role TEXT,                    -- NULL in the tombstone of a deleted message
             checkpoint INTEGER NOT NULL,
             created_at_ms INTEGER NOT NULL,
             updated_at_ms INTEGER NOT NULL,
             wants_vector INTEGER NOT NULL,
             key_name TEXT,
             tags,
             metadata,
             words TEXT NOT NULL,
             body,                         -- JSON object: content, name and any other keys
             UNIQUE (segment, position)
           )""",
        "CREATE INDEX message_name ON message(name, segment)",
        """CREATE TABLE message_vector(
             id INTEGER PRIMARY KEY REFERENCES message(id), vector NOT NULL)""",
        "CREATE TABLE message_bits(id INTEGER PRIMARY KEY REFERENCES message(id), bits NOT NULL)",
        """CREATE VIRTUAL TABLE message_words USING fts5(
             terms, content='', detail=none, columnsize=0, tokenize=ascii)""",
        "CREATE VIRTUAL TABLE message_terms USING fts5vocab(message_words, row)",
        "CREATE VIRTUAL TABLE message_postings USING fts5vocab(message_words, instance)",
        """CREATE TABLE state(
             id INTEGER PRIMARY KEY,
             thread INTEGER NOT NULL REFERENCES thread(id),
             key_name TEXT,
             body NOT NULL                 -- JSON object
           )""",
        "CREATE INDEX state_thread ON state(thread)",
        """CREATE TABLE checkpoint(
             id INTEGER PRIMARY KEY AUTOINCREMENT,
             thread INTEGER NOT NULL REFERENCES thread(id),
             parent INTEGER,               -- checkpoint; NULL at the start, or when pruned
             segment INTEGER REFERENCES segment(id),
             length INTEGER NOT NULL,      -- positions up to here
             messages INTEGER NOT NULL,    -- of those, messages that were not deleted
             state INTEGER REFERENCES state(id),
             created_at_ms INTEGER NOT NULL,
             run_id TEXT,
             key_name TEXT,
             label
           )""",
        "CREATE INDEX checkpoint_thread ON checkpoint(thread, id)",
        "CREATE INDEX checkpoint_state ON checkpoint(state) WHERE state IS NOT NULL",
        """CREATE TABLE run(               -- by name: a thread may be held before it is made
             namespace TEXT NOT NULL,
             thread TEXT NOT NULL,
             run_id TEXT NOT NULL,
             actor TEXT,
             fence INTEGER NOT NULL UNIQUE,
             interrupted INTEGER NOT NULL,
             host TEXT NOT NULL,           -- boot id and process namespace
             pid INTEGER NOT NULL,
             started TEXT NOT NULL,        -- the process's start time
             beat_ms INTEGER NOT NULL,     -- monotonic time of the last renewal
             PRIMARY KEY (namespace, thread)
           ) WITHOUT ROWID""",
        """CREATE TABLE ticket(
             id INTEGER PRIMARY KEY AUTOINCREMENT,
             namespace TEXT NOT NULL,
             thread TEXT NOT NULL,
             host TEXT NOT NULL,
             pid INTEGER NOT NULL,
             started TEXT NOT NULL,
             beat_ms INTEGER NOT NULL
           )""",
        "CREATE INDEX ticket_thread ON ticket(namespace, thread, id)",
        """CREATE TABLE audit(
             seq INTEGER PRIMARY KEY,
             at_ms INTEGER NOT NULL,
             action TEXT NOT NULL,
             actor TEXT,
             thread_id TEXT,
             run_id TEXT,
             subject TEXT,
             outcome TEXT,
             details,
             prev_hash BLOB NOT NULL,
             hash BLOB NOT NULL
           )""",
        """CREATE TRIGGER audit_keeps_updates_out BEFORE UPDATE ON audit
             BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END""",
        """CREATE TRIGGER audit_keeps_deletes_out BEFORE DELETE ON audit
             BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END""",
        """CREATE TABLE audit_head(
             id INTEGER PRIMARY KEY CHECK (id = 1),
             records INTEGER NOT NULL,
             hash BLOB NOT NULL,
             proof BLOB NOT NULL
           )""",
        """CREATE TABLE keyring(
             name TEXT PRIMARY KEY,
             proof BLOB NOT NULL,
             retired INTEGER NOT NULL
           ) WITHOUT ROWID""",
        """CREATE TABLE tombstone(
             seq INTEGER PRIMARY KEY,
             kind TEXT NOT NULL,
             id INTEGER NOT NULL
           )""",
    ),
)
_SCHEMA_VERSION = len(_MIGRATIONS)

# Every reader takes the later of its own clock and the file's last stamp: a clock that steps back
# revives nothing.
_ITEM_IS_LIVE = """(item.expires_at_ms IS NULL OR item.expires_at_ms >
  max(:now_ms, (SELECT at_ms FROM counter)))"""


# ---- Values --------------------------------------------------------------------------------------


_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def _check_name(value: object, field: str) -> str:
    """A key, an id or one part of a name: any text without control characters and surrogates."""
    if not isinstance(value, str) or not value:
        raise ValidationError(f"{field} must be a non-empty string", field=field)
    if _UNFIT.search(value):
        raise ValidationError(
            f"{field} has a control character or a lone surrogate; use printable text", field=field
        )
    if len(value) > MAX_NAME_BYTES // 4 and len(value.encode()) > MAX_NAME_BYTES:
        raise ValidationError(
            f"{field} is longer than {MAX_NAME_BYTES} bytes in UTF-8", field=field
        )
    return str.__str__(value)


_UNFIT_SEGMENT = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")  # empty, "." or ".."


@functools.lru_cache(maxsize=4_096)
def _is_path(text: str) -> bool:
    """Whether a namespace is fit; most were seen before."""
    fit = not _UNFIT.search(text) and not _UNFIT_SEGMENT.search(text)
    return fit and len(text.encode()) <= MAX_NAME_BYTES


def _check_namespace(value: object, field: str = "namespace", *, root: bool = False) -> str:
    """A path of segments joined by `/`; "" is the whole store, accepted only where *root* says."""
    if type(value) is str and _is_path(value):
        return value
    if root and value == "":
        return ""
    path = _check_name(value, field)
    if not _is_path(path):
        raise ValidationError(
            f"{field} must be segments joined by '/', such as 'users/42': none empty, '.' or '..'",
            field=field,
        )
    return path


def _check_count(value: object, field: str, *, unlimited: bool = False) -> int:
    """A limit or an offset; -1, which means "all" in SQL, for None where that is accepted."""
    if value is None and unlimited:
        return -1
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        accepted = "a whole number, 0 or more" + (", or None for all" if unlimited else "")
        raise ValidationError(f"{field} must be {accepted}", field=field)
    return min(int(value), 2**62)


def _check_choice(value: object, field: str, accepted: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in accepted:
        raise ValidationError(f"{field} must be one of {', '.join(accepted)}", field=field)
    return value


def _check_iterable(value: object, field: str) -> Iterable[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ValidationError(f"{field} must be an iterable of mappings", field=field)
    return value


def _check_mapping(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValidationError(f"{field} must be a mapping", field=field)
    return value


def _check_flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise ValidationError(f"{field} must be True or False", field=field)
    return value


def _check_seconds(value: object, field: str, *, zero: bool = False) -> float:
    accepted = "0 or a positive" if zero else "a positive"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValidationError(f"{field} must be {accepted} number of seconds", field=field)
    if not (value > 0 or (zero and value == 0)) or value > MAX_TIME_MS:
        raise ValidationError(
            f"{field} must be {accepted} number of seconds, not past the year 9999", field=field
        )
    return float(value)


def _check_text(value: object, field: str, max_bytes: int) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValidationError(f"{field} must be a string or None", field=field)
    if len(value.encode("utf-8", "surrogatepass")) > max_bytes:
        raise ValidationError(f"{field} is longer than {max_bytes:,} bytes in UTF-8", field=field)
    return str.__str__(value)


def _gather_text(value: object, field: str, depth: int, parts: list[str]) -> None:
    """Checks that *value* is JSON and nothing else, and collects its text for the word index."""
    if isinstance(value, str):
        parts.append(value)
    elif value is None or isinstance(value, bool):
        return
    elif isinstance(value, int):
        try:
            parts.append(int.__repr__(value))
        except ValueError:
            raise ValidationError(
                f"{field} has an integer too long to print", field=field
            ) from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValidationError(
                f"{field} has a NaN or an Infinity, which no JSON holds", field=field
            )
        parts.append(float.__repr__(value))
    elif depth > MAX_VALUE_DEPTH:
        raise ValidationError(
            f"{field} is nested deeper than {MAX_VALUE_DEPTH} levels", field=field
        )
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValidationError(
                    f"{field} has a {type(key).__name__} as a dict key; use strings", field=field
                )
            parts.append(key)
            _gather_text(inner, field, depth + 1, parts)
    elif isinstance(value, list | tuple):
        for inner in value:
            _gather_text(inner, field, depth + 1, parts)
    else:
        raise ValidationError(
            f"{field} has a {type(value).__name__}; JSON takes dicts, lists, strings, numbers, "
            "True, False and None",
            field=field,
        )


# Compact JSON text; not escaped, so that text of any script takes its own bytes.
_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder().raw_decode


def _check_json(value: object, field: str, max_bytes: int) -> tuple[str, list[str]]:
    """The JSON text of *value* and the texts inside it."""
    parts: list[str] = []
    _gather_text(value, field, 1, parts)
    text = _dump(value)
    if len(text) > max_bytes // 4 and len(text.encode("utf-8", "surrogatepass")) > max_bytes:
        raise ValidationError(
            f"{field} is larger than {max_bytes:,} bytes as JSON text", field=field
        )
    return text, parts


def _load(text: str) -> Any:
    """What `_dump` wrote."""
    try:
        value, end = _decode(text)
    except ValueError:
        end = -1
    if end != len(text):
        raise StorageError("a stored value is damaged; restore a backup")
    return value


def _iso(ms: int) -> str:
    """ISO 8601 in UTC with milliseconds, such as `2025-03-01T06:00:00.000Z`."""
    at = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=ms)
    return at.isoformat(timespec="milliseconds") + "Z"


# ---- Words ---------------------------------------------------------------------------------------


# Dropped from a query (not from the index), compared before stemming.
_STOP_WORDS = frozenset(
    """
    a about above after again all also am an and any are as at be because been before being below
    between both but by can could d did do does doing down during each few for from further had has
    have having he her here hers herself him himself his how i if in into is it its itself just ll m
    me might more most must my myself no nor not now of off on once only or other our ours ourselves
    out over own re s same shall she should so some such t than that the their theirs them
    themselves then there these they this those through to too under until up ve very was we were
    what when where which while who whom why will with would you your yours yourself yourselves
    """.split()  # noqa: SIM905
)


class _Separators(dict[int, str | None]):
    """A `str.translate` table, filled as characters are met: letters, digits and marks stay, `_`,
    `-` and `.` stay for the moment (they join the parts of a name), the rest parts words."""

    def __missing__(self, code: int) -> str | None:
        char = chr(code)
        kept: str | None = " "
        if char.isalnum() or char in "_-." or unicodedata.category(char)[0] == "M":
            kept = char
        elif char in "\u00ad\u200c\u200d\u2060\ufeff":  # invisible inside a word
            kept = None
        self[code] = kept
        return kept


_separators = _Separators()
_accents = re.compile("[\u0300-\u036f]+")
_joints = re.compile(r"[\s_.\-]+|(?<=[a-z0-9])(?=[A-Z])")
# Scripts written without spaces (Han, kana, Thai, Lao, Myanmar, Khmer), and Hangul, whose
# particles cling to the word.
_unspaced = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3041-\u30ff\u3105-\u312f\u3131-\u318e"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    "\U0001b000-\U0001b16f\U00020000-\U000323af]+"
)
_VOWELS = frozenset("aeiouy")


def _stem(word: str) -> str:
    """A light English stem: plural, -ing, -ed, e, -ly, y to i. Other alphabets pass through."""
    if len(word) < 4 or not word.isascii():
        return word
    if word.endswith("ies") and not word.endswith(("eies", "aies")):
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith(("us", "ss", "aes", "ees", "oes")):
        word = word[:-1]
    for suffix in ("ing", "ed"):
        base = word.removesuffix(suffix)
        if base is not word and len(base) > 2 and not _VOWELS.isdisjoint(base):
            word = base[:-1] if base[-1] == base[-2] and base[-1] not in "lsz" else base
            break
    if len(word) > 4 and word.endswith("e"):
        word = word[:-1]
    if len(word) > 5 and word.endswith("ly"):
        word = word[:-2]
    if len(word) > 3 and word.endswith("y") and word[-2] not in _VOWELS:
        word = word[:-1] + "i"
    return word


def _split_words(chunk: str) -> list[str]:
    """The folded words of a piece of text that `_separators` left in one: case, accents and
    compatibility forms are gone, and `_`, `-`, `.` and camelCase have parted it."""
    if not chunk.isascii():
        plain = _accents.sub("", unicodedata.normalize("NFKD", chunk))
        chunk = unicodedata.normalize("NFC", plain).translate(_separators)
    words = [word.casefold() for word in _joints.split(chunk) if word]
    return [unicodedata.normalize("NFC", word) for word in words]


def _word_terms(word: str, *, query: bool) -> Iterator[str]:
    """A word's index terms: its stem, or the single characters and pairs of an unspaced script."""
    start = 0
    word = word[:MAX_WORD_CHARS]
    for match in _unspaced.finditer(word):
        if match.start() > start:
            yield _stem(word[start : match.start()])
        run = match.group()
        if not query or len(run) == 1:
            yield from run
        yield from (run[i : i + 2] for i in range(len(run) - 1))
        start = match.end()
    if start < len(word):
        yield _stem(word[start:])


class _TermsOfChunk(dict[str, str]):
    """Remembers what a chunk of text came to: most words of a text were met before (4 times
    faster, 2026-11)."""

    def __missing__(self, chunk: str) -> str:
        if chunk.isascii() and chunk.isalnum() and (chunk.islower() or chunk.isdigit()):
            return self._keep(chunk, _stem(chunk[:MAX_WORD_CHARS]))
        words = _split_words(chunk)
        terms = [term for word in words for term in _word_terms(word, query=False)]
        if len(words) > 1 and not _unspaced.search(joined := "".join(words)):
            terms.append(_stem(joined[:MAX_WORD_CHARS]))
        return self._keep(chunk, " ".join(terms))

    def _keep(self, chunk: str, found: str) -> str:
        if len(self) < 65_536 and len(chunk) <= MAX_WORD_CHARS:
            self[chunk] = found
        return found


_terms_of_chunk = _TermsOfChunk()


def _text_terms(parts: Iterable[str]) -> list[str]:
    """The distinct index terms of a row's texts, in order: its first 20,000."""
    chunks = " ".join(parts).translate(_separators).split()
    terms = dict.fromkeys(" ".join(map(_terms_of_chunk.__getitem__, chunks)).split())
    return list(terms)[:MAX_ROW_TERMS]


def _query_terms(text: str) -> list[str]:
    """The distinct terms that a query asks for: its first 128 that are no stop words, or of all
    its words when it has no others."""
    terms: dict[str, None] = {}
    stopped: dict[str, None] = {}
    for chunk in text.translate(_separators).split():
        for word in _split_words(chunk):
            target = stopped if word in _STOP_WORDS else terms
            target.update(dict.fromkeys(_word_terms(word, query=True)))
            if len(terms) >= MAX_QUERY_WORDS:
                return list(terms)[:MAX_QUERY_WORDS]
    return list(terms or stopped)[:MAX_QUERY_WORDS]


# ---- Filters -------------------------------------------------------------------------------------


_FIRST_MS = -62_135_596_800_000  # the year 1 begins
_END_MS = MAX_TIME_MS + 1  # the year 9999 has ended
_LAST_DAY = datetime.date.max.toordinal()
_EPOCH = datetime.datetime(1970, 1, 1)
_GROUP_TERMS = 1_000  # a longer "any of" is left to SQL alone

_TAG_OPERATORS = ("$in", "$all", "$nin")
_RANGE_OPERATORS = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_FIELD_OPERATORS = ("$eq", "$ne", "$in", "$nin", *_RANGE_OPERATORS)
_TIME_KEYS = ("gte", "gt", "lte", "lt")

_CLOCK_UNITS = {"minute": 60_000, "hour": 3_600_000}  # in milliseconds
_DAY_UNITS = {"day": 1, "week": 7}
_MONTH_UNITS = {"month": 1, "quarter": 3, "year": 12}
_UNIT = f"({'|'.join([*_CLOCK_UNITS, *_DAY_UNITS, *_MONTH_UNITS])})"
_MONTHS = [  # not those of `calendar`, which follow the locale
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
]
_PHRASES = (
    "today, yesterday, this or last week (month, quarter, year), last or past 30 days (minutes, "
    "hours, weeks, months, years), 3 days ago, 2025, 2025-03, 2025-03-14, March, March 2025, "
    "March 14 2025, 14 March 2025, Q1 2025, an ISO instant, since X, before X, after X, "
    "between X and Y, X to Y"
)

# SQL reads all operands from one JSON text, so it parses their floats as it does the stored ones.
# `true` and `false` have the atoms 1 and 0 there, so the type is always compared. The CASE keeps
# text from being parsed as a list, in whatever order SQLite tests the conditions.
_TAGS_SQL = """FROM json_each({table}.tags) AS t
    WHERE t.atom IN (SELECT v.atom FROM json_each({given}) AS v)"""
_FIELD_SQL = """EXISTS (
    SELECT 1 FROM json_each({table}.metadata) AS f WHERE f.key = {key} AND {test})"""
_KIND_SQL = {
    "bool": "f.type IN (SELECT v.type FROM json_each({given}) AS v)",
    "number": """f.type IN ('integer', 'real')
    AND f.atom {compare} (SELECT v.atom FROM json_each({given}) AS v)""",
    "text": """(f.type = 'text'
    AND f.atom {compare} (SELECT v.atom FROM json_each({given}) AS v)
    OR f.type = 'array' AND EXISTS (
      SELECT 1 FROM json_each(CASE f.type WHEN 'array' THEN f.value END) AS e
      WHERE e.type = 'text' AND e.atom {compare} (SELECT v.atom FROM json_each({given}) AS v)))""",
}

_Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class _Where:
    """Conditions of a search. Every group of *terms* has one that a matching row's index entry
    holds; they narrow and no more, *sql* decides. *echo* shows the time ranges that were meant."""

    sql: str
    params: dict[str, Any]
    terms: tuple[tuple[str, ...], ...]
    echo: dict[str, dict[str, str]]


def _refuse(field: str, reason: str) -> ValidationError:
    return ValidationError(f"{field} {reason}", field=field)


def _check_operators(given: Mapping[Any, Any], field: str, accepted: Sequence[str]) -> None:
    """Refuses an empty object and unknown names; the hint is a name of ours, never the caller's."""
    if not given:
        raise _refuse(field, f"must not be empty; give {', '.join(accepted)}")
    bare = {name.strip("$"): name for name in accepted}
    for name in given:
        if name not in accepted:
            meant = bare.get(name.strip("$").lower()) if isinstance(name, str) else None
            hint = f"; use {meant}" if meant else ""
            raise _refuse(field, f"takes only {', '.join(accepted)}{hint}")


def _check_string(value: object, field: str, least: int, most: int) -> str:
    """A tag or a metadata string. SQLite's JSON cuts at NUL, so the rule of keys holds here too."""
    if not isinstance(value, str):
        raise _refuse(field, f"must be a string, not {type(value).__name__}")
    if not least <= len(value) <= most:
        raise _refuse(field, f"must have {least} to {most:,} characters")
    if _UNFIT.search(value):
        raise _refuse(field, "has a control character or a lone surrogate; use printable text")
    return str.__str__(value)


def _check_scalar(value: object, field: str) -> _Scalar:
    """One metadata value as its base type."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _check_string(value, field, 0, MAX_FIELD_CHARS)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise _refuse(field, "is an integer beyond 64 bits; use a string")
        return int.__int__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refuse(field, "is NaN or infinite; use a finite number")
        return float.__float__(value)
    raise _refuse(field, f"must be a string, number or bool, not {type(value).__name__}")


def _check_tag_list(tags: object, field: str) -> list[str]:
    if not isinstance(tags, list | tuple):
        raise _refuse(field, f"must be a list of strings, not {type(tags).__name__}")
    checked = [_check_string(tag, f"{field}[{i}]", 1, MAX_TAG_CHARS) for i, tag in enumerate(tags)]
    return list(dict.fromkeys(checked))


def _check_tags(tags: object, field: str = "tags") -> list[str] | None:
    """The tags to be stored: in their order, without doubles."""
    if tags is None:
        return None
    checked = _check_tag_list(tags, field)
    if len(checked) > MAX_TAGS:
        raise _refuse(field, f"must be at most {MAX_TAGS}")
    return checked


def _check_fields(metadata: object, field: str) -> Iterator[tuple[str, str, object]]:
    """The fields of stored or asked metadata: name, name in errors, value."""
    if not isinstance(metadata, Mapping):
        raise _refuse(field, f"must be a flat dict, not {type(metadata).__name__}")
    if len(metadata) > MAX_FIELDS:
        raise _refuse(field, f"must have at most {MAX_FIELDS} fields")
    for name, value in metadata.items():
        plain = str.__str__(name) if isinstance(name, str) else name
        checked = _check_name(plain, f"a field name of {field}")
        yield checked, f"{field}[{checked!r}]", value


def _check_metadata(
    metadata: object, field: str = "metadata"
) -> dict[str, _Scalar | list[str]] | None:
    """The metadata to be stored, all in base types."""
    if metadata is None:
        return None
    checked: dict[str, _Scalar | list[str]] = {}
    for name, place, value in _check_fields(metadata, field):
        if not isinstance(value, list | tuple):
            checked[name] = _check_scalar(value, place)
        elif len(value) > MAX_FIELDS:
            raise _refuse(place, f"must be at most {MAX_FIELDS} strings")
        else:
            checked[name] = [
                _check_string(each, f"{place}[{i}]", 0, MAX_FIELD_CHARS)
                for i, each in enumerate(value)
            ]
    return checked


def _term(mark: str, *parts: str) -> str:
    """An index term no text can make, since it begins with a private-use character. 48 bits may
    collide, by chance or on purpose: rows found by a term are always checked."""
    return mark + hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def _namespace_term(path: str) -> str:
    return _term("\ue000", path)


def _tag_term(tag: str) -> str:
    return _term("\ue001", tag)


def _kind(value: _Scalar) -> str:
    """Integers and floats are one kind, bools are their own."""
    if isinstance(value, bool):
        return "bool"
    return "text" if isinstance(value, str) else "number"


def _field_term(field: str, value: _Scalar) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return _term("\ue002", field, _kind(value), str(int(value) if whole else value))


def _metadata_terms(metadata: Mapping[str, Any]) -> list[str]:
    """The index terms of stored metadata: one a field, in a list one an element."""
    return [
        _field_term(field, each)
        for field, value in metadata.items()
        for each in (dict.fromkeys(value) if isinstance(value, list) else (value,))
    ]


class _Conditions:
    """What becomes a `_Where`: conditions on one *table*, their parameters and terms."""

    __slots__ = ("groups", "params", "sql", "table")

    def __init__(self, table: str) -> None:
        self.table, self.sql = table, list[str]()
        self.params, self.groups = dict[str, Any](), list[tuple[str, ...]]()

    def bind(self, value: str | int) -> str:
        """A placeholder for *value*; the table is in its name, so two tables' filters can join."""
        name = f"{self.table}_filter_{len(self.params)}"
        self.params[name] = value
        return f":{name}"

    def narrow(self, terms: Sequence[str]) -> None:
        if len(terms) <= _GROUP_TERMS:
            self.groups.append(tuple(terms))


def _tags_filter(tags: object, where: _Conditions) -> None:
    """A list means any of; `$in`, `$all` and `$nin` all hold where several are given."""
    given = tags if isinstance(tags, Mapping) else {"$in": tags}
    _check_operators(given, "tags", _TAG_OPERATORS)
    for operator, operand in given.items():
        field = f"tags.{operator}" if given is tags else "tags"
        wanted = _check_tag_list(operand, field)
        if not wanted:
            raise _refuse(field, "must not be an empty list; leave it out for no condition")
        found = _TAGS_SQL.format(table=where.table, given=where.bind(_dump(wanted)))
        if operator == "$all":
            where.sql.append(f"(SELECT count(DISTINCT t.atom) {found}) = {where.bind(len(wanted))}")
            for tag in wanted[:MAX_TAGS]:
                where.narrow([_tag_term(tag)])
        elif operator == "$nin":
            where.sql.append(f"NOT EXISTS (SELECT 1 {found})")
        else:
            where.sql.append(f"EXISTS (SELECT 1 {found})")
            where.narrow([_tag_term(tag) for tag in wanted])


def _operand(value: object, operator: str, field: str) -> list[_Scalar]:
    """What *operator* compares with: one value, or for `$in` and `$nin` some of one kind."""
    if operator in ("$in", "$nin"):
        if not isinstance(value, list | tuple) or not value:
            raise _refuse(field, "must be a list of one value or more")
        values = [_check_scalar(each, f"{field}[{i}]") for i, each in enumerate(value)]
        if len({_kind(each) for each in values}) > 1:
            raise _refuse(field, "must be all strings, all numbers or all bools")
        return list(dict.fromkeys(values))
    checked = _check_scalar(value, field)
    if operator in _RANGE_OPERATORS and isinstance(checked, bool):
        raise _refuse(field, "must be a number or a string, not bool")
    return [checked]


def _metadata_filter(metadata: object, where: _Conditions) -> None:
    """Field to scalar (equal), list (any of) or operators, which all hold, each on its own."""
    for name, field, asked in _check_fields(metadata, "metadata"):
        given = asked
        if isinstance(given, Mapping):
            _check_operators(given, field, _FIELD_OPERATORS)
        else:
            given = {"$in" if isinstance(asked, list | tuple) else "$eq": asked}
        for operator, value in given.items():
            values = _operand(value, operator, f"{field}.{operator}" if given is asked else field)
            key, operands = where.bind(name), where.bind(_dump(values))
            compare = _RANGE_OPERATORS.get(operator, "IN")
            test = _KIND_SQL[_kind(values[0])].format(compare=compare, given=operands)
            found = _FIELD_SQL.format(table=where.table, key=key, test=test)
            where.sql.append(f"NOT {found}" if operator in ("$ne", "$nin") else found)
            if operator in ("$eq", "$in"):
                where.narrow([_field_term(name, each) for each in values])


def _zone(name: object) -> datetime.tzinfo:
    """The time zone of an IANA name. UTC needs no zone data."""
    if isinstance(name, str) and name.upper() == "UTC":
        return datetime.UTC
    if isinstance(name, str) and name:
        with contextlib.suppress(LookupError, ValueError, OSError, ImportError):
            import zoneinfo  # slow to import, and most searches are in UTC

            return zoneinfo.ZoneInfo(name)
    raise _refuse(
        "timezone",
        "must be an IANA name such as 'America/Chicago' or 'UTC'; where the system has no zone "
        "data, install the package tzdata",
    )


def _in_ms(moment: datetime.datetime, zone: datetime.tzinfo) -> int:
    """Milliseconds since 1970; what has no zone of its own is in *zone*. Whole numbers all the way,
    since `timestamp()` and `astimezone()` overflow at both ends of the calendar."""
    offset = moment.utcoffset()
    if offset is None:
        offset = moment.replace(tzinfo=zone).utcoffset() or datetime.timedelta()
    return (moment.replace(tzinfo=None) - _EPOCH - offset) // datetime.timedelta(milliseconds=1)


def _month_start(month: int) -> int:
    """The ordinal of the first day of a *month*, which is counted as year * 12 + month - 1."""
    year, at = divmod(max(month, 12), 12)
    return datetime.date(year, at + 1, 1).toordinal() if year <= 9999 else _LAST_DAY + 1


class _Calendar:
    """The local calendar of a zone, seen from now. It counts in ordinals of days and turns only
    their starts into times, so a day has the hours that it has. (No zone has put its clock forward
    across a midnight since 1970, only at it or beside it.)"""

    __slots__ = ("local", "month", "now_ms", "zone")

    def __init__(self, zone: datetime.tzinfo, now_ms: int) -> None:
        day = 86_400_000  # so that no zone can push now off the calendar
        self.zone, self.now_ms = zone, min(max(now_ms, _FIRST_MS + day), _END_MS - day)
        utc = (_EPOCH + datetime.timedelta(milliseconds=self.now_ms)).replace(tzinfo=datetime.UTC)
        self.local = utc.astimezone(zone).replace(tzinfo=None)
        self.month = self.local.year * 12 + self.local.month - 1

    def _midnight(self, ordinal: int) -> int:
        if ordinal > _LAST_DAY:
            return _END_MS
        return _in_ms(datetime.datetime.fromordinal(max(ordinal, 1)), self.zone)

    def days(self, first: int, count: int) -> tuple[int, int]:
        return self._midnight(first), self._midnight(first + count)

    def months(self, first: int, count: int) -> tuple[int, int]:
        return self._midnight(_month_start(first)), self._midnight(_month_start(first + count))

    def whole(self, unit: str, back: int) -> tuple[int, int]:
        """The whole minute, week, year and so on that is *back* before the present one."""
        if size := _CLOCK_UNITS.get(unit):
            start = self.now_ms - _in_ms(self.local, datetime.UTC) % size - back * size
            return start, start + size
        if size := _DAY_UNITS.get(unit):
            weekday = self.local.weekday() if unit == "week" else 0
            return self.days(self.local.toordinal() - weekday - back * size, size)
        size = _MONTH_UNITS[unit]
        return self.months(self.month - self.month % size - back * size, size)

    def since(self, unit: str, number: int) -> tuple[int, int]:
        """From *number* units ago, at this time of the day, up to and with this millisecond."""
        if size := _CLOCK_UNITS.get(unit):
            return self.now_ms - number * size, self.now_ms + 1
        month = max(self.month - number * _MONTH_UNITS.get(unit, 0), 12)
        last = calendar.monthrange(month // 12, month % 12 + 1)[1]
        ordinal = _month_start(month) + min(self.local.day, last) - 1
        ordinal = max(ordinal - number * _DAY_UNITS.get(unit, 0), 1)
        day = datetime.date.fromordinal(ordinal)
        start = _in_ms(datetime.datetime.combine(day, self.local.time()), self.zone)
        return start, self.now_ms + 1


def _iso_range(text: str, at: _Calendar) -> tuple[int, int] | None:
    """What an ISO date or instant covers: a year, a month, a day, a millisecond."""
    try:
        if found := re.fullmatch("([0-9]{4})(?:-([0-9]{2}))?", text):
            first = datetime.date(int(found[1]), int(found[2] or 1), 1)
            return at.months(first.year * 12 + first.month - 1, 1 if found[2] else 12)
        if re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
            return at.days(datetime.date.fromisoformat(text).toordinal(), 1)
        if re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}[t ][0-9]{2}:.+", text):
            start = _in_ms(datetime.datetime.fromisoformat(text.upper()), at.zone)
            return start, start + 1
    except ValueError:  # no such day
        pass
    return None


def _named_range(text: str, at: _Calendar) -> tuple[int, int] | None:
    """`q1 2025`, `march`, `march 2025`, `march 14 2025`, `14 march 2025`."""
    if found := re.fullmatch("q([1-4]) (?!0000)([0-9]{4})", text):
        return at.months(int(found[2]) * 12 + int(found[1]) * 3 - 3, 3)
    found = re.fullmatch("(?:([0-9]{1,2}) )?([a-z]+)(?: ([0-9]{1,2}))?(?: ([0-9]{4}))?", text)
    months = [i for i, name in enumerate(_MONTHS) if found and found[2] in (name, name[:3])]
    if not found or not months or (found[1] and found[3]):
        return None
    day, year, month = found[1] or found[3], found[4], months[0]
    if day or year:
        return _iso_range(f"{year}-{month + 1:02}" + (f"-{day:0>2}" if day else ""), at)
    return at.months(at.month - (at.month - month) % 12, 1)


def _plain_range(text: str, at: _Calendar) -> tuple[int, int] | None:
    """A phrase without since, before, after, between and to."""
    if text in ("today", "yesterday"):
        return at.whole("day", int(text == "yesterday"))
    if found := re.fullmatch("(this|last) (week|month|quarter|year)", text):
        return at.whole(found[2], int(found[1] == "last"))
    if found := re.fullmatch(f"(?:last|past)(?: ([0-9]+))? {_UNIT}s?", text):
        return at.since(found[2], int(found[1] or 1))
    if found := re.fullmatch(f"([0-9]+) {_UNIT}s? ago", text):
        return at.whole(found[2], int(found[1]))
    return _iso_range(text, at) or _named_range(text, at)


def _clamp(start: int, end: int) -> tuple[int, int]:
    return min(max(start, _FIRST_MS), _END_MS - 1), min(max(end, _FIRST_MS + 1), _END_MS)


def _date_range(
    phrase: str, zone: datetime.tzinfo, now_ms: int, field: str = "created"
) -> tuple[int, int]:
    """The half-open range of milliseconds that a date phrase means; never an empty one."""
    text = " ".join(phrase.replace(",", " ").lower().split()) if len(phrase) <= 200 else ""
    at = _Calendar(zone, now_ms)
    side = re.fullmatch("(since|before|after) (.+)", text)
    pair = re.fullmatch("between (.+) and (.+)", text) or re.fullmatch("(.+) to (.+)", text)
    first = _plain_range(side[2] if side else pair[1] if pair else text, at)
    second = _plain_range(pair[2], at) if pair else first
    if first is None or second is None:
        raise _refuse(field, f"must be one of these forms: {_PHRASES}")
    start, end = first[0], second[1]
    if pair and end <= start:
        raise _refuse(field, "ends before it begins; put the earlier date first")
    if side:
        start, end = {
            "since": (start, _END_MS),
            "before": (_FIRST_MS, start),
            "after": (end, _END_MS),
        }[side[1]]
    start, end = _clamp(start, end)
    return start, max(end, start + 1)  # a day that a zone skipped had no millisecond


def _covered(value: object, field: str, at: _Calendar) -> tuple[int, int]:
    """What one bound of a range object covers: a millisecond, or the whole of a plain date."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value), int(value) + 1
    if isinstance(value, datetime.datetime):
        start = _in_ms(value, at.zone)
        return start, start + 1
    if isinstance(value, datetime.date):
        return at.days(value.toordinal(), 1)
    if isinstance(value, str) and (covered := _iso_range(value.strip().lower(), at)):
        return covered
    raise _refuse(
        field, "must be an ISO date or instant such as 2025-03-14, a datetime or milliseconds"
    )


def _object_range(given: Mapping[Any, Any], field: str, at: _Calendar) -> tuple[int, int]:
    """`gte` and `lt` of a plain date mean its start, `gt` and `lte` its end."""
    _check_operators(given, field, _TIME_KEYS)
    for one, other in (("gte", "gt"), ("lte", "lt")):
        if one in given and other in given:
            raise _refuse(field, f"takes {one} or {other}, not both")
    bounds = {key: _covered(value, f"{field}.{key}", at) for key, value in given.items()}
    start = bounds["gte"][0] if "gte" in bounds else bounds.get("gt", (0, _FIRST_MS))[1]
    end = bounds["lte"][1] if "lte" in bounds else bounds.get("lt", (_END_MS, 0))[0]
    return _clamp(start, end)


def _time_filter(field: str, given: object, at: _Calendar, where: _Conditions) -> dict[str, str]:
    """Adds the range of `created` or `modified`; returns it as ISO text, without an open side."""
    if isinstance(given, str):
        start, end = _date_range(given, at.zone, at.now_ms, field)
    elif isinstance(given, Mapping):
        start, end = _object_range(given, field, at)
    elif isinstance(given, datetime.date):  # a datetime is one too
        start, end = _clamp(*_covered(given, field, at))
    else:
        raise _refuse(field, "must be a date phrase or an object with gte, gt, lte, lt")
    column = f"{where.table}.{'created' if field == 'created' else 'updated'}_at_ms"
    echo = {}
    if start > _FIRST_MS:
        where.sql.append(f"{column} >= {where.bind(start)}")
        echo["gte"] = _iso(start)
    if end < _END_MS:
        where.sql.append(f"{column} < {where.bind(end)}")
        echo["lt"] = _iso(end)
    return echo


def _filters(
    *,
    tags: object = None,
    metadata: object = None,
    created: object = None,
    modified: object = None,
    timezone: object = "UTC",
    now_ms: int,
    table: str = "item",
) -> _Where:
    """All filters of a search, checked, as conditions on *table*. Every operand is a parameter."""
    where, at = _Conditions(table), _Calendar(_zone(timezone), now_ms)
    if tags is not None:
        _tags_filter(tags, where)
    if metadata is not None:
        _metadata_filter(metadata, where)
    times = {"created": created, "modified": modified}
    echo = {
        field: _time_filter(field, given, at, where)
        for field, given in times.items()
        if given is not None
    }
    return _Where(" AND ".join(where.sql), where.params, tuple(where.groups), echo)


# ---- Encryption ----------------------------------------------------------------------------------


class _Plain:
    """How content is kept in a file without keys: as text, or as bytes where it has surrogates,
    which SQLite's text can't hold."""

    key_name: str | None = None

    def seal(self, text: str, *place: str) -> str | bytes:
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-8", "surrogatepass")
        return text

    def open(self, stored: str | bytes, key_name: str | None, *place: str) -> str:
        return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")


# ---- Database ------------------------------------------------------------------------------------


_KINDS = ("item", "message")
_ADD_WORDS = {kind: f"INSERT INTO {kind}_words(rowid, terms) VALUES (?, ?)" for kind in _KINDS}
_DROP_WORDS = {
    kind: f"INSERT INTO {kind}_words({kind}_words, rowid, terms) VALUES ('delete', ?, ?)"
    for kind in _KINDS
}

# A worker that waited this long for its turn goes before those that come new; before that, letting
# the newest go on is faster than waking the one that waits.
_PATIENCE_SECS = 0.005

# A forked child must never close its parent's connections; it keeps them here, unused.
_inherited: list[sqlite3.Connection] = []


def _roll_back(connection: sqlite3.Connection) -> None:
    """Ends what is open, if anything is, without hiding the error that led here."""
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


class _Turn:
    """One worker's turn with the writing connection. It lasts while `held` is locked: a `with` of
    a lock ends in C, so no signal can keep a turn from ending."""

    __slots__ = ("held", "pid", "since", "worker")

    def __init__(self) -> None:
        self.held = threading.Lock()
        self.since = 0.0
        self.pid = os.getpid()
        self.worker = threading.get_ident()


class _Transaction(_Turn):
    """One open write transaction: its connection, its time, and the index work it has collected.

    Index work is applied at once, deletes before inserts and both by ascending row id: three
    times faster than as it comes, since FTS5 flushes whenever a row id is lower than the last.
    """

    __slots__ = (
        "_added", "_dropped", "connection", "counts", "now_ms", "seq", "stamped", "unerased",
    )  # fmt: skip

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__()
        self.connection = connection
        self.now_ms = 0
        self.seq = 0
        self.stamped = False
        self.unerased = False
        self.counts = dict.fromkeys(_KINDS, 0)
        self._added: dict[str, dict[int, str]] = {kind: {} for kind in _KINDS}
        self._dropped: dict[str, dict[int, str]] = {kind: {} for kind in _KINDS}

    def begin(self, clock_ms: int) -> None:
        row = self.connection.execute(
            "SELECT seq, at_ms, items, messages, unerased FROM counter"
        ).fetchone()
        self.seq, last_ms, items, messages, unerased = row
        self.now_ms = max(clock_ms, last_ms)
        self.counts = {"item": items, "message": messages}
        self.unerased = bool(unerased)

    def next_seq(self) -> int:
        """The number of this write; whoever takes one has written, so the counter is kept."""
        self.seq += 1
        self.stamped = True
        return self.seq

    def index(self, kind: str, seq: int, words: str) -> None:
        self._added[kind][seq] = words

    def unindex(self, kind: str, seq: int, words: str) -> None:
        self.unerased = self.stamped = True
        if self._added[kind].pop(seq, None) is None:
            self._dropped[kind][seq] = words

    def apply_index(self) -> None:
        for kind in _KINDS:
            added, dropped = self._added[kind], self._dropped[kind]
            if dropped:
                self.connection.executemany(_DROP_WORDS[kind], sorted(dropped.items()))
            if added:
                self.connection.executemany(_ADD_WORDS[kind], sorted(added.items()))
            self.counts[kind] += len(added) - len(dropped)
            added.clear()
            dropped.clear()

    def drop_index(self) -> None:
        """Forgets what was collected since the last savepoint, which is being rolled back."""
        for collected in (*self._added.values(), *self._dropped.values()):
            collected.clear()

    def write_through(self) -> None:
        """Applies what was collected: before the commit, and before a read of this worker."""
        self.apply_index()
        if self.stamped:
            self.stamped = False
            self.connection.execute(
                """UPDATE counter SET seq = ?, at_ms = ?, items = ?, messages = ?, unerased = ?""",
                (
                    self.seq, self.now_ms, self.counts["item"], self.counts["message"],
                    self.unerased,
                ),
            )  # fmt: skip


def _look(path: str, mode: str = "mode=ro") -> sqlite3.Connection:
    """A connection that leaves the file's bytes as they are."""
    uri = f"{Path(path).as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=5, isolation_level=None)


def _create_file(path: str, *, read_only: bool) -> None:
    """Makes a missing file with mode 0600 before SQLite opens it; the log inherits the mode."""
    if os.path.isdir(path):
        raise StorageError("the path is a folder; give the path of a file")
    if os.path.exists(path):
        return
    if read_only:
        raise StorageError("there is no such file, and read_only=True makes none")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return
    except FileNotFoundError:
        raise StorageError("the file's folder does not exist; make it first") from None
    except OSError as error:
        raise StorageError(f"the file can't be made: {error.strerror}") from error


def _look_before_opening(path: str, *, read_only: bool) -> None:
    """Refuses what is not ours, looking again while another process is making the file."""
    while True:
        before = _signature(path)
        try:
            _refuse_foreign(path, read_only=read_only)
            return
        except (StorageError, sqlite3.DatabaseError):
            time.sleep(0.02)
            if _signature(path) == before:
                raise


def _signature(path: str) -> tuple[int, int, bool]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, os.path.exists(path + "-wal")


def _refuse_foreign(path: str, *, read_only: bool) -> None:
    """Refuses what is not ours with its bytes unchanged: first by the header, then through a
    read-only connection, since opening for writing folds a left-over log into the file."""
    try:
        with open(path, "rb") as file:
            header = file.read(100)
    except OSError as error:
        raise StorageError(f"the file can't be read: {error.strerror}") from error
    if not header:
        if read_only:
            raise StorageError("the file is empty, and read_only=True makes no store in it")
        return
    if not header.startswith(b"SQLite format 3\0"):
        raise StorageError("the file is no SQLite database; it was left as it is")
    # Without a log nobody writes, and a look that ignores locks leaves no files behind.
    mode = "mode=ro" if os.path.exists(path + "-wal") else "immutable=1"
    with contextlib.closing(_look(path, mode)) as connection:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application == 0 and version == 0 and tables == 0 and not read_only:
        return
    if application != _APPLICATION_ID:
        raise StorageError("the file is another application's database; it was left as it is")
    if version > _SCHEMA_VERSION:
        raise SchemaError(
            f"the file has schema {version}, newer than this criomem's {_SCHEMA_VERSION}; "
            "use the newer criomem"
        )
    if version < _SCHEMA_VERSION and read_only:
        raise SchemaError("the file has an older schema; open it once for writing")


class _Database:
    """The only place that opens, guards and closes connections.

    One connection writes, by turns; a pool of connections reads beside it. A store in memory
    has the one connection only, and its reads take turns too. Two doors lead in: `read` and
    `transaction`. Both are generators: a class with `__enter__` leaks its transaction when a signal
    arrives between two of its lines (measured 2026-11).
    """

    _MAX_IDLE_READERS = 8

    def __init__(
        self, path: str | None, *, durable: bool, read_only: bool, busy_secs: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.path = path
        self.durable = durable
        self.read_only = read_only
        self.codec = _Plain()
        self._busy_secs = busy_secs
        self._clock = clock
        self._latest_ms = 0
        self.closed = False
        self._reset()
        try:
            self._open()
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.Error):
                raise _storage_error(error) from error
            raise

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._forked_inside = False
        self._lock = threading.Lock()  # entered by itself: a Condition's `with` is Python code
        self._gate = threading.Condition(self._lock)
        self._line: list[_Turn] = []
        self._turn: _Turn | None = None
        self._pool: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None

    # The doors.

    @contextlib.contextmanager
    def read(self, *, snapshot: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection to read with; with *snapshot* all statements see one moment. Inside this
        worker's own transaction: its connection, which sees what was written so far."""
        if self.closed or self._pid != os.getpid():
            self.ready()
        turn = self._own() if self._turn is not None else None
        try:
            if turn is not None:
                if isinstance(turn, _Transaction):
                    turn.write_through()
                yield self._connection()
            elif self.path is None:
                with self._in_turn(_Turn()):
                    yield self._connection()
            else:
                try:
                    connection = self._pool.pop()
                except IndexError:
                    connection = self._connect()
                try:
                    if snapshot:
                        connection.execute("BEGIN")
                    yield connection
                finally:
                    if snapshot or self.closed or len(self._pool) >= self._MAX_IDLE_READERS:
                        self._give_back(connection)
                    else:
                        self._pool.append(connection)
        except sqlite3.Error as error:
            raise _storage_error(error) from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[_Transaction]:
        """The write lock and one commit at the end, or none of it after any exception. Nested in
        this worker's own transaction: a savepoint of it."""
        self.ready()
        if self.read_only:
            raise StorageError("the store was opened with read_only=True; open it without to write")
        if self._forked_inside:
            raise StorageError(
                "this process was forked while its parent had a transaction open, and SQLite "
                "counts the lock as this process's too; write from a process forked before it"
            )
        turn = self._own()
        if isinstance(turn, _Transaction):
            turn.now_ms = max(turn.now_ms, self.now_ms())
            with self._savepoint(turn):
                yield turn
            return
        transaction = _Transaction(self._connection())
        with self._in_turn(transaction):
            try:
                self._begin(transaction.connection)
                transaction.begin(self.now_ms())
                yield transaction
                if transaction.pid == os.getpid():  # a forked child leaves its parent's block too
                    transaction.write_through()
                    transaction.connection.execute("COMMIT")
            except BaseException as error:
                if transaction.pid == os.getpid():
                    _roll_back(transaction.connection)
                if isinstance(error, sqlite3.Error):
                    raise _storage_error(error) from error
                raise

    @contextlib.contextmanager
    def _savepoint(self, transaction: _Transaction) -> Iterator[None]:
        connection = transaction.connection
        if not connection.in_transaction:
            raise StorageError(
                "the transaction was rolled back by an earlier error; leave its block"
            )
        try:
            transaction.apply_index()
            counts, unerased = dict(transaction.counts), transaction.unerased
            connection.execute("SAVEPOINT inner_block")
            try:
                yield
                transaction.apply_index()
            except BaseException:
                if connection.in_transaction and transaction.pid == os.getpid():
                    connection.execute("ROLLBACK TO inner_block")
                    transaction.drop_index()
                    transaction.counts, transaction.unerased = counts, unerased
                    transaction.stamped = True  # the row of the counter went back too
                raise
            finally:
                if connection.in_transaction and transaction.pid == os.getpid():
                    connection.execute("RELEASE inner_block")
        except sqlite3.Error as error:
            raise _storage_error(error) from error

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[sqlite3.Connection]:
        """The writing connection for statements that SQLite allows in no transaction, with this
        process's other writers kept out."""
        self.ready()
        if self._own() is not None:
            raise StorageError(f"{what} can't run inside a transaction; call it after the block")
        try:
            with self._in_turn(_Turn()):
                yield self._connection()
        except sqlite3.Error as error:
            raise _storage_error(error) from error

    def copy_to(self, target: str) -> None:
        """Writes a copy as it is at this moment into a new file of mode 0600."""
        try:
            file = os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise StorageError(f"the backup can't be made: {error.strerror}") from error
        try:
            with self.alone("backup") if self.path is None else self._copying() as connection:
                connection.execute("VACUUM INTO ?", (target,))
            os.fsync(file)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[sqlite3.Connection]:
        """A connection that may run VACUUM INTO, which a `query_only` one refuses."""
        self.ready()
        if self._own() is not None:
            raise StorageError("backup can't run inside a transaction; call it after the block")
        try:
            with contextlib.closing(_look(cast(str, self.path))) as connection:
                yield connection
        except sqlite3.Error as error:
            raise _storage_error(error) from error

    def size(self) -> int:
        """Bytes of the file and its log, or of the pages in memory."""
        if self.path is None:
            with self.read() as connection:
                pages: int = connection.execute(
                    "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
                ).fetchone()[0]
            return pages
        paths = (self.path, self.path + "-wal")
        return sum(os.path.getsize(path) for path in paths if os.path.exists(path))

    def vacuum(self) -> str | None:
        """Rewrites the file and empties its log; says what was in the way, if anything was."""
        if self.read_only:
            raise StorageError("the store was opened with read_only=True; open it without to write")
        with self.alone("compact") as connection:
            try:
                connection.execute("PRAGMA temp_store = FILE")  # in memory it takes the file's size
                self._retry_busy(connection, "VACUUM")
                if self.path is None or self._empty_log(connection):
                    return None
                return "a reader still uses the write-ahead log; call compact() again"
            except sqlite3.OperationalError as error:
                return str(_storage_error(error))
            finally:
                connection.execute("PRAGMA temp_store = MEMORY")

    def _empty_log(self, connection: sqlite3.Connection) -> bool:
        """Tried again and again for a moment: SQLite's own wait would hold the write lock."""
        for _ in range(20):
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                return True
            time.sleep(0.01)
        return False

    def now_ms(self) -> int:
        """The clock in milliseconds, never earlier than it was before in this store."""
        self._latest_ms = max(self._latest_ms, int(self._clock() * 1000))
        return self._latest_ms

    def close(self) -> None:
        """Closes every connection; the log is folded in only if that takes no waiting."""
        if self.closed:
            return
        if self._own() is not None:
            raise StorageError("close can't run inside a transaction; call it after the block")
        if self._pid == os.getpid():
            with contextlib.suppress(StorageError), self._in_turn(_Turn()):  # or another closed it
                self.closed = True
        self.closed = True
        connections = [*self._pool, *([self._writer] if self._writer else [])]
        self._pool.clear()
        if self._pid != os.getpid():
            _inherited.extend(connections)
            return
        for connection in connections:
            connection.close()

    # Who may use the writing connection.

    def in_transaction(self) -> bool:
        """Whether this worker has a transaction open."""
        return isinstance(self._own(), _Transaction)

    def ready(self) -> None:
        if self.closed:
            raise StorageError("the store is closed; open a new Storage")
        if self._pid != os.getpid():
            self._reopen_in_child()

    def _own(self) -> _Turn | None:
        """This worker's turn, if it has one."""
        turn = self._turn
        if turn is None:
            return None
        return turn if turn.worker == threading.get_ident() and turn.held.locked() else None

    @contextlib.contextmanager
    def _in_turn(self, turn: _Turn) -> Iterator[None]:
        """Waits for the turn, at most `busy_timeout_secs`, and keeps it for the block."""
        with turn.held:
            try:
                with self._lock:
                    if self._must_wait(turn):
                        self._await_turn(turn)
                    self._turn = turn
                if self.closed:  # meanwhile
                    self.ready()
                yield
            finally:
                with self._lock:
                    if self._turn is turn:
                        self._turn = None
                        self._gate.notify_all()

    def _must_wait(self, turn: _Turn) -> bool:
        """Whether another has the turn, or has waited for it long enough to go first."""
        if self._turn is not None and self._turn.held.locked():
            return True
        while self._line and not self._line[0].held.locked():  # a signal took it out of the line
            self._line.pop(0)
        if not self._line or self._line[0] is turn:
            return False
        return time.monotonic() - self._line[0].since > _PATIENCE_SECS

    def _await_turn(self, turn: _Turn) -> None:
        turn.since = time.monotonic()
        self._line.append(turn)
        try:
            while self._must_wait(turn):
                if time.monotonic() - turn.since >= self._busy_secs:
                    raise StorageError(
                        f"another worker has held the store for {self._busy_secs:g} s; "
                        "keep transactions short or raise busy_timeout_secs"
                    )
                self._gate.wait(0.05)  # a turn that a signal ended wakes nobody
        finally:
            self._line.remove(turn)

    def _begin(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:  # a signal kept the last holder from its rollback
            _roll_back(connection)
        self._retry_busy(connection, "BEGIN IMMEDIATE")

    def _retry_busy(self, connection: sqlite3.Connection, statement: str) -> None:
        """Runs a statement, again while another process writes: short pauses with jitter are
        fairer than SQLite's own, which grow to 100 ms."""
        deadline = time.monotonic() + self._busy_secs
        pause = 0.0003
        while True:
            try:
                connection.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() >= deadline:
                    raise
            time.sleep(random.uniform(0.5, 1.0) * pause)
            pause = min(pause * 1.5, 0.01)

    def _reopen_in_child(self) -> None:
        """After a fork a file gets new connections; a store in memory goes on with its copy."""
        if self.path is None:
            writer = self._writer
            self._reset()
            self._writer = writer
            if writer is not None:
                _roll_back(writer)
            return
        _inherited.extend([*self._pool, *([self._writer] if self._writer else [])])
        inside = self._writer is not None and self._writer.in_transaction
        self._reset()
        self._writer = self._connect(writing=True)
        self._forked_inside = inside

    # Opening.

    def _connection(self) -> sqlite3.Connection:
        if self._writer is None:
            raise StorageError("the store is closed; open a new Storage")
        return self._writer

    def _give_back(self, connection: sqlite3.Connection) -> None:
        if self._pid != os.getpid():
            _inherited.append(connection)
            return
        _roll_back(connection)  # ends a snapshot
        if self.closed or len(self._pool) >= self._MAX_IDLE_READERS:
            connection.close()
        else:
            self._pool.append(connection)

    def _connect(self, *, writing: bool = False) -> sqlite3.Connection:
        if self.path is None:
            target = ":memory:"
        elif self.read_only:
            target = Path(self.path).as_uri() + "?mode=ro"
        else:
            target = self.path
        connection = sqlite3.connect(
            target, uri=self.read_only, isolation_level=None, check_same_thread=False,
            timeout=0 if writing else 5, cached_statements=256,
        )  # fmt: skip
        try:
            self._configure(connection, writing)
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self, connection: sqlite3.Connection, writing: bool) -> None:
        # Even a pragma may meet a lock, while another process makes the file.
        run = functools.partial(self._retry_busy, connection)
        run("PRAGMA temp_store = MEMORY")  # no content in temporary files
        run("PRAGMA trusted_schema = OFF")  # a planted view or trigger calls no function
        run("PRAGMA cell_size_check = ON")
        run("PRAGMA secure_delete = ON")  # per connection; the build's default varies
        if self.path is None:
            return
        if not writing or self.read_only:
            run("PRAGMA query_only = ON")
            run(f"PRAGMA mmap_size = {256 * 1024 * 1024}")
            return
        run(f"PRAGMA synchronous = {'FULL' if self.durable else 'NORMAL'}")
        run(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")
        if self.durable:  # macOS needs these for a sync that reaches the disk; elsewhere no effect
            run("PRAGMA fullfsync = ON")
            run("PRAGMA checkpoint_fullfsync = ON")

    def _open(self) -> None:
        if sqlite3.sqlite_version_info < (3, 34):
            raise StorageError(
                f"SQLite {sqlite3.sqlite_version} is too old; 3.34 or newer is needed"
            )
        if self.path is None:
            self._writer = self._connect(writing=True)
            self._migrate(self._writer)
            return
        _create_file(self.path, read_only=self.read_only)
        _look_before_opening(self.path, read_only=self.read_only)
        self._writer = self._connect(writing=True)
        if not self.read_only:
            self._use_log(self._writer)
            self._migrate(self._writer)

    def _use_log(self, connection: sqlite3.Connection) -> None:
        """Switches to the write-ahead log. Two processes that open a new file at once may refuse
        each other the switch, without waiting, so it is tried again."""
        self._retry_busy(connection, "PRAGMA journal_mode = WAL")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            raise StorageError("the file system can't hold a write-ahead log; use a local disk")

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Brings the schema up to date in one transaction; the first to get the lock does it."""
        if connection.execute("PRAGMA user_version").fetchone()[0] == _SCHEMA_VERSION:
            return
        try:
            self._begin(connection)
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            for statements in _MIGRATIONS[version:]:
                for statement in statements:
                    connection.execute(statement)
            if version == 0:
                connection.execute(
                    "INSERT INTO meta(name, value) VALUES ('file_id', ?), ('tokenizer', ?)",
                    (os.urandom(16), _TOKENIZER_VERSION),
                )
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise


# Long work aims at this for one transaction, so that other writers get in.
_CHUNK_SECS = 0.01


def _in_chunks(step: Callable[[int], int], progress: Progress | None, total: int | None) -> int:
    """Runs `step(size)`, which does up to *size* rows in a transaction of its own and says how
    many, until it does none; sizes follow the time that a chunk takes."""
    done, size = 0, 200
    while True:
        started = time.perf_counter()
        count = step(size)
        if not count:
            return done
        done += count
        if progress is not None:
            progress(done, total)
        spent = time.perf_counter() - started
        size = max(50, min(20_000, round(size * min(2.0, _CHUNK_SECS / max(spent, 1e-6)))))
        time.sleep(0.0005)  # lets a waiting writer in


# ---- Search --------------------------------------------------------------------------------------


# Sets of up to this many rows are searched by scanning their words: about 0.5 µs a row and word.
_SCAN_ROWS = 1_500
# Up to this many postings are joined in one union; beyond, tiers of words stop early.
_UNION_POSTINGS = 120_000
# What it costs to look at a row in a scan, as a share of joining a posting with its row.
_SCAN_COST = 0.5
# A word's frequency is estimated from this many of its newest postings.
_SAMPLE_POSTINGS = 128
# The first step of a filtered search ranks this many rows more than are asked for.
_SPARE_ROWS = 32

_SOURCE = {
    "item": "item",
    "message": """message
      CROSS JOIN segment ON segment.id = message.segment
      CROSS JOIN thread ON thread.id = segment.thread""",
}


@functools.lru_cache(maxsize=4_096)
def _scope_terms(namespace: str) -> tuple[str, ...]:
    """One index term for the namespace and one for each that it lies in."""
    segments = namespace.split("/")
    return tuple(_namespace_term("/".join(segments[: i + 1])) for i in range(len(segments)))


def _condition(sql: str, **params: Any) -> _Where:
    return _Where(sql, params, (), {})


def _inside(namespace: str, table: str, *, recursive: bool = True) -> _Where:
    """Rows of *namespace* and, if *recursive*, of those inside it, which begin with it and "/"
    ("0" follows "/"). No condition for the root."""
    if not namespace and recursive:
        return _condition("")
    sql, params = f"{table}.namespace = :namespace", {"namespace": namespace}
    if recursive:
        inside = f"{table}.namespace >= :namespace_from AND {table}.namespace < :namespace_to"
        sql = f"({sql} OR ({inside}))"
        params |= {"namespace_from": namespace + "/", "namespace_to": namespace + "0"}
    return _Where(sql, params, ((_namespace_term(namespace),),) if namespace else (), {})


def _both(*conditions: _Where) -> _Where:
    """All of the conditions."""
    params: dict[str, Any] = {}
    echo: dict[str, dict[str, str]] = {}
    for condition in conditions:
        params |= condition.params
        echo |= condition.echo
    return _Where(
        " AND ".join(condition.sql for condition in conditions if condition.sql),
        params,
        tuple(group for condition in conditions for group in condition.terms),
        echo,
    )


def _match_all(groups: Iterable[Sequence[str]]) -> str:
    """An FTS5 query: of each group at least one term."""
    return " AND ".join("(" + " OR ".join(f'"{term}"' for term in group) + ")" for group in groups)


class _Ranking:
    """Ranks the rows of one kind by the weights of the words they have, newest first among equals.

    Exact at any size and under any filter: every way below gives what the plain union gives, which
    adds up the words' posting lists. Row ids of the index are `seq`, so descending is newest first.
    Methods: a bounded scan; the all-words stream; the union; tiers, which take the heaviest word
    first and stop when no unseen row can reach the page (it lacks all words taken so far).
    """

    def __init__(
        self,
        index: sqlite3.Connection,
        kind: str,
        weights: dict[str, int],
        where: _Where,
        rows: int,
    ) -> None:
        self._index = index
        self._kind = kind
        self._table = f"{kind}_words"
        self._weights = weights
        self._where = where
        self._rows = max(1, rows)
        self._narrow = _match_all(where.terms)
        self._frequency: dict[str, float] = {}
        self._share = 1.0

    def top(self, count: int) -> list[tuple[int, int]]:
        """The best *count* rows (-1: all) as (seq, weight of the words found)."""
        narrowed = self._estimate(self._narrow, _SCAN_ROWS + 1) if self._narrow else self._rows
        if narrowed <= _SCAN_ROWS:
            return self._scan(count)
        self._share = min(1.0, narrowed / self._rows)
        self._frequency = {
            word: self._estimate(f'"{word}"', _SAMPLE_POSTINGS) for word in self._weights
        }
        present = [word for word in self._weights if self._frequency[word]]
        present.sort(key=lambda word: (-self._weights[word], self._frequency[word]))
        postings = self._share * sum(self._frequency.values())
        if count < 0:
            return self._union(present, count, filtered=True)
        wanted = count + _SPARE_ROWS
        first = self._best(present, wanted, postings, filtered=False)
        passed = self._passing(first)
        if len(passed) >= count or len(first) < wanted:
            return passed[:count]
        if len(passed) * 20 < len(first) and postings > _SCAN_COST * narrowed:
            return self._scan(count)
        self._share *= max(1, len(passed)) / len(first)
        return self._best(present, count, postings, filtered=True)

    def _best(
        self, words: list[str], count: int, postings: float, *, filtered: bool
    ) -> list[tuple[int, int]]:
        streamed = self._stream(words, count, filtered=filtered)
        if streamed:
            return streamed
        if postings <= _UNION_POSTINGS:
            return self._union(words, count, filtered=filtered)
        return self._tiers(words, count, filtered=filtered)

    def _estimate(self, match: str, sample: int) -> float:
        """About how many rows match: counted up to *sample*, then from how dense the newest are."""
        found, lowest, newest = self._index.execute(
            f"""SELECT count(*), min(rowid), (SELECT seq FROM counter) FROM (
                  SELECT rowid FROM {self._table} WHERE {self._table} MATCH :match
                  ORDER BY rowid DESC LIMIT :sample)""",
            {"match": match, "sample": sample},
        ).fetchone()
        if found < sample:
            return float(found)
        return float(min(self._rows, found * newest / max(1, newest - lowest + 1)))

    def _expression(self, match: str) -> str:
        return f"({self._narrow}) AND ({match})" if self._narrow else match

    def _passing(self, ranked: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the ranked rows that pass the filter, in their order."""
        if not self._where.sql:
            return ranked
        passed = {
            seq
            for (seq,) in self._index.execute(
                f"""SELECT {self._kind}.seq FROM {_SOURCE[self._kind]}
                    WHERE {self._kind}.seq IN (SELECT value FROM json_each(:seqs))
                      AND {self._where.sql}""",
                self._where.params | {"seqs": json.dumps([seq for seq, _ in ranked])},
            ).fetchall()
        }
        return [row for row in ranked if row[0] in passed]

    def _scan(self, count: int) -> list[tuple[int, int]]:
        """Counts words in every row that passes the filter: for few rows, or a filter that passes
        few."""
        found = " + ".join(
            f"(instr(passed.words, :word_{i}) > 0) * :weight_{i}" for i in range(len(self._weights))
        )
        params = self._where.params | {"count": count}
        for i, (word, weight) in enumerate(self._weights.items()):
            params |= {f"word_{i}": f" {word} ", f"weight_{i}": weight}
        source, conditions = _SOURCE[self._kind], [self._where.sql] if self._where.sql else []
        if self._narrow:
            source = f"{self._table} CROSS JOIN {source}"
            conditions += [
                f"{self._kind}.seq = {self._table}.rowid", f"{self._table} MATCH :narrow"
            ]  # fmt: skip
            params["narrow"] = self._narrow
        # The inner LIMIT keeps SQLite from counting words in rows that the filter drops.
        return self._index.execute(
            f"""SELECT seq, weight FROM (
                  SELECT seq, {found} AS weight FROM (
                    SELECT {self._kind}.seq AS seq, {self._kind}.words AS words FROM {source}
                    WHERE {" AND ".join(conditions) or "1"} LIMIT -1) AS passed)
                WHERE weight > 0 ORDER BY weight DESC, seq DESC LIMIT :count""",
            params,
        ).fetchall()

    def _filter_join(self, seq: str, filtered: bool) -> tuple[str, str]:
        """The FROM and WHERE parts that let only rows pass which the filter accepts."""
        if not filtered or not self._where.sql:
            return "", "1"
        return (
            f"CROSS JOIN {_SOURCE[self._kind]}",
            f"{self._kind}.seq = {seq} AND {self._where.sql}",
        )

    def _stream(self, words: list[str], count: int, *, filtered: bool) -> list[tuple[int, int]]:
        """The newest rows that have all the words there are, if that seems to fill the page."""
        expected = self._rows * self._share
        for word in words:
            expected *= self._frequency[word] / self._rows
        if not words or (expected < count and len(words) > 1):
            return []
        join, condition = self._filter_join(f"{self._table}.rowid", filtered)
        found = self._index.execute(
            f"""SELECT {self._table}.rowid, :weight FROM {self._table} {join}
                WHERE {self._table} MATCH :match AND {condition}
                ORDER BY {self._table}.rowid DESC LIMIT :count""",
            (self._where.params if filtered else {})
            | {
                "match": self._expression(" AND ".join(f'"{word}"' for word in words)),
                "weight": sum(self._weights[word] for word in words),
                "count": count,
            },
        ).fetchall()
        return found if len(found) >= count or len(words) == 1 else []

    def _add_up(
        self, asked: list[tuple[str, int]], count: int, *, filtered: bool
    ) -> list[tuple[int, int]]:
        """Adds up the weights of the (match, weight) pairs row by row."""
        params = dict(self._where.params) if filtered else {}
        params["count"] = count
        parts = []
        for i, (match, weight) in enumerate(asked):
            params |= {f"match_{i}": self._expression(match), f"weight_{i}": weight}
            parts.append(
                f"SELECT rowid AS seq, :weight_{i} AS weight FROM {self._table} "
                f"WHERE {self._table} MATCH :match_{i}"
            )
        join, condition = self._filter_join("found.seq", filtered)
        return self._index.execute(
            f"""SELECT found.seq, found.weight FROM (
                  SELECT seq, sum(weight) AS weight FROM ({" UNION ALL ".join(parts)})
                  GROUP BY seq) AS found {join}
                WHERE {condition}
                ORDER BY found.weight DESC, found.seq DESC LIMIT :count""",
            params,
        ).fetchall()

    def _union(self, words: list[str], count: int, *, filtered: bool) -> list[tuple[int, int]]:
        if not words:
            return []
        asked = [(f'"{word}"', self._weights[word]) for word in words]
        return self._add_up(asked, count, filtered=filtered)

    def _tiers(self, words: list[str], count: int, *, filtered: bool) -> list[tuple[int, int]]:
        """Rows with the heaviest word, then rows that lack it but have the next, and so on."""
        best: list[tuple[int, int]] = []
        taken: list[str] = []
        for i, word in enumerate(words):
            tier = f'("{word}" NOT ({" OR ".join(taken)}))' if taken else f'"{word}"'
            asked = [(tier, self._weights[word])]
            asked += [(f'{tier} AND "{later}"', self._weights[later]) for later in words[i + 1 :]]
            best += self._add_up(asked, count, filtered=filtered)
            best.sort(key=lambda row: (-row[1], -row[0]))
            del best[count:]
            rest = sum(self._weights[later] for later in words[i + 1 :])
            if len(best) == count and best[-1][1] > rest:
                break
            taken.append(f'"{word}"')
        return best


def _word_weights(
    index: sqlite3.Connection, kind: str, terms: list[str], rows: int, *, weighted: bool
) -> dict[str, int]:
    """What each query word counts: 1, or its rarity as a whole number (idf x 2^20).

    idf = ln(1 + (N - df + 0.5) / (df + 0.5)), as in BM25 (Robertson and Zaragoza, "The
    Probabilistic Relevance Framework", 2009), with N and df exact over the whole store.
    """
    if not weighted:
        return dict.fromkeys(terms, 1)
    weights = {}
    for term in terms:
        row = index.execute(f"SELECT doc FROM {kind}_terms WHERE term = ?", (term,)).fetchone()
        found = row[0] if row else 0
        weights[term] = round(math.log(1 + (rows - found + 0.5) / (found + 0.5)) * 2**20)
    return weights


def _rank_by_words(
    index: sqlite3.Connection, kind: str, text: str, where: _Where, count: int, *, weighted: bool
) -> list[tuple[int, float]]:
    """The best *count* rows (-1: all) for the words of *text*, as (seq, score from 0 to 1)."""
    terms = _query_terms(text)
    if not terms or count == 0:
        return []
    rows = index.execute(f"SELECT {kind}s FROM counter").fetchone()[0]
    weights = _word_weights(index, kind, terms, rows, weighted=weighted)
    total = sum(weights.values())
    ranked = _Ranking(index, kind, weights, where, rows).top(count)
    return [(seq, weight / total) for seq, weight in ranked]


def _newest(
    index: sqlite3.Connection, kind: str, where: _Where, count: int, offset: int, before: int
) -> list[int]:
    """The `seq` of the rows that pass, newest first, below *before*."""
    source, conditions, params = _SOURCE[kind], [], dict(where.params)
    if where.sql:
        conditions.append(where.sql)
    seq = f"{kind}.seq"
    if where.terms:  # the index lists a namespace's rows newest first
        source = f"{kind}_words CROSS JOIN {source}"
        seq = f"{kind}_words.rowid"
        conditions += [f"{kind}_words MATCH :narrow", f"{kind}.seq = {seq}"]
        params["narrow"] = _match_all(where.terms)
    conditions.append(f"{seq} < :before")
    params |= {"count": count, "offset": offset, "before": before}
    rows = index.execute(
        f"""SELECT {seq} FROM {source} WHERE {" AND ".join(conditions)}
            ORDER BY {seq} DESC LIMIT :count OFFSET :offset""",
        params,
    ).fetchall()
    return [seq for (seq,) in rows]


class _Ask(NamedTuple):
    """How a search was asked, checked."""

    text: str | None  # None for a list without ranking
    mode: str
    limit: int  # -1: all
    skip: int
    least: float
    order_by: str
    order: str


class _Found(NamedTuple):
    """A record that a search chose, with what orders it."""

    record: Any
    id: int
    seq: int


def _check_ask(
    text: object, limit: object, offset: object, mode: object, order_by: object, order: object,
    min_score: object,
) -> _Ask:  # fmt: skip
    if text is not None and not isinstance(text, str):
        raise ValidationError("text must be a string or None", field="text")
    if isinstance(min_score, bool) or not isinstance(min_score, int | float):
        raise ValidationError("min_score must be a number from 0 to 1", field="min_score")
    if not 0 <= min_score <= 1:
        raise ValidationError("min_score must be a number from 0 to 1", field="min_score")
    modes = ("keyword", "weighted", "semantic", "hybrid")
    chosen = "keyword" if mode is None else _check_choice(mode, "mode", modes)
    if chosen in ("semantic", "hybrid"):
        raise UnavailableError(f"mode {chosen!r} is not built into this version")
    return _Ask(
        text if text is not None and text.strip() else None,
        chosen,
        _check_count(limit, "limit", unlimited=True),
        _check_count(offset, "offset"),
        float(min_score),
        _check_choice(order_by, "order_by", ("relevance", "created", "modified")),
        _check_choice(order, "order", ("asc", "desc")),
    )


def _chosen(
    index: sqlite3.Connection, kind: str, ask: _Ask, where: _Where, before: int
) -> dict[int, float | None]:
    """The one search: the `seq` of the rows of the page, best first, each with its score; newest
    first and without one when no text was asked, below *before*."""
    if ask.text is None:
        return dict.fromkeys(_newest(index, kind, where, ask.limit, ask.skip, before))
    count = -1 if ask.limit < 0 else ask.limit and ask.limit + ask.skip
    weighted = ask.mode == "weighted"
    ranked = _rank_by_words(index, kind, ask.text, where, count, weighted=weighted)
    return {seq: score for seq, score in ranked[ask.skip :] if score >= ask.least}


def _arranged(found: list[_Found], ask: _Ask, scores: dict[int, float | None]) -> list[Any]:
    """The chosen records, which come best first, with their scores and in the order asked for."""
    for row in found:
        if (score := scores[row.seq]) is not None:
            row.record["score"] = score
    if ask.order_by == "created":
        found.sort(key=lambda row: (row.record["created_at_ms"], row.id), reverse=True)
    elif ask.order_by == "modified":
        found.sort(key=lambda row: (row.record["updated_at_ms"], row.seq), reverse=True)
    if ask.order == "asc":
        found.reverse()
    return [row.record for row in found]


def _index_faults(connection: sqlite3.Connection, kind: str) -> list[str]:
    """Compares the word index with the rows, both ways, as sets of (term, row): FTS5's own check
    sees nothing on an index without content."""
    rows = balance = 0
    for seq, words in connection.execute(f"SELECT seq, words FROM {kind} WHERE words <> ''"):
        rows += 1
        balance += sum(hash((term, seq)) for term in words.split())
    for term, seq in connection.execute(f"SELECT term, doc FROM {kind}_postings"):
        balance -= hash((term, seq))
    faults = []
    if balance:
        faults.append(f"the word index differs from the {kind} rows; run reindex()")
    counted, last, newest = connection.execute(
        f"SELECT {kind}s, seq, (SELECT max(seq) FROM {kind}) FROM counter"
    ).fetchone()
    if newest is not None and newest > last:
        faults.append(f"the counter is behind the {kind} rows; run reindex()")
    if counted != rows:
        faults.append(f"the counter says {counted} {kind} rows, there are {rows}; run reindex()")
    return faults


def _refill_index(transaction: _Transaction, kind: str) -> int:
    """Fills the word index from the rows, at once; returns their number."""
    transaction.apply_index()
    connection = transaction.connection
    connection.execute(f"INSERT INTO {kind}_words({kind}_words) VALUES ('delete-all')")
    connection.execute(
        f"""INSERT INTO {kind}_words(rowid, terms)
            SELECT seq, words FROM {kind} WHERE words <> '' ORDER BY seq"""
    )
    sql = f"SELECT count(*) FROM {kind} WHERE words <> ''"
    rows: int = connection.execute(sql).fetchone()[0]
    newest = connection.execute(f"SELECT max(seq) FROM {kind}").fetchone()[0] or 0
    transaction.seq = max(transaction.seq, newest)
    transaction.counts[kind] = rows
    transaction.stamped = True
    return rows


# ---- Items ---------------------------------------------------------------------------------------


_ITEM_COLUMNS = """item.created_at_ms,
  item.updated_at_ms, item.expires_at_ms, item.key_name, item.label, item.description, item.tags,
  item.metadata, item.value"""
_ITEM_FIELDS = (
    *("namespace", "key", "value", "ttl_secs", "label", "description", "tags", "metadata"),
    "if_absent",
)
_ITEM_TIMES = ("created_at_ms", "updated_at_ms", "expires_at_ms")
_EXPORT_ROWS = 500
_PAGE_ENDS = 1_024  # where the pages handed out ended: others may rewrite a page's last item


class _Fact(NamedTuple):
    """An item checked, serialised and sealed, ready to be written; an import sets the times."""

    namespace: str
    key: str
    key_name: str | None
    content: dict[str, str | bytes | None]  # sealed columns by name
    words: str
    ttl_ms: int | None
    if_absent: bool
    created_at_ms: int | None = None
    updated_at_ms: int | None = None
    expires_at_ms: int | None = None


def _item_words(
    namespace: str, texts: Iterable[str], tags: list[str] | None, metadata: dict[str, Any] | None
) -> str:
    marks = [
        *_scope_terms(namespace),
        *map(_tag_term, tags or ()),
        *_metadata_terms(metadata or {}),
    ]
    return f" {' '.join(_text_terms(texts))} {' '.join(dict.fromkeys(marks))} "


def _item_record(namespace: str, key: str, row: Sequence[Any], codec: _Plain) -> Item:
    """The record of a row of `_ITEM_COLUMNS`."""
    created, updated, expires, key_name, label, description, tags, metadata, value = row

    def opened(column: str, stored: str | bytes) -> str:
        return codec.open(stored, key_name, "item", column, namespace, key)

    item: Item = {
        "namespace": namespace,
        "key": key,
        "value": _load(opened("value", value)),
        "created_at_ms": created,
        "updated_at_ms": updated,
    }
    if expires is not None:
        item["expires_at_ms"] = expires
    if label is not None:
        item["label"] = opened("label", label)
    if description is not None:
        item["description"] = opened("description", description)
    if tags is not None:
        item["tags"] = _load(opened("tags", tags))
    if metadata is not None:
        item["metadata"] = _load(opened("metadata", metadata))
    return item


def _check_after(after: object) -> tuple[str, str, int] | None:
    """The place of a listed item, the last of the page before."""
    if after is None:
        return None
    if isinstance(after, Mapping):
        namespace, key, updated = (
            after.get(name) for name in ("namespace", "key", "updated_at_ms")
        )
        if isinstance(namespace, str) and isinstance(key, str) and isinstance(updated, int):
            return namespace, key, updated
    raise ValidationError("after must be the last item of the page before", field="after")


_FIND_ITEM = f"""
    SELECT {_ITEM_COLUMNS} FROM item
    WHERE item.namespace = ?1 AND item.key = ?2 AND {_ITEM_IS_LIVE.replace(":now_ms", "?3")}"""
_INSERT_ITEM = """
    INSERT INTO item(seq, namespace, key, created_at_ms, updated_at_ms, expires_at_ms,
      wants_vector, key_name, label, description, tags, metadata, words, value)
    VALUES (:seq, :namespace, :key, :created_at_ms, :updated_at_ms, :expires_at_ms,
      0, :key_name, :label, :description, :tags, :metadata, :words, :value)"""
_UPDATE_ITEM = """
    UPDATE item SET seq = :seq, created_at_ms = coalesce(:created_at_ms, created_at_ms),
      updated_at_ms = :updated_at_ms, expires_at_ms = :expires_at_ms, key_name = :key_name,
      label = :label, description = :description, tags = :tags, metadata = :metadata,
      words = :words, value = :value
    WHERE id = :id"""


class _Items:
    """The rows of facts: checked, written, read, searched and deleted here and nowhere else."""

    __slots__ = ("_db", "_page_ends")

    def __init__(self, database: _Database) -> None:
        self._db = database
        self._page_ends: dict[tuple[str, str, int] | None, int] = {}

    def prepare(
        self, namespace: Any, key: Any, value: Any, *, ttl_secs: Any = None, label: Any = None,
        description: Any = None, tags: Any = None, metadata: Any = None, if_absent: Any = False,
        place: str = "",
    ) -> _Fact:  # fmt: skip
        """Everything that can be refused or takes time, before any lock is taken. *place* names
        the item of a batch in errors."""
        path = _check_namespace(namespace, place + "namespace")
        name = _check_name(key, place + "key")
        text, parts = _check_json(value, place + "value", MAX_VALUE_BYTES)
        label = _check_text(label, place + "label", MAX_LABEL_BYTES)
        description = _check_text(description, place + "description", MAX_DESCRIPTION_BYTES)
        tags = _check_tags(tags, place + "tags")
        metadata = _check_metadata(metadata, place + "metadata")
        texts = {
            "label": label,
            "description": description,
            "tags": _dump(tags) if tags else None,
            "metadata": _dump(metadata) if metadata else None,
            "value": text,
        }
        codec = self._db.codec
        content = {
            column: None if text is None else codec.seal(text, "item", column, path, name)
            for column, text in texts.items()
        }
        words = _item_words(path, [name, *parts, label or "", description or ""], tags, metadata)
        ttl_ms = self._check_ttl(ttl_secs, place + "ttl_secs")
        absent = _check_flag(if_absent, place + "if_absent")
        return _Fact(path, name, codec.key_name, content, words, ttl_ms, absent)

    def _check_ttl(self, ttl_secs: object, field: str) -> int | None:
        if ttl_secs is None:
            return None
        ttl_ms = max(1, round(_check_seconds(ttl_secs, field) * 1000))
        if self._db.now_ms() + ttl_ms > MAX_TIME_MS:
            raise ValidationError(f"{field} must not reach past the year 9999", field=field)
        return ttl_ms

    def prepare_mapping(self, item: object, place: str) -> _Fact:
        """One of a batch, a mapping with the names of `Storage.remember`'s arguments."""
        if not isinstance(item, Mapping):
            raise ValidationError(f"{place} must be a mapping", field=place)
        if not {"namespace", "key", "value"} <= item.keys() <= set(_ITEM_FIELDS):
            raise ValidationError(
                f"{place} must have namespace, key and value, and may have "
                f"{', '.join(_ITEM_FIELDS[3:])}",
                field=place,
            )
        return self.prepare(**item, place=place + ".")

    def prepare_export(self, item: Mapping[str, Any], place: str) -> _Fact:
        """One that `Storage.export` gave, with its times."""
        given = {name: item[name] for name in _ITEM_TIMES if item.get(name) is not None}
        for name, stamp in given.items():
            if (
                isinstance(stamp, bool)
                or not isinstance(stamp, int)
                or not 0 <= stamp <= MAX_TIME_MS
            ):
                raise ValidationError(
                    f"{place}.{name} must be milliseconds since 1970", field=f"{place}.{name}"
                )
        rest = {name: part for name, part in item.items() if name not in (*_ITEM_TIMES, "kind")}
        return self.prepare_mapping(rest, place)._replace(**given)

    def put(self, transaction: _Transaction, fact: _Fact) -> None:
        """Writes a prepared fact over what is under its key."""
        connection, now_ms = transaction.connection, transaction.now_ms
        old = connection.execute(
            "SELECT id, seq, words, expires_at_ms FROM item WHERE namespace = ? AND key = ?",
            (fact.namespace, fact.key),
        ).fetchone()
        if old is not None:
            live = old[3] is None or old[3] > now_ms
            if live and fact.if_absent:
                raise DuplicateError(
                    f"the key is taken in namespace {fact.namespace!r}", field="key"
                )
            transaction.unindex("item", old[1], old[2])
            if not live:  # starts afresh, with an id and a creation time of its own
                connection.execute("DELETE FROM item WHERE id = ?", (old[0],))
                old = None
        seq = transaction.next_seq()
        row = {
            "seq": seq,
            "namespace": fact.namespace,
            "key": fact.key,
            "created_at_ms": fact.created_at_ms,
            "updated_at_ms": now_ms if fact.updated_at_ms is None else fact.updated_at_ms,
            "expires_at_ms": fact.expires_at_ms,
            "key_name": fact.key_name,
            "words": fact.words,
            **fact.content,
        }
        if fact.ttl_ms is not None:
            row["expires_at_ms"] = min(MAX_TIME_MS, now_ms + fact.ttl_ms)
        if old is None:
            row["created_at_ms"] = now_ms if fact.created_at_ms is None else fact.created_at_ms
            connection.execute(_INSERT_ITEM, row)
        else:
            connection.execute(_UPDATE_ITEM, row | {"id": old[0]})
        transaction.index("item", seq, fact.words)

    def put_all(self, facts: Collection[_Fact]) -> None:
        with self._db.transaction() as transaction:
            for fact in facts:
                self.put(transaction, fact)

    def change(self, namespace: Any, key: Any, ttl_secs: Any, changes: dict[str, Any]) -> None:
        """Writes a live item again with *changes* to its attributes, and a time to live if one is
        given (... keeps the expiry)."""
        ttl = None if ttl_secs is ... else ttl_secs
        self.prepare(namespace, key, None, ttl_secs=ttl, **changes)  # refuses before the lock
        with self._db.transaction() as transaction:
            item = self.find(transaction.connection, namespace, key)
            if item is None:
                raise NotFoundError(f"no such item in namespace {namespace!r}", field="key")
            attributes: dict[str, Any] = {
                name: item.get(name) for name in ("label", "description", "tags", "metadata")
            }
            attributes |= changes
            fact = self.prepare(namespace, key, item["value"], ttl_secs=ttl, **attributes)
            if ttl_secs is ...:
                fact = fact._replace(expires_at_ms=item.get("expires_at_ms"))
            self.put(transaction, fact)

    def find(self, connection: sqlite3.Connection, namespace: str, key: str) -> Item | None:
        row = connection.execute(_FIND_ITEM, (namespace, key, self._db.now_ms())).fetchone()
        return None if row is None else _item_record(namespace, key, row, self._db.codec)

    def search(
        self, namespace: Any, ask: _Ask, after: Any, recursive: Any, filters: dict[str, Any]
    ) -> list[Item]:
        """The live items that a search chose, in the order asked for."""
        position = _check_after(after)
        if position and ask.text is not None:
            raise ValidationError("after pages lists without text; use offset here", field="after")
        path = _check_namespace(namespace, root=True)
        now_ms = self._db.now_ms()
        where = _both(
            _inside(path, "item", recursive=_check_flag(recursive, "recursive")),
            _filters(**filters, now_ms=now_ms),
            _condition(_ITEM_IS_LIVE, now_ms=now_ms),
        )
        with self._db.read(snapshot=True) as index:
            before = self._place_before(index, position)
            scores = _chosen(index, "item", ask, where, before)
            items: list[Item] = _arranged(self._records(index, scores), ask, scores)
        if items and ask.text is None:
            self._page_ends[_check_after(items[-1])] = min(scores)
            while len(self._page_ends) > _PAGE_ENDS:
                del self._page_ends[next(iter(self._page_ends))]
        return items

    def _records(self, connection: sqlite3.Connection, seqs: Iterable[int]) -> list[_Found]:
        """The records of these rows, in this order."""
        wanted = list(seqs)
        rows = connection.execute(
            f"""SELECT item.id, item.seq, item.namespace, item.key, {_ITEM_COLUMNS} FROM item
                WHERE item.seq IN (SELECT value FROM json_each(?))""",
            (_dump(wanted),),
        ).fetchall()
        codec = self._db.codec
        found = {
            seq: _Found(_item_record(namespace, key, row, codec), id, seq)
            for id, seq, namespace, key, *row in rows
        }
        return [found[seq] for seq in wanted if seq in found]

    def _place_before(
        self, connection: sqlite3.Connection, after: tuple[str, str, int] | None
    ) -> int:
        """The `seq` below which the page after this item begins. Where the page came from another
        store: the item's own while its row is as it was, else what was written up to its time."""
        if after is None:
            return 2**62
        if after in self._page_ends:
            return self._page_ends[after]
        namespace, key, updated = after
        row = connection.execute(
            "SELECT seq FROM item WHERE namespace = ? AND key = ? AND updated_at_ms = ?",
            (namespace, key, updated),
        ).fetchone()
        if row is None:
            row = connection.execute(
                "SELECT seq + 1 FROM item WHERE updated_at_ms <= ? ORDER BY seq DESC LIMIT 1",
                (updated,),
            ).fetchone()
        return row[0] if row else 0

    def namespaces(self, path: str, levels: int) -> list[str]:
        """Jumps from one namespace to the next in the index, whatever they hold."""
        within = "item.namespace >= :low AND item.namespace < :high" if path else "1"
        params = {"path": path, "low": path + "/", "high": path + "0", "now_ms": self._db.now_ms()}
        with self._db.read() as connection:
            rows = connection.execute(
                f"""WITH RECURSIVE found(namespace) AS (
                      SELECT min(item.namespace) FROM item WHERE {within}
                      UNION ALL
                      SELECT (SELECT min(item.namespace) FROM item
                              WHERE item.namespace > found.namespace AND {within})
                      FROM found WHERE found.namespace IS NOT NULL),
                    named(namespace) AS (SELECT :path UNION ALL SELECT namespace FROM found)
                    SELECT namespace FROM named
                    WHERE EXISTS (SELECT 1 FROM item
                                  WHERE item.namespace = named.namespace AND {_ITEM_IS_LIVE})
                    ORDER BY namespace""",
                params,
            ).fetchall()
        if levels < 0:
            return [name for (name,) in rows]
        kept = levels + (path.count("/") + 1 if path else 0)
        cut = dict.fromkeys("/".join(name.split("/")[:kept]) for (name,) in rows)
        return [name for name in cut if name]

    def delete(self, transaction: _Transaction, where: _Where) -> tuple[int, int]:
        """Deletes the items that *where* names with all that hangs on them; returns how many rows
        went and how many of them were live."""
        connection = transaction.connection
        params = where.params | {"now_ms": transaction.now_ms}
        total, live = connection.execute(
            f"SELECT count(*), total({_ITEM_IS_LIVE}) FROM item WHERE {where.sql}", params
        ).fetchone()
        if not total:
            return 0, 0
        transaction.apply_index()
        for statement in (
            f"""INSERT INTO item_words(item_words, rowid, terms)
                SELECT 'delete', seq, words FROM item WHERE {where.sql} ORDER BY seq""",
            f"DELETE FROM item_vector WHERE id IN (SELECT id FROM item WHERE {where.sql})",
            f"DELETE FROM item_bits WHERE id IN (SELECT id FROM item WHERE {where.sql})",
            f"DELETE FROM item WHERE {where.sql}",
        ):
            connection.execute(statement, params)
        transaction.next_seq()
        transaction.counts["item"] -= total
        transaction.unerased = True
        return total, int(live)

    def prune(self, size: int) -> int:
        """Deletes up to *size* expired rows in a transaction of its own."""
        with self._db.transaction() as transaction:
            ids = transaction.connection.execute(
                "SELECT id FROM item WHERE expires_at_ms <= ? ORDER BY expires_at_ms LIMIT ?",
                (transaction.now_ms, size),
            ).fetchall()
            listed = json.dumps([id for (id,) in ids])
            where = _condition("item.id IN (SELECT value FROM json_each(:ids))", ids=listed)
            return self.delete(transaction, where)[0]

    def reindex(self, place: int, last: int, size: int) -> tuple[int, int, int]:
        """Derives the words of the next *size* items after id *place* anew; returns how many it
        looked at, how many had others, and the last id."""
        changed = 0
        with self._db.transaction() as transaction:
            rows = transaction.connection.execute(
                f"""SELECT item.id, item.seq, item.words, item.namespace, item.key, {_ITEM_COLUMNS}
                    FROM item
                    WHERE id > ? AND id <= ? ORDER BY id LIMIT ?""",
                (place, last, size),
            ).fetchall()
            for id, seq, words, namespace, key, *row in rows:
                derived = self._words_of(_item_record(namespace, key, row, self._db.codec))
                if derived != words:
                    changed += 1
                    transaction.unindex("item", seq, words)
                    transaction.index("item", seq, derived)
                    transaction.connection.execute(
                        "UPDATE item SET words = ? WHERE id = ?", (derived, id)
                    )
        return len(rows), changed, rows[-1][0] if rows else last

    def _words_of(self, item: Item) -> str:
        parts: list[str] = []
        _gather_text(item["value"], "value", 1, parts)
        texts = [item["key"], *parts, item.get("label", ""), item.get("description", "")]
        return _item_words(item["namespace"], texts, item.get("tags"), item.get("metadata"))

    def export(self, where: _Where) -> Iterator[dict[str, Any]]:
        """Live items by namespace and key, a page at a time."""
        condition = f"{where.sql} AND {_ITEM_IS_LIVE}" if where.sql else _ITEM_IS_LIVE
        place = {"last_namespace": "", "last_key": ""}
        while True:
            with self._db.read() as connection:
                rows = connection.execute(
                    f"""SELECT item.namespace, item.key, {_ITEM_COLUMNS} FROM item
                        WHERE {condition}
                          AND (item.namespace, item.key) > (:last_namespace, :last_key)
                        ORDER BY item.namespace, item.key LIMIT {_EXPORT_ROWS}""",
                    where.params | place | {"now_ms": self._db.now_ms()},
                ).fetchall()
            for namespace, key, *row in rows:
                yield {"kind": "item", **_item_record(namespace, key, row, self._db.codec)}
            if len(rows) < _EXPORT_ROWS:
                return
            place = {"last_namespace": rows[-1][0], "last_key": rows[-1][1]}


# ---- Threads -------------------------------------------------------------------------------------
#
# A run holds a thread by a row of `run`. Its `fence` is a number that only grows, and every write
# of the run checks it in its own transaction: a process that was stopped and wakes up late finds
# another's number there and can't write. A holder that died is known by its process id and start
# time on the same host (boot id and process namespace: a container may share the boot id), else by
# a lease that no beat renewed. Waiters take tickets and get in by turn.


_LEASE_SECS = 30.0
_BEAT_SECS = 5.0
_POLL_SECS = (0.002, 0.05)

_runs_of_context: contextvars.ContextVar[tuple[_Lease, ...]] = contextvars.ContextVar(
    "criomem_runs", default=()
)


def _read_line(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """When a process started, in ticks since boot; "" where /proc doesn't tell."""
    fields = _read_line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _host() -> str:
    """Names this boot and process namespace; "" where they can't be told."""
    boot = _read_line("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


def _is_alive(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there and belongs to somebody else
        pass
    return not started or _process_start(pid) in (started, "")


class _Lease:
    """One run's hold on a thread."""

    __slots__ = ("__weakref__", "actor", "fence", "lost", "name", "namespace", "pid", "run_id",
                 "store")  # fmt: skip

    def __init__(
        self, store: int, namespace: str, name: str, run_id: str, actor: str | None, fence: int
    ) -> None:
        self.store = store  # which store of this process
        self.namespace = namespace
        self.name = name
        self.run_id = run_id
        self.actor = actor
        self.fence = fence
        self.pid = os.getpid()
        self.lost = False

    def verify(self, connection: sqlite3.Connection) -> None:
        """RunInterruptedError unless the thread is still held under this fence."""
        row = connection.execute(
            """SELECT 1 FROM run
               WHERE namespace = ? AND thread = ? AND fence = ? AND interrupted = 0""",
            (self.namespace, self.name, self.fence),
        ).fetchone()
        if self.lost or row is None or self.pid != os.getpid():
            self.lost = True
            raise RunInterruptedError(
                "the run lost its thread to another run, or the thread was deleted; nothing of "
                "this call was written"
            )


class _Runs:
    """Leases and tickets of one store."""

    __slots__ = ("__weakref__", "_db", "_leases", "_lock", "_pulse", "_seen", "_wake")

    def __init__(self, database: _Database) -> None:
        self._db = database
        self._leases: weakref.WeakSet[_Lease] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._pulse: threading.Thread | None = None
        self._wake = threading.Event()
        self._seen: dict[
            int, tuple[int, float]
        ] = {}  # fence of another host: beat, when first seen

    def own(self, namespace: str, name: str) -> _Lease | None:
        """The lease that this context holds on the thread."""
        for lease in reversed(_runs_of_context.get()):
            if (lease.store, lease.namespace, lease.name) == (id(self), namespace, name):
                return lease
        return None

    def held(self, connection: sqlite3.Connection) -> set[tuple[str, str]]:
        """The threads that a live run holds."""
        rows = connection.execute(
            "SELECT namespace, thread, fence, host, pid, started, beat_ms FROM run"
        ).fetchall()
        return {(row[0], row[1]) for row in rows if self._holds(*row[2:])}

    def is_free(self, connection: sqlite3.Connection, namespace: str, name: str) -> bool:
        """Whether nobody holds the thread or waits for it."""
        if not connection.execute(
            """SELECT EXISTS (SELECT 1 FROM run WHERE namespace = ?1 AND thread = ?2)
                 OR EXISTS (SELECT 1 FROM ticket WHERE namespace = ?1 AND thread = ?2)""",
            (namespace, name),
        ).fetchone()[0]:  # fmt: skip
            return True
        row = self._holder(connection, namespace, name)
        waiting = self._first_ticket(connection, namespace, name)
        return (row is None or not self._holds(*row[:5])) and waiting is None

    def _holds(self, fence: int, host: str, pid: int, started: str, beat_ms: int) -> bool:
        """Whether the owner of a row lives and renews it."""
        if self._db.path is None:
            return pid == os.getpid()
        now = time.monotonic()
        if host and host == _host():
            return _is_alive(pid, started) and now * 1000 - beat_ms < _LEASE_SECS * 1000
        beat, since = self._seen.get(fence, (None, now))
        if beat != beat_ms:
            since = now
        self._seen[fence] = (beat_ms, since)
        while len(self._seen) > 10_000:
            del self._seen[next(iter(self._seen))]
        return now - since < _LEASE_SECS

    def _first_ticket(
        self, connection: sqlite3.Connection, namespace: str, name: str
    ) -> int | None:
        """The lowest ticket whose owner lives."""
        for ticket, *owner in connection.execute(
            """SELECT id, -id, host, pid, started, beat_ms FROM ticket
               WHERE namespace = ? AND thread = ? ORDER BY id""",
            (namespace, name),
        ).fetchall():
            if self._holds(*owner):
                return int(ticket)
        return None

    @contextlib.contextmanager
    def hold(
        self, namespace: str, name: str, *, policy: str, timeout: float, run_id: str | None = None,
        actor: str | None = None,
    ) -> Iterator[_Lease]:  # fmt: skip
        """Holds the thread for the block, by turns with others."""
        lease = None
        token = None
        try:
            lease = self._acquire(namespace, name, policy, timeout, run_id, actor)
            token = _runs_of_context.set((*_runs_of_context.get(), lease))
            yield lease
        finally:
            if token is not None:
                _runs_of_context.reset(token)
            if lease is not None:
                self._release(lease)

    def _acquire(
        self, namespace: str, name: str, policy: str, timeout: float, run_id: str | None,
        actor: str | None,
    ) -> _Lease:  # fmt: skip
        """Tries to take the thread until it is free; never waits with the write lock held."""
        started = renewed = time.monotonic()
        ticket: int | None = None
        pause = _POLL_SECS[0]
        if self._db.in_transaction():
            policy, timeout = "reject", 0.0
        lease = _Lease(id(self), namespace, name, run_id or _new_id(self._db.now_ms()), actor, 0)
        try:
            while True:
                waited = time.monotonic() - started
                force = policy == "interrupt" and waited >= timeout
                with self._db.transaction() as transaction:
                    if self._take(transaction, lease, ticket, policy, force=force):
                        ticket = None
                        break
                    if policy == "reject" or waited >= timeout:
                        raise ThreadBusyError(
                            f"the thread is running; waited {waited:.1f} s",
                            thread_id=name, waited_secs=waited,
                        )  # fmt: skip
                    if ticket is None:
                        ticket = self._draw_ticket(transaction.connection, namespace, name)
                    elif time.monotonic() - renewed >= _BEAT_SECS:
                        renewed = time.monotonic()
                        self._renew_ticket(transaction.connection, ticket)
                while True:
                    time.sleep(random.uniform(0.5, 1.0) * min(pause, max(0.001, timeout)))
                    pause = min(pause * 1.5, _POLL_SECS[1])
                    with self._db.read() as connection:
                        first = self._first_ticket(connection, namespace, name)
                        row = self._holder(connection, namespace, name)
                    if (row is None or not self._holds(*row[:5])) and first in (None, ticket):
                        break
                    now = time.monotonic()
                    late = now - started >= timeout or now - renewed >= _BEAT_SECS
                    if late or policy == "interrupt":
                        break
        finally:
            if ticket is not None:
                self._drop_ticket(ticket)
        with self._lock:
            self._leases.add(lease)
            if self._pulse is None and self._db.path is not None:
                self._start_pulse()
        return lease

    def _holder(
        self, connection: sqlite3.Connection, namespace: str, name: str
    ) -> tuple[Any, ...] | None:
        row = connection.execute(
            """SELECT fence, host, pid, started, beat_ms, interrupted, run_id, actor FROM run
               WHERE namespace = ? AND thread = ?""",
            (namespace, name),
        ).fetchone()
        return cast("tuple[Any, ...] | None", row)

    def _take(
        self, transaction: _Transaction, lease: _Lease, ticket: int | None, policy: str, *,
        force: bool,
    ) -> bool:  # fmt: skip
        """Takes the thread if it is free and this is its turn; with the policy "interrupt" takes
        it from a holder, at once for its writes and, if *force*, for good."""
        connection = transaction.connection
        place = (lease.namespace, lease.name)
        holder = self._holder(connection, *place)
        if holder is not None and self._holds(*holder[:5]) and not force:
            if policy == "interrupt" and not holder[5]:
                connection.execute(
                    "UPDATE run SET interrupted = 1 WHERE namespace = ? AND thread = ?", place
                )
            return False
        if policy != "interrupt" and self._first_ticket(connection, *place) not in (None, ticket):
            return False
        lease.fence = transaction.next_seq()
        connection.execute(
            """INSERT OR REPLACE INTO run(namespace, thread, run_id, actor, fence, host, pid,
                 started, beat_ms, interrupted)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)""",
            (*place, lease.run_id, lease.actor, lease.fence, *self._owner()),
        )
        connection.execute("DELETE FROM ticket WHERE id = ?", (ticket,))
        return True

    def _owner(self) -> tuple[str, int, str, int]:
        """The columns that tell who holds a row: host, pid, started, beat_ms."""
        pid = os.getpid()
        return _host(), pid, _process_start(pid), int(time.monotonic() * 1000)

    def _renew_ticket(self, connection: sqlite3.Connection, ticket: int) -> None:
        beat_ms = int(time.monotonic() * 1000)
        connection.execute("UPDATE ticket SET beat_ms = ? WHERE id = ?", (beat_ms, ticket))

    def _draw_ticket(self, connection: sqlite3.Connection, namespace: str, name: str) -> int:
        for ticket, *owner in connection.execute(
            "SELECT id, -id, host, pid, started, beat_ms FROM ticket"
        ).fetchall():
            if not self._holds(*owner):
                connection.execute("DELETE FROM ticket WHERE id = ?", (ticket,))
        return cast(int, connection.execute(
            """INSERT INTO ticket(namespace, thread, host, pid, started, beat_ms)
               VALUES (?, ?, ?, ?, ?, ?)""",
            (namespace, name, *self._owner()),
        ).lastrowid)  # fmt: skip

    def _drop_ticket(self, ticket: int) -> None:
        with contextlib.suppress(StorageError), self._db.transaction() as transaction:
            transaction.connection.execute(
                "DELETE FROM ticket WHERE id = ? AND pid = ?", (ticket, os.getpid())
            )

    def _release(self, lease: _Lease) -> None:
        """Gives the thread back; a forked child, which runs this too, gives back nothing."""
        self._leases.discard(lease)
        if lease.pid != os.getpid():
            return
        with contextlib.suppress(StorageError), self._db.transaction() as transaction:
            transaction.connection.execute("DELETE FROM run WHERE fence = ?", (lease.fence,))

    def _start_pulse(self) -> None:
        self._wake = threading.Event()
        self._pulse = threading.Thread(
            target=_keep_beating, args=(weakref.ref(self), self._wake), daemon=True,
            name="criomem-leases",
        )  # fmt: skip
        self._pulse.start()

    def beat(self) -> bool:
        """Renews all leases of this process in one statement; False when there are none left."""
        with self._lock:
            fences = [lease.fence for lease in self._leases if lease.pid == os.getpid()]
            if not fences or self._db.closed:
                self._pulse = None
                return False
        try:
            with self._db.transaction() as transaction:
                transaction.connection.execute(
                    "UPDATE run SET beat_ms = ? WHERE fence IN (SELECT value FROM json_each(?))",
                    (int(time.monotonic() * 1000), json.dumps(fences)),
                )
        except StorageError as error:
            _log.warning("leases of runs could not be renewed: %s", error)
        return True

    def close(self) -> None:
        self._wake.set()


def _keep_beating(runs: weakref.ref[_Runs], wake: threading.Event) -> None:
    """Renews a store's leases until it has none, is closed or is gone."""
    while not wake.wait(_BEAT_SECS):
        alive = runs()
        if alive is None or not alive.beat():
            return
        del alive


_MESSAGE_COLUMNS = """message.name, message.role, message.checkpoint, message.created_at_ms,
  message.updated_at_ms, message.key_name, message.tags, message.metadata, message.body"""
_CHECKPOINT_COLUMNS = """checkpoint.id, checkpoint.parent, checkpoint.created_at_ms,
  checkpoint.messages, checkpoint.run_id, checkpoint.key_name, checkpoint.label"""
_THREAD_COLUMNS = """thread.namespace, thread.name, thread.status, thread.head,
  thread.created_at_ms, thread.saved_at_ms, thread.updated_at_ms, thread.ended_at_ms,
  thread.thread_of, thread.key_name, thread.label, thread.tags, thread.metadata,
  coalesce((SELECT messages FROM checkpoint WHERE id = thread.head), 0)"""
_MESSAGE_IS_CURRENT = "message.position < segment.live AND message.role IS NOT NULL"
# What a record carries beside the message itself; dropped when a record is saved again.
_RECORD_KEYS = frozenset(
    {"created_at_ms", "updated_at_ms", "checkpoint", "thread_id", "namespace", "score"}
)
# From a checkpoint's segment up to the first, each with the position where it stops counting.
_CHAIN = """
    WITH RECURSIVE chain(id, stop, fork, parent) AS (
      SELECT id, :length, fork, parent FROM segment WHERE id = :segment
      UNION ALL
      SELECT segment.id, min(chain.fork, chain.stop), segment.fork, segment.parent
      FROM chain JOIN segment ON segment.id = chain.parent)
    SELECT id, fork, stop FROM chain"""
_PATH = """
    WITH RECURSIVE path(id, parent, depth) AS (
      SELECT id, parent, 1 FROM checkpoint WHERE id = :head
      UNION ALL
      SELECT checkpoint.id, checkpoint.parent, depth + 1
      FROM path JOIN checkpoint ON checkpoint.id = path.parent)"""


class _Head(NamedTuple):
    """A thread's row and what its head points at."""

    id: int
    head: int | None
    status: str
    segment: int | None
    length: int
    messages: int
    state: int | None


class _Note(NamedTuple):
    """A message checked, serialised and sealed, ready to be written."""

    name: str
    role: str
    key_name: str | None
    tags: str | bytes | None
    metadata: str | bytes | None
    body: str | bytes
    words: str


def _thread_term(namespace: str, name: str) -> str:
    return _term("\ue003", namespace, name)


def _role_term(role: str) -> str:
    return _term("\ue004", role)


def _of_thread(namespace: str, name: str) -> _Where:
    """Messages of one thread."""
    sql = "thread.namespace = :of_namespace AND thread.name = :of_thread"
    params = {"of_namespace": namespace, "of_thread": name}
    return _Where(sql, params, ((_thread_term(namespace, name),),), {})


def _of_role(role: str) -> _Where:
    return _Where("message.role = :role", {"role": role}, ((_role_term(role),),), {})


def _new_id(now_ms: int, place: int = 0) -> str:
    """An id that sorts by time: 12 hex digits of milliseconds, 4 of the place in a batch."""
    return f"{now_ms:012x}{place & 0xFFFF:04x}{os.urandom(8).hex()}"


def _message_words(
    namespace: str, thread: str, message: Mapping[str, Any], tags: Any, metadata: Any
) -> str:
    texts: list[str] = [message.get("name") or ""]
    _gather_text(message.get("content"), "content", 1, texts)
    marks = [*_scope_terms(namespace), _thread_term(namespace, thread), _role_term(message["role"])]
    marks += [*map(_tag_term, tags or ()), *_metadata_terms(metadata or {})]
    return f" {' '.join(_text_terms(texts))} {' '.join(dict.fromkeys(marks))} "


def _message_record(
    namespace: str, thread: str, row: Sequence[Any], codec: _Plain
) -> MessageRecord:
    """The record of a row of `_MESSAGE_COLUMNS`."""
    name, role, checkpoint, created, updated, key_name, tags, metadata, body = row

    def opened(column: str, stored: str | bytes) -> Any:
        return _load(codec.open(stored, key_name, "message", column, namespace, thread, name))

    record: dict[str, Any] = {"id": name, "role": role} | opened("body", body)
    record["created_at_ms"] = created
    record["updated_at_ms"] = updated
    record["checkpoint"] = checkpoint
    if tags is not None:
        record["tags"] = opened("tags", tags)
    if metadata is not None:
        record["metadata"] = opened("metadata", metadata)
    return cast(MessageRecord, record)


def _checkpoint_record(
    namespace: str, thread: str, row: Sequence[Any], codec: _Plain
) -> CheckpointRecord:
    """The record of a row of `_CHECKPOINT_COLUMNS`."""
    id, parent, created, messages, run_id, key_name, label = row
    record: CheckpointRecord = {
        "id": id,
        "thread_id": thread,
        "namespace": namespace,
        "parent": parent,
        "created_at_ms": created,
        "message_count": messages,
    }
    if label is not None:
        record["label"] = codec.open(label, key_name, "checkpoint", "label", namespace, thread)
    if run_id is not None:
        record["run_id"] = run_id
    return record


def _thread_record(row: Sequence[Any], codec: _Plain, *, running: bool) -> ThreadRecord:
    """The record of a row of `_THREAD_COLUMNS`."""
    (namespace, name, status, head, created, saved, updated, ended, thread_of, key_name, label,
     tags, metadata, messages) = row  # fmt: skip

    def opened(column: str, stored: str | bytes) -> str:
        return codec.open(stored, key_name, "thread", column, namespace, name)

    record: ThreadRecord = {
        "namespace": namespace,
        "id": name,
        "status": status,
        "running": running,
        "head": head,
        "message_count": messages,
        "created_at_ms": created,
        "saved_at_ms": saved,
        "updated_at_ms": updated,
    }
    if label is not None:
        record["label"] = opened("label", label)
    if tags is not None:
        record["tags"] = _load(opened("tags", tags))
    if metadata is not None:
        record["metadata"] = _load(opened("metadata", metadata))
    if thread_of is not None:
        record["thread_of"] = thread_of
    if ended is not None:
        record["ended_at_ms"] = ended
    return record


def _ancestors(id: int | None, parent: Mapping[int, int | None]) -> Iterator[int]:
    """A checkpoint and those above it."""
    while id is not None and id in parent:
        yield id
        id = parent[id]


_THREAD_FAULTS = {
    "threads have a head that is not theirs": """
        SELECT 1 FROM thread LEFT JOIN checkpoint ON checkpoint.id = thread.head
        WHERE thread.head IS NOT NULL AND checkpoint.thread IS NOT thread.id""",
    "checkpoints have a parent that is not there": """
        SELECT 1 FROM checkpoint LEFT JOIN checkpoint AS above ON above.id = checkpoint.parent
        WHERE checkpoint.parent IS NOT NULL AND above.thread IS NOT checkpoint.thread""",
    "checkpoints point at another thread's segment or state": """
        SELECT 1 FROM checkpoint
        LEFT JOIN segment ON segment.id = checkpoint.segment
        LEFT JOIN state ON state.id = checkpoint.state
        WHERE (checkpoint.segment IS NOT NULL AND segment.thread IS NOT checkpoint.thread)
           OR (checkpoint.state IS NOT NULL AND state.thread IS NOT checkpoint.thread)""",
    "states belong to no checkpoint": """
        SELECT 1 FROM state
        WHERE NOT EXISTS (SELECT 1 FROM checkpoint WHERE checkpoint.state = state.id)""",
    "segments have gaps in their positions": """
        SELECT 1 FROM segment JOIN message ON message.segment = segment.id
        GROUP BY segment.id
        HAVING min(position) <> fork OR max(position) - min(position) + 1 <> count(*)""",
    "segments hold no message": """
        SELECT 1 FROM segment
        WHERE NOT EXISTS (SELECT 1 FROM message WHERE message.segment = segment.id)""",
    "deleted messages left content behind": """
        SELECT 1 FROM message
        WHERE role IS NULL AND (body IS NOT NULL OR words <> '' OR tags IS NOT NULL)""",
}
_INSERT_THREAD = """
    INSERT INTO thread(seq, saved_seq, namespace, name, thread_of, status, created_at_ms,
      saved_at_ms, updated_at_ms, key_name, label, tags, metadata)
    VALUES (:seq, :seq, :namespace, :name, :thread_of, 'active', :created, :now, :now, :key_name,
      :label, :tags, :metadata)"""
_DOOMED_CHECKPOINTS = """
    WITH RECURSIVE kept(id, parent, depth) AS (
      SELECT checkpoint.id, checkpoint.parent, 1
      FROM thread CROSS JOIN checkpoint ON checkpoint.id = thread.head
      WHERE thread.id BETWEEN :low AND :high
      UNION ALL
      SELECT checkpoint.id, checkpoint.parent, depth + 1
      FROM kept CROSS JOIN checkpoint ON checkpoint.id = kept.parent
      WHERE :keep < 0 OR depth < :keep)
    SELECT id, thread, thread IN (SELECT value FROM json_each(:busy)) FROM checkpoint
    WHERE thread BETWEEN :low AND :high AND id NOT IN (SELECT id FROM kept)"""


def _check_state(state: object) -> str:
    if not isinstance(state, dict):
        raise ValidationError("state must be a dict", field="state")
    return _check_json(state, "state", MAX_STATE_BYTES)[0]


def _check_content(body: Mapping[str, Any], place: str) -> None:
    """A message's content: text, a dict, a list of dicts; nothing only beside other keys."""
    content = body.get("content")
    field = f"{place}.content"
    if content is None or content == "":
        if not body.keys() - {"content", "name"}:
            raise ValidationError(f"{field} must not be empty without other keys", field=field)
    elif isinstance(content, list | tuple):
        if not all(isinstance(part, dict) for part in content) or not content:
            raise ValidationError(f"{field} must be a list of dicts, or text", field=field)
    elif not isinstance(content, str | dict):
        raise ValidationError(f"{field} must be text, a dict or a list of dicts", field=field)
    name = body.get("name")
    if name is not None and not isinstance(name, str):
        raise ValidationError(f"{place}.name must be a string", field=f"{place}.name")


def _drawn(records: list[CheckpointRecord], head: int | None) -> str:
    """A line a checkpoint: its branch goes on below it, those left behind are set in."""
    children: dict[int | None, list[int]] = {}
    known = {record["id"]: record for record in records}
    for record in records:
        parent = record["parent"] if record["parent"] in known else None
        children.setdefault(parent, []).append(record["id"])
    current = set(_ancestors(head, {record["id"]: record["parent"] for record in records}))
    lines: list[str] = []
    waiting = [(id, "") for id in sorted(children.get(None, ()), key=lambda id: id not in current)]
    waiting.reverse()
    while waiting:
        id, indent = waiting.pop()
        label = f"  {known[id]['label']}" if "label" in known[id] else ""
        lines.append(f"{indent}{id}{label}{'  <- head' if id == head else ''}")
        below = sorted(children.get(id, ()), key=lambda child: child not in current)
        if below:
            waiting.append((below[0], indent))
        waiting += [(left, indent + "| ") for left in reversed(below[1:])]
        lines += [indent + "|\\"] if below[1:] else []
    return "\n".join(lines)


def _mermaid(records: list[CheckpointRecord], head: int | None) -> str:
    lines = ["graph TD"]
    for record in records:
        id = record["id"]
        label = record.get("label", "").replace('"', "'").replace("\n", " ")
        text = f"{id} {label}".strip()
        lines.append(f'  c{id}(["{text} (head)"])' if id == head else f'  c{id}["{text}"]')
    known = {record["id"] for record in records}
    lines += [f"  c{r['parent']} --> c{r['id']}" for r in records if r["parent"] in known]
    return "\n".join(lines)


def _branches(connection: sqlite3.Connection, head: _Head) -> list[BranchRecord]:
    """One a tip: the head, then the tips left behind, newest first."""
    rows = connection.execute(
        "SELECT id, parent, created_at_ms FROM checkpoint WHERE thread = ?", (head.id,)
    ).fetchall()
    parent = {id: above for id, above, _ in rows}
    created = {id: at for id, _, at in rows}
    current = list(_ancestors(head.head, parent))
    on_current = set(current)
    inner = set(parent.values())
    tips = [id for id in parent if id not in inner and id not in on_current]
    found: list[BranchRecord] = []
    for tip in [head.head, *sorted(tips, reverse=True)] if head.head else []:
        line = list(_ancestors(tip, parent))
        own = line if tip == head.head else [id for id in line if id not in on_current]
        fork = parent[own[-1]] if tip != head.head else None
        found.append(
            {
                "head": tip, "fork": fork, "checkpoints": len(own),
                "current": tip == head.head, "created_at_ms": created[own[-1]],
                "saved_at_ms": created[tip],
            }
        )  # fmt: skip
    return found


def _chosen_threads(
    now_ms: int, namespace: Any, thread_of: Any, status: Any, filters: dict[str, Any]
) -> _Where:
    """The condition of a list of threads."""
    conditions = [
        _inside(_check_namespace(namespace, root=True), "thread"),
        _filters(**filters, now_ms=now_ms, table="thread"),
    ]
    if thread_of is not None:
        parent = _check_name(thread_of, "thread_of")
        conditions.append(_condition("thread.thread_of = :thread_of", thread_of=parent))
    if status is not None:
        _check_choice(status, "status", ("active", "ended"))
        conditions.append(_condition("thread.status = :status", status=status))
    return _both(*conditions)


class _Threads:
    """The rows of threads: segments, messages, checkpoints and states, here and nowhere else."""

    __slots__ = ("_db", "runs")

    def __init__(self, database: _Database, runs: _Runs) -> None:
        self._db = database
        self.runs = runs

    # Preparing, before any lock is taken.

    def prepare(
        self, namespace: str, thread: str, message: object, place: str, number: int
    ) -> _Note:
        """One message of a batch, of which *place* names it in errors."""
        given = _check_mapping(message, place)
        role = given.get("role")
        if not isinstance(role, str) or not role or _UNFIT.search(role):
            raise ValidationError(f"{place}.role must be a non-empty string", field=f"{place}.role")
        id = given.get("id")
        name = _new_id(self._db.now_ms(), number) if id is None else _check_name(id, f"{place}.id")
        own = ("id", "role", "tags", "metadata")
        body = {n: p for n, p in given.items() if n not in own and n not in _RECORD_KEYS}
        _check_content(body, place)
        text, _ = _check_json(body, place, MAX_VALUE_BYTES)
        tags = _check_tags(given.get("tags"), f"{place}.tags") or None
        metadata = _check_metadata(given.get("metadata"), f"{place}.metadata") or None
        words = _message_words(namespace, thread, body | {"role": role}, tags, metadata)
        return self.note(namespace, thread, name, str.__str__(role), tags, metadata, text, words)

    def note(
        self, namespace: str, thread: str, name: str, role: str, tags: Any, metadata: Any,
        body: str, words: str,
    ) -> _Note:  # fmt: skip
        codec = self._db.codec
        place = (namespace, thread, name)
        return _Note(
            name,
            role,
            codec.key_name,
            None if not tags else codec.seal(_dump(tags), "message", "tags", *place),
            None if not metadata else codec.seal(_dump(metadata), "message", "metadata", *place),
            codec.seal(body, "message", "body", *place),
            words,
        )

    def attributes(
        self,
        namespace: str,
        name: str,
        *,
        label: Any = None,
        tags: Any = None,
        metadata: Any = None,
    ) -> dict[str, Any]:
        """The sealed columns of a thread's own attributes."""
        label = _check_text(label, "label", MAX_LABEL_BYTES)
        tags = _check_tags(tags)
        metadata = _check_metadata(metadata)
        texts = {
            "label": label,
            "tags": _dump(tags) if tags else None,
            "metadata": _dump(metadata) if metadata else None,
        }
        codec = self._db.codec
        return {"key_name": codec.key_name} | {
            column: None if text is None else codec.seal(text, "thread", column, namespace, name)
            for column, text in texts.items()
        }

    # Reading.

    def head(self, connection: sqlite3.Connection, namespace: str, name: str) -> _Head | None:
        row = connection.execute(
            """SELECT thread.id, head, status, segment, coalesce(length, 0),
                 coalesce(messages, 0), state
               FROM thread LEFT JOIN checkpoint ON checkpoint.id = thread.head
               WHERE namespace = ? AND name = ?""",
            (namespace, name),
        ).fetchone()
        return None if row is None else _Head(*row)

    def checkpoint(self, connection: sqlite3.Connection, head: _Head | None, id: object) -> _Head:
        """The thread as if its head were at this checkpoint of it."""
        row = None
        if head is not None and isinstance(id, int) and abs(id) < 2**63:
            row = connection.execute(
                """SELECT segment, length, messages, state FROM checkpoint
                   WHERE id = ? AND thread = ?""",
                (id, head.id),
            ).fetchone()
        if head is None or row is None:
            raise NotFoundError("the thread has no such checkpoint", field="checkpoint_id")
        return _Head(head.id, cast(int, id), head.status, *row)

    def info(self, namespace: str, name: str) -> ThreadRecord | None:
        found = self.records(_condition(
            "thread.namespace = :namespace AND thread.name = :name", namespace=namespace, name=name
        ), "thread.id", 1)  # fmt: skip
        return found[0][1] if found else None

    def records(self, where: _Where, order: str, count: int) -> list[tuple[int, ThreadRecord]]:
        with self._db.read(snapshot=True) as connection:
            rows = connection.execute(
                f"""SELECT thread.id, {_THREAD_COLUMNS} FROM thread
                    WHERE {where.sql or "1"} ORDER BY {order} LIMIT :count""",
                where.params | {"count": count},
            ).fetchall()
            held = self.runs.held(connection)
        codec = self._db.codec
        return [
            (id, _thread_record(row, codec, running=(row[0], row[1]) in held)) for id, *row in rows
        ]

    def page(self, where: _Where, limit: Any, after: Any, order: Any) -> list[ThreadRecord]:
        """A page of a list, by last save."""
        count = _check_count(limit, "limit", unlimited=True)
        direction = _check_choice(order, "order", ("asc", "desc"))
        if after is not None:
            where = _both(where, self._beyond(_check_mapping(after, "after"), direction))
        by = f"thread.saved_at_ms {direction}, thread.id {direction}"
        return [record for _, record in self.records(where, by, count)]

    def _beyond(self, after: Mapping[str, Any], direction: str) -> _Where:
        """The threads after one in the order of their last save. One that was saved meanwhile
        stands where it stood in the record."""
        saved, namespace, name = (after.get(part) for part in ("saved_at_ms", "namespace", "id"))
        if (
            not isinstance(saved, int)
            or not isinstance(namespace, str)
            or not isinstance(name, str)
        ):
            raise ValidationError("after must be the last thread of the page before", field="after")
        with self._db.read() as connection:
            row = connection.execute(
                "SELECT id FROM thread WHERE namespace = ? AND name = ?", (namespace, name)
            ).fetchone()
        sign = "<" if direction == "desc" else ">"
        place = {"after_ms": saved, "after_id": row[0] if row else -1}
        return _condition(f"(thread.saved_at_ms, thread.id) {sign} (:after_ms, :after_id)", **place)

    def state_text(
        self, connection: sqlite3.Connection, namespace: str, name: str, state: int | None
    ) -> str:
        if state is None:
            return "{}"
        body, key_name = connection.execute(
            "SELECT body, key_name FROM state WHERE id = ?", (state,)
        ).fetchone()
        return self._db.codec.open(body, key_name, "state", "body", namespace, name)

    def chain(self, connection: sqlite3.Connection, head: _Head) -> list[tuple[int, int, int]]:
        """The segments of a branch from its tip up: (segment, first position, stop)."""
        return connection.execute(
            _CHAIN, {"segment": head.segment, "length": head.length}
        ).fetchall()

    def messages(
        self, connection: sqlite3.Connection, namespace: str, name: str, head: _Head, count: int,
        *, before: str | None = None, after: str | None = None, oldest: bool = False,
    ) -> list[MessageRecord]:  # fmt: skip
        """Messages of a branch in order: the newest *count* (-1: all), or with *oldest* the
        first; only those *before* or *after* the message of that id."""
        chain = self.chain(connection, head)
        low, high = 0, head.length
        if before is not None:
            high = self._position(connection, chain, before)
        if after is not None:
            low = self._position(connection, chain, after) + 1
        found: list[Any] = []
        direction = "ASC" if oldest else "DESC"
        for segment, start, stop in reversed(chain) if oldest else chain:
            left = -1 if count < 0 else count - len(found)
            if left == 0 or (not oldest and stop <= low):
                break
            found += connection.execute(
                f"""SELECT {_MESSAGE_COLUMNS} FROM message
                    WHERE segment = ? AND position >= ? AND position < ? AND role IS NOT NULL
                    ORDER BY position {direction} LIMIT ?""",
                (segment, max(start, low), min(stop, high), left),
            ).fetchall()
        if not oldest:
            found.reverse()
        codec = self._db.codec
        return [_message_record(namespace, name, row, codec) for row in found]

    def _position(
        self, connection: sqlite3.Connection, chain: list[tuple[int, int, int]], id: str
    ) -> int:
        """Where a message stands on a branch; NotFoundError if it isn't there."""
        stops = {segment: stop for segment, _, stop in chain}
        for segment, position in connection.execute(
            "SELECT segment, position FROM message WHERE name = ?", (id,)
        ).fetchall():
            if position < stops.get(segment, 0):
                return int(position)
        raise NotFoundError("the thread has no such message", field="before")

    def history(
        self,
        connection: sqlite3.Connection,
        namespace: str,
        name: str,
        head: int | None,
        count: int,
    ) -> list[CheckpointRecord]:
        rows = connection.execute(
            f"""{_PATH} SELECT {_CHECKPOINT_COLUMNS}
                FROM path JOIN checkpoint ON checkpoint.id = path.id
                ORDER BY depth LIMIT :count""",
            {"head": head, "count": count},
        ).fetchall()
        codec = self._db.codec
        return [_checkpoint_record(namespace, name, row, codec) for row in rows]

    # Writing, inside a transaction.

    def create(
        self, transaction: _Transaction, namespace: str, name: str, *,
        thread_of: str | None = None, created_at_ms: int | None = None, columns: dict[str, Any],
    ) -> _Head:  # fmt: skip
        seq = transaction.next_seq()
        row = {
            "seq": seq, "namespace": namespace, "name": name, "thread_of": thread_of,
            "created": transaction.now_ms if created_at_ms is None else created_at_ms,
            "now": transaction.now_ms, **columns,
        }  # fmt: skip
        id = transaction.connection.execute(_INSERT_THREAD, row).lastrowid
        return _Head(cast(int, id), None, "active", None, 0, 0, None)

    def save(
        self, transaction: _Transaction, namespace: str, name: str, head: _Head,
        notes: Sequence[_Note], state: str | None, label: str | bytes | None, run_id: str | None,
    ) -> _Head:  # fmt: skip
        """Appends messages, points at the state, adds a checkpoint and moves the head to it."""
        connection = transaction.connection
        segment, length = head.segment, head.length
        self._refuse_taken(connection, head.id, [note.name for note in notes])
        if notes:
            segment = self._segment_for(connection, head)
        state_id = self._state_for(connection, namespace, name, head, state)
        codec = self._db.codec
        seq = transaction.next_seq()
        checkpoint = cast(int, connection.execute(
            """INSERT INTO checkpoint(thread, parent, segment, length, messages, state,
                 created_at_ms, run_id, key_name, label)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
            (
                head.id, head.head, segment, length + len(notes), head.messages + len(notes),
                state_id, transaction.now_ms, run_id, codec.key_name, label,
            ),
        ).lastrowid)  # fmt: skip
        for position, note in enumerate(notes, length):
            self.insert(transaction, cast(int, segment), position, checkpoint, note)
        if notes:
            connection.execute(
                "UPDATE segment SET live = ? WHERE id = ?", (length + len(notes), segment)
            )
        connection.execute(
            """UPDATE thread SET head = ?, seq = ?, saved_seq = ?, saved_at_ms = ?,
                 updated_at_ms = ? WHERE id = ?""",
            (checkpoint, seq, seq, transaction.now_ms, transaction.now_ms, head.id),
        )
        return head._replace(
            head=checkpoint, segment=segment, length=length + len(notes),
            messages=head.messages + len(notes), state=state_id,
        )  # fmt: skip

    def _refuse_taken(self, connection: sqlite3.Connection, thread: int, names: list[str]) -> None:
        taken = len(set(names)) < len(names)
        for name in names:
            taken = taken or connection.execute(
                f"""SELECT 1 FROM message JOIN segment ON segment.id = message.segment
                    WHERE message.name = ? AND segment.thread = ? AND {_MESSAGE_IS_CURRENT}""",
                (name, thread),
            ).fetchone() is not None  # fmt: skip
        if taken:
            raise DuplicateError("the thread already has a message of that id", field="id")

    def _segment_for(self, connection: sqlite3.Connection, head: _Head) -> int:
        """The segment that takes the next messages: the head's where nothing follows the head in
        it, else a new one that forks there."""
        if head.segment is not None:
            tip = connection.execute(
                "SELECT max(position) + 1 FROM message WHERE segment = ?", (head.segment,)
            ).fetchone()[0]
            if tip == head.length:
                return head.segment
        parent = head.segment if head.length else None
        return cast(int, connection.execute(
            "INSERT INTO segment(thread, parent, fork, live) VALUES (?, ?, ?, ?)",
            (head.id, parent, head.length, head.length),
        ).lastrowid)  # fmt: skip

    def _state_for(
        self, connection: sqlite3.Connection, namespace: str, name: str, head: _Head,
        state: str | None,
    ) -> int | None:  # fmt: skip
        """The row of the state: the head's, when there is no new one or it is the same text."""
        if state is None or state == self.state_text(connection, namespace, name, head.state):
            return head.state
        codec = self._db.codec
        body = codec.seal(state, "state", "body", namespace, name)
        return connection.execute(
            "INSERT INTO state(thread, key_name, body) VALUES (?, ?, ?)",
            (head.id, codec.key_name, body),
        ).lastrowid

    def insert(
        self, transaction: _Transaction, segment: int, position: int, checkpoint: int, note: _Note,
        created_at_ms: int | None = None, updated_at_ms: int | None = None,
    ) -> None:  # fmt: skip
        connection, now_ms = transaction.connection, transaction.now_ms
        seq = transaction.next_seq()
        connection.execute(
            """INSERT INTO message(seq, segment, position, name, role, checkpoint, created_at_ms,
                 updated_at_ms, wants_vector, key_name, tags, metadata, words, body)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?)""",
            (
                seq, segment, position, note.name, note.role, checkpoint,
                now_ms if created_at_ms is None else created_at_ms,
                now_ms if updated_at_ms is None else updated_at_ms,
                note.key_name, note.tags, note.metadata, note.words, note.body,
            ),
        )  # fmt: skip
        transaction.index("message", seq, note.words)

    def rewind(self, transaction: _Transaction, head: _Head, target: _Head) -> None:
        """Moves the head: only the segments' live lengths change, no message and no index row."""
        connection = transaction.connection
        connection.execute("UPDATE segment SET live = 0 WHERE thread = ? AND live > 0", (head.id,))
        connection.executemany(
            "UPDATE segment SET live = ? WHERE id = ?",
            [(stop, segment) for segment, _, stop in self.chain(connection, target)],
        )
        self.touch(transaction, head.id, head=target.head)

    def touch(self, transaction: _Transaction, thread: int, **columns: Any) -> None:
        """Changes columns of a thread's row, which is no save."""
        columns |= {"seq": transaction.next_seq(), "updated_at_ms": transaction.now_ms}
        assignments = ", ".join(f"{column} = :{column}" for column in columns)
        transaction.connection.execute(
            f"UPDATE thread SET {assignments} WHERE id = :id", columns | {"id": thread}
        )

    def change(
        self, transaction: _Transaction, namespace: str, name: str, head: _Head,
        changes: dict[str, Any], status: str | None,
    ) -> None:  # fmt: skip
        """Writes a thread's attributes anew, those in *changes* changed."""
        row = transaction.connection.execute(
            f"SELECT {_THREAD_COLUMNS} FROM thread WHERE thread.id = ?", (head.id,)
        ).fetchone()
        record: Mapping[str, Any] = _thread_record(row, self._db.codec, running=False)
        kept = {column: record.get(column) for column in ("label", "tags", "metadata")}
        columns = self.attributes(namespace, name, **(kept | changes))
        if status is not None:
            columns["status"] = status
            ended = record.get("ended_at_ms", transaction.now_ms) if status == "ended" else None
            columns["ended_at_ms"] = ended
        self.touch(transaction, head.id, **columns)

    def delete(self, transaction: _Transaction, ids: Sequence[int]) -> int:
        """Deletes whole threads with all that hangs on them; returns how many there were."""
        connection = transaction.connection
        listed = {"ids": json.dumps(list(ids))}
        within = "IN (SELECT value FROM json_each(:ids))"
        of_threads = f"segment IN (SELECT id FROM segment WHERE thread {within})"
        self.drop_messages(transaction, of_threads, listed)
        for statement in (
            f"DELETE FROM checkpoint WHERE thread {within}",
            f"DELETE FROM state WHERE thread {within}",
            f"DELETE FROM segment WHERE thread {within}",
            f"""DELETE FROM run WHERE EXISTS (SELECT 1 FROM thread WHERE thread.id {within}
                  AND thread.namespace = run.namespace AND thread.name = run.thread)""",
        ):
            connection.execute(statement, listed)
        gone = connection.execute(f"DELETE FROM thread WHERE id {within}", listed).rowcount
        if gone:
            transaction.next_seq()
            transaction.unerased = True
        return gone

    def drop_messages(
        self, transaction: _Transaction, condition: str, params: dict[str, Any]
    ) -> None:
        """Deletes message rows with their index entries and vectors."""
        connection = transaction.connection
        transaction.apply_index()
        listed = connection.execute(
            f"SELECT count(*), total(words <> '') FROM message WHERE {condition}", params
        ).fetchone()
        if not listed[0]:
            return
        for statement in (
            f"""INSERT INTO message_words(message_words, rowid, terms)
                SELECT 'delete', seq, words FROM message
                WHERE {condition} AND words <> '' ORDER BY seq""",
            f"DELETE FROM message_vector WHERE id IN (SELECT id FROM message WHERE {condition})",
            f"DELETE FROM message_bits WHERE id IN (SELECT id FROM message WHERE {condition})",
            f"DELETE FROM message WHERE {condition}",
        ):
            connection.execute(statement, params)
        transaction.counts["message"] -= int(listed[1])
        transaction.unerased = True
        transaction.next_seq()

    # Search.

    def search(
        self, ask: _Ask, namespace: Any, thread_id: Any, role: Any, filters: dict[str, Any]
    ) -> list[MessageRecord]:
        """The messages of current branches that a search chose, in the order asked for."""
        path = _check_namespace(namespace, root=True)
        conditions = [
            _filters(**filters, now_ms=self._db.now_ms(), table="message"),
            _condition(_MESSAGE_IS_CURRENT),
        ]
        if thread_id is None:
            conditions.append(_inside(path, "thread"))
        else:
            conditions.append(_of_thread(path or "default", _check_name(thread_id, "thread_id")))
        if role is not None:
            conditions.append(_of_role(_check_name(role, "role")))
        where = _both(*conditions)
        codec = self._db.codec
        with self._db.read(snapshot=True) as index:
            scores = _chosen(index, "message", ask, where, 2**62)
            rows = index.execute(
                f"""SELECT message.id, message.seq, thread.namespace, thread.name,
                      {_MESSAGE_COLUMNS}
                    FROM {_SOURCE["message"]}
                    WHERE message.seq IN (SELECT value FROM json_each(?))""",
                (_dump(list(scores)),),
            ).fetchall()
        found = {}
        for id, seq, namespace, name, *row in rows:
            record: Any = _message_record(namespace, name, row, codec)
            record |= {"thread_id": name, "namespace": namespace}
            found[seq] = _Found(record, id, seq)
        return _arranged([found[seq] for seq in scores if seq in found], ask, scores)


class _MessageEdits:
    """Changes of single messages, in all checkpoints and branches that have them."""

    __slots__ = ("_db", "_threads")

    def __init__(self, database: _Database, threads: _Threads) -> None:
        self._db = database
        self._threads = threads

    def _find(self, connection: sqlite3.Connection, thread: int, id: str) -> tuple[Any, ...]:
        """A message of the current branch, else the newest of that id on a branch left behind:
        (row id, seq, words, segment, position, columns)."""
        row = connection.execute(
            f"""SELECT message.id, message.seq, message.words, message.segment, message.position,
                  {_MESSAGE_COLUMNS}
                FROM message JOIN segment ON segment.id = message.segment
                WHERE message.name = ? AND segment.thread = ? AND message.role IS NOT NULL
                ORDER BY message.position < segment.live DESC, message.id DESC LIMIT 1""",
            (id, thread),
        ).fetchone()
        if row is None:
            raise NotFoundError("the thread has no such message", field="id")
        return cast(tuple[Any, ...], row)

    def tag(
        self, transaction: _Transaction, namespace: str, name: str, head: _Head, id: str, tags: Any
    ) -> None:
        row, seq, words, _, _, *columns = self._find(transaction.connection, head.id, id)
        record: Any = _message_record(namespace, name, columns, self._db.codec)
        metadata = record.get("metadata")
        body = {
            part: value for part, value in record.items()
            if part not in _RECORD_KEYS and part not in ("id", "role", "tags", "metadata")
        }  # fmt: skip
        new_words = _message_words(namespace, name, record, tags, metadata)
        note = self._threads.note(
            namespace, name, id, record["role"], tags, metadata, _dump(body), new_words
        )
        transaction.unindex("message", seq, words)
        new_seq = transaction.next_seq()
        transaction.connection.execute(
            """UPDATE message SET seq = ?, updated_at_ms = ?, key_name = ?, tags = ?, metadata = ?,
                 words = ?, body = ? WHERE id = ?""",
            (
                new_seq, transaction.now_ms, note.key_name, note.tags, note.metadata, note.words,
                note.body, row,
            ),
        )  # fmt: skip
        transaction.index("message", new_seq, new_words)
        self._threads.touch(transaction, head.id)

    def delete(self, transaction: _Transaction, head: _Head, id: str) -> None:
        """Leaves a tombstone without content, so that positions hold on every branch."""
        connection = transaction.connection
        row, seq, words, segment, position, *_ = self._find(connection, head.id, id)
        transaction.unindex("message", seq, words)
        connection.execute("DELETE FROM message_vector WHERE id = ?", (row,))
        connection.execute("DELETE FROM message_bits WHERE id = ?", (row,))
        connection.execute(
            """UPDATE message SET seq = ?, updated_at_ms = ?, role = NULL, body = NULL,
                 tags = NULL, metadata = NULL, words = '' WHERE id = ?""",
            (transaction.next_seq(), transaction.now_ms, row),
        )
        connection.execute(
            """WITH RECURSIVE holder(id, start) AS (
                 SELECT ?1, ?2 + 1
                 UNION ALL
                 SELECT segment.id, 0 FROM holder JOIN segment ON segment.parent = holder.id
                 WHERE segment.fork > ?2)
               UPDATE checkpoint SET messages = messages - 1
               WHERE thread = ?3 AND length > ?2 AND segment IN (SELECT id FROM holder)""",
            (segment, position, head.id),
        )
        self._threads.touch(transaction, head.id)


class _ThreadCopies:
    """Whole threads as plain data and back: export, import, fork."""

    __slots__ = ("_db", "_threads")

    def __init__(self, database: _Database, threads: _Threads) -> None:
        self._db = database
        self._threads = threads

    def copy(
        self, transaction: _Transaction, namespace: str, name: str, head: _Head, new_name: str
    ) -> None:
        """Writes a branch anew as a thread of its own, with the same message ids."""
        connection = transaction.connection
        record = self._exported(connection, namespace, name, head)
        self.restore(transaction, record | {"id": new_name}, replace=False)

    def _exported(
        self, connection: sqlite3.Connection, namespace: str, name: str, head: _Head | None = None
    ) -> dict[str, Any]:
        """A thread as plain data: of all its branches, or of the one that *head* ends."""
        codec = self._db.codec
        id, *row = connection.execute(
            f"""SELECT thread.id, {_THREAD_COLUMNS} FROM thread
                WHERE namespace = ? AND name = ?""",
            (namespace, name),
        ).fetchone()
        thread: dict[str, Any] = {"kind": "thread"}
        thread |= _thread_record(row, codec, running=False)
        checkpoints = connection.execute(
            f"""SELECT checkpoint.segment, checkpoint.length, checkpoint.state,
                  {_CHECKPOINT_COLUMNS} FROM checkpoint WHERE thread = ? ORDER BY id""",
            (id,),
        ).fetchall()
        segments = connection.execute(
            "SELECT id, parent, fork FROM segment WHERE thread = ? ORDER BY id", (id,)
        ).fetchall()
        stops: dict[int, int] = {}
        if head is not None:
            path = set(_ancestors(head.head, {row[3]: row[4] for row in checkpoints}))
            checkpoints = [row for row in checkpoints if row[3] in path]
            stops = {segment: stop for segment, _, stop in self._threads.chain(connection, head)}
            segments = [row for row in segments if row[0] in stops]
            thread["head"] = head.head
        thread["checkpoints"] = [
            _checkpoint_record(namespace, name, row, codec)
            | {"segment": segment, "length": length, "state_id": state}
            for segment, length, state, *row in checkpoints
        ]
        thread["states"] = {
            str(state): _load(self._threads.state_text(connection, namespace, name, state))
            for state in sorted({row[2] for row in checkpoints if row[2] is not None})
        }
        thread["segments"] = [
            {
                "id": segment, "parent": parent, "fork": fork,
                "messages": self._exported_messages(
                    connection, namespace, name, segment, stops.get(segment, 2**62)
                ),
            }
            for segment, parent, fork in segments
        ]  # fmt: skip
        return thread

    def _exported_messages(
        self, connection: sqlite3.Connection, namespace: str, name: str, segment: int, stop: int
    ) -> list[dict[str, Any]]:
        rows = connection.execute(
            f"""SELECT {_MESSAGE_COLUMNS} FROM message
                WHERE segment = ? AND position < ? ORDER BY position""",
            (segment, stop),
        ).fetchall()
        return [
            {"id": row[0], "created_at_ms": row[3], "deleted": True} if row[1] is None
            else dict(_message_record(namespace, name, row, self._db.codec))
            for row in rows
        ]  # fmt: skip

    def export(self, where: _Where) -> Iterator[dict[str, Any]]:
        """Whole threads by namespace and id."""
        place = {"last_namespace": "", "last_name": ""}
        while True:
            with self._db.read(snapshot=True) as connection:
                row = connection.execute(
                    f"""SELECT namespace, name FROM thread
                        WHERE {where.sql or "1"}
                          AND (namespace, name) > (:last_namespace, :last_name)
                        ORDER BY namespace, name LIMIT 1""",
                    where.params | place,
                ).fetchone()
                thread = None if row is None else self._exported(connection, *row)
            if thread is None:
                return
            yield thread
            place = {"last_namespace": row[0], "last_name": row[1]}

    def replace(self, thread: Mapping[str, Any], place: str) -> None:
        try:
            with self._db.transaction() as transaction:
                self.restore(transaction, thread, replace=True)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValidationError(f"{place} is no whole thread", field=place) from error

    def restore(
        self, transaction: _Transaction, thread: Mapping[str, Any], *, replace: bool
    ) -> None:
        """Writes what `export` gave, its times kept; *replace* or DuplicateError."""
        connection = transaction.connection
        namespace, name = _check_namespace(thread["namespace"]), _check_name(thread["id"], "id")
        old = self._threads.head(connection, namespace, name)
        if old is not None and not replace:
            raise DuplicateError(f"the id is taken in namespace {namespace!r}", field="id")
        if old is not None:
            self._threads.delete(transaction, [old.id])
        columns = self._threads.attributes(
            namespace, name, label=thread.get("label"), tags=thread.get("tags"),
            metadata=thread.get("metadata"),
        )  # fmt: skip
        row = self._threads.create(
            transaction, namespace, name, thread_of=thread.get("thread_of"),
            created_at_ms=thread["created_at_ms"], columns=columns,
        ).id  # fmt: skip
        codec = self._db.codec
        states: dict[Any, int | None] = {None: None}
        for key, state in thread["states"].items():
            body = codec.seal(_check_state(state), "state", "body", namespace, name)
            states[int(key)] = connection.execute(
                "INSERT INTO state(thread, key_name, body) VALUES (?, ?, ?)",
                (row, codec.key_name, body),
            ).lastrowid
        segments: dict[Any, int | None] = {None: None}
        for segment in thread["segments"]:
            segments[segment["id"]] = connection.execute(
                "INSERT INTO segment(thread, parent, fork, live) VALUES (?, ?, ?, 0)",
                (row, segments[segment["parent"]], segment["fork"]),
            ).lastrowid
        checkpoints = self._restore_checkpoints(
            connection, thread, row, segments, states, namespace, name
        )
        self._restore_messages(transaction, thread, segments, checkpoints, namespace, name)
        status = _check_choice(thread["status"], "status", ("active", "ended"))
        connection.execute(
            """UPDATE thread SET head = ?, status = ?, saved_at_ms = ?, updated_at_ms = ?,
                 ended_at_ms = ? WHERE id = ?""",
            (
                checkpoints.get(thread["head"]), status, thread["saved_at_ms"],
                thread["updated_at_ms"], thread.get("ended_at_ms"), row,
            ),
        )  # fmt: skip
        head = self._threads.head(connection, namespace, name)
        connection.executemany(
            "UPDATE segment SET live = ? WHERE id = ?",
            [
                (stop, segment)
                for segment, _, stop in self._threads.chain(connection, cast(_Head, head))
            ],
        )

    def _restore_checkpoints(
        self, connection: sqlite3.Connection, thread: Mapping[str, Any], row: int,
        segments: Mapping[Any, int | None], states: Mapping[Any, int | None], namespace: str,
        name: str,
    ) -> dict[Any, int | None]:  # fmt: skip
        codec = self._db.codec
        checkpoints: dict[Any, int | None] = {}
        for checkpoint in thread["checkpoints"]:
            label = _check_text(checkpoint.get("label"), "label", MAX_LABEL_BYTES)
            checkpoints[checkpoint["id"]] = connection.execute(
                """INSERT INTO checkpoint(thread, parent, segment, length, messages, state,
                     created_at_ms, run_id, key_name, label)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
                (
                    row, checkpoints.get(checkpoint["parent"]), segments[checkpoint["segment"]],
                    checkpoint["length"], checkpoint["message_count"],
                    states[checkpoint["state_id"]], checkpoint["created_at_ms"],
                    checkpoint.get("run_id"), codec.key_name,
                    None if label is None
                    else codec.seal(label, "checkpoint", "label", namespace, name),
                ),
            ).lastrowid  # fmt: skip
        return checkpoints

    def _restore_messages(
        self, transaction: _Transaction, thread: Mapping[str, Any],
        segments: Mapping[Any, int | None], checkpoints: Mapping[Any, int | None],
        namespace: str, name: str,
    ) -> None:  # fmt: skip
        for segment in thread["segments"]:
            row = cast(int, segments[segment["id"]])
            for position, message in enumerate(segment["messages"], segment["fork"]):
                times = (message["created_at_ms"], message.get("updated_at_ms"))
                if message.get("deleted"):
                    transaction.connection.execute(
                        """INSERT INTO message(seq, segment, position, name, checkpoint,
                             created_at_ms, updated_at_ms, wants_vector, words)
                           VALUES (?, ?, ?, ?, 0, ?, ?, 0, '')""",
                        (transaction.next_seq(), row, position, message["id"], times[0], times[0]),
                    )
                    continue
                note = self._threads.prepare(
                    namespace, name, message, f"message {position}", position
                )
                checkpoint = checkpoints.get(message["checkpoint"]) or 0
                self._threads.insert(transaction, row, position, checkpoint, note, *times)


def _prune_threads(
    step: Callable[[int, int], tuple[int, int, int]], progress: Progress | None
) -> tuple[int, int]:
    """Goes through the threads in chunks by row id; what was deleted and passed over."""
    after = deleted = busy = 0

    def chunk(size: int) -> int:
        nonlocal after, deleted, busy
        after, gone, passed_over = step(after, size)
        deleted += gone
        busy += passed_over
        return size if after else 0

    _in_chunks(chunk, progress and (lambda done, total: progress(deleted, None)), None)
    return deleted, busy


class _ThreadCare:
    """Long work on threads, in chunks: retention, the words anew; and what is wrong with them."""

    __slots__ = ("_db", "_threads")

    def __init__(self, database: _Database, threads: _Threads) -> None:
        self._db = database
        self._threads = threads

    def reindex(self, place: int, last: int, size: int) -> tuple[int, int, int]:
        """As `_Items.reindex`, for messages."""
        changed = 0
        with self._db.transaction() as transaction:
            rows = transaction.connection.execute(
                f"""SELECT message.id, message.seq, message.words, thread.namespace, thread.name,
                      {_MESSAGE_COLUMNS}
                    FROM message JOIN segment ON segment.id = message.segment
                    JOIN thread ON thread.id = segment.thread
                    WHERE message.id > ? AND message.id <= ? AND role IS NOT NULL
                    ORDER BY message.id LIMIT ?""",
                (place, last, size),
            ).fetchall()
            for id, seq, words, namespace, name, *row in rows:
                record: Any = _message_record(namespace, name, row, self._db.codec)
                tags, metadata = record.get("tags"), record.get("metadata")
                derived = _message_words(namespace, name, record, tags, metadata)
                if derived != words:
                    changed += 1
                    transaction.unindex("message", seq, words)
                    transaction.index("message", seq, derived)
                    transaction.connection.execute(
                        "UPDATE message SET words = ? WHERE id = ?", (derived, id)
                    )
        return len(rows), changed, rows[-1][0] if rows else last

    def faults(self, connection: sqlite3.Connection) -> list[str]:
        """What is wrong with threads that no foreign key sees."""
        faults = []
        for name, sql in _THREAD_FAULTS.items():
            count = connection.execute(f"SELECT count(*) FROM ({sql})").fetchone()[0]
            if count:
                faults.append(f"{count} {name}")
        for row in connection.execute(
            """SELECT thread.id, thread.head, thread.status, segment, coalesce(length, 0), 0, state
               FROM thread LEFT JOIN checkpoint ON checkpoint.id = thread.head"""
        ).fetchall():
            head = _Head(*row)
            expected = {segment: stop for segment, _, stop in self._threads.chain(connection, head)}
            live = dict(connection.execute(
                "SELECT id, live FROM segment WHERE thread = ? AND live > 0", (head.id,)
            ).fetchall())  # fmt: skip
            if live != expected:
                faults.append(f"thread row {head.id}: its segments don't show its current branch")
        return faults

    def prune(self, rules: Retention, progress: Progress | None) -> PruneCounts:
        """Applies the retention rules once."""
        threads = checkpoints = busy = 0
        if rules.thread_ttl_secs is not None:
            oldest = self._db.now_ms() - round(rules.thread_ttl_secs * 1000)
            step = functools.partial(self.prune_old, oldest)
            threads, busy = _prune_threads(step, progress)
        if rules.keep_checkpoints is not None or rules.drop_branches:
            step = functools.partial(self.prune_checkpoints, rules.keep_checkpoints)
            checkpoints, passed_over = _prune_threads(step, progress)
            busy += passed_over
        return {
            "threads_deleted": threads, "threads_busy": busy, "checkpoints_deleted": checkpoints,
            "memory_items_deleted": 0,
        }  # fmt: skip

    def prune_old(self, oldest_ms: int, after: int, size: int) -> tuple[int, int, int]:
        """Deletes, of the threads after row id *after* last saved then or before, the next *size*
        that are idle; returns the last row id (0: no more), how many went, and how many running
        ones were passed over."""
        with self._db.transaction() as transaction:
            rows = transaction.connection.execute(
                """SELECT id, namespace, name FROM thread WHERE id > ? AND saved_at_ms <= ?
                   ORDER BY id LIMIT ?""",
                (after, oldest_ms, size),
            ).fetchall()
            if not rows:
                return 0, 0, 0
            held = self._threads.runs.held(transaction.connection)
            idle = [id for id, namespace, name in rows if (namespace, name) not in held]
            return rows[-1][0], self._threads.delete(transaction, idle), len(rows) - len(idle)

    def prune_checkpoints(self, keep: int | None, after: int, size: int) -> tuple[int, int, int]:
        """Trims the next *size* threads after row id *after* to their current branch, and that to
        its newest *keep* checkpoints; returns the last row id (0: no more), checkpoints deleted,
        and how many running threads were passed over."""
        with self._db.transaction() as transaction:
            connection = transaction.connection
            rows = connection.execute(
                "SELECT id, namespace, name FROM thread WHERE id > ? ORDER BY id LIMIT ?",
                (after, size),
            ).fetchall()
            held = self._threads.runs.held(connection)
            busy = [id for id, namespace, name in rows if (namespace, name) in held]
            if not rows:
                return 0, 0, 0
            params = {
                "low": rows[0][0], "high": rows[-1][0], "keep": -1 if keep is None else keep,
                "busy": json.dumps(busy),
            }  # fmt: skip
            doomed = connection.execute(_DOOMED_CHECKPOINTS, params).fetchall()
            passed_over = len({thread for _, thread, running in doomed if running})
            listed = [id for id, _, running in doomed if not running]
            if listed:
                self._trim(transaction, listed, params)
            return rows[-1][0], len(listed), passed_over

    def _trim(
        self, transaction: _Transaction, checkpoints: list[int], params: dict[str, Any]
    ) -> None:
        """Deletes checkpoints, and the states and messages that no other checkpoint holds."""
        connection = transaction.connection
        idle = """thread BETWEEN :low AND :high
                  AND thread NOT IN (SELECT value FROM json_each(:busy))"""
        connection.executemany("DELETE FROM checkpoint WHERE id = ?", [(id,) for id in checkpoints])
        connection.execute(
            f"""UPDATE checkpoint SET parent = NULL
                WHERE {idle} AND parent IS NOT NULL
                  AND NOT EXISTS (SELECT 1 FROM checkpoint AS above
                                  WHERE above.id = checkpoint.parent)""",
            params,
        )
        connection.execute(
            f"""DELETE FROM state WHERE {idle}
                  AND NOT EXISTS (SELECT 1 FROM checkpoint WHERE checkpoint.state = state.id)""",
            params,
        )
        left = f"""id IN (SELECT message.id FROM segment
                     CROSS JOIN message ON message.segment = segment.id
                       AND message.position >= segment.live
                     WHERE {idle})"""
        self._threads.drop_messages(transaction, left, params)
        connection.execute(
            f"""DELETE FROM segment WHERE {idle} AND live = 0
                  AND NOT EXISTS (SELECT 1 FROM message WHERE message.segment = segment.id)""",
            params,
        )
        transaction.next_seq()
        transaction.unerased = True


class Thread:
    """One durable conversation or run: its messages, state and checkpoints.

    A handle without a cache: every call reads the file. The thread is made at the first save.
    A writing call is a run of its own; inside `run()` of the same context it joins that run.
    While another run holds the thread, the store's `on_busy` decides.

    >>> with Storage() as store:
    ...     chat = store.thread("chat-1")
    ...     saved = chat.append("user", "Where is the office?")
    ...     saved = chat.append("assistant", "In Lisbon.", state={"topic": "office"})
    ...     [message["role"] for message in chat.messages()], chat.state()
    (['user', 'assistant'], {'topic': 'office'})
    """

    __slots__ = ("_lease", "_storage", "_threads", "id", "namespace")

    def __init__(
        self, storage: Storage, namespace: str, id: str, lease: _Lease | None = None
    ) -> None:
        self._storage = storage
        self._threads = storage._threads
        self._lease = lease
        self.namespace = namespace
        self.id = id

    def __repr__(self) -> str:
        return f"Thread({self.id!r}, namespace={self.namespace!r})"

    # Reading.

    def exists(self) -> bool:
        """Whether there is such a thread."""
        with self._storage._db.read() as connection:
            return self._threads.head(connection, self.namespace, self.id) is not None

    def info(self) -> ThreadRecord | None:
        """The thread's record; None before its first save."""
        return self._threads.info(self.namespace, self.id)

    def state(self) -> dict[str, Any]:
        """The state at the head, a fresh copy; `{}` before the first save."""
        with self._reading() as (connection, head):
            state = head.state if head else None
            text = self._threads.state_text(connection, self.namespace, self.id, state)
        return cast(dict[str, Any], _load(text))

    def messages(
        self, limit: int | None = None, *, before: str | None = None,
        checkpoint: int | None = None,
    ) -> list[MessageRecord]:  # fmt: skip
        """The messages of the current branch in order: the newest *limit*, those *before* a
        message's id, or as they were at a *checkpoint*. NotFoundError for an unknown one."""
        count = _check_count(limit, "limit", unlimited=True)
        with self._reading() as (connection, head):
            if checkpoint is not None:
                head = self._threads.checkpoint(connection, head, checkpoint)
            if head is None:
                return []
            return self._threads.messages(
                connection, self.namespace, self.id, head, count, before=before
            )

    def history(
        self, limit: int | None = None, *, before: int | None = None
    ) -> list[CheckpointRecord]:
        """The checkpoints of the current branch, newest first, or those before one of them."""
        count = _check_count(limit, "limit", unlimited=True)
        with self._reading() as (connection, head):
            start = head.head if head else None
            if before is not None:
                self._threads.checkpoint(connection, head, before)
                row = connection.execute(
                    "SELECT parent FROM checkpoint WHERE id = ?", (before,)
                ).fetchone()
                start = row[0]
            return self._threads.history(connection, self.namespace, self.id, start, count)

    def get_checkpoint(self, checkpoint_id: int) -> CheckpointRecord:
        """One checkpoint, with `state` and `messages` as they were then."""
        with self._reading() as (connection, head):
            at = self._threads.checkpoint(connection, head, checkpoint_id)
            place = (self.namespace, self.id)
            record = self._threads.history(connection, *place, at.head, 1)[0]
            record["state"] = _load(self._threads.state_text(connection, *place, at.state))
            record["messages"] = self._threads.messages(connection, *place, at, -1)
        return record

    def branches(self) -> list[BranchRecord]:
        """One record a tip: the current branch, then those that `rewind` left, newest first."""
        with self._reading() as (connection, head):
            return _branches(connection, head) if head else []

    def tree(self, style: str = "text") -> str:
        """The checkpoints and branches drawn as text, the head marked, or as "mermaid".

        >>> with Storage() as store:
        ...     chat = store.thread("chat")
        ...     first = chat.append("user", "a")["checkpoint"]
        ...     saved = chat.append("user", "b")
        ...     moved = chat.rewind(first)
        ...     saved = chat.append("user", "c")
        ...     print(chat.tree())
        1
        |\\
        | 2
        3  <- head
        """
        _check_choice(style, "style", ("text", "mermaid"))
        with self._reading() as (connection, head):
            if head is None:
                return ""
            rows = connection.execute(
                f"SELECT {_CHECKPOINT_COLUMNS} FROM checkpoint WHERE thread = ? ORDER BY id",
                (head.id,),
            ).fetchall()
        codec = self._storage._db.codec
        records = [_checkpoint_record(self.namespace, self.id, row, codec) for row in rows]
        return _drawn(records, head.head) if style == "text" else _mermaid(records, head.head)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[tuple[sqlite3.Connection, _Head | None]]:
        with self._storage._db.read(snapshot=True) as connection:
            yield connection, self._threads.head(connection, self.namespace, self.id)

    # Writing.

    @contextlib.contextmanager
    def run(
        self, *, run_id: str | None = None, actor: str | None = None, on_busy: str | None = None,
        busy_timeout_secs: float | None = None,
    ) -> Iterator[Run]:  # fmt: skip
        """Holds the thread for the block; others wait, are rejected or interrupt, as they choose.

        *on_busy* and *busy_timeout_secs* say what this call does when another run holds it, in
        any process: "wait" for its turn, then ThreadBusyError; "reject" at once; "interrupt" takes
        the thread from it. Its next write then raises RunInterruptedError. A run whose process
        died is free at once on the same host, else 30 s after its last sign of life.

        >>> with Storage() as store, store.thread("chat").run() as run:
        ...     saved = run.append("user", "hello")
        ...     run.interrupted
        False
        """
        if run_id is not None:
            _check_name(run_id, "run_id")
        if actor is not None:
            _check_name(actor, "actor")
        policy, timeout = self._storage._busy(on_busy, busy_timeout_secs)
        own = self._threads.runs.own(self.namespace, self.id)
        if own is not None:
            yield Run(self._storage, own)
            return
        with self._threads.runs.hold(
            self.namespace, self.id, policy=policy, timeout=timeout, run_id=run_id, actor=actor
        ) as lease:
            yield Run(self._storage, lease)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[_Transaction, _Head | None, str | None]]:
        """A transaction in which nobody else holds the thread: (transaction, head, run id)."""
        runs = self._threads.runs
        place = (self.namespace, self.id)
        lease = self._lease or runs.own(*place)
        with contextlib.ExitStack() as stack:
            transaction = stack.enter_context(self._storage._db.transaction())
            if lease is None and not runs.is_free(transaction.connection, *place):
                stack.close()
                policy, timeout = self._storage._busy(None, None)
                lease = stack.enter_context(runs.hold(*place, policy=policy, timeout=timeout))
                transaction = stack.enter_context(self._storage._db.transaction())
            if lease is not None:
                lease.verify(transaction.connection)
            head = self._threads.head(transaction.connection, *place)
            yield transaction, head, lease.run_id if lease is not None else None

    def save(
        self, *, messages: Iterable[Mapping[str, Any]] = (), state: Mapping[str, Any] | None = None,
        label: str | None = None, expected_head: int | EllipsisType | None = ...,
    ) -> CheckpointRecord:  # fmt: skip
        """Appends messages, replaces the state when one is given, and adds a checkpoint under the
        head, all in one transaction; makes the thread at the first save.

        A message has a `role`, a `content` (text, a dict or a list of dicts) and any other keys,
        which come back as they went in; at most 1 MiB. The state is a JSON object of at most
        16 MiB. With *expected_head* (None: not there yet) a moved head is a ConflictError, as are
        messages to an ended thread. An id that the branch has is a DuplicateError.
        """
        notes = [
            self._threads.prepare(self.namespace, self.id, message, f"messages[{i}]", i)
            for i, message in enumerate(_check_iterable(messages, "messages"))
        ]
        return self._save(notes, state, label, expected_head)

    def _save(
        self, notes: list[_Note], state: object, label: object,
        expected_head: int | EllipsisType | None = ...,
    ) -> CheckpointRecord:  # fmt: skip
        text = None if state is None else _check_state(state)
        label = _check_text(label, "label", MAX_LABEL_BYTES)
        codec = self._storage._db.codec
        place = (self.namespace, self.id)
        sealed = None if label is None else codec.seal(label, "checkpoint", "label", *place)
        columns = self._threads.attributes(*place)
        with self._writing() as (transaction, head, run_id):
            at = head.head if head else None
            if expected_head is not ... and at != expected_head:
                raise ConflictError("the thread's head has moved; read it again, then save")
            if head is None:
                head = self._threads.create(transaction, *place, columns=columns)
            if notes and head.status == "ended":
                raise ConflictError("the thread has ended and takes no messages")
            self._threads.save(transaction, *place, head, notes, text, sealed, run_id)
            return self._head_record(transaction.connection)

    def _head_record(self, connection: sqlite3.Connection) -> CheckpointRecord:
        row = connection.execute(
            f"""SELECT {_CHECKPOINT_COLUMNS} FROM thread
                JOIN checkpoint ON checkpoint.id = thread.head
                WHERE thread.namespace = ? AND thread.name = ?""",
            (self.namespace, self.id),
        ).fetchone()
        return _checkpoint_record(self.namespace, self.id, row, self._storage._db.codec)

    def append(
        self, role: str, content: Any = None, *, id: str | None = None, name: str | None = None,
        tags: Sequence[str] | None = None, metadata: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None, **extra: Any,
    ) -> MessageRecord:  # fmt: skip
        """Appends one message and a checkpoint; the rest as `save`. Keys of *extra* are kept."""
        message = {"role": role, "content": content, **extra}
        given = {"id": id, "name": name, "tags": tags, "metadata": metadata}
        message |= {key: value for key, value in given.items() if value is not None}
        note = self._threads.prepare(self.namespace, self.id, message, "message", 0)
        saved = self._save([note], state, None)
        at = saved["created_at_ms"]
        row = (
            note.name, note.role, saved["id"], at, at, note.key_name, note.tags, note.metadata,
            note.body,
        )  # fmt: skip
        return _message_record(self.namespace, self.id, row, self._storage._db.codec)

    def rewind(self, checkpoint_id: int) -> CheckpointRecord:
        """Moves the head to any checkpoint of the thread, also one on a branch left behind.

        Later checkpoints stay as a branch until pruned; their messages are in no read and no
        search until the head is on their branch again. NotFoundError if it is not this thread's
        or was pruned.
        """
        with self._writing() as (transaction, head, _):
            target = self._threads.checkpoint(transaction.connection, head, checkpoint_id)
            self._threads.rewind(transaction, cast(_Head, head), target)
            return self._head_record(transaction.connection)

    def fork(self, new_id: str | None = None, *, checkpoint_id: int | None = None) -> Thread:
        """A new thread in the same namespace with a copy of the path up to the head or to a
        checkpoint. DuplicateError if the id is taken."""
        name = _new_id(self._storage._db.now_ms()) if new_id is None else _check_name(new_id, "id")
        with self._storage._db.transaction() as transaction:
            head = self._threads.head(transaction.connection, self.namespace, self.id)
            if head is None or checkpoint_id is not None:
                head = self._threads.checkpoint(transaction.connection, head, checkpoint_id)
            self._storage._copies.copy(transaction, self.namespace, self.id, head, name)
        return Thread(self._storage, self.namespace, name)

    def update(
        self, *, label: str | EllipsisType | None = ...,
        tags: Sequence[str] | EllipsisType | None = ...,
        metadata: Mapping[str, Any] | EllipsisType | None = ..., status: str | None = None,
    ) -> None:  # fmt: skip
        """Changes what is given and nothing else; None clears. *status* is "active" or "ended";
        an ended thread takes no messages. NotFoundError if there is no such thread."""
        given = {"label": label, "tags": tags, "metadata": metadata}
        changes = {name: new for name, new in given.items() if new is not ...}
        if status is not None:
            _check_choice(status, "status", ("active", "ended"))
        self._threads.attributes(self.namespace, self.id, **changes)  # refuses before the lock
        with self._writing() as (transaction, head, _):
            place = (self.namespace, self.id)
            self._threads.change(transaction, *place, self._required(head), changes, status)

    def set_message_tags(self, id: str, tags: Sequence[str] | None) -> None:
        """Replaces a message's tags, in all checkpoints and branches. Counts as a write of the
        message. NotFoundError if there is none of that id."""
        _check_name(id, "id")
        checked = _check_tags(tags)
        with self._writing() as (transaction, head, _):
            place = (self.namespace, self.id)
            self._storage._edits.tag(transaction, *place, self._required(head), id, checked)

    def delete_message(self, id: str) -> None:
        """Deletes a message from all checkpoints and branches. NotFoundError if there is none."""
        _check_name(id, "id")
        with self._writing() as (transaction, head, _):
            self._storage._edits.delete(transaction, self._required(head), id)

    def delete(self) -> bool:
        """Deletes the thread with its checkpoints, branches and messages; True if it was there.
        Never waits: a run that holds it loses it."""
        with self._storage._db.transaction() as transaction:
            head = self._threads.head(transaction.connection, self.namespace, self.id)
            transaction.connection.execute(
                "DELETE FROM run WHERE namespace = ? AND thread = ?", (self.namespace, self.id)
            )
            return head is not None and self._threads.delete(transaction, [head.id]) > 0

    def _required(self, head: _Head | None) -> _Head:
        if head is None:
            raise NotFoundError(f"no such thread in namespace {self.namespace!r}", field="id")
        return head


class Run:
    """Somebody's work on a thread, which it holds meanwhile; made by `Thread.run`.

    It has every writing method of the thread, and `check` for the pauses between them.
    """

    __slots__ = ("_lease", "_storage", "thread")

    def __init__(self, storage: Storage, lease: _Lease) -> None:
        self._storage = storage
        self._lease = lease
        #: The thread as this run writes it.
        self.thread = Thread(storage, lease.namespace, lease.name, lease)

    @property
    def id(self) -> str:
        """The run's id."""
        return self._lease.run_id

    @property
    def interrupted(self) -> bool:
        """Whether another run took the thread, or the thread was deleted."""
        try:
            self.check()
        except RunInterruptedError:
            return True
        return False

    def check(self) -> None:
        """RunInterruptedError when the run has lost its thread; call it in long work."""
        with self._storage._db.read() as connection:
            self._lease.verify(connection)

    def save(
        self, *, messages: Iterable[Mapping[str, Any]] = (), state: Mapping[str, Any] | None = None,
        label: str | None = None, expected_head: int | EllipsisType | None = ...,
    ) -> CheckpointRecord:  # fmt: skip
        """`Thread.save`, as this run."""
        return self.thread.save(
            messages=messages, state=state, label=label, expected_head=expected_head
        )

    def append(
        self, role: str, content: Any = None, *, id: str | None = None, name: str | None = None,
        tags: Sequence[str] | None = None, metadata: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None, **extra: Any,
    ) -> MessageRecord:  # fmt: skip
        """`Thread.append`, as this run."""
        return self.thread.append(
            role, content, id=id, name=name, tags=tags, metadata=metadata, state=state, **extra
        )

    def rewind(self, checkpoint_id: int) -> CheckpointRecord:
        """`Thread.rewind`, as this run."""
        return self.thread.rewind(checkpoint_id)

    def fork(self, new_id: str | None = None, *, checkpoint_id: int | None = None) -> Thread:
        """`Thread.fork`, as this run."""
        return self.thread.fork(new_id, checkpoint_id=checkpoint_id)

    def update(
        self, *, label: str | EllipsisType | None = ...,
        tags: Sequence[str] | EllipsisType | None = ...,
        metadata: Mapping[str, Any] | EllipsisType | None = ..., status: str | None = None,
    ) -> None:  # fmt: skip
        """`Thread.update`, as this run."""
        self.thread.update(label=label, tags=tags, metadata=metadata, status=status)

    def set_message_tags(self, id: str, tags: Sequence[str] | None) -> None:
        """`Thread.set_message_tags`, as this run."""
        self.thread.set_message_tags(id, tags)

    def delete_message(self, id: str) -> None:
        """`Thread.delete_message`, as this run."""
        self.thread.delete_message(id)

    def delete(self) -> bool:
        """`Thread.delete`, as this run, which then has lost the thread."""
        return self.thread.delete()


# ---- Storage -------------------------------------------------------------------------------------


_IMPORT_ROWS = 1_000
_BUSY_POLICIES = ("wait", "reject", "interrupt")


_STATS = f"""SELECT
    (SELECT count(*) FROM item)
      - (SELECT count(*) FROM item WHERE expires_at_ms IS NOT NULL AND NOT {_ITEM_IS_LIVE}),
    (SELECT count(*) FROM message WHERE role IS NOT NULL),
    (SELECT count(*) FROM thread),
    (SELECT count(*) FROM checkpoint),
    (SELECT count(*) FROM item_vector) + (SELECT count(*) FROM message_vector),
    (SELECT count(*) FROM audit),
    (SELECT unerased FROM counter),
    (SELECT value FROM meta WHERE name = 'tokenizer')"""


def _sqlite_path(url: object, field: str = "url") -> str | None:
    """The file that a url or path names; None for a store in memory."""
    if url is None:
        return None
    if isinstance(url, os.PathLike):
        url = os.fspath(url)
    try:
        fit = isinstance(url, str) and bool(url) and b"\0" not in os.fsencode(url)
    except UnicodeEncodeError:
        fit = False
    if not isinstance(url, str) or not fit:
        raise ValidationError(
            f'{field} must be a path, "sqlite:///file.db", ":memory:" or None for memory',
            field=field,
        )
    if url in (":memory:", "sqlite://", "sqlite:///:memory:"):
        return None
    scheme, separator, rest = url.partition("://")
    if not separator:
        return os.path.abspath(url)
    if scheme != "sqlite" or not rest.startswith("/") or len(rest) < 2 or "?" in rest:
        raise ValidationError(
            f'{field} is not supported; use "sqlite:///relative.db", "sqlite:////absolute.db" '
            "without options, a plain path, or None for memory",
            field=field,
        )
    return os.path.abspath(rest[1:])


def _check_retention(given: object) -> Retention:
    """The rules as a Retention, from one or from a dict with its names."""
    if given is None:
        return Retention()
    names = ("thread_ttl_secs", "keep_checkpoints", "drop_branches")
    if isinstance(given, Mapping) and set(given) <= set(names):
        given = Retention(**given)
    if not isinstance(given, Retention):
        raise ValidationError(
            f"retention must be a Retention, or a dict with {', '.join(names)}", field="retention"
        )
    if given.thread_ttl_secs is not None:
        _check_seconds(given.thread_ttl_secs, "retention.thread_ttl_secs")
    if given.keep_checkpoints is not None and not _check_count(
        given.keep_checkpoints, "retention.keep_checkpoints"
    ):
        raise ValidationError(
            "retention.keep_checkpoints must be 1 or more", field="retention.keep_checkpoints"
        )
    _check_flag(given.drop_branches, "retention.drop_branches")
    return given


def _rederive(
    step: Callable[[int, int, int], tuple[int, int, int]], total: int, last: int | None,
    progress: Progress | None,
) -> int:  # fmt: skip
    """Goes through the rows in chunks by id; returns how many were changed."""
    place = changed = 0

    def chunk(size: int) -> int:
        nonlocal place, changed
        looked, differed, place = step(place, last or 0, size)
        changed += differed
        return looked

    _in_chunks(chunk, progress, total)
    return changed


def _compact(database: _Database) -> CompactReport:
    """Merges the word indexes, rewrites the file and empties the log."""
    before = database.size()
    with database.transaction() as transaction:
        for kind in _KINDS:
            transaction.connection.execute(
                f"INSERT INTO {kind}_words({kind}_words) VALUES ('optimize')"
            )
        seq = transaction.next_seq()
    reason = database.vacuum()
    if reason is None:
        with database.transaction() as transaction:
            if transaction.seq == seq:  # nobody deleted anything meanwhile
                transaction.unerased = False
                transaction.stamped = True
    after = database.size()
    report: CompactReport = {
        "bytes_before": before, "bytes_after": after, "erased": reason is None,
    }  # fmt: skip
    return report if reason is None else {**report, "reason": reason}


class Storage:
    """Facts in one SQLite file (or in memory), found by their words.

    *url* is a path, `sqlite:///relative.db`, `sqlite:////absolute.db`, or nothing for a store in
    memory. With *durable* an acknowledged write survives power loss; without, the last commits may
    be lost then, never the file. *read_only* writes nothing. *clock* gives seconds since 1970.
    *busy_timeout_secs* is how long a call waits for another writer before it raises StorageError.

    One store may be used from many workers, one file by many processes, and a forked child opens
    its own connections by itself. After `close` every call raises StorageError.

    >>> with Storage() as store:
    ...     store.remember("users/42", "diet", "vegetarian", tags=["food"])
    ...     store.search("users", "vegetarians")[0]["key"]
    'diet'
    """

    def __init__(
        self, url: str | os.PathLike[str] | None = None, *, encryption_keys: str | None = None,
        audit: bool = False, retention: Retention | Mapping[str, Any] | None = None,
        on_busy: str = "wait", busy_timeout_secs: float = 60, embedder: object = None,
        embed: Sequence[str] = ("items", "messages"), durable: bool = True,
        read_only: bool = False, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        path = _sqlite_path(url)
        _check_flag(audit, "audit")
        unbuilt = {
            "encryption_keys": encryption_keys, "audit": audit or None, "embedder": embedder,
        }  # fmt: skip
        for option, given in unbuilt.items():
            if given is not None:
                raise UnavailableError(f"{option} is not built into this version", field=option)
        self._on_busy = _check_choice(on_busy, "on_busy", _BUSY_POLICIES)
        self._busy_secs = _check_seconds(busy_timeout_secs, "busy_timeout_secs", zero=True)
        self._retention = _check_retention(retention)
        self._embed = [_check_choice(kind, "embed", ("items", "messages")) for kind in embed]
        if not callable(clock):
            raise ValidationError("clock must be a function that gives seconds", field="clock")
        #: What was passed, as a string; None for a store in memory.
        self.url: str | None = None if path is None else os.fspath(cast(Any, url))
        self._db = _Database(
            path,
            durable=_check_flag(durable, "durable"),
            read_only=_check_flag(read_only, "read_only"),
            busy_secs=self._busy_secs,
            clock=clock,
        )
        self._items = _Items(self._db)
        self._threads = _Threads(self._db, _Runs(self._db))
        self._copies = _ThreadCopies(self._db, self._threads)
        self._edits = _MessageEdits(self._db, self._threads)
        self._care = _ThreadCare(self._db, self._threads)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def __enter__(self) -> Storage:
        self._db.ready()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Storage can't be pickled; open the file anew in the other process")

    def close(self) -> None:
        """Closes the connections, after a write of another worker has ended. Twice is fine."""
        self._db.close()
        self._threads.runs.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Several calls of this worker in one commit, or none of them after an exception.

        Reads inside see the writes. Other workers and processes that write wait meanwhile (in
        memory, readers too), at most *busy_timeout_secs*: so keep it short, and don't join such a
        worker inside. Nested blocks roll back alone.

        >>> with Storage() as store:
        ...     with store.transaction():
        ...         store.remember("notes", "a", 1)
        ...         store.remember("notes", "b", 2)
        ...     len(store.search("notes"))
        2
        """
        foreign: sqlite3.Error | None = None
        try:
            with self._db.transaction():
                try:
                    yield
                except sqlite3.Error as error:  # of the caller's own database, not of ours
                    foreign = error
                    raise
        except StorageError:
            if foreign is not None:
                raise foreign from None
            raise

    # Facts.

    def remember(
        self, namespace: str, key: str, value: Any, *, ttl_secs: float | None = None,
        label: str | None = None, description: str | None = None,
        tags: Sequence[str] | None = None, metadata: Mapping[str, Any] | None = None,
        if_absent: bool = False,
    ) -> None:  # fmt: skip
        """Saves a fact under *key*; value, time to live and attributes replace what was there.

        *value* is any JSON value of at most 1 MiB as text. It is absent from every read *ttl_secs*
        seconds from now. With *if_absent* a live item under the key is a DuplicateError.

        >>> with Storage() as store:
        ...     store.remember("users/42", "diet", {"kind": "vegetarian", "since": 2019})
        ...     store.recall("users/42", "diet")["value"]["since"]
        2019
        """
        fact = self._items.prepare(
            namespace, key, value, ttl_secs=ttl_secs, label=label, description=description,
            tags=tags, metadata=metadata, if_absent=if_absent,
        )  # fmt: skip
        with self._db.transaction() as transaction:
            self._items.put(transaction, fact)

    def remember_many(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Saves many facts in one transaction, all or none; returns how many were read.

        Each is a mapping with the names of `remember`'s arguments. Of a key that comes twice the
        last wins. About five times faster than one by one.

        >>> with Storage() as store:
        ...     store.remember_many({"namespace": "n", "key": str(i), "value": i} for i in range(3))
        3
        """
        facts: dict[tuple[str, str], _Fact] = {}
        read = 0
        for item in _check_iterable(items, "items"):
            fact = self._items.prepare_mapping(item, f"items[{read}]")
            facts[fact.namespace, fact.key] = fact
            read += 1
        self._items.put_all(facts.values())
        return read

    def update(
        self, namespace: str, key: str, *, label: str | EllipsisType | None = ...,
        description: str | EllipsisType | None = ...,
        tags: Sequence[str] | EllipsisType | None = ...,
        metadata: Mapping[str, Any] | EllipsisType | None = ...,
        ttl_secs: float | EllipsisType | None = ...,
    ) -> None:  # fmt: skip
        """Changes what is given of a live item and nothing else; None clears. Counts as a write.

        The value stays, and the expiry unless *ttl_secs* is given. NotFoundError if there is none.
        """
        given = {"label": label, "description": description, "tags": tags, "metadata": metadata}
        changes = {name: new for name, new in given.items() if new is not ...}
        self._items.change(namespace, key, ttl_secs, changes)

    def recall(self, namespace: str, key: str) -> Item | None:
        """Reads one item; None if it is missing or expired."""
        _check_namespace(namespace)
        _check_name(key, "key")
        with self._db.read() as connection:
            return self._items.find(connection, namespace, key)

    def forget(self, namespace: str, key: str) -> bool:
        """Deletes one item; True if it was there and live. `compact` erases its bytes."""
        where = _condition(
            "item.namespace = :namespace AND item.key = :key",
            namespace=_check_namespace(namespace),
            key=_check_name(key, "key"),
        )
        with self._db.transaction() as transaction:
            return self._items.delete(transaction, where)[1] > 0

    def forget_all(self, namespace: str, *, threads: bool = False) -> int:
        """Deletes the items of a namespace and of those inside it, all at once, for example
        everything about one person, with *threads* its threads too; returns how many items were
        live. A run that holds such a thread loses it.

        >>> with Storage() as store:
        ...     store.remember("users/42", "diet", "vegetarian")
        ...     store.forget_all("users/42")
        1
        """
        path = _check_namespace(namespace)
        _check_flag(threads, "threads")
        with self._db.transaction() as transaction:
            if threads:
                where = _inside(path, "thread")
                rows = transaction.connection.execute(
                    f"SELECT id FROM thread WHERE {where.sql}", where.params
                ).fetchall()
                self._threads.delete(transaction, [id for (id,) in rows])
            return self._items.delete(transaction, _inside(path, "item"))[1]

    def search(
        self, namespace: str, text: str | None = None, limit: int | None = 10, *, offset: int = 0,
        after: Mapping[str, Any] | None = None, mode: str | None = None, tags: Any = None,
        metadata: Any = None, created: Any = None, modified: Any = None, timezone: str = "UTC",
        order_by: str = "relevance", order: str = "desc", min_score: float = 0.0,
        recursive: bool = True, exact: bool = False,
    ) -> list[Item]:  # fmt: skip
        """Finds live items in *namespace* ("" for the whole store) and those inside it.

        Without *text*: all that pass the filters, newest first; *after* is the last record of the
        page before. With *text*: the best matches, each with a `score` from 0 to 1. Mode `keyword`
        scores the share of the query's words that an item's key, value, label or description has;
        `weighted` weighs each word by its rarity in the whole store. Newer wins among equals. Any
        text may be searched. A query counts its first 128 distinct words, a word its first 64
        characters, an item its first 20,000 terms.

        *tags*: a list (any of), or `$in`, `$all`, `$nin`. *metadata*: field to value, list, or
        `$eq $ne $in $nin $gt $gte $lt $lte`. *created*, *modified*: a date phrase on the calendar
        of *timezone*, such as "last 30 days", or `gte gt lte lt`. Rows are always chosen by
        relevance; *order_by* (relevance, created, modified) and *order* arrange those chosen.

        >>> with Storage() as store:
        ...     store.remember("users/42", "favorite_color", "dark green")
        ...     [item["score"] for item in store.search("users", "which green color?")]
        [1.0]
        """
        _check_flag(exact, "exact")
        ask = _check_ask(text, limit, offset, mode, order_by, order, min_score)
        filters = {
            "tags": tags, "metadata": metadata, "created": created, "modified": modified,
            "timezone": timezone,
        }  # fmt: skip
        return self._items.search(namespace, ask, after, recursive, filters)

    def namespaces(self, prefix: str = "", *, depth: int | None = None) -> list[str]:
        """The namespaces that hold live items, sorted: *prefix* itself and those inside it. With
        *depth* they are cut to that many segments below it."""
        path = _check_namespace(prefix, "prefix", root=True)
        return self._items.namespaces(path, _check_count(depth, "depth", unlimited=True))

    # Threads.

    def thread(self, thread_id: str, *, namespace: str = "default") -> Thread:
        """A handle on a thread, which need not exist yet. Reads nothing."""
        return Thread(self, _check_namespace(namespace), _check_name(thread_id, "thread_id"))

    def create_thread(
        self, thread_id: str | None = None, *, namespace: str = "default",
        thread_of: str | None = None, label: str | None = None, tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None, state: Mapping[str, Any] | None = None,
        messages: Iterable[Mapping[str, Any]] = (),
    ) -> Thread:  # fmt: skip
        """Makes a thread, also an empty one; an id is made when none is given. A taken id is a
        DuplicateError. *thread_of* names its parent, *state* and *messages* are its first save."""
        now_ms = self._db.now_ms()
        name = _new_id(now_ms) if thread_id is None else _check_name(thread_id, "thread_id")
        thread = self.thread(name, namespace=namespace)
        if thread_of is not None:
            _check_name(thread_of, "thread_of")
        attributes = {"label": label, "tags": tags, "metadata": metadata}
        columns = self._threads.attributes(thread.namespace, name, **attributes)
        given = list(_check_iterable(messages, "messages"))
        with self._db.transaction() as transaction:
            place = (thread.namespace, name)
            if self._threads.head(transaction.connection, *place) is not None:
                raise DuplicateError(
                    f"the id is taken in namespace {thread.namespace!r}", field="thread_id"
                )
            self._threads.create(transaction, *place, thread_of=thread_of, columns=columns)
            if given or state is not None:
                thread.save(messages=given, state=state)
        return thread

    def threads(
        self, namespace: str = "", *, thread_of: str | None = None, status: str | None = None,
        tags: Any = None, metadata: Any = None, created: Any = None, limit: int | None = 50,
        after: Mapping[str, Any] | None = None, order: str = "desc",
    ) -> list[ThreadRecord]:  # fmt: skip
        """The threads of a namespace and of those inside it, last saved first (*order* "asc":
        last). Filters as in `search`; *after* is the last record of the page before."""
        filters = {"tags": tags, "metadata": metadata, "created": created}
        where = _chosen_threads(self._db.now_ms(), namespace, thread_of, status, filters)
        return self._threads.page(where, limit, after, order)

    def search_messages(
        self, text: str | None = None, *, namespace: str = "", thread_id: str | None = None,
        limit: int | None = 10, offset: int = 0, mode: str | None = None, tags: Any = None,
        metadata: Any = None, created: Any = None, modified: Any = None, timezone: str = "UTC",
        role: str | None = None, order_by: str = "relevance", order: str = "desc",
        min_score: float = 0.0, exact: bool = False,
    ) -> list[MessageRecord]:  # fmt: skip
        """Finds messages of current branches, with the ranking and filters of `search`; each
        record has its `thread_id` and `namespace`, and a `score` when text was given. With
        *thread_id* only that thread of that very namespace ("" means "default" then).

        >>> with Storage() as store:
        ...     saved = store.thread("chat").append("user", "My flight leaves on Monday.")
        ...     [found["thread_id"] for found in store.search_messages("monday flights")]
        ['chat']
        """
        _check_flag(exact, "exact")
        ask = _check_ask(text, limit, offset, mode, order_by, order, min_score)
        filters = {
            "tags": tags, "metadata": metadata, "created": created, "modified": modified,
            "timezone": timezone,
        }  # fmt: skip
        return self._threads.search(ask, namespace, thread_id, role, filters)

    def _busy(self, on_busy: object, busy_timeout_secs: object) -> tuple[str, float]:
        """What a call does about a busy thread: its own choice, else the store's."""
        policy, timeout = self._on_busy, self._busy_secs
        if on_busy is not None:
            policy = _check_choice(on_busy, "on_busy", _BUSY_POLICIES)
        if busy_timeout_secs is not None:
            timeout = _check_seconds(busy_timeout_secs, "busy_timeout_secs", zero=True)
        return policy, timeout

    # Care of the file.

    def prune(self, *, progress: Progress | None = None) -> PruneCounts:
        """Applies the retention rules once, and removes the rows of expired items.

        Works in chunks: others write meanwhile, and what was done stays done after an interrupt.
        Running threads are passed over and counted. State and messages at every checkpoint that
        stays read as before. *progress* is called with (rows done, None).

        >>> with Storage(retention={"keep_checkpoints": 1}) as store:
        ...     chat = store.thread("chat")
        ...     saved = [chat.append("user", word) for word in ("one", "two", "three")]
        ...     store.prune()["checkpoints_deleted"], len(chat.messages())
        (2, 3)
        """
        expired = _in_chunks(self._items.prune, progress, None)
        counts = self._care.prune(self._retention, progress)
        return {**counts, "memory_items_deleted": expired}

    def stats(self) -> Stats:
        """Counts of rows, bytes in the file and its log (or in memory), and how the store runs.
        `unerased` says that deleted content may still be in the file: `compact` erases it."""
        with self._db.read(snapshot=True) as connection:
            row = connection.execute(_STATS, {"now_ms": self._db.now_ms()}).fetchone()
        counts = ("items", "messages", "threads", "checkpoints", "vectors_stored", "audit_records")
        unerased, tokenizer = row[len(counts) :]
        stats: dict[str, Any] = dict(zip(counts, row, strict=False)) | {
            "bytes": self._db.size(), "sealed": False, "durable": self._db.durable,
            "vectors": None, "unerased": bool(unerased),
            "needs_reindex": tokenizer != _TOKENIZER_VERSION,
            "sqlite_version": sqlite3.sqlite_version,
        }  # fmt: skip
        return cast(Stats, stats)

    def check(self) -> list[str]:
        """What is wrong with the file, in words; empty when it is sound.

        Looks at the pages, the references, the counters, and the word index against the rows both
        ways. Reads everything: about 3 seconds per 100,000 items. Others may write meanwhile.
        """
        faults: list[str] = []
        try:
            with self._db.read(snapshot=True) as connection:
                rows = connection.execute("PRAGMA integrity_check").fetchall()
                faults += [f"the file is damaged: {text}" for (text,) in rows if text != "ok"]
                for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
                    faults.append(f"row {row} of {table} belongs to a {parent} that is not there")
                for kind in _KINDS:
                    faults += _index_faults(connection, kind)
                faults += self._care.faults(connection)
                version = "SELECT value FROM meta WHERE name = 'tokenizer'"
                if connection.execute(version).fetchone() != (_TOKENIZER_VERSION,):
                    faults.append("the words were made by another version; run reindex()")
        except StorageError as error:
            if self._db.closed:
                raise
            faults.append(str(error))
        return faults

    def reindex(self, *, embedder: object = None, progress: Progress | None = None) -> int:
        """Rebuilds the words of every item from its content, and the word index if it differs from
        the rows; returns how many rows were rebuilt.

        Works in chunks, so that others write meanwhile and an interrupt keeps what was done; only
        an index that is damaged is rebuilt at once. *progress* is called with (rows looked at,
        rows).
        """
        if embedder is not None:
            raise UnavailableError("embedder is not built into this version", field="embedder")
        with self._db.read(snapshot=True) as connection:
            faulty = [kind for kind in _KINDS if _index_faults(connection, kind)]
            sizes = {
                kind: connection.execute(f"SELECT count(*), max(id) FROM {kind}").fetchone()
                for kind in _KINDS
            }
        rebuilt = 0
        for kind in faulty:
            with self._db.transaction() as transaction:
                rebuilt += _refill_index(transaction, kind)
        for kind, step in zip(_KINDS, (self._items.reindex, self._care.reindex), strict=True):
            total, last = sizes[kind]
            rebuilt += _rederive(step, total, last, progress)
        with self._db.transaction() as transaction:
            transaction.connection.execute(
                "UPDATE meta SET value = ? WHERE name = 'tokenizer'", (_TOKENIZER_VERSION,)
            )
        return rebuilt

    def compact(self) -> CompactReport:
        """Rewrites the file without its gaps, which erases deleted content, and empties the log.

        Only the rewrite erases: SQLite leaves old copies in the gaps of rebalanced pages. It needs
        as much free disk as the file, and writers wait meanwhile. `erased` is False, with a
        `reason`, when a reader or the disk is in the way; nothing is lost then, call it again.
        """
        return _compact(self._db)

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Writes a consistent copy to *path*, mode 0600, while others write; refuses a file that
        exists. The copy carries no deleted content."""
        target = _sqlite_path(path, "path")
        if target is None:
            raise ValidationError("path must name a file", field="path")
        self._db.copy_to(target)

    def export(self, namespace: str = "") -> Iterator[dict[str, Any]]:
        """The live items and whole threads of a namespace and of those inside it as JSON-ready
        dicts, in clear, sorted by namespace and key. Read in pages: what others write meanwhile
        may or may not be in it, nothing comes twice."""
        path = _check_namespace(namespace, root=True)
        items, threads = _inside(path, "item"), _inside(path, "thread")
        return itertools.chain(self._items.export(items), self._copies.export(threads))

    def import_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Writes what `export` gave, times and expiry kept, existing keys and threads replaced;
        returns how many were read. In transactions of 1,000 items or one thread, each all or
        nothing."""
        facts: list[_Fact] = []
        read = 0
        for item in _check_iterable(items, "items"):
            place = f"items[{read}]"
            kind = item.get("kind") if isinstance(item, Mapping) else None
            if kind == "thread":
                self._copies.replace(item, place)
            elif kind == "item":
                facts.append(self._items.prepare_export(item, place))
            else:
                raise ValidationError(f"{place} must be a dict that export gave", field=place)
            read += 1
            if len(facts) == _IMPORT_ROWS:
                self._items.put_all(facts)
                facts.clear()
        self._items.put_all(facts)
        return read
