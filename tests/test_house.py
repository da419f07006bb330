"""The house: order of sections, sizes, where SQL stands, the public names, which file is tested."""

import ast
import inspect
import re
import sqlite3
from pathlib import Path

import pytest
from helpers import ROOT, raw, run_child

import criomem

SOURCE = (ROOT / "criomem.py").read_text()
TREE = ast.parse(SOURCE)
LINES = SOURCE.splitlines()
BANNER = re.compile(r"# ---- (\S.*\S) -+")
ORDER = [
    "Errors",
    "Records and settings",
    "Schema",
    "Values",
    "Words",
    "Filters",
    "Encryption",
    "Database",
    "Audit",
    "Search",
    "Items",
    "Threads",
    "Storage",
    "Agent memory",
    "Dialogues",
    "Async",
]
NO_SQL = {
    "Errors",
    "Records and settings",
    "Values",
    "Words",
    "Agent memory",
    "Dialogues",
    "Async",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# ---- Sections -----------------------------------------------------------------------------------


def sections(lines):
    """The titles of the banners and their lines."""
    found = [(match[1], n) for n, line in enumerate(lines, 1) if (match := BANNER.fullmatch(line))]
    assert found, "no banners"
    return found


def section_of(line, found):
    """The number and the title of the section in which a line stands; 0 is before the first."""
    number = sum(start <= line for _, start in found)
    return number, found[number - 1][0] if number else "the head"


def bound_names(target):
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}


