"""The file: transactions, workers, processes, forks, refusals, closing, interrupts, failures."""

import ast
import contextlib
import os
import random
import shutil
import sqlite3
import stat
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import (
    CANARY,
    START,
    Clock,
    Model,
    apply,
    attributes,
    child,
    contents,
    family,
    finish,
    keys,
    names,
    queries,
    raw,
    refused,
    rounded,
    run_child,
    share,
    some_value,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import criomem


def in_workers(function, arguments):
    """Call *function* once an argument, all at once; the first error is raised."""
    arguments = list(arguments)
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(function, arguments))


# ---- Transactions -------------------------------------------------------------------------------


class Undone(BaseException):
    """Raised to roll a block back; no plain Exception, as a Ctrl-C is none."""


writes = st.one_of(
    st.tuples(st.just("remember"), names, some_value, attributes),
    st.tuples(st.just("update"), names, attributes),
    st.tuples(st.just("forget"), names),
    st.tuples(st.just("forget_all"), st.just("users/4")),
)
blocks = st.recursive(
    st.lists(writes | queries, max_size=4),
    lambda inner: st.lists(
        writes | queries | st.tuples(st.just("block"), inner, st.booleans()), max_size=5
    ),
    max_leaves=12,
)


def play(store, model, steps):
    for step in steps:
        if isinstance(step, dict):
            assert rounded(store.search(**step)) == rounded(model.search(**step))
        elif step[0] != "block":
            apply(store, model, step)
        else:
            _, inner, fails = step
            rows = dict(model.rows)
            try:
                with store.transaction():
                    play(store, model, inner)
                    if fails:
                        raise Undone
            except Undone:
                model.rows = rows


@given(blocks)
def test_nested_transactions_keep_and_undo_exactly_their_own_writes(steps):
    clock = Clock()
    model = Model(clock)
    with criomem.Storage(clock=clock) as store:
        play(store, model, steps)
        assert store.search("", limit=None) == model.search("", limit=None)
        for word in ("kiwi", "mango tulip"):
            found = store.search("", word, limit=None)
            assert rounded(found) == rounded(model.search("", word, limit=None))
        assert store.check() == []


def test_a_transaction_is_one_commit_that_others_see_at_its_end(file_store, path):
    with criomem.Storage(path) as other:
        with file_store.transaction():
            file_store.remember("a", "1", "walnut")
            file_store.remember_many([{"namespace": "a", "key": "2", "value": "walnut"}])
            assert other.search("a") == other.search("a", "walnut") == []
            assert other.recall("a", "1") is None
            assert other.namespaces() == []
        assert keys(other.search("a", "walnut")) == ["2", "1"]


def test_reads_inside_a_transaction_see_its_writes(store):
    store.remember("a", "old", "walnut")
    with store.transaction():
        store.remember("a/b", "new", "walnut falcon", tags=["t"], metadata={"m": 1})
        store.forget("a", "old")
        assert store.recall("a/b", "new")["value"] == "walnut falcon"
        assert store.recall("a", "old") is None
        for asked in (
            {},
            {"text": "walnut"},
            {"text": "falcon", "mode": "weighted"},
            {"text": "walnut", "tags": ["t"]},
        ):
            assert keys(store.search("a", **asked)) == ["new"]
        assert store.namespaces() == ["a/b"]
        assert store.stats()["items"] == 1
        assert keys(store.export()) == ["new"]
        store.update("a/b", "new", label="cobalt")
        assert keys(store.search("", "cobalt")) == ["new"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, Undone])
def test_whatever_is_raised_rolls_the_whole_transaction_back(store, kind):
    store.remember("a", "k", "walnut")
    before = store.recall("a", "k")

    def block():
        with store.transaction():
            store.remember("a", "k", "falcon")
            store.remember("a", "new", "falcon")
            with store.transaction():
                store.forget("a", "k")
            raise kind

    with pytest.raises(kind):
        block()
    assert store.recall("a", "k") == before
    assert store.search("", "falcon") == []
    assert keys(store.search("", "walnut")) == ["k"]
    store.remember("a", "next", 1)


def test_an_inner_block_that_was_searched_and_fails_undoes_rows_index_and_counts(store):
    store.remember("a", "old", "walnut")
    with store.transaction():
        store.remember("a", "outer", "walnut")
        with contextlib.suppress(ValueError), store.transaction():
            store.forget("a", "old")
            store.remember("a", "inner", "walnut falcon")
            assert keys(store.search("a", "walnut")) == ["inner", "outer"]
            store.forget_all("a")
            store.remember("a/b", "inner", "falcon")
            raise ValueError
        assert keys(store.search("a", "walnut falcon")) == ["outer", "old"]
        assert store.check() == []
    assert keys(store.search("", "walnut falcon")) == ["outer", "old"]
    assert store.stats()["items"] == 2


