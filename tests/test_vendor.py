"""The file alone, copied into somebody's package under another name, with the bare interpreter."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

import criomem

PROGRAM = """
import logging, sys
sys.path.insert(0, sys.argv[1])
from application._vendored import memory
from application._vendored.memory import Storage, ValidationError

assert "criomem" not in sys.modules
assert "site" not in sys.modules
assert memory.__name__ == "application._vendored.memory"
with Storage(sys.argv[1] + "/facts.db") as store:
    store.remember("users/42", "diet", "vegetarian", tags=["food"], ttl_secs=60)
    store.remember_many({"namespace": "users/7", "key": str(n), "value": [n]} for n in range(3))
    assert store.search("users", "vegetarians", tags=["food"], created="today")[0]["key"] == "diet"
    assert store.search("", "vegetarian", mode="weighted")[0]["score"] == 1.0
    assert store.forget_all("users/7") == 3
    store.backup(sys.argv[1] + "/copy.db")
    assert len(list(store.export())) == 1
    assert store.compact()["erased"]
    assert store.check() == []
with Storage(sys.argv[1] + "/copy.db", read_only=True) as store:
    assert store.recall("users/42", "diet")["value"] == "vegetarian"
try:
    Storage("")
except memory.CriomemError as error:
    assert isinstance(error, ValidationError)
names = [name for name in logging.root.manager.loggerDict]
assert names == ["criomem"], names
print("done")
"""


@pytest.fixture
def vendored(tmp_path):
    """A folder with a package in which the file lies under another name, and nothing else."""
    package = tmp_path / "application" / "_vendored"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    shutil.copy(ROOT / "criomem.py", package / "memory.py")
    return tmp_path


@pytest.mark.parametrize("flags", [["-I", "-S"], ["-I", "-S", "-O"], ["-I", "-S", "-W", "error"]])
def test_the_file_works_alone_under_another_name_with_the_bare_interpreter(vendored, flags):
    command = [sys.executable, *flags, "-c", PROGRAM, str(vendored)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=vendored, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_the_import_of_the_file_needs_the_standard_library_alone():
    imported = set()
    for node in ast.walk(ast.parse(Path(criomem.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            imported.add(node.module.split(".")[0])
    extras = {"cryptography", "sqlite_vec", "numpy"}
    assert imported - extras <= sys.stdlib_module_names
    assert "criomem" not in imported


def test_a_name_for_itself_stands_nowhere_in_the_code_but_in_its_logger_and_files():
    """Where it were looked up as `criomem`, a vendored copy would meet another copy or none."""
    source = Path(criomem.__file__).read_text()
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert "criomem" not in names
    assert "import_module" not in source
