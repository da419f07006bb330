"""Cases of the store: each measures criomem and a hand-written floor over sqlite3, alternated."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import ROOT, Bench, case, timed

import criomem

WORDS_A_ROW = 30


def zipf_words(rows: int, seed: int = 1) -> Iterator[list[str]]:
    """Texts of about 30 words, common and rare ones as in real text: w0 is the commonest."""
    pick = random.Random(seed)
    vocabulary = [f"w{n:x}" for n in range(60_000)]
    weights = [1 / (n + 2) for n in range(60_000)]
    for start in range(0, rows, 1_000):
        count = min(1_000, rows - start)
        chosen = pick.choices(vocabulary, weights, k=count * WORDS_A_ROW)
        for n in range(count):
            yield chosen[n * WORDS_A_ROW : (n + 1) * WORDS_A_ROW]


def namespace_of(n: int) -> str:
    return "tiny" if n % 10_000 == 7 else f"users/{n % 100}"


def filled(bench: Bench, rows: int) -> Path:
    """A store of that many items, made once for each size."""
    path = bench.folder / f"items-{rows}.db"
    if not path.exists():
        with criomem.Storage(path, durable=False) as store:
            batch: list[dict[str, Any]] = []
            for n, words in enumerate(zipf_words(rows)):
                batch.append(
                    {
                        "namespace": namespace_of(n), "key": f"k{n}", "value": " ".join(words),
                        "metadata": {"n": n, "kind": "rare" if n % (rows // 5) == 3 else "usual"},
                    }
                )  # fmt: skip
                if len(batch) == 5_000:
                    store.remember_many(batch)
                    batch.clear()
            store.remember_many(batch)
    return path


def floor_index(bench: Bench, rows: int) -> sqlite3.Connection:
    """The same rows in FTS5 as its documentation shows it."""
    path = bench.folder / f"fts-{rows}.db"
    fresh = not path.exists()
    floor = bench.raw(path)
    if fresh:
        floor.execute("CREATE VIRTUAL TABLE fts USING fts5(body)")
        floor.execute("BEGIN")
        floor.executemany(
            "INSERT INTO fts(rowid, body) VALUES (?, ?)",
            ((n + 1, " ".join(words)) for n, words in enumerate(zipf_words(rows))),
        )
        floor.execute("COMMIT")
    return floor


def floor_table(bench: Bench, path: Path, *, durable: bool) -> sqlite3.Connection:
    floor = bench.raw(path, durable=durable)
    floor.execute(
        """CREATE TABLE IF NOT EXISTS item(
             id INTEGER PRIMARY KEY, namespace TEXT, key TEXT, value TEXT, at_ms INTEGER,
             UNIQUE (namespace, key))"""
    )
    floor.execute("CREATE VIRTUAL TABLE IF NOT EXISTS fts USING fts5(body)")
    return floor


def floor_insert(floor: sqlite3.Connection, namespace: str, key: str, text: str) -> None:
    row = floor.execute(
        "INSERT INTO item(namespace, key, value, at_ms) VALUES (?, ?, ?, ?)",
        (namespace, key, json.dumps(text), int(time.time() * 1000)),
    ).lastrowid
    floor.execute("INSERT INTO fts(rowid, body) VALUES (?, ?)", (row, text))


def write_one(bench: Bench, *, durable: bool) -> None:
    texts = [" ".join(words) for words in zipf_words(bench.count(4_000))]
    path = bench.folder / f"one-{durable}.db"
    floor = floor_table(bench, path.with_suffix(".floor"), durable=durable)
    with criomem.Storage(path, durable=durable) as store:

        def ours(n: int) -> None:
            store.remember("users/1", f"k{n}", texts[n])

        def theirs(n: int) -> None:
            floor.execute("BEGIN IMMEDIATE")
            floor_insert(floor, "users/1", f"k{n}", texts[n])
            floor.execute("COMMIT")

        bench.against(ours, theirs, len(texts), aim=0.5)


@case
def remember(bench: Bench) -> None:
    """one fact, durable"""
    write_one(bench, durable=True)


@case
def remember_normal(bench: Bench) -> None:
    """one fact, durable=False"""
    write_one(bench, durable=False)


@case
def remember_many(bench: Bench) -> None:
    """1,000 facts in one transaction"""
    batches = 10
    texts = [" ".join(words) for words in zipf_words(1_000 * batches)]
    floor = floor_table(bench, bench.folder / "many.floor", durable=True)
    with criomem.Storage(bench.folder / "many.db") as store:

        def ours(n: int) -> None:
            store.remember_many(
                {"namespace": "users/1", "key": f"k{n}-{i}", "value": texts[n * 1_000 + i]}
                for i in range(1_000)
            )

        def theirs(n: int) -> None:
            floor.execute("BEGIN IMMEDIATE")
            for i in range(1_000):
                floor_insert(floor, "users/1", f"k{n}-{i}", texts[n * 1_000 + i])
            floor.execute("COMMIT")

        bench.against(ours, theirs, batches, aim=0.35, each=1_000)


@case
def recall(bench: Bench) -> None:
    """one fact by its key"""
    rows = 10_000
    store = bench.keep(criomem.Storage(filled(bench, rows), read_only=True))
    floor = floor_table(bench, bench.folder / "recall.floor", durable=False)
    floor.execute("BEGIN")
    for n, words in enumerate(zipf_words(rows)):
        floor_insert(floor, namespace_of(n), f"k{n}", " ".join(words))
    floor.execute("COMMIT")
    sql = "SELECT value FROM item WHERE namespace = ? AND key = ?"

    def theirs(n: int) -> None:
        json.loads(floor.execute(sql, (namespace_of(n), f"k{n}")).fetchone()[0])

    bench.against(lambda n: store.recall(namespace_of(n), f"k{n}"), theirs, rows, aim=0.5)


def words_search(
    bench: Bench, queries: list[list[str]], *, aim: float | None, mode: str = "keyword"
) -> None:
    store = bench.keep(criomem.Storage(filled(bench, bench.size), read_only=True))
    floor = floor_index(bench, bench.size)
    sql = "SELECT rowid FROM fts WHERE fts MATCH ? ORDER BY rank LIMIT 10"

    def theirs(n: int) -> None:
        match = " OR ".join(f'"{word}"' for word in queries[n])
        floor.execute(sql, (match,)).fetchall()

    def ours(n: int) -> None:
        found = store.search("", " ".join(queries[n]), mode=mode)
        assert found, "common words are found"

    bench.against(ours, theirs, len(queries), aim=aim, rounds=3)


@case
def search_two_common(bench: Bench) -> None:
    """two common words"""
    words_search(bench, [["w0", "w1"], ["w1", "w2"], ["w0", "w3"]] * 2, aim=20)


@case
def search_three_common(bench: Bench) -> None:
    """three common words"""
    words_search(bench, [["w0", "w1", "w2"], ["w1", "w2", "w4"]] * 3, aim=20)


def mixed_queries(count: int) -> list[list[str]]:
    pick = random.Random(4)
    return [
        list(dict.fromkeys(
            f"w{min(59_999, int(10 ** pick.uniform(0.3, 4.6))):x}"
            for _ in range(pick.randint(2, 10))
        ))
        for _ in range(count)
    ]  # fmt: skip


@case
def search_mixed(bench: Bench) -> None:
    """2 to 10 words, common and rare"""
    words_search(bench, mixed_queries(30), aim=2.5 if bench.size < 1_000_000 else 10)


@case
def search_mixed_weighted(bench: Bench) -> None:
    """the same, weighted by rarity"""
    words_search(bench, mixed_queries(30), aim=None, mode="weighted")


def filtered_search(bench: Bench, metadata: dict[str, Any]) -> None:
    """A filter that passes 5 rows of all, beside the search without it."""
    store = bench.keep(criomem.Storage(filled(bench, bench.size), read_only=True))
    queries = ["w0 w1", "w0 w3 w1e w3e8 w2710", " ".join(f"w{n:x}" for n in range(10))]

    def ours(n: int) -> None:
        store.search("", queries[n], metadata=metadata)

    bench.against(ours, lambda n: store.search("", queries[n]), len(queries), aim=0.5, rounds=3)


@case
def filter_equal(bench: Bench) -> None:
    """5 rows pass (metadata equal), against no filter"""
    filtered_search(bench, {"kind": "rare"})


@case
def filter_range(bench: Bench) -> None:
    """5 rows pass (metadata range), against no filter"""
    filtered_search(bench, {"n": {"$gte": bench.size - 5}})


@case
def search_tiny_namespace(bench: Bench) -> None:
    """a namespace of a few items in a large store"""
    store = bench.keep(criomem.Storage(filled(bench, bench.size), read_only=True))
    bench.alone(lambda n: store.search("tiny", "w0 w1 w5"), 300, limit_ms=0.3)


@case
def list_newest(bench: Bench) -> None:
    """the newest ten of a namespace of 1 %"""
    store = bench.keep(criomem.Storage(filled(bench, bench.size), read_only=True))
    bench.alone(lambda n: store.search(f"users/{n % 100}"), 300)


@case
def namespaces(bench: Bench) -> None:
    """all namespaces"""
    store = bench.keep(criomem.Storage(filled(bench, bench.size), read_only=True))
    bench.alone(lambda n: store.namespaces(), 100)


WRITER = """
import sys, time
sys.path.insert(0, sys.argv[2])
import criomem
took, n = [], 0
with criomem.Storage(sys.argv[1], durable=False) as store:
    print("ready", flush=True)
    while not store.recall("control", "stop"):
        started = time.perf_counter()
        store.remember("other", f"k{n % 100}", n)
        took.append(time.perf_counter() - started)
        n += 1
        time.sleep(0.002)
