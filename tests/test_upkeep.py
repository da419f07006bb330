"""Care of the file: check, stats, backup, export, import, reindex, compact; what erasing erases."""

import json
import random
import sqlite3
import time

import pytest
from helpers import CANARY, family, is_in_file, keys, raw, refused

import criomem

# ---- check and stats ----------------------------------------------------------------------------

FAULTS = {
    "a row without its index entry": "INSERT INTO item_words(item_words, rowid, terms)"
    " SELECT 'delete', seq, words FROM item WHERE key = 'k1'",
    "a term of a row without its index entry": "UPDATE item SET words = words || 'extra '"
    " WHERE key = 'k1'",
    "an index entry without its row": "INSERT INTO item_words(rowid, terms) VALUES (99, 'walnut')",
    "a term too many in the index": "INSERT INTO item_words(rowid, terms)"
    " SELECT seq, 'more' FROM item WHERE key = 'k1'",
    "a row that is gone": "DELETE FROM item WHERE key = 'k1'",
    "a vector without its item": "INSERT INTO item_vector VALUES (99, x'00')",
    "sign bits without their item": "INSERT INTO item_bits VALUES (99, x'00')",
    "a message without its segment": "INSERT INTO message(seq, segment, position, name, checkpoint,"
    " created_at_ms, updated_at_ms, wants_vector, words) VALUES (99, 99, 0, 'm', 1, 0, 0, 0, '')",
    "a wrong count of items": "UPDATE counter SET items = items + 1",
    "a wrong count of messages": "UPDATE counter SET messages = 1",
    "a counter that went back": "UPDATE counter SET seq = 1",
    "an index of another tokenizer": "UPDATE meta SET value = 99 WHERE name = 'tokenizer'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_a_planted_fault(path, fault):
    with criomem.Storage(path, durable=False) as store:
        for n in range(5):
            store.remember("a", f"k{n}", "walnut falcon")
        assert store.check() == []
        with raw(path) as other:
            other.execute(FAULTS[fault])
        faults = store.check()
        assert faults
        assert all(isinstance(one, str) and one for one in faults)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if "index" in fault or "count of" in fault]
)
def test_reindex_mends_what_is_derived(path, fault):
    with criomem.Storage(path, durable=False) as store:
        for n in range(5):
            store.remember("a", f"k{n}", "walnut falcon")
        with raw(path) as other:
            other.execute(FAULTS[fault])
        store.reindex()
        assert store.check() == []
        assert keys(store.search("a", "walnut")) == ["k4", "k3", "k2", "k1", "k0"]


def test_a_cut_file_is_refused_or_check_finds_it(path):
    with criomem.Storage(path, durable=False) as store:
        store.remember_many(
            {"namespace": "a", "key": f"k{n}", "value": "walnut"} for n in range(300)
        )
    data = path.read_bytes()
    path.write_bytes(data[:-4096])
    try:
        with criomem.Storage(path) as store:
            faults = store.check()
    except criomem.StorageError as error:
        faults = [error.sqlite_error]
    assert faults


def test_stats_count_what_is_there(store, path, clock):
    for n in range(5):
        store.remember("a", f"k{n}", "walnut " * 100)
    store.remember("a", "expired", 1, ttl_secs=1)
    clock.advance(1)
    stats = store.stats()
    assert stats["items"] == 5
    assert (stats["threads"], stats["checkpoints"], stats["messages"]) == (0, 0, 0)
    assert stats["sealed"] is False
    assert stats["durable"] is False
    assert stats["vectors"] in ("native", "capi", "plain", None)
    assert type(stats["bytes"]) is int
    assert stats["bytes"] > 500
    assert sqlite3.sqlite_version in stats.values()
    json.dumps(stats)


# ---- backup -------------------------------------------------------------------------------------


def test_a_backup_is_a_whole_store(store, tmp_path, clock):
    store.remember("a", "k", "walnut", tags=["t"], metadata={"m": 1}, ttl_secs=60, label="l")
    store.remember("b/c", "k", [1, "falcon"])
    assert store.backup(tmp_path / "copy.db") is None
    store.remember("a", "later", 1)
    with criomem.Storage(tmp_path / "copy.db", clock=clock) as copy:
        assert keys(copy.search("")) == ["k", "k"]
        assert copy.recall("a", "k") == store.recall("a", "k")
        assert keys(copy.search("", "falcon")) == ["k"]
        assert keys(copy.search("", "walnut", tags=["t"], metadata={"m": 1})) == ["k"]
        assert copy.check() == []
        copy.remember("a", "own", 1)
        assert keys(copy.search(""))[0] == "own"
    assert store.recall("a", "own") is None


