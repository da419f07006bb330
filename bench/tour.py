"""The main job on real text, with the standard library alone.

python bench/tour.py                    the language reference that comes with Python
python bench/tour.py notes.txt          a text of your own: its paragraphs become facts
python bench/tour.py facts.jsonl        JSON lines of namespace, key, value
python bench/tour.py --db tour.db       keep the file (else it goes to a temporary folder)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import criomem

QUESTIONS = (
    "how do I catch an exception",
    "what does yield do in a generator",
    "difference between is and ==",
    "can a function have keyword only parameters",
    "how are decorators evaluated",
    "list comprehension scope of variables",
    "format a number with thousands separators",
    "context manager with statement enter exit",
    "what is a metaclass",
    "how does the import system find modules",
    "walrus assignment expression",
    "precedence of operators",
)


class Clock:
    """A clock that can be set forward, so that a time to live is shown without waiting."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def excerpt(value: Any, width: int = 64) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def milliseconds(started: float) -> str:
    return f"{(time.perf_counter() - started) * 1000:.2f} ms"


def python_reference() -> Iterator[dict[str, Any]]:
    """The paragraphs of the language reference, a namespace for each topic."""
    from pydoc_data.topics import topics

    for topic, text in topics.items():
        paragraphs = [part.strip() for part in text.split("\n\n") if len(part.strip()) > 60]
        for number, paragraph in enumerate(paragraphs):
            yield {
                "namespace": f"python/{topic}",
                "key": f"{topic}-{number}",
                "value": paragraph,
                "tags": ["example"] if ">>>" in paragraph else ["prose"],
                "metadata": {"words": len(paragraph.split())},
            }


def own_facts(path: Path) -> Iterator[dict[str, Any]]:
    """A text's paragraphs, or JSON lines as they are."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".jsonl", ".ndjson"):
        for line in text.splitlines():
            if line.strip():
                fact = json.loads(line)
                yield {name: fact[name] for name in ("namespace", "key", "value")}
        return
    for number, paragraph in enumerate(part.strip() for part in text.split("\n\n")):
        if paragraph:
            yield {"namespace": "text", "key": f"paragraph-{number}", "value": paragraph}


def store_facts(store: criomem.Storage, facts: Iterator[dict[str, Any]]) -> None:
    heading("Storing")
    started = time.perf_counter()
    count = store.remember_many(facts)
    spent = time.perf_counter() - started
    print(f"  {count:,} facts in {spent:.2f} s ({count / spent:,.0f} a second), one transaction")
    names = store.namespaces(depth=1)
    print(f"  in {len(store.namespaces()):,} namespaces under {', '.join(names)}")


def ask_questions(store: criomem.Storage, questions: tuple[str, ...]) -> None:
    heading("Asking")
    for question in questions:
        started = time.perf_counter()
        found = store.search("", question, limit=1, mode="weighted")
        took = milliseconds(started)
        print(f"  {question}")
        for item in found:
            print(f"    {item['score']:.2f}  {item['key']:<24} {excerpt(item['value'])}  ({took})")


def use_filters(store: criomem.Storage) -> None:
    heading("Filtering")
    for words, filters in (
        ("iterator", {"tags": ["example"]}),
        ("class", {"metadata": {"words": {"$lt": 15}}}),
        ("exception", {"created": "today", "tags": {"$nin": ["example"]}}),
    ):
        found = store.search("python", words, limit=None, **filters)
        best = found[0]["key"] if found else "nothing"
        print(f"  {words!r} with {json.dumps(filters)}: {len(found)} facts, best {best}")


def use_time_to_live(store: criomem.Storage, clock: Clock) -> None:
    heading("A time to live, and a namespace of one user's own")
    store.remember("users/42", "favorite_color", "dark green", label="what the user likes")
    store.remember("users/42", "session", {"cart": ["tea"]}, ttl_secs=3600)
    print(f"  users/42 holds {[item['key'] for item in store.search('users/42')]}")
    clock.ahead += 3601
    print(f"  an hour later  {[item['key'] for item in store.search('users/42')]}")
    print(
        f"  asked for 'favorite colors': {store.search('users/42', 'favorite colors')[0]['value']}"
    )
    print(f"  prune removed {store.prune()['memory_items_deleted']} expired row")
    print(f"  everything about the user forgotten: {store.forget_all('users/42')} fact")


def show_file(store: criomem.Storage, path: Path) -> None:
    heading("The file")
    report = store.compact()
    print(f"  {path}")
    print(f"  {report['bytes_after'] / 1e6:.2f} MB, deleted content erased: {report['erased']}")
    print(f"  check() found {store.check() or 'nothing wrong'}")


def run(source: Path | None, path: Path) -> None:
    clock = Clock()
    with criomem.Storage(path, clock=clock) as store:
        store_facts(store, own_facts(source) if source else python_reference())
        if source is None:
            ask_questions(store, QUESTIONS)
            use_filters(store)
        else:
            keys = [str(item["value"]) for item in store.search("", limit=3)]
            ask_questions(store, tuple(" ".join(key.split()[:6]) for key in keys))
        use_time_to_live(store, clock)
        show_file(store, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", type=Path, help="a text, or JSON lines of facts")
    parser.add_argument("--db", type=Path, help="where to keep the file")
    options = parser.parse_args()
    if options.db is not None:
        run(options.source, options.db)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(options.source, Path(folder) / "tour.db")


if __name__ == "__main__":
    main()
