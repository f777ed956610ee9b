"""The public names: all of the modules that ``docs/api`` shows or a page tells to import from."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = ("fsdp_dynamo", "graph_passes")
PAGES = "\n".join(p.read_text() for p in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")))
TOLD = re.findall(rf"^ *from ((?:{'|'.join(OURS)})[\w.]*) import ([\w, ]+)", PAGES, re.MULTILINE)


def _find(entry: str) -> tuple[str, str]:
    """Module and name of what a page shows; no name where that is a whole module."""
    owner, _, name = entry.rpartition(".")
    is_module = hasattr(import_module(owner), "__path__") and find_spec(entry) is not None
    return (entry, "") if is_module else (owner, name)


SHOWN = [_find(entry) for entry in re.findall(r"^::: (.+)", PAGES, re.MULTILINE)]
MODULES = {name: import_module(name) for name, _ in SHOWN + TOLD}
PUBLIC = {f"{m}.{n}": getattr(module, n) for m, module in MODULES.items() for n in module.__all__}


def _functions(things: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Each function, and the docstring that describes it: of ``__init__`` that of the class."""
    for path, thing in things.items():
        if inspect.isfunction(thing):
            yield path, inspect.unwrap(thing), thing.__doc__ or ""
        for cls in thing.__mro__ if inspect.isclass(thing) else ():
            for name, kept in vars(cls).items() if cls.__module__.startswith(OURS) else ():
                inner = (getattr(kept, attribute, None) for attribute in ("fget", "__func__"))
                function = inspect.unwrap(next(filter(None, inner), kept))
                if name in ("__init__", "__post_init__"):
                    yield path, function, cls.__doc__ or ""
                elif name[0] != "_" and inspect.isfunction(function):
                    yield f"{path}.{name}", function, inspect.getdoc(getattr(cls, name)) or ""


def _is_torchs(thing: object) -> bool:
    return inspect.isclass(thing) and thing.__module__.startswith("torch.")


def test_every_public_name_has_an_entry() -> None:
    """But torch's own, under our name; what a module shows may be at the top, too."""
    whole = {module for module, name in SHOWN if not name}
    shown = [getattr(MODULES[module], name) for module, name in SHOWN if name]
    lacking = [p for p in PUBLIC if "__" not in p and not {p, p.rpartition(".")[0]} & whole]
    shown += [getattr(MODULES[module], n) for module in whole for n in MODULES[module].__all__]
    shown += [thing for thing in PUBLIC.values() if _is_torchs(thing)]
    assert [path for path in lacking if not any(PUBLIC[path] is one for one in shown)] == []
    names = {f"{module}.{name.strip()}" for module, given in TOLD for name in given.split(",")}
    assert sorted(names - PUBLIC.keys()) == []


def test_docstrings_say_what_arguments_are_and_what_is_raised() -> None:
    """Three arguments or more; to name what says it, as in "see ``save``", is enough."""
    for path, function, text in _functions(PUBLIC):
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        others = [function.__globals__.get(name) for name in re.findall(r"see ``(\w+)``", text)]
        said = "\n".join([text, *(inspect.getdoc(other) or "" for other in others)])
        lacking = [n for n in names if len(names) > 2 and not re.search(rf"\b{n}\b", said)]
        is_made = function.__code__.co_filename.startswith("<")  # by a dataclass
        tree = ast.parse("" if is_made else textwrap.dedent(inspect.getsource(function)))
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]:
            kind = getattr(getattr(node.exc, "func", None), "id", "")
            known = {**vars(builtins), **function.__globals__}.get(kind, object)
            bases = [base.__name__ for base in getattr(known, "__mro__", ())][:-1]
            in_raises = re.search(rf"Raises:.*\b({'|'.join(bases)})\b", said, re.DOTALL)
            lacking += [kind] if bases and not in_raises else []
        assert lacking == [], path
