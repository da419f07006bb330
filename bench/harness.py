"""How cases are measured and shown: alternated rounds, percentiles, ratios to a floor."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import criomem  # noqa: E402 - from this checkout, whatever is installed

CASES: dict[str, Callable[[Bench], None]] = {}
T = TypeVar("T")


def case(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
    CASES[function.__name__] = function
    return function


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Bench:
    """What a case has: a folder, the size asked for, and ways to measure."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        self.rows: list[dict[str, Any]] = []
        self.name = self.about = ""
        self._stack = contextlib.ExitStack()

    def run(self, name: str) -> None:
        self.name = name
        self.about = " ".join((CASES[name].__doc__ or "").split())
        with self._stack:
            CASES[name](self)

    def keep(self, thing: T) -> T:
        """Closes it when the case ends."""
        self._stack.callback(thing.close)  # type: ignore[attr-defined]
        return thing

    def count(self, usual: int) -> int:
        return min(usual, self.size)

    def raw(self, path: Path, *, durable: bool = False) -> sqlite3.Connection:
        """A plain connection with the pragmas that criomem sets."""
        connection = self.keep(sqlite3.connect(path, isolation_level=None))
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    def against(
        self, ours: Callable[[int], object], floor: Callable[[int], object], count: int, *,
        aim: float | None, each: int = 1, rounds: int = 5,
    ) -> None:  # fmt: skip
        """Ours and the floor in turn, a share of the work each round; the ratio of the rates."""
        took: list[float] = []
        ratios = []
        share = max(1, count // rounds)
        for start in range(0, share * rounds, share):
            numbers = [n % count for n in range(start, start + share)]
            spent = [timed(lambda n=n: ours(n)) for n in numbers]  # type: ignore[misc]
            baseline = [timed(lambda n=n: floor(n)) for n in numbers]  # type: ignore[misc]
            ratios.append(sum(baseline) / sum(spent))
            took += spent
        self._add(took, each, ratio=statistics.median(ratios), aim=aim)

    def alone(
        self, ours: Callable[[int], object], count: int, *, limit_ms: float | None = None
    ) -> None:
        took = [timed(lambda n=n: ours(n)) for n in range(count)]  # type: ignore[misc]
        self._add(took, 1, limit_ms=limit_ms)

    def rate(self, count: int, seconds: float, *, note: str = "", aim: float | None = None) -> None:
        """So many a second, of one long call."""
        rate = count / seconds
        self.rows.append(self._row(
            n=count, per_second=rate, note=note, verdict=self._verdict(rate, aim, "a second")
        ))  # fmt: skip

    def amount(self, value: float, unit: str, *, most: float | None = None) -> None:
        verdict = "" if most is None else f"ok (under {most:g} {unit})"
        if most is not None and value > most:
            verdict = f"over {most:g} {unit}"
        self.rows.append(self._row(amount=value, unit=unit, verdict=verdict))

    def expect(self, seen: object, wanted: object) -> None:
        assert seen == wanted, f"{self.name}: {seen} is not {wanted}"

    def _row(self, **fields: Any) -> dict[str, Any]:
        return {"case": self.name, "about": self.about, "size": self.size, **fields}

    def _verdict(self, value: float, aim: float | None, unit: str) -> str:
        if aim is None:
            return ""
        if value >= aim:
            return f"ok ({aim:g} {unit})"
        return f"{value / aim:.0%} of {aim:g} {unit}"

    def _add(
        self, took: list[float], each: int, *, ratio: float | None = None,
        aim: float | None = None, limit_ms: float | None = None,
    ) -> None:  # fmt: skip
        took = sorted(took)
        row = self._row(n=len(took) * each, per_second=each * len(took) / sum(took), ratio=ratio)
        for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            row[f"{name}_ms"] = took[min(len(took) - 1, int(len(took) * share))] * 1000
        row["verdict"] = "" if ratio is None else self._verdict(ratio, aim, "x")
        if limit_ms is not None:
            kept = row["median_ms"] <= limit_ms
            row["verdict"] = f"{'ok' if kept else 'over'} ({limit_ms:g} ms)"
        self.rows.append(row)


def header(folder: Path) -> dict[str, str]:
    with criomem.Storage() as store:
        stats = store.stats()
    kind = ""
    with contextlib.suppress(OSError):
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        mounts = [m for m in mounts if str(folder).startswith(m[1])]
        kind = max(mounts, key=lambda m: len(m[1]))[2] if mounts else ""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "vectors": stats["vectors"] or "none",
        "cores": str(os.cpu_count()),
        "file system": kind,
        "criomem": criomem.__version__,
    }


def line(row: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        return f"{row[name]:.3f}" if name in row else ""

    times = "".join(f"{shown(f'{name}_ms'):>10}" for name in ("median", "p90", "p99", "max"))
    per_second = f"{row['per_second']:,.0f}" if "per_second" in row else ""
    if "amount" in row:
        per_second = f"{row['amount']:.1f} {row['unit']}"
    ratio = f"{row['ratio']:.2f}" if row.get("ratio") is not None else ""
    about = f"{row['about']}{'; ' + row['note'] if row.get('note') else ''}"
    return (
        f"{row['case']:<24}{row.get('n', ''):>8}{times}{per_second:>12}{ratio:>8}  "
        f"{row['verdict']:<22}{about}"
    )


TITLE = (
    f"{'case':<24}{'n':>8}{'median':>10}{'P90':>10}{'P99':>10}{'max ms':>10}{'a second':>12}"
    f"{'ratio':>8}  {'aim':<22}"
)


def save(path: Path, head: dict[str, str], rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"header": head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
