"""The README and the docstrings do what they say."""

import ast
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

from helpers import child_env

import criomem

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    """Each python block, shifted so that its lines have the numbers they have in the README."""
    for match in BLOCK.finditer(README):
        yield "\n" * README.count("\n", 0, match.start(1)) + match.group(1)


def test_every_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    for block in blocks():
        exec(compile(block, "README.md", "exec"), names)
    assert "vegetarian, no nuts" in capsys.readouterr().out


def test_every_example_of_a_docstring_runs():
    failures, examples = doctest.testmod(criomem)
    assert failures == 0
    assert examples >= 6


def test_the_program_stands_in_the_first_30_lines_and_two_commands_follow():
    first = README.splitlines()[:30]
    assert "with Storage(" in "\n".join(first)
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert "bench/tour.py" in commands[0]
    assert "pytest" in commands[1]


def test_every_public_name_is_in_the_readme():
    missing = [name for name in criomem.__all__ if not re.search(rf"\b{name}\b", README)]
    assert missing == []


def test_every_public_method_of_a_storage_is_in_the_readme():
    methods = [name for name, _ in inspect.getmembers(criomem.Storage) if name[0] != "_"]
    assert [name for name in methods if not re.search(rf"\b{name}\b", README)] == []


def test_every_option_of_a_storage_is_in_the_readme():
    options = ["url", "on_busy", "busy_timeout_secs", "retention", "durable", "read_only", "clock"]
    assert [name for name in options if not re.search(rf"\b{name}\b", README)] == []


def test_the_size_stated_in_the_readme_is_the_file_s():
    stated = int(re.search(r"trust it: ([\d,]+) lines", README).group(1).replace(",", ""))
    lines = len((ROOT / "criomem.py").read_text(encoding="utf-8").splitlines())
    assert abs(lines - stated) <= 60, f"criomem.py has {lines} lines"


def test_everything_public_has_a_docstring():
    tree = ast.parse((ROOT / "criomem.py").read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    bare = []
    for node in tree.body:
        if isinstance(node, kinds) and node.name[0] != "_":
            members = node.body if isinstance(node, ast.ClassDef) else []
            inner = [m for m in members if isinstance(m, kinds) and m.name[0] != "_"]
            plain = [m for m in inner if not any(_is_property(d) for d in m.decorator_list)]
            bare += [n.name for n in (node, *plain) if not ast.get_docstring(n)]
    assert bare == []


def _is_property(decorator):
    return ast.unparse(decorator).split(".")[-1] in ("property", "setter")


def test_the_tour_runs_on_a_text_of_one_s_own(tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("Ada likes green tea.\n\nGrace is allergic to peanuts.\n", encoding="utf-8")
    command = [sys.executable, ROOT / "bench" / "tour.py", text]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=child_env())
    assert "2 facts" in done.stdout
    assert "nothing wrong" in done.stdout