def test_a_call_that_fails_inside_a_transaction_undoes_only_itself(store):
    store.remember("a", "taken", 1)
    with store.transaction():
        store.remember("a", "first", "walnut")
        with pytest.raises(criomem.DuplicateError):
            store.remember("a", "taken", 2, if_absent=True)
        with pytest.raises(criomem.DuplicateError):
            store.remember_many(
                [
                    {"namespace": "a", "key": "half", "value": "walnut"},
                    {"namespace": "a", "key": "taken", "value": 3, "if_absent": True},
                ]
            )
        with pytest.raises(criomem.ValidationError):
            store.remember("a", "bad", {1})
        with pytest.raises(criomem.NotFoundError):
            store.update("a", "never", label="l")
        store.remember("a", "last", "walnut")
    assert keys(store.search("a", "walnut")) == ["last", "first"]
    assert store.recall("a", "taken")["value"] == 1


def test_an_early_return_and_a_break_commit(store):
    def saves():
        with store.transaction():
            store.remember("a", "returned", 1)
            return

    saves()
    for n in range(3):
        with store.transaction():
            store.remember("a", f"broken {n}", 1)
            if n == 1:
                break
    assert keys(store.search("a")) == ["broken 1", "broken 0", "returned"]


def test_other_workers_wait_for_a_transaction_and_then_go_on(store):
    begun, order = threading.Event(), []

    def other():
        begun.wait(10)
        store.remember("a", "other", 1)
        order.append("other")

    with ThreadPoolExecutor(1) as pool:
        with store.transaction():
            waiting = pool.submit(other)
            store.remember("a", "k", 1)
            begun.set()
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
            order.append("block")
        waiting.result(10)
    assert order == ["block", "other"]
    assert keys(store.search("a")) == ["other", "k"]


def test_readers_of_a_file_do_not_wait_for_a_transaction(file_store):
    file_store.remember("a", "k", "walnut")
    with file_store.transaction():
        file_store.remember("a", "k", "falcon")
        seen = in_workers(
            lambda _: (file_store.recall("a", "k"), file_store.search("a", "walnut")), range(8)
        )
        assert [(recalled["value"], len(found)) for recalled, found in seen] == [("walnut", 1)] * 8
    assert file_store.recall("a", "k")["value"] == "falcon"


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_who_waits_too_long_for_another_worker_is_told(path, kind):
    with criomem.Storage(path if kind == "file" else None, busy_timeout_secs=0.05) as store:
        with ThreadPoolExecutor(1) as pool, store.transaction():
            store.remember("a", "k", 1)
            with refused(criomem.StorageError):
                pool.submit(store.remember, "a", "other", 1).result(10)
        assert keys(store.search("a")) == ["k"]
        store.remember("a", "other", 1)
        assert store.check() == []


def test_who_waits_too_long_for_another_process_is_told_and_nothing_is_left(locked_out):
    for call in (
        lambda: locked_out.remember("a", "new", CANARY),
        lambda: locked_out.remember_many([{"namespace": "a", "key": "new", "value": CANARY}]),
        lambda: locked_out.update("a", "k", label="l"),
        lambda: locked_out.forget("a", "k"),
        lambda: locked_out.forget_all("a"),
        lambda: locked_out.transaction().__enter__(),
    ):
        with refused(criomem.StorageError) as caught:
            call()
        assert not isinstance(caught.value, sqlite3.Error)
    assert keys(locked_out.search("", "walnut")) == ["k"]


def test_two_stores_of_one_file_take_turns(file_store, path):
    with criomem.Storage(path, durable=False) as other:

        def count(which):
            for _ in range(60):
                with which.transaction():
                    old = which.recall("a", "n")
                    which.remember("a", "n", old["value"] + 1 if old else 1)

        in_workers(count, [file_store, other, file_store, other])
        assert file_store.recall("a", "n")["value"] == 240
        assert other.recall("a", "n")["value"] == 240


def test_sixteen_workers_mix_everything_and_lose_nothing(store):
    def work(n):
        pick = random.Random(n)
        own = {}
        for turn in range(30):
            key = f"k{pick.randrange(6)}"
            action = pick.randrange(7)
            if action < 3:
                store.remember(f"own/{n}", key, f"falcon {turn}", tags=[f"t{n}"])
                own[key] = f"falcon {turn}"
            elif action == 3:
                assert store.forget(f"own/{n}", key) is (own.pop(key, None) is not None)
            elif action == 4:
                with store.transaction():
                    old = store.recall("shared", "n")
                    store.remember("shared", "n", (old["value"] if old else 0) + 1)
                    store.remember("pair", "x", turn * n)
                    store.remember("pair", "y", turn * n)
                own["counted"] = own.get("counted", 0) + 1
            elif action == 5:
                pair = {item["value"] for item in store.search("pair")}
                assert len(pair) <= 1, "half a transaction was seen"
            else:
                found = store.search("own", "falcon", limit=None, tags=[f"t{n}"])
                assert {i["key"]: i["value"] for i in found} == {
                    k: v for k, v in own.items() if k != "counted"
                }
        return own.pop("counted", 0), own

    results = in_workers(work, range(16))
    total = store.recall("shared", "n")
    assert (total["value"] if total else 0) == sum(counted for counted, _ in results)
    for n, (_, own) in enumerate(results):
        assert {i["key"]: i["value"] for i in store.search(f"own/{n}", limit=None)} == own