def test_a_backup_refuses_an_existing_file_and_leaves_it(store, tmp_path):
    store.remember("a", "k", 1)
    target = tmp_path / "copy.db"
    for content in (b"", b"precious"):
        target.write_bytes(content)
        for name in (target, str(target)):
            with refused(criomem.CriomemError):
                store.backup(name)
        assert target.read_bytes() == content
    for odd in (tmp_path / "missing" / "copy.db", tmp_path, "", "copy\x00.db"):
        with refused(criomem.CriomemError):
            store.backup(odd)
    assert {p.name for p in tmp_path.iterdir()} <= {
        "copy.db",
        "memory.db",
        "memory.db-wal",
        "memory.db-shm",
    }


def test_a_backup_does_not_overwrite_its_own_store(file_store, path):
    file_store.remember("a", "k", 1)
    with refused(criomem.CriomemError):
        file_store.backup(path)
    assert file_store.recall("a", "k")["value"] == 1


def test_a_backup_beside_a_writing_process_is_consistent(file_store, writer, tmp_path):
    seen = []
    for n in range(5):
        file_store.backup(tmp_path / f"{n}.db")
        with criomem.Storage(tmp_path / f"{n}.db") as copy:
            (value,) = {item["value"] for item in copy.search("pair")}
            seen.append(value)
            assert copy.check() == []
    assert seen == sorted(seen)
    assert seen[0] < seen[-1], "the writer stood still"
    writer.kill()
    writer.wait()


def test_a_backup_carries_nothing_deleted(file_store, tmp_path):
    for n in range(200):
        file_store.remember("a", f"k{n}", f"{CANARY} {n}")
    file_store.forget_all("a")
    file_store.backup(tmp_path / "copy.db")
    assert is_in_file(tmp_path / "copy.db", CANARY) == []


# ---- export and import --------------------------------------------------------------------------


def fill(store):
    store.remember("a", "k", {"x": ["walnut", None]}, ttl_secs=60, label="l", description="d")
    store.remember(
        "a/b", "k", "falcon", tags=["t", "u"], metadata={"m": 1.5, "n": True, "l": ["x"]}
    )
    store.remember("ab", "k", 10**30)
    store.remember("z", "\U0001f642", "\x00")


def test_an_export_comes_back_with_times_and_attributes(store, clock):
    fill(store)
    clock.advance(5)
    store.update("a/b", "k", label="touched")
    store.remember("a", "expired", 1, ttl_secs=1)
    clock.advance(1)
    exported = [json.loads(json.dumps(record)) for record in store.export()]
    assert len(exported) == 4
    clock.advance(7)
    with criomem.Storage(clock=clock) as other:
        other.remember("a", "k", "to be replaced", tags=["old"])
        other.remember("other", "stays", 1)
        assert other.import_items(iter(exported)) == 4
        for namespace, key in (("a", "k"), ("a/b", "k"), ("ab", "k"), ("z", "\U0001f642")):
            assert other.recall(namespace, key) == store.recall(namespace, key)
        assert other.recall("other", "stays")["value"] == 1
        assert keys(other.search("", "falcon touched")) == ["k"]
        assert other.search("", "replaced") == []
        assert other.check() == []
        again = list(other.export())
        assert [r for r in again if r["namespace"] != "other"] == exported
        clock.advance(60)
        assert other.recall("a", "k") is None


@pytest.mark.parametrize(
    ("namespace", "wanted"), [("", 4), ("a", 2), ("a/b", 1), ("ab", 1), ("b", 0)]
)
def test_an_export_covers_the_namespace_and_what_is_inside(store, namespace, wanted):
    fill(store)
    exported = list(store.export(namespace))
    assert len(exported) == wanted
    assert all(
        not namespace or r["namespace"] == namespace or r["namespace"].startswith(namespace + "/")
        for r in exported
    )


