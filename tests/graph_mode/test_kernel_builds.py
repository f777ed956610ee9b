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


def _fail(compiled: Callable[..., Any]) -> None:
    raise ZeroDivisionError


def _build_together() -> None:
    with built_together([torch.rand(1), 2]):
        compiled = [_compiled(width) for width in WIDTHS]
    _require_right(compiled)


def _require_right(compiled: list[Callable[..., Any]]) -> None:
    for run, width in zip(compiled, WIDTHS, strict=True):
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


def test_kernels_are_waited_for_at_the_end(waits: list[int]) -> None:
    with nothing_cached():
        with built_together([torch.rand(1), 2]):
            compiled = [_compiled(width) for width in WIDTHS]
            assert waits == []
        assert waits == [1] * len(WIDTHS)
        _require_right(compiled)


@pytest.mark.usefixtures("empty_cache")
def test_kernels_are_built_in_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    _build_together()
    assert _built() == 1

    def refuse(builder: CppBuilder) -> None:
        raise AssertionError(f"{builder.get_target_file_path()} is there")

    CppPythonBindingsCodeCache.cache_clear()  # as in another process, of Inductor alone
    monkeypatch.setattr(CppBuilder, "build", refuse)
    _require_right([_compiled(width) for width in WIDTHS])


@pytest.mark.usefixtures("empty_cache")
def test_many_kernels_are_built_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_KERNELS_A_FILE", 2)
    monkeypatch.setattr(inductor, "get_compile_threads", lambda: 2)
    _build_together()
    assert _built() == 2


@pytest.mark.usefixtures("empty_cache")
def test_kernels_that_cannot_be_joined_are_built_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inductor, "joined_source", lambda sources: "#error planted")
    _build_together()
    assert _built() == len(WIDTHS)


@pytest.mark.usefixtures("empty_cache")
def test_a_file_system_without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))

    monkeypatch.setattr(os, "link", refuse)
    _build_together()
    assert _built() == len(WIDTHS)  # copies
    sizes = {file.stat().st_size for file in _libraries()}
    assert len(sizes) == 1


@pytest.mark.usefixtures("empty_cache")
def test_a_library_that_another_process_has_made_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    link, made = os.link, []

    def be_late(source: Path, target: Path) -> None:
        if not made:
            made.append(target.write_bytes(Path(source).read_bytes()))
        link(source, target)

    monkeypatch.setattr(os, "link", be_late)
    _build_together()
    assert _built() == 2


@pytest.mark.usefixtures("empty_cache")
def test_a_kernel_that_a_library_lacks_is_not_loaded_from_it() -> None:
    _build_together()
    library = _libraries()[0]
    spec = importlib.util.spec_from_file_location("another.kernel", library)
    assert spec is not None
    with pytest.raises(ImportError, match=r"another\.kernel is not in this library"):
        importlib.util.module_from_spec(spec)


def test_kernels_of_other_devices_are_waited_for_at_once(waits: list[int]) -> None:
    with nothing_cached(), built_together([torch.empty(1, device="meta")]):
        _compiled(3)
        assert waits == [1]


@pytest.mark.usefixtures("empty_cache")
def test_an_error_leaves_nothing_behind(waits: list[int]) -> None:
    before = dict(vars(AsyncCompile))
    with pytest.raises(ZeroDivisionError), built_together([torch.rand(1)]):
        _fail(_compiled(WIDTHS[0]))
    assert dict(vars(AsyncCompile)) == before
    assert waits == []
    _require_right([_compiled(width) for width in WIDTHS])  # the first one's build was put off