def test_short_lived_workers_leave_no_connection_behind(file_store):
    file_store.remember("a", "k", 1)
    here = Path("/proc/self/fd")
    if not here.exists():
        pytest.skip("counts open files through /proc")
    in_workers(lambda _: file_store.recall("a", "k"), range(8))
    before = len(list(here.iterdir()))
    for _ in range(20):
        in_workers(lambda _: file_store.search("a"), range(8))
    assert len(list(here.iterdir())) <= before + 16


def test_a_clock_that_fails_writes_nothing_and_frees_the_lock(path):
    clock = Clock()
    with criomem.Storage(path, clock=lambda: clock() / clock.now * START) as store:
        store.remember("a", "k", 1)
        clock.now = 0
        with pytest.raises(ZeroDivisionError):
            store.remember("a", "new", 1)
        clock.now = START + 1
        assert keys(store.search("a")) == ["k"]
        with raw(path) as other:
            other.execute("PRAGMA busy_timeout = 0")
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        assert store.check() == []


# ---- Forks --------------------------------------------------------------------------------------

FORKING = """
import os, signal, sys, threading, traceback, warnings
import criomem
warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is the point here
signal.alarm(50)

def fork(function, leave=os._exit):
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    leave(0)

def joined(pid):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

path = sys.argv[1] if len(sys.argv) > 1 else None
store = criomem.Storage(path, busy_timeout_secs=5, durable=False)
"""


def forking(source, *arguments):
    return run_child(FORKING + "\n" + textwrap.dedent(source), *arguments)


@pytest.mark.parametrize("leave", ["os._exit", "sys.exit"])
def test_a_forked_child_gets_a_connection_of_its_own(path, leave):
    forking(
        f"""
        store.remember("a", "parent", "walnut")
        store.search("a", "walnut")

        def child():
            assert store.recall("a", "parent")["value"] == "walnut"
            for n in range(20):
                store.remember("a", f"{{n}}", "walnut child")
            assert len(store.search("a", "child", limit=None)) == 20
            if "{leave}" == "sys.exit":
                store.close()

        pid = fork(child, {leave})
        for n in range(20):
            store.remember("a", f"parent{{n}}", "walnut")
        joined(pid)
        assert len(store.search("a", "walnut", limit=None)) == 41
        store.remember("a", "after", "walnut")
        assert store.check() == []
        store.close()
        """,
        path,
    )


def test_a_forked_child_of_a_store_in_memory_has_a_copy_of_its_own():
    forking(
        """
        store.remember("a", "parent", "walnut")

        def child():
            store.remember("a", "child", "walnut")
            assert [i["key"] for i in store.search("a", "walnut")] == ["child", "parent"]
            assert store.check() == []

        joined(fork(child))
        assert [i["key"] for i in store.search("a", "walnut")] == ["parent"]
        store.remember("a", "child", 1, if_absent=True)
        assert store.check() == []
        store.close()
        """
    )


@pytest.mark.parametrize("ends", ["pass", "raise ValueError"])
def test_a_child_forked_inside_a_transaction_does_not_end_it(path, ends):
    forking(
        f"""
        pid = None
        try:
            with store.transaction():
                store.remember("a", "before", "walnut")
                pid = os.fork()
                if pid == 0:
                    {ends}
                else:
                    joined(pid)
                    other = criomem.Storage(path)
                    assert other.search("") == []
                    other.close()
                    store.remember("a", "after", "walnut")
        except ValueError:
            assert pid == 0
        except criomem.StorageError:
            assert pid == 0
        if pid == 0:
            assert store.recall("a", "before") is None
            os._exit(0)
        assert [i["key"] for i in store.search("a", "walnut")] == ["after", "before"]
        assert store.check() == []
        store.close()
        """,
        path,
    )


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_child_forked_while_another_worker_holds_the_lock_is_not_stuck(path, kind):
    forking(
        """
        store.remember("a", "k", 1)
        held, release = threading.Event(), threading.Event()

        def hold():
            with store.transaction():
                store.remember("a", "held", 1)
                held.set()
                release.wait(30)

        worker = threading.Thread(target=hold)
        worker.start()
        held.wait(10)

        def child():
            assert store.recall("a", "k")["value"] == 1
            assert store.recall("a", "held") is None
            try:
                store.remember("a", "child", 1)
            except criomem.StorageError as error:  # SQLite counts the parent's lock as its own
                assert path and "fork" in str(error)
            else:
                assert store.recall("a", "child")["value"] == 1

        pid = fork(child)
        joined(pid)
        release.set()
        worker.join()
        assert store.recall("a", "held")["value"] == 1
        assert store.recall("a", "child") is None
        joined(fork(lambda: path and store.remember("a", "child", 1)))
        assert (store.recall("a", "child") is None) is (path is None)
        assert store.check() == []
        store.close()
        """,
        *([path] if kind == "file" else []),
    )


