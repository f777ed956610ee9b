"""Compiled code."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from compiling import boxed, product, product_alone, with_settings
from torch import fx
from torch._functorch._aot_autograd import graph_compile

pytestmark = pytest.mark.usefixtures("fresh", "cache")


@pytest.mark.private(
    "torch._inductor.compile_fx.compile_fx_inner",
    need="each distinct stretch of a graph between two collectives is compiled by itself, once, "
    "and called wherever it stands; it lets go of the inputs that it is given",
    instead="torch._inductor.standalone_compile for each stretch",
)
def test_a_part_of_a_graph_lets_go_of_its_inputs() -> None:
    from torch._inductor.compile_fx import compile_fx_inner

    left: list[int] = []

    def inner(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        kwargs |= {"static_input_idxs": ()}
        compiled = compile_fx_inner(product_alone(*inputs), list(inputs), **kwargs)

        def run(args: list[Any]) -> Any:
            x, y = args
            given = [x, y]
            (once,) = compiled(given)
            left.append(len(given))
            return compiled([once, y])

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    x, y = torch.rand(4, 4), torch.rand(4, 4)
    compiled = torch.compile(lambda x, y: (x @ y) @ y, backend=with_settings({}, inner))
    assert torch.equal(compiled(x, y), (x @ y) @ y)
    assert left == [0]


@pytest.mark.private(
    "user_visible_output_idxs",
    need="outputs of a stretch keep the strides that they were traced with, with which the next "
    "stretches are compiled: Inductor may pad all but a user's own",
    instead="the strides that a stretch's code gives, put into the values of its outputs before "
    "the next one is compiled",
)
def test_an_output_keeps_its_strides_on_request() -> None:
    from torch._inductor.compile_fx import compile_fx_inner

    def strides_with(visible: list[int]) -> Any:
        def inner(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            body = product_alone(*inputs)
            body.graph.output_node().meta["user_visible_output_idxs"] = visible
            compiled = compile_fx_inner(body, list(inputs), **kwargs)

            def run(args: list[Any]) -> Any:
                results = compiled(args)
                strides.extend(one.stride() for one in results)
                return results

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        strides: list[Any] = []
        torch.compiler.reset()
        settings = {"disable_padding_cpu": False, "fx_graph_cache": False}  # not in the cache's key
        backend = with_settings(settings, inner)
        torch.compile(product, backend=backend)(torch.rand(2, 2), torch.rand(2, 1025))
        return strides

    assert strides_with([0]) == [(1025, 1)]
    assert strides_with([]) != [(1025, 1)]  # else the request is not needed any more


@pytest.mark.private(
    "torch._guards.TracingContext.try_get",
    "TracingContext.output_strides",
    need="Inductor reports the strides of a graph's outputs, by which AOTAutograd compiles the "
    "backward; it is kept from reporting those of stretches, and those of the whole graph are "
    "reported in their place",
    instead="TracingContext.report_output_strides() around each stretch, and its list thrown away",
)
def test_strides_of_outputs_are_reported_on_request() -> None:
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx_inner

    reported: list[Any] = []
    given: list[Any] = []

    def inner(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        context = TracingContext.try_get()
        assert context is not None
        if kwargs.get("is_backward"):
            given.extend(one.stride() for one in inputs)
            return boxed(gm)
        strides, context.output_strides = context.output_strides, None
        assert strides == []
        compiled = compile_fx_inner(gm, inputs, **kwargs)
        context.output_strides = strides
        assert strides == []
        outputs: Any = gm.graph.output_node().args[0]
        reported.extend(node.meta["val"].stride()[::-1] for node in outputs)
        strides.extend(reported)
        return compiled

    assert TracingContext.try_get() is None
    backend = with_settings({}, inner)
    x, y = torch.rand(2, 3), torch.rand(3, 4, requires_grad=True)
    torch.compile(product, backend=backend)(x, y).sum().backward()
    _, saved = reported
    assert given[0] == saved


@pytest.mark.private(
    "torch._functorch._aot_autograd.graph_compile.collect_bw_donated_buffer_idxs",
    "torch._functorch._aot_autograd.graph_compile",
    "torch._functorch.config.saved_tensors_hooks_filtering_mode",
    need="replaced while graphs are compiled: Inductor may write into what is saved for a backward "
    "and read by nothing else, and takes its positions among the inputs of the backward for those "
    "among a segment's or a stretch's",
    instead="torch._functorch.config.donated_buffer, and backwards that cannot be retained",
)
def test_nothing_is_found_to_donate() -> None:
    from torch._guards import TracingContext

    def compiled(found: list[int], **settings: Any) -> list[torch.Tensor]:
        """Gradients by two backwards of one forward; appends to the positions of donations."""

        def inner(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            context: Any = TracingContext.try_get()
            if kwargs.get("is_backward"):
                found.extend(context.fw_metadata.bw_donated_idxs or [])
            return boxed(gm)

        torch.compiler.reset()
        settings |= {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        with torch._functorch.config.patch(settings):
            x = torch.rand(2, 3, requires_grad=True)
            y = torch.compile(
                lambda x: (x.sin() @ x.cos().t()).exp(), backend=with_settings({}, inner)
            )(x)
        return [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]

    found: list[int] = []
    with mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[]):
        first, second = compiled(found)
    assert not found
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="donated buffers"):  # else nothing need be replaced
        compiled(found)
    assert found
    with pytest.raises(RuntimeError, match="donated buffers"):  # else the setting is enough
        compiled([], donated_buffer=False)
    # Hooks that are graphs apply to what is donated, if nothing else is asked for.
    assert torch._functorch.config.saved_tensors_hooks_filtering_mode == "donated"


@pytest.mark.private(
    "torch._functorch.config.force_non_lazy_backward_lowering",
    need="the backward is compiled before the backend returns: with its settings, and while "
    "other ranks wait for what this one compiles",
    instead="settings put in place again, and ranks that wait, when a backward is compiled",
)
def test_a_backward_is_compiled_with_its_forward() -> None:
    phases: list[bool] = []

    def inner(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        phases.append(bool(kwargs.get("is_backward")))
        return boxed(gm)

    def phases_of(**settings: Any) -> list[bool]:
        def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
            with torch._functorch.config.patch(enable_autograd_cache=False, **settings):
                return with_settings({}, inner)(gm, inputs)

        phases.clear()
        torch.compiler.reset()
        x, y = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
        torch.compile(product, backend=backend)(x, y)
        return list(phases)

    assert phases_of(force_non_lazy_backward_lowering=True) == [False, True]
    assert phases_of() == [False]  # else the setting is not needed any more


class _Product(torch.autograd.Function):
    """Nothing that takes a C++ compiler."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad @ grad


@pytest.mark.private(
    "torch._functorch.config.autograd_cache_allow_custom_autograd_functions",
    need="AOTAutograd keeps graphs with a traced autograd.Function of the user's",
    instead="nothing: a later start then partitions and plans anew, and only the stretches' code "
    "is kept",
)
def test_graphs_with_functions_are_cached_on_demand() -> None:
    from torch._dynamo.utils import counters

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True):
            return with_settings({})(gm, inputs)

    def hits_and_misses() -> list[int]:
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(_Product.apply, backend=backend, fullgraph=True)
        compiled(torch.rand(4, 4, requires_grad=True)).sum().backward()
        return [counters["aot_autograd"][f"autograd_cache_{one}"] for one in ("hit", "miss")]

    assert hits_and_misses() == [0, 1]
    assert hits_and_misses() == [1, 0]
