"""Kernels of several graphs are built in one file, and are there when the graphs run."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import nothing_cached
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_dynamo.graph_mode import inductor
from fsdp_dynamo.graph_mode.inductor import built_together

WIDTHS = (3, 5, 7)


def _compiled(width: int) -> Callable[..., Any]:
    """``sin(x) + width``, as Inductor compiles it."""
    gm = make_fx(lambda x: (x.sin() + width,), tracing_mode="fake")(torch.rand(width))
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with values[0].fake_mode:
        return compile_fx_inner(gm, values)  # type: ignore[return-value]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of kernels of every wait."""
    calls: list[int] = []
    wait = AsyncCompile.wait

    def counted(builds: AsyncCompile, scope: dict[str, Any]) -> None:
        calls.append(sum(name.startswith("cpp_fused") for name in scope))
        wait(builds, scope)

    monkeypatch.setattr(AsyncCompile, "wait", counted)
    return calls


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """No kernel has a library, and none is loaded."""
    with fresh_cache(), nothing_cached():
        for name in [name for name in sys.modules if name.endswith(".kernel")]:
            del sys.modules[name]
        yield


def _build_together() -> None:
    with built_together([torch.rand(1), 2]):
        compiled = [_compiled(width) for width in WIDTHS]
    _require_right(compiled)


def _require_right(compiled: list[Callable[..., Any]]) -> None:
    for run, width in zip(compiled, WIDTHS, strict=False):
        x = torch.rand(width)
        torch.testing.assert_close(run([x])[0], x.sin() + width)


def _libraries() -> list[Path]:
    """Those that kernels have been loaded from, one for each kernel."""
    modules = [module for name, module in sys.modules.items() if name.endswith(".kernel")]
    files = [Path(str(module.__file__)) for module in modules]
    return [file for file in files if file.is_relative_to(cache_dir())]


def _built() -> int:
    """Number of different libraries of the kernels; what they were built in is gone."""
    libraries = _libraries()
    assert len(libraries) == len(WIDTHS)
    others = set(Path(cache_dir()).rglob("*.so")) - set(libraries)
    assert not [file for file in others if ".main" in file.name or "joined" in file.name]
    assert not [folder for folder in Path(cache_dir()).glob("tmp*") if any(folder.rglob("*.cpp"))]
    return len({file.stat().st_ino for file in libraries})


def test_kernels_are_built_in_one_file(
    empty_cache: None, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end; other processes load them from there."""
    with built_together([torch.rand(1), 2]):
        compiled = [_compiled(width) for width in WIDTHS]
        assert waits == []
    assert waits == [1] * len(WIDTHS)
    _require_right(compiled)
    assert _built() == 1

    spec = importlib.util.spec_from_file_location("another.kernel", _libraries()[0])
    assert spec is not None
    with pytest.raises(ImportError, match=r"another\.kernel is not in this library"):
        importlib.util.module_from_spec(spec)

    def refuse(builder: CppBuilder) -> None:
        raise AssertionError(f"{builder.get_target_file_path()} is there")

    CppPythonBindingsCodeCache.cache_clear()  # as in another process, of Inductor alone
    monkeypatch.setattr(CppBuilder, "build", refuse)
    _require_right([_compiled(width) for width in WIDTHS])


def _refuse_links(source: Path, target: Path) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))


@pytest.mark.parametrize(
    ("owner", "name", "value", "num_libraries"),
    [
        pytest.param(inductor, "_KERNELS_A_FILE", 2, 2, id="side by side"),
        pytest.param(inductor, "joined_source", lambda sources: "#error", 3, id="one by one"),
        pytest.param(os, "link", _refuse_links, 3, id="copies"),
    ],
)
@pytest.mark.usefixtures("empty_cache")
def test_kernels_are_built_otherwise(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, num_libraries: int
) -> None:
    monkeypatch.setattr(inductor, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(owner, name, value)
    _build_together()
    assert _built() == num_libraries


def test_kernels_of_other_devices_are_waited_for_at_once(waits: list[int]) -> None:
    with nothing_cached(), built_together([torch.empty(1, device="meta")]):
        _compiled(3)
        assert waits == [1]


@pytest.mark.usefixtures("empty_cache")
def test_an_error_leaves_nothing_behind(waits: list[int]) -> None:
    before = dict(vars(AsyncCompile))

    def fail() -> None:
        with built_together([torch.rand(1)]):
            _compiled(WIDTHS[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dict(vars(AsyncCompile)) == before
    assert waits == []
    _require_right([_compiled(WIDTHS[0])])  # its build was put off