# ---- Two processes ------------------------------------------------------------------------------

OPENER = """
import sys
import criomem
folder, name = sys.argv[1:]
sys.stdin.readline()
for n in range(25):
    with criomem.Storage(f"{folder}/{n}.db", durable=False) as store:
        store.remember("a", name, "walnut")
"""


@pytest.mark.slow
def test_many_processes_may_open_a_new_file_at_once(tmp_path):
    openers = [child(OPENER, tmp_path, f"p{n}") for n in range(6)]
    for opener in openers:
        opener.stdin.write("go\n")
        opener.stdin.flush()
    finish(*openers)
    for n in range(25):
        with criomem.Storage(tmp_path / f"{n}.db") as store:
            assert sorted(keys(store.search("a", "walnut"))) == [f"p{n}" for n in range(6)]
            assert store.check() == []
    assert {p.name for p in tmp_path.iterdir()} == {f"{n}.db" for n in range(25)}


def test_a_search_beside_a_writing_process_sees_whole_transactions(file_store, writer):
    seen = set()
    for _ in range(200):
        values = [item["value"] for item in file_store.search("pair")]
        assert len(values) == 2
        assert len(set(values)) == 1
        seen.update(values)
    assert len(seen) > 1, "the writer stood still"
    writer.kill()
    writer.wait()


# ---- Files and urls -----------------------------------------------------------------------------


@pytest.mark.parametrize("url", [None, "sqlite://", "sqlite:///:memory:", ":memory:"])
def test_a_store_in_memory_makes_no_file(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with criomem.Storage(url) as store:
        store.remember("a", "k", 1)
        assert store.url is None
        assert store.check() == []
    assert list(tmp_path.iterdir()) == []
    with criomem.Storage(url) as store:
        assert store.recall("a", "k") is None


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("sqlite:///relative.db", "relative.db"),
        ("sqlite:///{here}/absolute.db", "absolute.db"),
        ("relative.db", "relative.db"),
        ("{here}/plain.db", "plain.db"),
        ("./plain.db", "plain.db"),
        ("sqlite:///with%20percent.db", "with%20percent.db"),
        ("with%41percent.db", "with%41percent.db"),
        ("odd?name#x&mode=ro.db", "odd?name#x&mode=ro.db"),
        ("sqlite:///with blank#1.db", "with blank#1.db"),
        ("ünï 字 🙂.db", "ünï 字 🙂.db"),
        ("no-suffix", "no-suffix"),
    ],
)
def test_a_url_names_exactly_one_file(tmp_path, monkeypatch, url, name):
    monkeypatch.chdir(tmp_path)
    url = url.format(here=tmp_path)
    for n in range(2):
        with criomem.Storage(url) as store:
            assert store.url == url
            assert type(store.url) is str
            assert (store.recall("a", "k") is None) is (n == 0)
            store.remember("a", "k", 1)
            assert store.check() == []
        assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_path_object_is_a_file(path):
    with criomem.Storage(path) as store:
        assert store.url == str(path)
        assert path.exists()


def test_a_relative_file_stays_the_same_after_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with criomem.Storage("relative.db") as store:
        store.remember("a", "k", 1)
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert in_workers(lambda _: store.recall("a", "k")["value"], range(4)) == [1] * 4
        store.remember("a", "k2", 1)
        assert store.check() == []
        store.backup("copy.db")
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["copy.db"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sqlite:///",
        "sqlite://relative.db",
        "sqlite:///x.db?mode=ro",
        "sqlite:////tmp/x.db?",
        "postgres://localhost/x",
        "postgresql+psycopg://u:p@host/x",
        "mysql://x",
        "redis://x",
        "http://x/y.db",
        "sqlite3:///x.db",
        5,
        True,
        b"x.db",
        ["x.db"],
        object(),
    ],
    ids=repr,
)
def test_any_other_url_is_refused(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with refused() as caught:
        criomem.Storage(url)
    assert list(tmp_path.iterdir()) == []
    if isinstance(url, str) and "://" in url and not url.startswith("sqlite://"):
        assert "sqlite" in str(caught.value)
        assert "u:p" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["a\x00b.db", "sqlite:///a\x00b.db", "\ud800.db", "x" * 5000, "sqlite:///" + "y/" * 5000]
)
def test_a_path_that_no_file_can_have_is_refused_by_name(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with refused(criomem.CriomemError):
        criomem.Storage(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_busy": "sometimes"},
        {"on_busy": None},
        {"busy_timeout_secs": -1},
        {"busy_timeout_secs": "60"},
        {"busy_timeout_secs": float("nan")},
        {"busy_timeout_secs": True},
        {"durable": "yes"},
        {"read_only": 1},
        {"audit": "on"},
        {"embed": ("texts",)},
        {"embed": "items"},
        {"clock": 5},
    ],
    ids=repr,
)
def test_an_unknown_value_of_an_option_is_refused_by_the_name_of_the_option(path, wrong):
    with refused() as caught:
        criomem.Storage(path, **wrong)
    assert next(iter(wrong)) in str(caught.value)
    assert family(path) == []


