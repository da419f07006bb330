"""Fixtures, and the profiles of hypothesis: dev by default, ci where CI is set, deep by hand."""

import faulthandler
import os

import pytest
from helpers import Clock, child, raw
from hypothesis import HealthCheck, settings

import criomem

_common = {
    "deadline": None,
    "print_blob": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("dev", max_examples=50, **_common)
settings.register_profile("ci", max_examples=60, derandomize=True, **_common)
settings.register_profile("deep", max_examples=3000, **_common)
_chosen = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
settings.load_profile(_chosen)

KINDS = ["memory", "file"]
HANGS_AFTER_SECS = 120


def pytest_configure(config):
    """A test that hangs ends the run and shows where every worker stands."""
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.hang_report = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config):
    config.hang_report.close()


@pytest.fixture(autouse=True)
def no_hang(request):
    faulthandler.dump_traceback_later(HANGS_AFTER_SECS, exit=True, file=request.config.hang_report)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "memory.db"


@pytest.fixture(params=KINDS)
def store(request, path, clock):
    """An open store of each kind; whatever a test does to it, the file is sound afterwards."""
    url = None if request.param == "memory" else path
    with criomem.Storage(url, clock=clock, durable=False) as opened:
        yield opened
        assert opened.check() == []


@pytest.fixture
def file_store(path, clock):
    """For what only a file has."""
    with criomem.Storage(path, clock=clock, durable=False) as opened:
        yield opened
        assert opened.check() == []


@pytest.fixture
def locked_out(path, clock):
    """A store whose write lock somebody else holds: what needs the lock fails with StorageError."""
    with criomem.Storage(path, clock=clock, durable=False, busy_timeout_secs=0.001) as opened:
        opened.remember("a", "k", "walnut")
        with raw(path) as other:
            other.execute("BEGIN IMMEDIATE")
            yield opened
            other.execute("ROLLBACK")
        assert opened.recall("a", "k")["value"] == "walnut"
        assert opened.check() == []


@pytest.fixture
def one_scope_term(monkeypatch):
    """All namespaces have one index term, all tags, all fields: as if their hashes collided."""
    remembered = [part for part in vars(criomem).values() if hasattr(part, "cache_clear")]
    for part in remembered:
        part.cache_clear()
    monkeypatch.setattr(criomem, "_term", lambda mark, *parts: mark + "collision")
    yield
    for part in remembered:
        part.cache_clear()


WRITER = """
import sys
import criomem
with criomem.Storage(sys.argv[1], durable=False) as store:
    n = 0
    while True:
        n += 1
        with store.transaction():
            store.remember("pair", "x", n)
            store.remember("pair", "y", n)
        if n == 5:
            print("ready", flush=True)
"""


@pytest.fixture
def writer(path):
    """Another process that writes pairs without end."""
    process = child(WRITER, path)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()