def test_an_export_gives_every_row_once_while_others_write(store):
    store.remember_many({"namespace": "a", "key": f"k{n:04}", "value": n} for n in range(2500))
    seen = []
    for n, record in enumerate(store.export()):
        seen.append(record["key"])
        if n % 100 == 0:
            store.remember("a", f"k{(n * 7) % 2500:04}", "again")
            store.remember("a", f"a{n}", "new and before")
    assert len(seen) == len(set(seen))
    assert {key for key in seen if key.startswith("k")} == {f"k{n:04}" for n in range(2500)}


def test_an_import_is_all_or_nothing(store):
    fill(store)
    good = list(store.export())
    for bad in (
        {},
        {"namespace": "a"},
        None,
        "text",
        {**good[0], "namespace": ""},
        {**good[0], "key": 5},
    ):
        with criomem.Storage() as other:
            with refused():
                other.import_items([*good, bad])
            assert other.search("") == []
            assert other.check() == []
    with criomem.Storage() as other:
        for wrong in (None, 5, "text", good[0]):
            with refused():
                other.import_items(wrong)
        assert other.import_items([]) == 0


def test_an_import_refuses_forged_fields(store):
    store.remember("a", "k", 1, ttl_secs=60)
    (good,) = store.export()
    for field, wrong in (
        ("created_at_ms", "now"),
        ("created_at_ms", 2**63),
        ("updated_at_ms", True),
        ("updated_at_ms", -1.5),
        ("expires_at_ms", "never"),
        ("expires_at_ms", 10**18),
        ("value", {1}),
        ("tags", "abc"),
        ("metadata", [1]),
        ("label", 5),
    ):
        with refused():
            store.import_items([{**good, field: wrong}])
    assert list(store.export()) == [good]


def test_stamps_after_an_import_from_the_future_do_not_go_back(store, clock):
    store.remember("a", "k", 1)
    (record,) = store.export()
    later = record["updated_at_ms"] + 10_000
    store.import_items([{**record, "updated_at_ms": later}])
    store.remember("a", "next", 1)
    assert store.recall("a", "k")["updated_at_ms"] == later
    assert keys(store.search("a")) == ["next", "k"]
    assert store.recall("a", "next")["updated_at_ms"] >= record["updated_at_ms"]


# ---- reindex and compact ------------------------------------------------------------------------


def test_reindex_changes_no_result(store, clock):
    clock.advance(1)
    fill(store)
    asks = (
        {},
        {"text": "walnut falcon"},
        {"text": "falcon x", "mode": "weighted"},
        {"text": "falcon", "tags": ["t"]},
    )
    before = [store.search("", **asked) for asked in asks]
    calls = []
    assert type(store.reindex(progress=lambda done, total: calls.append(done))) is int
    assert [store.search("", **asked) for asked in asks] == before
    assert calls


def test_a_forgotten_value_is_overwritten_in_the_file_even_before_compact(file_store, path):
    for n in range(50):
        file_store.remember("a", f"k{n}", f"{CANARY}/{n}!")  # no term of the index has these marks
    with raw(path) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert is_in_file(path, f"{CANARY}/7!")
        file_store.forget_all("a")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert [n for n in range(50) if is_in_file(path, f"{CANARY}/{n}!")] == []


def test_compact_gives_the_room_of_what_was_deleted_back(file_store, path):
    empty = file_store.compact()["bytes_after"]
    for n in range(300):
        file_store.remember("a", f"k{n}", f"{n} " * 1000)
    file_store.forget_all("a")
    told = file_store.compact()
    assert told["bytes_before"] > empty * 2
    assert told["bytes_after"] < empty * 1.2


def test_compact_says_what_it_did(file_store, path):
    for n in range(300):
        file_store.remember("a", f"k{n}", f"{CANARY} " * 40)
    file_store.forget_all("a")
    told = file_store.compact()
    assert told["erased"] is True
    assert "reason" not in told
    assert told["bytes_before"] > told["bytes_after"] > 0
    assert told["bytes_after"] == sum(
        p.stat().st_size for p in family(path) if p.name.endswith(("db", "wal"))
    )
    assert is_in_file(path, CANARY) == []


def test_compact_works_in_memory_and_not_inside_a_transaction(store):
    store.remember("a", "k", "walnut")
    assert store.compact()["erased"] is True
    with store.transaction():
        store.remember("a", "k2", "walnut")
        with refused(criomem.CriomemError):
            store.compact()
    assert keys(store.search("a", "walnut")) == ["k2", "k"]


