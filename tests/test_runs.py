"""Runs: who holds a thread, across workers and processes, and how it is lost."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import child, finish, refused

import criomem

# A child that takes the thread and says so, then does what it is told, line by line.
HOLDER = """
import sys, time
import criomem
path, policy = sys.argv[1:3]
store = criomem.Storage(path, durable=False)
thread = store.thread("t")
with thread.run(on_busy=policy, run_id="holder") as run:
    print("held", flush=True)
    for line in sys.stdin:
        if line.strip() == "append":
            try:
                run.append("user", "from the holder")
                print("written", flush=True)
            except criomem.RunInterruptedError:
                print("interrupted", flush=True)
        else:
            break
store.close()
print("left", flush=True)
"""


class Holder:
    """A process that holds the thread "t"."""

    def __init__(self, path, policy="wait"):
        self.process = child(HOLDER, path, policy)
        assert self.said() == "held"

    def said(self):
        return self.process.stdout.readline().strip()

    def tell(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def leave(self):
        self.tell("leave")
        assert self.said() == "left"
        finish(self.process)

    def kill(self, number=signal.SIGKILL):
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.communicate()


@pytest.fixture
def holder(path):
    criomem.Storage(path).close()
    holder = Holder(path)
    yield holder
    if holder.process.returncode is None:
        holder.process.kill()
        holder.process.communicate()


# ---- In one process -----------------------------------------------------------------------------


def test_a_run_writes_and_its_checkpoints_carry_its_id(store):
    thread = store.thread("t")
    with thread.run(run_id="r1", actor="ada") as run:
        assert (run.id, run.interrupted, thread.info()) == ("r1", False, None)
        run.append("user", "a")
        thread.append("user", "b")  # of the same context: joins
        store.thread("t").save(state={"n": 1})
        with thread.run() as inner:  # joins, and never waits for itself
            inner.append("user", "c")
        assert thread.info()["running"] is True
        run.check()
    assert thread.info()["running"] is False
    assert {c["run_id"] for c in thread.history()} == {"r1"}
    assert [m["content"] for m in thread.messages()] == ["a", "b", "c"]


def test_a_run_has_every_writing_method_of_its_thread(store):
    thread = store.thread("t")
    with thread.run() as run:
        first = run.append("user", "a", id="m")["checkpoint"]
        run.save(messages=[{"role": "user", "content": "b"}], label="l")
        run.set_message_tags("m", ["x"])
        run.update(label="thread")
        run.rewind(first)
        assert run.fork("copy").exists()
        run.delete_message("m")
        assert thread.messages() == []
        assert run.delete() is True
        assert run.interrupted
        with refused(criomem.RunInterruptedError):
            run.append("user", "x")
    assert not thread.exists()


def test_an_exception_inside_a_run_frees_the_thread_and_keeps_what_was_saved(store):
    thread = store.thread("t")

    def fail():
        with thread.run() as run:
            run.append("user", "a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with thread.run(on_busy="reject") as run:
        run.append("user", "b")
    assert [m["content"] for m in thread.messages()] == ["a", "b"]


def test_another_worker_is_rejected_at_once_or_after_its_time(store):
    thread = store.thread("t")

    def rejected(**options):
        started = time.monotonic()
        with pytest.raises(criomem.ThreadBusyError) as caught, thread.run(**options):
            pass
        return caught.value, time.monotonic() - started

    with thread.run(), ThreadPoolExecutor(1) as pool:
        error, _ = pool.submit(rejected, on_busy="reject").result()
        assert (error.thread_id, error.code) == ("t", "thread_busy")
        error, took = pool.submit(rejected, on_busy="wait", busy_timeout_secs=0.05).result()
        assert error.waited_secs >= 0.05
        assert took < 5
    assert store._db._turn is None


def test_inside_a_transaction_a_busy_thread_is_rejected_at_once(store):
    thread = store.thread("t")

    def inside():
        with store.transaction():
            store.remember("a", "k", "walnut")
            with pytest.raises(criomem.ThreadBusyError):
                thread.append("user", "x")

    with thread.run(), ThreadPoolExecutor(1) as pool:
        pool.submit(inside).result()
    assert thread.messages() == []
    assert store.recall("a", "k")


def test_a_waiting_worker_gets_in_when_the_run_ends(store):
    thread = store.thread("t")
    entered = threading.Event()

    def wait():
        entered.set()
        with thread.run() as run:
            run.append("user", "second")

    with ThreadPoolExecutor(1) as pool:
        with thread.run() as run:
            waiting = pool.submit(wait)
            entered.wait(10)
            run.append("user", "first")
        waiting.result(20)
    assert [m["content"] for m in thread.messages()] == ["first", "second"]


def test_a_plain_save_waits_for_a_run_of_another_worker(store):
    thread = store.thread("t")
    with ThreadPoolExecutor(1) as pool:
        with thread.run() as run:
            saved = pool.submit(thread.append, "user", "second")
            run.append("user", "first")
        saved.result(20)
    assert [m["content"] for m in thread.messages()] == ["first", "second"]


def test_an_interrupt_takes_the_thread_and_nothing_more_of_the_old_run_is_written(store):
    thread = store.thread("t")
    taken = threading.Event()

    def take():
        with thread.run(on_busy="interrupt", busy_timeout_secs=20) as run:
            run.append("user", "new")
        taken.set()

    with ThreadPoolExecutor(1) as pool:
        with thread.run() as old:
            old.append("user", "old")
            taking = pool.submit(take)
            while not old.interrupted:
                assert not taken.is_set()
            with refused(criomem.RunInterruptedError):
                old.append("user", "too late")
        taking.result(20)
    assert [m["content"] for m in thread.messages()] == ["old", "new"]


def test_an_interrupt_goes_on_when_the_old_run_does_not_leave(store):
    thread = store.thread("t")

    def take():
        with thread.run(on_busy="interrupt", busy_timeout_secs=0.05) as run:
            run.append("user", "new")

    with thread.run() as old, ThreadPoolExecutor(1) as pool:
        pool.submit(take).result(20)
        with refused(criomem.RunInterruptedError):
            old.check()
        assert old.interrupted
    assert [m["content"] for m in thread.messages()] == ["new"]


def test_a_thread_deleted_by_another_stays_deleted_when_the_run_saves(store):
    thread = store.thread("t")
    with thread.run() as run:
        run.append("user", "a")
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(thread.delete).result() is True
        with refused(criomem.RunInterruptedError):
            run.append("user", "b")
    assert not thread.exists()


@pytest.mark.parametrize(
    "options",
    [{"on_busy": "maybe"}, {"busy_timeout_secs": -1}, {"run_id": ""}, {"actor": "a\x00"}],
)
def test_a_bad_option_of_a_run_is_refused(store, options):
    with refused(), store.thread("t").run(**options):
        pass


def test_eight_waiting_workers_all_get_in(store):
    thread = store.thread("t")

    def one(n):
        with thread.run(busy_timeout_secs=30) as run:
            run.append("user", str(n))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    assert sorted(m["content"] for m in thread.messages()) == sorted(map(str, range(8)))


def test_renewal_goes_on_only_while_a_run_lives(path, monkeypatch):
    monkeypatch.setattr(criomem, "_BEAT_SECS", 0.01)
    with criomem.Storage(path, durable=False) as store:
        thread = store.thread("t")

        def beat():
            with store._db.read() as connection:
                return connection.execute("SELECT beat_ms FROM run").fetchone()[0]

        with thread.run():
            first, until = beat(), time.monotonic() + 10
            while beat() == first:
                assert time.monotonic() < until
            pulse = store._threads.runs._pulse
        pulse.join(10)
        assert not pulse.is_alive()


# ---- Across processes ---------------------------------------------------------------------------


def test_another_process_is_rejected_and_gets_in_when_the_run_ends(path, holder):
    with criomem.Storage(path, durable=False) as store:
        thread = store.thread("t")
        assert store._threads.runs.held  # the holder is another process
        with pytest.raises(criomem.ThreadBusyError), thread.run(on_busy="reject"):
            pass
        with pytest.raises(criomem.ThreadBusyError), thread.run(busy_timeout_secs=0.05):
            pass
        holder.leave()
        with thread.run(on_busy="reject") as run:
            run.append("user", "mine")
        assert store.check() == []


def test_a_process_that_waits_gets_in_when_the_other_leaves(path, holder):
    with criomem.Storage(path, durable=False) as store, ThreadPoolExecutor(1) as pool:
        thread = store.thread("t")
        saved = pool.submit(thread.append, "user", "second")
        holder.tell("append")
        assert holder.said() == "written"
        holder.leave()
        saved.result(20)
        assert [m["content"] for m in thread.messages()] == ["from the holder", "second"]
        assert store.check() == []


def test_a_process_interrupts_another_which_can_write_no_more(path, holder):
    with criomem.Storage(path, durable=False) as store, ThreadPoolExecutor(1) as pool:
        thread = store.thread("t")

        def take():
            with thread.run(on_busy="interrupt", busy_timeout_secs=20) as run:
                run.append("user", "mine")

        taking = pool.submit(take)
        said = ""
        while said != "interrupted":
            holder.tell("append")
            said = holder.said()
        holder.leave()
        taking.result(20)
        assert [m["content"] for m in thread.messages()][-1] == "mine"
        assert store.check() == []


def test_a_killed_process_frees_its_thread_at_once(path, holder):
    with criomem.Storage(path, durable=False) as store:
        thread = store.thread("t")
        holder.tell("append")
        assert holder.said() == "written"
        holder.kill()
        with thread.run(on_busy="reject") as run:
            run.append("user", "mine")
        assert [m["content"] for m in thread.messages()] == ["from the holder", "mine"]
        assert thread.info()["running"] is False
        assert store.check() == []


def test_a_stopped_process_past_its_lease_loses_the_thread_and_cannot_write(
    path, holder, monkeypatch
):
    monkeypatch.setattr(criomem, "_LEASE_SECS", 0.0)
    with criomem.Storage(path, durable=False) as store:
        thread = store.thread("t")
        holder.kill(signal.SIGSTOP)
        try:
            with thread.run(on_busy="reject") as run:
                run.append("user", "mine")
        finally:
            holder.kill(signal.SIGCONT)
        holder.tell("append")
        assert holder.said() == "interrupted"
        holder.leave()
        assert [m["content"] for m in thread.messages()] == ["mine"]
        assert store.check() == []


def test_a_holder_on_another_host_keeps_its_thread_until_its_lease_ends(path, holder, monkeypatch):
    monkeypatch.setattr(criomem, "_host", lambda: "another/host")
    with criomem.Storage(path, durable=False) as store:
        thread = store.thread("t")
        with pytest.raises(criomem.ThreadBusyError), thread.run(on_busy="reject"):
            pass
        holder.kill()  # its process id means nothing here
        with pytest.raises(criomem.ThreadBusyError), thread.run(on_busy="reject"):
            pass
        monkeypatch.setattr(criomem, "_LEASE_SECS", 0.05)
        with thread.run(busy_timeout_secs=20) as run:
            run.append("user", "mine")
        assert store.check() == []


def test_a_process_id_given_to_another_process_is_not_the_holder(path, holder, monkeypatch):
    with criomem.Storage(path, durable=False) as store:
        with store._db.transaction() as transaction:
            transaction.connection.execute("UPDATE run SET started = 'long ago'")
        with store.thread("t").run(on_busy="reject") as run:
            run.append("user", "mine")


FORKED = """
import os, sys
import criomem
store = criomem.Storage(sys.argv[1], durable=False)
thread = store.thread("t")
with thread.run() as run:
    run.append("user", "parent")
    pid = os.fork()
    if pid == 0:
        try:
            run.append("user", "child")
        except criomem.RunInterruptedError:
            os.write(1, b"refused\\n")
        # and leaves the block as its parent does
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
print([m["content"] for m in thread.messages()], store.check())
store.close()
"""

PARENT_GOES_ON = FORKED.replace(
    "        # and leaves the block as its parent does\n",
    "    else:\n        os.waitpid(pid, 0)\n        run.append('user', 'still mine')\n",
).replace("if pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\n", "if pid == 0:\n    os._exit(0)\n")


@pytest.mark.parametrize("program", [FORKED, PARENT_GOES_ON], ids=["at once", "after the child"])
def test_a_forked_child_neither_writes_in_its_parent_s_run_nor_ends_it(path, program):
    said = finish(child(program, path)).splitlines()
    assert said[0] == "refused"
    assert said[1] in ("['parent'] []", "['parent', 'still mine'] []")
    assert ("still mine" in said[1]) is (program is PARENT_GOES_ON)


WAITER = """
import sys, time
import criomem
store = criomem.Storage(sys.argv[1], durable=False)
for n in range(4):
    with store.thread("t").run(busy_timeout_secs=60) as run:
        run.append("user", sys.argv[2])
store.close()
"""


@pytest.mark.slow
def test_eight_waiting_processes_all_get_in(path):
    criomem.Storage(path).close()
    finish(*[child(WAITER, path, n) for n in range(8)], timeout=100)
    with criomem.Storage(path) as store:
        said = [m["content"] for m in store.thread("t").messages()]
        assert sorted(said) == sorted(str(n) for n in range(8) for _ in range(4))
        assert store.check() == []
        with store._db.read() as connection:
            assert connection.execute("SELECT count(*) FROM run").fetchone() == (0,)
            assert connection.execute("SELECT count(*) FROM ticket").fetchone() == (0,)
