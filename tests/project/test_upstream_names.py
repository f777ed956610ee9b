"""Every public name of ``torch.distributed.fsdp`` is here, or in the tables of names that differ.

Names are those of the installed torch: classes, functions, arguments and their defaults, members of
enums, fields of dataclasses, methods, and attributes that upstream's wrapper sets on itself.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as upstream

import fsdp_dynamo

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
MODULES = ("", ".api", ".fully_sharded_data_parallel", ".sharded_grad_scaler", ".wrap")
SAME, OTHER, REFUSED = "same", "other", "refused"
_ABSENT = object()


def _table() -> dict[str, tuple[str, str]]:
    """By name, what it is here, and the sentence that says how it differs."""
    found: dict[str, tuple[str, str]] = {}
    row = rf"^\| (`.*?) \| ({OTHER}|{REFUSED}) \| (.*?) \|$"
    for names, here, why in re.findall(row, PAGE, re.MULTILINE):
        for name in re.findall(r"`(.*?)`", names):
            assert name not in found, name
            found[name] = (here, why)
    return found


def _names(module: ModuleType) -> list[str]:
    """Its ``__all__`` and what it exports beside; without one, its own classes and functions."""
    listed = list(getattr(module, "__all__", ()))
    exported = vars(module) if module is upstream or not listed else ()
    own = [n for n in exported if not n.startswith("_") and inspect.isclass(vars(module)[n])]
    if module is not upstream:
        own = [n for n in own if vars(module)[n].__module__ == module.__name__]
    return sorted({*listed, *own})


def _default(value: object) -> str:
    return getattr(value, "name", None) or repr(value)


def _arguments(function: Callable[..., Any]) -> list[tuple[str, str]] | None:
    """Names, kinds and defaults, in order; ``None`` where anything is taken."""
    found = []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_POSITIONAL:
            return None
        if not one.name.startswith("_") and one.kind is not one.VAR_KEYWORD:
            kind = "by name" if one.kind is one.KEYWORD_ONLY else "in order"
            default = "" if one.default is one.empty else _default(one.default)
            found.append((one.name, f"{kind}, {default}"))
    return found


def _compared(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    """Names below one of upstream's and itself, each with what it is here."""
    yield name, REFUSED if ours is None else SAME
    if ours is None or ours is theirs:
        return
    if inspect.isclass(theirs):
        yield from _compared_members(name, theirs, ours)
    elif callable(theirs):
        yield from _compared_arguments(name, theirs, ours)


def _compared_members(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    if issubclass(theirs, enum.Enum):
        for key, member in theirs.__members__.items():
            value = getattr(ours.__members__.get(key), "value", _ABSENT)
            yield f"{name}.{key}", _same(value, value == member.value)
        return
    if dataclasses.is_dataclass(theirs):
        fields = {f.name: f.default for f in dataclasses.fields(ours)}
        for field in dataclasses.fields(theirs):
            if not field.name.startswith("_"):
                own = fields.get(field.name, _ABSENT)
                yield f"{name}.{field.name}", _same(own, _default(own) == _default(field.default))
        return
    yield from _compared_arguments(name, theirs.__init__, ours.__init__)
    for cls in theirs.__mro__:
        for key in vars(cls) if cls.__module__.startswith("torch.distributed.fsdp") else ():
            if not key.startswith("_"):
                own = getattr(ours, key, _ABSENT)
                if own is getattr(theirs, key):  # inherited: it works on upstream's own state
                    own = _ABSENT
                yield f"{name}.{key}", _same(own, True)
                if callable(own):
                    yield from _compared_arguments(f"{name}.{key}", getattr(theirs, key), own)


def _compared_arguments(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    wanted, given = _arguments(theirs), _arguments(ours)
    if wanted is None or given is None:
        return
    known = dict(given)
    for position, (key, kind) in enumerate(wanted):
        own = known.get(key, _ABSENT)
        in_order = kind.startswith("by name") or given[position : position + 1] == [(key, kind)]
        yield f"{name}({key})", _same(own, in_order and own == kind)


def _same(ours: object, is_equal: bool) -> str:
    if ours is _ABSENT:
        return REFUSED
    return SAME if is_equal else OTHER


def _attributes() -> set[str]:
    """Public attributes that upstream's constructor sets."""
    source = inspect.getsource(import_module("torch.distributed.fsdp._init_utils"))
    return set(re.findall(r"^ +state\.([a-z]\w*)(?:: [^=]*)? = ", source, re.MULTILINE))


def _walk() -> dict[str, str]:
    """All of upstream's names, each with what it is here."""
    found: dict[str, str] = {}
    for suffix in MODULES:
        theirs = import_module(f"torch.distributed.fsdp{suffix}")
        ours = import_module(f"fsdp_dynamo{suffix}")
        for name in _names(theirs):
            own = getattr(ours, name, None)
            is_at_the_top = suffix and hasattr(upstream, name)
            if not is_at_the_top or own is not getattr(fsdp_dynamo, name):
                found.update(_compared(name, getattr(theirs, name), own))
    for name in _attributes():
        own = getattr(fsdp_dynamo.FSDP, name, None)
        found[f"FullyShardedDataParallel.{name}"] = SAME if own is not None else REFUSED
    return found


def test_every_name_is_here_or_in_the_table() -> None:
    walk, table = _walk(), _table()
    assert len(walk) > 180
    assert len(_attributes()) >= 12
    kept = {name: here for name, here in walk.items() if here != SAME}
    assert sorted(kept.keys() - table.keys()) == [], "say in the table how it differs"
    assert {name: here for name, here in kept.items() if here != table[name][0]} == {}


def test_the_table_is_true() -> None:
    """A name that is refused is not here; one that the installed torch lacks is of some only."""
    walk = _walk()
    for name, (here, why) in _table().items():
        assert here in (OTHER, REFUSED), name
        assert re.fullmatch(r"[A-Z`].*\.", why), (name, why)
        if name in walk:
            assert here == walk[name] or (here, walk[name]) == (OTHER, SAME), name
        else:
            assert "Older torch lacks " in why, name
