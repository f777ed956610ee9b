"""Writes the page that lists every private name of torch that the project uses.

That is ``docs/decisions/records/private-api.md``::

    python tools/private_api.py [--check]

Names come from the source: imports and attributes of private modules, and private attributes of
any object that no file here defines. What a name is needed for, and what to do when it is gone,
comes from the mark ``private`` of its test in ``tests/private_api``, if it has one. With
``--check`` nothing is written; the exit code is 1 if a test names what is not used, or the page
would change.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "decisions" / "records" / "private-api.md"
TESTS = ROOT / "tests" / "private_api"
DOCUMENTED = ("_asdict", "_replace")
"""Of named tuples: public in spite of the underscore."""

SOURCES = ("fsdp_dynamo", "graph_passes", "benchmarks")

_OF_TORCH = {*dir(nn.Module), *vars(nn.Module()), *dir(torch.Tensor)}

HEAD = """\
# Private API

Names of torch, and of libraries that are built on it, that begin with an underscore or live in a
module that does, and that this project uses; also what else it relies on without a promise. This
page is written by `python tools/private_api.py`.

A behaviour whose loss no other test would show has a quick test that needs nothing of this project:

    python -m pytest --confcutdir tests/private_api tests/private_api

runs these tests on any version, also a nightly, and a failure says what to do. All other names have
no test of their own: without such a name, an import or the tests of its users fail.
"""
TABLE = """
## {title}

| name | needed for | when it is gone | used in | test |
|---|---|---|---|---|
"""
USERS = """
## Without a test of their own

| name | used in |
|---|---|
"""


class Need(NamedTuple):
    """What a test's mark says of the names that it exercises."""

    names: tuple[str, ...]
    need: str
    instead: str
    test: str


# Names in the source ---------------------------------------------------------------------------


def is_private(name: str) -> bool:
    """Whether one part of a dotted name is private, and not an attribute that we set."""
    is_ours = name.startswith("_fsdp_") or name in DOCUMENTED
    return name.startswith("_") and not is_ours and not name.endswith("__")


def _imported(tree: ast.Module) -> dict[str, str]:
    """Dotted names of what a file imports, by the names that it uses for them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({a.asname: a.name for a in node.names if a.asname})
            found.update({a.name.partition(".")[0]: a.name.partition(".")[0] for a in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def _dotted(node: ast.AST, imported: dict[str, str]) -> str | None:
    """The full name of an expression that begins with an import; ``None`` for others."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    owner = _dotted(node.value, imported) if isinstance(node, ast.Attribute) else None
    return None if owner is None else f"{owner}.{node.attr}"  # type: ignore[attr-defined]


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names of functions, methods and attributes that a file makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name):
                yield node.attr
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (one.id for one in targets if isinstance(one, ast.Name))


def _names(node: ast.AST, imported: dict[str, str]) -> Iterator[str]:
    """Names at one node: in full, or ``.name`` of an object that is not known."""
    name = _dotted(node, imported)
    if name is not None:
        if name.startswith("torch.") and any(map(is_private, name.split("."))):
            yield name
    elif isinstance(node, ast.Attribute):
        yield f".{node.attr}"
    elif isinstance(node, ast.ClassDef):  # its methods may replace those of torch
        yield from (f".{one.name}" for one in node.body if isinstance(one, ast.FunctionDef))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
        text = node.args[1]
        if isinstance(text, ast.Constant):
            yield f".{text.value}"


def _uses(tree: ast.Module) -> Iterator[str]:
    imported = _imported(tree)
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if id(node) in owners and _dotted(node, imported):
            continue  # part of a longer name
        for name in _names(node, imported):
            if not name.startswith(".") or is_private(name[1:]):
                yield name


def used_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Private names that these files do not define themselves, each with the files that use it.

    Args:
        sources: text of each file.

    Returns:
        Files by name; ``.name`` is an attribute of an object whose module the file does not show.
    """
    trees = {path: ast.parse(text) for path, text in sources.items()}
    names = {name for tree in trees.values() for name in _defined(tree)}
    own = {f".{name}" for name in names - _OF_TORCH}
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for name in sorted(set(_uses(tree)) - own):
            found.setdefault(name, []).append(path)
    return found


# What tests say of them ------------------------------------------------------------------------


def needs_of(text: str) -> Iterator[Need]:
    """The marks ``private`` of a file of tests."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.private":
                    names = tuple(ast.literal_eval(one) for one in mark.args)
                    said = {str(one.arg): ast.literal_eval(one.value) for one in mark.keywords}
                    yield Need(names, said["need"], said["instead"], node.name)


def covers(name: str, used: str) -> bool:
    """Whether a name in a mark is that of a use, or of the module or object that it belongs to."""
    if used.startswith("."):
        return name == used[1:] or name.endswith(used)
    return f"{used}.".startswith(f"{name}.")


# The page --------------------------------------------------------------------------------------


def page(tests: dict[str, str], sources: dict[str, str]) -> str:
    """The page's text: a table per file of tests, and one of the names that no test has."""
    used = used_names(sources)
    tested: list[str] = []
    text = HEAD
    for path, source in tests.items():
        title = str(ast.get_docstring(ast.parse(source))).partition("\n")[0].rstrip(".")
        text += TABLE.format(title=title)
        for need in needs_of(source):
            text += _row(need, path, used, sources)
            tested += need.names
    text += USERS
    for name, files in sorted(used.items()):
        if not any(covers(one, name) for one in tested):
            text += f"| `{name}` | {_list(files)} |\n"
    return text


def _places(need: Need, used: dict[str, list[str]], sources: dict[str, str]) -> list[str]:
    """Files that use a name, or else those that have all as words: in strings, or as our own."""
    found = {
        file
        for name, files in used.items()
        for file in files
        if any(covers(marked, name) for marked in need.names)
    }
    words = [re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\b") for name in need.names]
    return sorted(found) or [
        path for path, text in sources.items() if all(word.search(text) for word in words)
    ]


def _row(need: Need, path: str, used: dict[str, list[str]], sources: dict[str, str]) -> str:
    names = ", ".join(f"`{name}`" for name in need.names)
    link = f"[{need.test}](../../../{path})"
    where = _list(_places(need, used, sources))
    return f"| {names} | {need.need} | {need.instead} | {where} | {link} |\n"


def _list(files: list[str]) -> str:
    return "<br>".join(f"`{file}`" for file in files)


def faults(tests: dict[str, str], sources: dict[str, str]) -> list[str]:
    """Names in marks that no source has."""
    marked = [name for text in tests.values() for need in needs_of(text) for name in need.names]
    words = {word for text in sources.values() for word in re.findall(r"\w+", text)}
    return [
        f"{name} has a test in tests/private_api, and is not used"
        for name in marked
        if name.rpartition(".")[2] not in words
    ]


def texts(folders: tuple[Path, ...], pattern: str) -> dict[str, str]:
    """Files below folders: text by path from the project's root."""
    files = sorted(path for folder in folders for path in folder.rglob(pattern))
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def main() -> int:
    """Write or check the page; the exit code is 1 for a fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    tests = texts((TESTS,), "test_*.py")
    sources = texts(tuple(ROOT / folder for folder in SOURCES), "*.py")
    found = faults(tests, sources)
    text = page(tests, sources)
    if not check:
        PAGE.write_text(text)
    elif text != PAGE.read_text():
        found.append(f"{PAGE.relative_to(ROOT)} is old; python tools/private_api.py writes it")
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
