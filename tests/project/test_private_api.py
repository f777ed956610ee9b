"""Every use of torch's private names is in docs/private-api.md, beside a test that notices."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "private-api.md"
PACKAGES = ("fsdp_dynamo", "graph_passes")
OF_TORCH = {*dir(nn.Module), *vars(nn.Module()), *dir(torch.Tensor)}

_ROWS = re.compile(r"^\| (.*`.+?) \| .+? \| (.*) \|$", re.MULTILINE)
_TESTS = re.compile(r"\[(\w+)\]\(\.\./tests/([\w/]+)\.py\): (test_\w+(?:, test_\w+)*)")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("_fsdp_") and not name.endswith("__")


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
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _names(node: ast.AST, imported: dict[str, str]) -> Iterator[str]:
    """Names at one node: in full, or ``.name`` of an object that is not known."""
    name = _dotted(node, imported)
    if name is not None:
        is_private = name.startswith("torch.") and any(map(_is_private, name.split(".")))
        yield from [name] * is_private
    elif isinstance(node, ast.Attribute):
        yield f".{node.attr}"
    elif isinstance(node, ast.ClassDef):  # its methods may replace those of torch
        yield from (
            f".{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)
        )
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
        text = node.args[1]
        if isinstance(text, ast.Constant):
            yield f".{text.value}"


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and private name of each use."""
    imported = _imported(tree)
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if id(node) in owners and _dotted(node, imported):
            continue  # part of a longer name
        for name in _names(node, imported):
            if not name.startswith(".") or _is_private(name[1:]):
                yield node.lineno, name


def _used() -> dict[str, str]:
    """Private names that are not our own, each with the first place."""
    files = [p for package in PACKAGES for p in (ROOT / package).rglob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in sorted(files)}
    own = {f".{name}" for tree in trees.values() for name in _defined(tree) if name not in OF_TORCH}
    found: dict[str, str] = {}
    for path, tree in trees.items():
        for line, name in _uses(tree):
            if name not in own:
                found.setdefault(name, f"{path.relative_to(ROOT)}:{line}")
    return found


def _listed() -> list[str]:
    """Names in the first column of the page's tables."""
    rows = _ROWS.findall(PAGE.read_text())
    return [name for first, _ in rows for name in re.findall(r"`([\w.]+)`", first)]


def _is_listed(name: str, listed: list[str]) -> bool:
    """In full, or as part of a module or object that is listed; an attribute by its own name."""
    if name.startswith("."):
        return any(one == name[1:] or one.endswith(name) for one in listed)
    return any(f"{name}.".startswith(f"{one}.") for one in listed)


def test_every_use_is_listed() -> None:
    listed = _listed()
    assert {n: place for n, place in _used().items() if not _is_listed(n, listed)} == {}


def test_every_listed_name_is_used() -> None:
    files = [p for package in PACKAGES for p in (ROOT / package).rglob("*.py")]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    assert [name for name in _listed() if name.rpartition(".")[2] not in words] == []


def test_tests_that_notice_exist() -> None:
    rows = _ROWS.findall(PAGE.read_text())
    assert len(rows) > 50
    for name, tests in rows:
        assert _TESTS.sub("", tests).replace("<br>", "") == "", name
        for label, file, functions in _TESTS.findall(tests):
            text = (ROOT / "tests" / f"{file}.py").read_text()
            assert label == Path(file).name
            for function in functions.split(", "):
                assert f"\ndef {function}(" in text, (name, function)
