"""Kernels of several graphs are built at the same time, and are there when the graphs run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import nothing_cached
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx_inner
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_dynamo.graph_path.kernel_builds import built_together

WIDTHS = (3, 5)


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


def test_kernels_are_waited_for_at_the_end(waits: list[int]) -> None:
    with nothing_cached():
        with built_together([torch.rand(1), 2]):
            compiled = [_compiled(width) for width in WIDTHS]
            assert waits == []
        assert waits == [1, 1]
        for run, width in zip(compiled, WIDTHS, strict=True):
            x = torch.rand(width)
            torch.testing.assert_close(run([x])[0], x.sin() + width)


def test_kernels_of_other_devices_are_waited_for_at_once(waits: list[int]) -> None:
    with nothing_cached(), built_together([torch.empty(1, device="meta")]):
        _compiled(3)
        assert waits == [1]


def test_an_error_leaves_nothing_behind(waits: list[int]) -> None:
    wait = AsyncCompile.wait
    with pytest.raises(ZeroDivisionError), built_together([torch.rand(1)]):
        raise ZeroDivisionError
    assert AsyncCompile.wait is wait
    assert waits == []
