"""Measures criomem beside hand-written sqlite3, in one run.

    python bench/run.py [case …] [--size N] [--json FILE]

A ratio is our rate by the floor's, median over alternated rounds: above 1 is faster than the floor.
These machines are shared: read the ratios, not the times.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness


def progress(names: Iterable[str]) -> Iterable[str]:
    try:
        from tqdm import tqdm
    except ImportError:
        return names
    return tqdm(list(names), leave=False, disable=not sys.stderr.isatty())


def main() -> None:
    for path in sorted(Path(__file__).resolve().parent.glob("cases*.py")):
        importlib.import_module(path.stem)
    parser = argparse.ArgumentParser(description="Measures criomem beside sqlite3.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(harness.CASES)}")
    parser.add_argument("--size", type=int, default=100_000, help="rows of the large stores")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(harness.CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        bench = harness.Bench(Path(folder), options.size)
        head = harness.header(Path(folder))
        print("  ".join(f"{name}: {value}" for name, value in head.items()))
        print(f"size: {options.size:,}\n{harness.TITLE}", flush=True)
        for name in progress(options.cases or harness.CASES):
            shown = len(bench.rows)
            bench.run(name)
            for row in bench.rows[shown:]:
                print(harness.line(row), flush=True)
    if options.json is not None:
        harness.save(options.json, head, bench.rows)


if __name__ == "__main__":
    main()
