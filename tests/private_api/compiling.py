"""What tests of the compilers share: partitions, settings, and a product that is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]


def boxed(gm: fx.GraphModule) -> Callable[..., Any]:
    """A graph that takes its inputs in a list."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(gm.forward)  # type: ignore[no-any-return]


def with_settings(settings: dict[str, Any], inner: Callable[..., Any] | None = None) -> Any:
    """A backend: Inductor with settings, and with another inner compiler."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(gm, inputs, inner or compile_fx_inner, config_patches=settings)

    return backend


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Nothing that takes a C++ compiler, neither here nor in the gradient of ``y``."""
    return x @ y


def product_alone(x: torch.Tensor, y: torch.Tensor) -> fx.GraphModule:
    """The product of two fake tensors as a graph by itself."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    nodes.append(graph.call_function(torch.ops.aten.mm.default, tuple(nodes)))
    for node, value in zip(nodes, (x, y, torch.mm(x, y)), strict=True):
        node.meta["val"] = value
    graph.output((nodes[-1],))
    return fx.GraphModule({}, graph)


def compile_product(settings: dict[str, Any], inner: Callable[..., Any] | None = None) -> None:
    """Compile ``product`` and its backward as if for the first time."""
    torch.compiler.reset()
    x, y = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
    torch.compile(product, backend=with_settings(settings, inner))(x, y).sum().backward()
