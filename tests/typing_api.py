"""Uses the public names as a caller does; checked by mypy --strict, never run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

from criomem import (
    CompactReport,
    CriomemError,
    Item,
    PruneCounts,
    Stats,
    Storage,
    StorageError,
    ValidationError,
)


def facts() -> None:
    with Storage(Path("memory.db"), durable=False, clock=lambda: 0.0) as store:
        assert_type(store, Storage)
        store.remember("users/42", "diet", {"kind": "vegetarian"}, tags=["food"], ttl_secs=1.5)
        assert_type(store.remember_many([{"namespace": "n", "key": "k", "value": 1}]), int)
        store.update("users/42", "diet", label=None, ttl_secs=None)
        item = store.recall("users/42", "diet")
        assert_type(item, Item | None)
        if item is not None:
            assert_type(item["created_at_ms"], int)
            assert_type(item.get("label"), str | None)
        found = store.search("users", "diet", limit=None, metadata={"n": {"$gt": 1}})
        assert_type(found, list[Item])
        assert_type(store.namespaces(depth=1), list[str])
        assert_type(store.forget("users/42", "diet"), bool)
        assert_type(store.forget_all("users/42"), int)


def care(store: Storage) -> None:
    with store.transaction() as nothing:
        assert_type(nothing, None)
    assert_type(store.prune(progress=lambda done, total: None), PruneCounts)
    assert_type(store.stats(), Stats)
    assert_type(store.check(), list[str])
    assert_type(store.compact(), CompactReport)
    assert_type(store.export("users"), Iterator[dict[str, Any]])
    assert_type(store.import_items(store.export()), int)
    assert_type(store.reindex(), int)
    store.backup("copy.db")


def errors() -> None:
    try:
        Storage("memory.db").close()
    except ValidationError as error:
        assert_type(error.details, dict[str, str])
    except StorageError as error:
        assert_type(error.sqlite_error, str | None)
    except CriomemError as error:
        assert_type(error.code, str)