def test_options_are_keywords(path):
    with pytest.raises(TypeError):
        criomem.Storage(path, None)
    assert family(path) == []


def modes(path):
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in family(path)}


def test_new_files_are_for_the_owner_alone_whatever_the_umask(path, tmp_path):
    old = os.umask(0)
    try:
        with criomem.Storage(path) as store:
            store.remember("a", "k", 1)
            store.recall("a", "k")
            assert modes(path) == dict.fromkeys(
                ("memory.db", "memory.db-wal", "memory.db-shm"), 0o600
            )
            store.compact()
            store.backup(tmp_path / "copy.db")
            assert set(modes(path).values()) == {0o600}
        assert modes(path) == {"memory.db": 0o600}
        assert modes(tmp_path / "copy.db") == {"copy.db": 0o600}
    finally:
        os.umask(old)


def test_an_empty_file_is_a_new_store_and_keeps_its_mode(path):
    path.touch()
    path.chmod(0o640)
    with criomem.Storage(path) as store:
        store.remember("a", "k", 1)
        assert set(modes(path).values()) == {0o640}
    with criomem.Storage(path) as store:
        assert store.recall("a", "k")["value"] == 1


def test_a_closed_file_has_nothing_beside_it(path):
    with criomem.Storage(path) as store:
        store.remember("a", "k", 1)
    assert [p.name for p in family(path)] == ["memory.db"]
    assert path.read_bytes().startswith(b"SQLite format 3\x00")


def test_what_was_acknowledged_is_there_after_the_process_is_killed(path):
    source = """
        import os, signal, sys
        import criomem
        store = criomem.Storage(sys.argv[1])
        for n in range(20):
            store.remember("a", f"k{n}", "walnut")
        with store.transaction():
            store.remember("a", "half", "walnut")
            os.kill(os.getpid(), signal.SIGKILL)
        """
    killed = child(source, path)
    killed.communicate(timeout=30)
    assert killed.returncode == -9
    with criomem.Storage(path) as store:
        assert len(store.search("a", "walnut", limit=None)) == 20
        assert store.recall("a", "half") is None
        assert store.check() == []


# ---- Files that are refused ---------------------------------------------------------------------


def _foreign(path, *statements):
    with raw(path) as other:
        for statement in statements:
            other.execute(statement)


def _ours(path, *statements):
    with criomem.Storage(path) as store:
        store.remember("a", "k", "walnut")
    _foreign(path, *statements)


def _newer_in_the_log(path):
    """A newer file whose version stands in the left-over log alone."""
    source = path.with_suffix(".source")
    with criomem.Storage(source) as store:
        store.remember("a", "k", 1)
    with raw(source) as other:
        other.execute("PRAGMA user_version = 99")
        for end in ("", "-wal"):
            shutil.copy(f"{source}{end}", f"{path}{end}")
    for left in family(source):
        left.unlink()
    assert path.read_bytes()[60:64] != (99).to_bytes(4, "big")


def _half(path):
    with criomem.Storage(path) as store:
        for n in range(100):
            store.remember("a", str(n), "walnut " * 50)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])


BAD_FILES = {
    "noise": lambda path: path.write_bytes(random.Random(1).randbytes(8192)),
    "a short text": lambda path: path.write_text("hello"),
    "a long text": lambda path: path.write_text("hello\n" * 5000),
    "one byte": lambda path: path.write_bytes(b"\x00"),
    "a header alone": lambda path: path.write_bytes(b"SQLite format 3\x00"),
    "a header and noise": lambda p: p.write_bytes(
        b"SQLite format 3\x00" + random.Random(2).randbytes(8000)
    ),
    "a directory": lambda path: path.mkdir(),
    "a full directory": lambda path: (path / "x").mkdir(parents=True),
    "another application": lambda path: _foreign(
        path, "PRAGMA application_id = 7", "CREATE TABLE t (x)", "INSERT INTO t VALUES (1)"
    ),
    "another application without id": lambda path: _foreign(path, "CREATE TABLE t (x)"),
    "another application with tables of our names": lambda path: _foreign(
        path, "CREATE TABLE item (x)"
    ),
    "another application in WAL": lambda path: _foreign(
        path, "PRAGMA journal_mode = WAL", "CREATE TABLE t (x)"
    ),
    "a newer schema": lambda path: _ours(path, "PRAGMA user_version = 99"),
    "a newer schema in the log": _newer_in_the_log,
    "ours under another application's id": lambda path: _ours(path, "PRAGMA application_id = 7"),
    "a cut file": _half,
}