def test_compact_beside_a_reader_says_soon_that_it_has_not_erased(path):
    with criomem.Storage(path, busy_timeout_secs=60, durable=False) as store:
        store.remember("a", "k", CANARY)
        with raw(path) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM item").fetchall()
            store.forget("a", "k")
            begun = time.monotonic()
            told = store.compact()
            assert time.monotonic() - begun < 10
            assert told["erased"] is False
            assert told["reason"]
            assert CANARY not in told["reason"]
            store.remember("a", "next", 1)
        assert store.compact()["erased"] is True
        assert is_in_file(path, CANARY) == []
        assert store.check() == []


def test_stats_say_whether_deleted_content_is_erased_yet(path):
    with criomem.Storage(path, durable=False) as store:
        store.remember("a", "k", "walnut")
        assert store.stats()["unerased"] is False
        for lose in (
            lambda: store.forget("a", "k"),
            lambda: store.remember("a", "k", "over it"),
            lambda: store.update("a", "k", label="l"),
            lambda: store.forget_all("a"),
        ):
            store.remember("a", "k", "walnut")
            lose()
            assert store.stats()["unerased"] is True
            assert store.compact()["erased"] is True
            assert store.stats()["unerased"] is False
        store.remember("a", "k", "walnut")
        with raw(path) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM item").fetchall()
            store.forget("a", "k")
            store.compact()
            assert store.stats()["unerased"] is True
        store.compact()
        assert store.stats()["unerased"] is False


@pytest.mark.parametrize("work", ["prune", "reindex"])
def test_long_work_that_is_interrupted_keeps_its_chunks_and_goes_on_later(store, clock, work):
    store.remember_many(
        {"namespace": "a", "key": f"k{n}", "value": "walnut", "ttl_secs": 1} for n in range(900)
    )
    store.remember("a", "stays", "walnut")
    clock.advance(work == "prune")

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        getattr(store, work)(progress=interrupt)
    assert store.check() == []
    if work == "prune":
        assert 0 < store.prune()["memory_items_deleted"] < 900
    else:
        store.reindex()
    assert len(store.search("a", "walnut", limit=None)) == (1 if work == "prune" else 901)


def churn(store, pick):
    """Write and rewrite rows of all sizes, half of them secret; give the keys of those."""
    secret = {}
    for _ in range(1500):
        with store.transaction():
            for _ in range(pick.randint(1, 4)):
                key = f"k{pick.randrange(2500)}"
                secret[key] = pick.random() < 0.5
                mark = CANARY if secret[key] else "plain"
                words = [
                    f"{mark}{pick.getrandbits(24):06x}"
                    for _ in range(pick.choice([3, 10, 30, 100, 800]))
                ]
                store.remember("a", key, " ".join(words), tags=[words[0]], metadata={"m": words[1]})
    return [key for key, is_secret in secret.items() if is_secret]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_after_churn_and_compact_nothing_forgotten_is_in_the_file(path, clock, seed):
    pick = random.Random(seed)
    with criomem.Storage(path, clock=clock, durable=False) as store:
        gone = churn(store, pick)
        pick.shuffle(gone)
        assert is_in_file(path, CANARY), "the search for the secret must be able to find it"
        for n in range(0, len(gone), 7):
            with store.transaction():
                for key in gone[n : n + 7]:
                    assert store.forget("a", key)
        kept = store.search("", limit=None)
        assert store.search("", "plain", limit=None) == []
        assert store.compact()["erased"] is True
        assert is_in_file(path, CANARY) == [], f"seed {seed}"
        assert store.search("", limit=None) == kept
        assert store.check() == []
    assert is_in_file(path, CANARY) == []


@pytest.mark.slow
def test_after_expiry_prune_and_compact_nothing_is_in_the_file(path, clock):
    with criomem.Storage(path, clock=clock, durable=False) as store:
        for n in range(0, 3000, 100):
            store.remember_many(
                {
                    "namespace": "a",
                    "key": f"{CANARY}{m}",
                    "value": [CANARY] * (m % 50),
                    "ttl_secs": 1,
                }
                for m in range(n, n + 100)
            )
            store.remember("b", f"k{n}", "plain")
        clock.advance(1)
        assert store.prune()["memory_items_deleted"] == 3000
        assert store.compact()["erased"] is True
        assert is_in_file(path, CANARY) == []