took.sort()
print(took[int(len(took) * 0.99)] * 1000)
"""


def beside_a_writer(path: Path, work: Callable[[criomem.Storage], None]) -> tuple[float, float]:
    """Seconds that the work took, and a second process's 99th percentile of a write in ms."""
    with criomem.Storage(path, durable=False) as store:
        command = [sys.executable, "-c", WRITER, str(path), str(ROOT)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        seconds = timed(lambda: work(store))
        store.remember("control", "stop", True)
        latency = float(writer.stdout.readline())
        writer.wait()
        store.forget("control", "stop")
    return seconds, latency


@case
def prune_expired(bench: Bench) -> None:
    """expired facts a second, while another process writes"""
    path, rows = bench.folder / "expired.db", bench.size
    now = [1_700_000_000.0]
    with criomem.Storage(path, durable=False, clock=lambda: now[0]) as store:
        for start in range(0, rows, 5_000):
            store.remember_many(
                {"namespace": "n", "key": str(start + n), "value": " ".join(words), "ttl_secs": 1}
                for n, words in enumerate(zipf_words(min(5_000, rows - start), seed=start))
            )
    seconds, latency = beside_a_writer(path, lambda store: bench.expect(
        store.prune()["memory_items_deleted"], rows
    ))  # fmt: skip
    bench.rate(rows, seconds, note=f"the other's writes P99 {latency:.1f} ms", aim=30_000)


MEMORY = """
import sys
sys.path.insert(0, sys.argv[2])
import criomem
with criomem.Storage(sys.argv[1], read_only=True) as store:
    for words in ("w0 w1", "w3 w1e w3e8", " ".join(f"w{n:x}" for n in range(10))):
        store.search("", words)
        store.search("", words, mode="weighted")
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) / 1024)
"""


@case
def memory(bench: Bench) -> None:
    """MB of a process that opens the file and searches"""
    command = [sys.executable, "-c", MEMORY, str(filled(bench, bench.size)), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    bench.amount(float(done.stdout), "MB", most=150)