def bytes_of(path):
    """Everything but the index of the log, which every reader may make anew."""
    if path.is_dir():
        return sorted(str(p) for p in path.rglob("*"))
    return {name: data for name, data in contents(path).items() if not name.endswith("-shm")}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_not_ours_is_refused_with_its_bytes_unchanged(path, kind, read_only):
    BAD_FILES[kind](path)
    before = bytes_of(path)
    with refused(criomem.StorageError) as caught:
        criomem.Storage(path, read_only=read_only)
    assert len(str(caught.value)) > 20, "the error should say what to do"
    assert bytes_of(path) == before
    if "newer" in kind:
        assert isinstance(caught.value, criomem.SchemaError)
        assert caught.value.code == "schema"


@pytest.mark.parametrize(
    "url", ["{here}/missing/x.db", "sqlite:///{here}/missing/x.db", "{here}/file/x.db"]
)
def test_a_missing_directory_is_refused_and_not_made(tmp_path, url):
    (tmp_path / "file").write_text("no directory")
    with refused(criomem.StorageError):
        criomem.Storage(url.format(here=tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- Read only ----------------------------------------------------------------------------------

WRITES = {
    "remember": lambda store, tmp: store.remember("a", "k", 2),
    "remember_many": lambda store, tmp: store.remember_many(
        [{"namespace": "a", "key": "k", "value": 2}]
    ),
    "update": lambda store, tmp: store.update("a", "k", label="l"),
    "forget": lambda store, tmp: store.forget("a", "k"),
    "forget_all": lambda store, tmp: store.forget_all("a"),
    "prune": lambda store, tmp: store.prune(),
    "reindex": lambda store, tmp: store.reindex(),
    "compact": lambda store, tmp: store.compact(),
    "import_items": lambda store, tmp: store.import_items([]),
}
READS = {
    "recall": lambda store, tmp: store.recall("a", "k"),
    "search": lambda store, tmp: store.search("a"),
    "search words": lambda store, tmp: store.search("a", "walnut"),
    "search weighted": lambda store, tmp: store.search("", "walnut falcon", mode="weighted"),
    "namespaces": lambda store, tmp: store.namespaces(),
    "export": lambda store, tmp: list(store.export()),
    "check": lambda store, tmp: store.check(),
    "stats": lambda store, tmp: store.stats(),
    "backup": lambda store, tmp: store.backup(tmp / "copy.db"),
}


def _enters_a_transaction(store, tmp):
    with store.transaction():
        store.remember("a", "k", 3)


def test_a_read_only_store_reads_and_writes_nothing(path, tmp_path):
    with criomem.Storage(path) as store:
        store.remember("a", "k", "walnut")
        store.remember("a", "expired", 1, ttl_secs=1e-6)
    before = path.read_bytes()
    with criomem.Storage(path, read_only=True) as store:
        assert store.recall("a", "k")["value"] == "walnut"
        for read in READS.values():
            read(store, tmp_path)
        assert store.check() == []
        for name, write in {**WRITES, "transaction": _enters_a_transaction}.items():
            with refused(criomem.StorageError):
                write(store, tmp_path)
            assert store.recall("a", "k")["value"] == "walnut", name
    assert path.read_bytes() == before


def test_a_read_only_store_sees_what_others_write(file_store, path):
    with criomem.Storage(path, read_only=True) as reader:
        for n in range(3):
            file_store.remember("a", f"k{n}", "walnut")
            assert len(reader.search("a", "walnut")) == n + 1


def test_a_read_only_store_makes_no_file(path):
    with refused(criomem.StorageError):
        criomem.Storage(path, read_only=True)
    assert family(path) == []
    path.touch()
    with pytest.raises(criomem.StorageError):
        criomem.Storage(path, read_only=True).recall("a", "k")
    assert path.read_bytes() == b""


# ---- Closing ------------------------------------------------------------------------------------


def test_after_close_every_call_says_so(store, tmp_path):
    with criomem.Storage(None if store.url is None else tmp_path / "closed.db") as closed:
        closed.remember("a", "k", "walnut")
    closed.close()
    for name, call in {**WRITES, **READS, "transaction": _enters_a_transaction}.items():
        with refused(criomem.StorageError):
            call(closed, tmp_path)
        assert name
    with refused(criomem.StorageError), closed:
        pass
    closed.close()
    assert not (tmp_path / "copy.db").exists()


def test_a_running_export_ends_with_an_error_when_the_store_is_closed(path):
    for url in (None, path):
        store = criomem.Storage(url)
        store.remember("a", "k0", 0)
        store.remember_many({"namespace": "b", "key": f"k{n}", "value": n} for n in range(3000))
        export = store.export()
        assert next(export)["key"] == "k0"
        store.close()
        with refused(criomem.StorageError):
            list(export)


def test_an_export_that_is_not_read_to_its_end_holds_nothing(file_store):
    file_store.remember_many({"namespace": "b", "key": f"k{n}", "value": n} for n in range(3000))
    export = file_store.export()
    next(export)
    file_store.remember("a", "k", 1)
    assert file_store.compact()["erased"] is True
    assert len(list(export)) >= 2999


def test_close_is_quick_beside_a_reader(path):
    store = criomem.Storage(path)
    store.remember("a", "k", 1)
    with raw(path) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM sqlite_master").fetchall()
        store.remember("a", "k", 2)
        begun = time.monotonic()
        store.close()
        assert time.monotonic() - begun < 20, "it waited for the busy timeout"
    with criomem.Storage(path) as store:
        assert store.recall("a", "k")["value"] == 2


CLOSING = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import criomem
path = sys.argv[1] if len(sys.argv) > 1 else None

def until_closed(store, n, turns):
    going.wait(10)
    for turn in range(turns):
        try:
            store.remember("a", f"k{n}", turn) if n % 2 else store.search("a", "walnut")
        except criomem.StorageError:
            return
    assert turns == 1, "the store was never closed"

def closed(store):
    going.wait(10)
    store.close()

for _ in range(30):  # a transaction ends while others wait for it, one of them to close
    store, going = criomem.Storage(path, durable=False), threading.Barrier(6)
    with ThreadPoolExecutor(5) as pool:
        with store.transaction():
            workers = [pool.submit(until_closed, store, n, 1) for n in range(4)]
            workers.append(pool.submit(closed, store))
            going.wait(10)
            try:
                workers[-1].result(0.005)
            except TimeoutError:
                pass
        for worker in workers:
            worker.result(20)
for _ in range(5):  # all are busy when it is closed
    store, going = criomem.Storage(path, durable=False), threading.Barrier(5)
    with ThreadPoolExecutor(5) as pool:
        workers = [pool.submit(until_closed, store, n, 100_000) for n in range(4)]
        workers.append(pool.submit(closed, store))
        for worker in workers:
            worker.result(20)
"""


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_close_gives_busy_and_waiting_workers_storage_errors_and_no_other(path, kind):
    run_child(CLOSING, *([path] if kind == "file" else []))


# ---- Interrupts and broken files ----------------------------------------------------------------


def is_free(path):
    """Nobody holds the write lock of the file."""
    with raw(path) as other:
        other.execute("PRAGMA busy_timeout = 0")
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        other.execute("ROLLBACK")
        return True


WITH_BLOCKS = {
    node.lineno: node.end_lineno
    for node in ast.walk(ast.parse(Path(criomem.__file__).read_text()))
    if isinstance(node, ast.With)
}


def interrupted_at(moment, call):
    """Call with a KeyboardInterrupt at the n-th line run in criomem.py; False when it ended before.

    The line of a `with` is run again when its block ends, before `__exit__` is called. No signal
    arrives there, as CPython looks for signals after calls and jumps: such moments are left out.
    """
    left, last = moment, {}

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != criomem.__file__:
            return None
        if event == "call":
            last[id(frame)] = 0  # no frame itself is kept: whatever lived in it must go with it
        elif event == "line":
            line, before = frame.f_lineno, last[id(frame)]
            last[id(frame)] = line
            if not line < before <= WITH_BLOCKS.get(line, 0):
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return left <= 0


def elsewhere(call, *arguments):
    """What the call gives in another worker, which may not hang."""
    result = []
    worker = threading.Thread(target=lambda: result.append(call(*arguments)), daemon=True)
    worker.start()
    worker.join(20)
    assert result, "the other worker failed or hung: " + ("hung" if worker.is_alive() else "failed")
    return result[0]


def test_an_interrupt_at_any_line_of_remember_leaves_no_lock_and_no_half_write(store, path):
    store.remember("a", "k", "walnut 0", tags=["t"])
    for moment in range(1, 5000):
        was = store.recall("a", "k")["value"]
        now = f"falcon {moment}"
        hit = interrupted_at(moment, lambda now=now: store.remember("a", "k", now, tags=["t"]))
        assert store.url is None or is_free(path), f"moment {moment} left the file locked"
        value = elsewhere(store.recall, "a", "k")["value"]
        elsewhere(store.remember, "a", "other", 1)
        assert value in (was, now)
        for word in ("walnut", "falcon"):
            assert len(store.search("a", word)) == (word in value), f"moment {moment}"
        if not hit:
            break
    assert moment > 20
    assert value == now


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.forget("a", "k"),
        lambda store: store.update("a", "k", label="cobalt", tags=["u"]),
        lambda store: store.remember_many(
            {"namespace": "a", "key": f"m{n}", "value": "tulip"} for n in range(2)
        ),
        lambda store: store.forget_all("a"),
        lambda store: store.prune(),
    ],
    ids=["forget", "update", "remember_many", "forget_all", "prune"],
)
def test_an_interrupt_at_any_line_of_another_write_leaves_all_or_nothing(call, clock):
    for moment in range(1, 5000):
        with criomem.Storage(clock=clock) as store:
            store.remember("a", "k", "walnut", tags=["t"])
            store.remember("a", "expired", "mango", ttl_secs=1)
            clock.advance(1)
            hit = interrupted_at(moment, lambda store=store: call(store))
            elsewhere(store.remember, "a", "other", 1)
            assert store.check() == [], f"moment {moment}"
            assert len(store.search("", "tulip")) in (0, 2)
        if not hit:
            break
    assert moment > 10


INTERRUPTS = """
import random, signal, sqlite3, sys, threading, time
import criomem

seed, path = int(sys.argv[1]), sys.argv[2]
pick = random.Random(seed)
signal.signal(signal.SIGALRM, signal.default_int_handler)
store = criomem.Storage(path, durable=False, busy_timeout_secs=2)
hits, end = 0, time.monotonic() + 2
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, pick.uniform(20e-6, 1500e-6))
        try:
            for n in range(20):
                with store.transaction():
                    store.remember("pair", "x", f"walnut {n}")
                    store.remember("pair", "y", f"walnut {n}")
                store.search("pair", "walnut")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hits += 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hits += 1
    other = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        sys.exit(f"seed {seed}: after {hits} interrupts the file is locked: {error}")
    finally:
        other.close()
    done = threading.Event()
    worker = threading.Thread(target=lambda: (store.remember("a", "k", hits), done.set()))
    worker.start()
    worker.join()
    if not done.is_set():
        sys.exit(f"seed {seed}: after {hits} interrupts the lock of the process is held")
    if len({item["value"] for item in store.search("pair")}) > 1:
        sys.exit(f"seed {seed}: after {hits} interrupts half a transaction is visible")
assert hits > 100, hits
assert store.check() == [], store.check()
store.close()
"""


@pytest.mark.slow
def test_real_signals_leave_no_transaction_and_no_lock(path):
    run_child(INTERRUPTS, random.randrange(10**6), path)


DISK_FULL = """
import os, resource, sys
import criomem
path = sys.argv[1]
store = criomem.Storage(path)
store.remember("a", "k", "walnut")
whole = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path + "-wal") + 50_000, whole[1]))
failed = 0
for n in range(20):
    try:
        store.remember("a", f"big{n}", "falcon " * 10_000)
    except criomem.StorageError as error:
        assert "falcon" not in str(error)
        failed += 1
    assert store.recall("a", "k")["value"] == "walnut"
    assert len(store.search("a", "walnut")) == 1