def defined_at(tree):
    """The first line at which each global name of the module is defined."""
    lines = {}
    for node in tree.body:
        names = set()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names = {node.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = set().union(*map(bound_names, targets))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            names = {
                n.id
                for n in ast.walk(node)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            } | {n.name for n in ast.walk(node) if isinstance(n, (*FUNCTIONS, ast.ClassDef))}
        for name in names:
            lines.setdefault(name, node.lineno)
    return lines


def without_annotations(node):
    """The children of a node that run; annotations are exempt."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def own_names(scope):
    """What a function or comprehension binds itself."""
    names = set()
    if isinstance(scope, (*FUNCTIONS, ast.Lambda)):
        a = scope.args
        listed = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        names |= {one.arg for one in listed if one}
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
            continue
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name:
            names.add(node.name)
        elif isinstance(node, SCOPES):
            continue
        todo.extend(ast.iter_child_nodes(node))
    return names


def used_globals(node, hidden=frozenset()):
    """(name, line) of every global name that is read at or below a node."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in hidden:
        yield node.id, node.lineno
    if isinstance(node, SCOPES):
        hidden = hidden | own_names(node)
    for child in without_annotations(node):
        yield from used_globals(child, hidden)


def culprits(source):
    """Every use of a name that a later section defines, in words."""
    tree, found = ast.parse(source), sections(source.splitlines())
    defined = defined_at(tree)
    told = []
    for name, line in used_globals(tree):
        here, title = section_of(line, found)
        there, later = section_of(defined.get(name, 0), found)
        if there > here:
            told.append(
                f"line {line}, section {title}: uses {name}, which section {later} defines in"
                f" line {defined[name]}"
            )
    return told


def test_a_section_uses_only_what_stands_above_it():
    assert culprits(SOURCE) == []


def test_the_search_for_culprits_finds_one_and_names_line_section_and_name():
    source = """
# ---- First ---
def early(late: "Late" = None, *, own=1) -> "Late":
    local = [other for other in ()]
    return local, other_late(), own
class Early:
    later = 1
# ---- Second ---
def other_late(): return Early
class Late: pass
other = 1
"""
    (told,) = culprits(source)
    assert told.startswith("line 5, section First: uses other_late, which section Second")


def test_the_banners_are_one_line_to_column_100_and_in_order():
    titles = [title for title, _ in sections(LINES)]
    assert [title for title in ORDER if title in titles] == titles
    assert len(set(titles)) == len(titles)
    for title, line in sections(LINES):
        assert len(LINES[line - 1]) == 100, f"line {line}: the banner of {title}"
    wanted = {"Errors", "Schema", "Values", "Words", "Filters", "Database", "Search", "Storage"}
    assert wanted <= set(titles)


# ---- Sizes --------------------------------------------------------------------------------------


def sizes(kinds):
    nodes = [node for node in ast.walk(TREE) if isinstance(node, kinds)]
    assert nodes
    return {f"{n.name} (line {n.lineno})": n.end_lineno - n.lineno + 1 for n in nodes}


def test_no_function_is_longer_than_70_lines():
    assert {name: size for name, size in sizes(FUNCTIONS).items() if size > 70} == {}


def test_no_class_is_longer_than_450_lines():
    assert {name: size for name, size in sizes(ast.ClassDef).items() if size > 450} == {}


def test_the_file_stays_within_its_size_and_its_lines_within_100_columns():
    assert len(LINES) <= 6500
    assert max(map(len, LINES)) <= 100


def test_every_public_name_has_a_docstring():
    bare = []
    for name in criomem.__all__:
        thing = getattr(criomem, name)
        if not inspect.isclass(thing):
            continue
        members = {name: thing} | {
            f"{name}.{key}": part
            for key, part in vars(thing).items()
            if inspect.isfunction(part) and not key.startswith("_")
        }
        bare += [full for full, part in members.items() if not (part.__doc__ or "").strip()]
    assert bare == []


# ---- SQL ----------------------------------------------------------------------------------------

STATEMENT = re.compile(
    r"""\s*(SELECT\b.*\bFROM | INSERT\ INTO | UPDATE\b.*\bSET | DELETE\ FROM
      | (CREATE|DROP|ALTER)\ (TABLE|INDEX|VIRTUAL|TRIGGER|UNIQUE) | WITH\ RECURSIVE
      | PRAGMA\s | BEGIN(\ IMMEDIATE)?$ | COMMIT$ | ROLLBACK | SAVEPOINT | RELEASE
      | VACUUM | ATTACH)""",
    re.DOTALL | re.VERBOSE,
)


def sql_texts():
    """(line, text) of every string that is a statement, docstrings left out."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(TREE)
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(TREE):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = node.value
            if isinstance(text, str) and STATEMENT.match(text):
                yield node.lineno, text


def test_sql_stands_only_where_it_may():
    found = sections(LINES)
    texts = list(sql_texts())
    assert len(texts) > 40, "the search for statements finds too few"
    misplaced = {line: text for line, text in texts if section_of(line, found)[1] in NO_SQL}
    assert misplaced == {}


def calls(attribute, owner=None):
    for node in ast.walk(TREE):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if node.func.attr == attribute and (
                owner is None or (isinstance(of, ast.Name) and of.id == owner)
            ):
                yield node.lineno


def test_connections_are_opened_in_the_database_section_alone():
    found = sections(LINES)
    lines = list(calls("connect", "sqlite3"))
    assert lines
    assert {section_of(line, found)[1] for line in lines} == {"Database"}


@pytest.mark.parametrize("method", ["commit", "rollback", "executescript", "enable_load_extension"])
def test_transactions_go_through_the_two_doors(method):
    found = sections(LINES)
    assert {section_of(line, found)[1] for line in calls(method)} <= {"Database"}


def test_nothing_is_pickled_or_evaluated():
    words = {"pickle", "marshal", "shelve", "eval", "exec", "__import__"}
    used = {node.id for node in ast.walk(TREE) if isinstance(node, ast.Name)}
    imported = {
        alias.name
        for node in ast.walk(TREE)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert words & (used | imported) == set()


# ---- Public names -------------------------------------------------------------------------------


def test_all_lists_every_public_class_and_function_and_nothing_else():
    own = {
        name
        for name, thing in vars(criomem).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == criomem.__name__
    }
    assert own - set(criomem.__all__) == set()
    assert {name for name in criomem.__all__ if not hasattr(criomem, name)} == set()
    assert {name for name in criomem.__all__ if name.startswith("_")} == set()
    assert len(set(criomem.__all__)) == len(criomem.__all__)


def all_groups():
    """The groups of `__all__`, which comments part."""
    (start,) = [n for n, line in enumerate(LINES) if line.startswith("__all__ = [")]
    groups = [[]]
    for line in LINES[start + 1 : LINES.index("]", start)]:
        if line.strip().startswith("#"):
            groups.append([])
        groups[-1] += re.findall(r'"(\w+)"', line)
    return [group for group in groups if group]


def test_each_group_of_all_is_sorted():
    groups = all_groups()
    assert [name for group in groups for name in group] == criomem.__all__
    assert groups == [sorted(group) for group in groups]


def test_every_error_has_a_stable_code_and_the_one_base():
    wanted = {
        "CriomemError": (None, Exception),
        "ValidationError": ("invalid_value", ValueError),
        "InvalidStateError": ("invalid_state", criomem.ValidationError),
        "NotFoundError": ("not_found", LookupError),
        "DuplicateError": ("duplicate_id", criomem.CriomemError),
        "ConflictError": ("conflict", criomem.CriomemError),
        "ThreadBusyError": ("thread_busy", criomem.CriomemError),
        "RunInterruptedError": ("run_interrupted", criomem.CriomemError),
        "StorageError": ("storage_error", criomem.CriomemError),
        "KeyRequiredError": ("key_required", criomem.StorageError),
        "WrongKeyError": ("wrong_key", criomem.StorageError),
        "SchemaError": ("schema", criomem.StorageError),
        "TamperedError": ("tampered", criomem.StorageError),
        "UnavailableError": ("unavailable", ImportError),
        "EmbedderError": ("embedder", criomem.CriomemError),
    }
    there = {
        name: thing
        for name, thing in vars(criomem).items()
        if inspect.isclass(thing) and issubclass(thing, Exception) and not name.startswith("_")
    }
    assert there.keys() <= wanted.keys()
    for name, error in there.items():
        code, base = wanted[name]
        assert issubclass(error, base)
        assert issubclass(error, criomem.CriomemError)
        assert code is None or error.code == code
        assert error.__module__ == criomem.__name__


def test_a_storage_error_tells_the_name_that_sqlite_gives_it(path):
    with criomem.Storage(path, busy_timeout_secs=0.01) as store, raw(path) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(criomem.StorageError) as caught:
            store.remember("a", "k", 1)
        assert "SQLITE_BUSY" in str(caught.value)
        assert isinstance(caught.value.__cause__, sqlite3.Error)


# ---- Which file is tested -----------------------------------------------------------------------


def test_the_file_of_this_folder_is_the_one_that_is_tested():
    assert Path(criomem.__file__) == ROOT / "criomem.py"


def test_children_import_the_same_file(tmp_path):
    told = run_child("import criomem; print(criomem.__file__)", cwd=tmp_path)
    assert Path(told) == ROOT / "criomem.py"


def test_the_top_level_holds_what_it_may_and_nothing_else():
    allowed = {"pyproject.toml", "criomem.py", "tests", "bench", "README.md"}
    there = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert there - allowed - {"__pycache__"} == set()