assert failed > 10, failed
resource.setrlimit(resource.RLIMIT_FSIZE, whole)
store.remember("a", "again", "tulip")
assert store.check() == []
assert len(store.search("a", "tulip")) == 1
store.close()
"""


def test_a_full_disk_is_a_storage_error_and_the_old_facts_stay(path):
    run_child(DISK_FULL, path)


@pytest.mark.parametrize("call", [*WRITES, *READS])
def test_no_sqlite_error_leaves_a_store_whose_tables_are_gone(path, tmp_path, call):
    store = criomem.Storage(path, durable=False)
    store.remember("a", "k", "walnut")
    with raw(path) as other:
        other.execute("ALTER TABLE item RENAME TO gone")
    with contextlib.suppress(criomem.StorageError):
        {**WRITES, **READS}[call](store, tmp_path)
    store.close()


@pytest.mark.parametrize("seed", range(8))
def test_no_sqlite_error_leaves_a_file_with_noise_in_it(path, tmp_path, seed):
    with criomem.Storage(path, durable=False) as store:
        store.remember("a", "k", "walnut")
        store.remember_many(
            {"namespace": "a", "key": f"k{n}", "value": f"walnut {n}"} for n in range(300)
        )
    pick = random.Random(seed)
    data = bytearray(path.read_bytes())
    for page in pick.sample(range(1, len(data) // 4096), 5):
        data[page * 4096 : page * 4096 + 4096] = pick.randbytes(4096) if seed % 2 else bytes(4096)
    path.write_bytes(data)
    try:
        store = criomem.Storage(path, durable=False)
    except criomem.StorageError:
        return
    failures = 0
    for call in [*READS.values(), *WRITES.values()]:
        try:
            failures += bool(call(store, tmp_path)) and call is READS["check"]
        except criomem.CriomemError:
            failures += 1
    assert failures, "noise in five pages was not noticed"
    store.close()


@settings(max_examples=share(5))
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_as_a_file_and_left_alone(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "x.db"
    path.write_bytes(data)
    if data:
        with refused(criomem.StorageError):
            criomem.Storage(path)
        assert path.read_bytes() == data
    else:
        criomem.Storage(path).close()
