"""Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import compile_product, partition

pytestmark = pytest.mark.usefixtures("fresh", "cache")


@pytest.mark.private(
    "torch._inductor.compile_fx.compile_fx",
    need="a backend of ours hands its graph to Inductor, with settings made for that graph and "
    "with an inner compiler of its own, which plans forward and backward and cuts them",
    instead="compile_fx_inner for each stretch, below an aot_autograd of our own",
)
def test_settings_hold_in_forward_and_backward() -> None:
    from torch._inductor.compile_fx import compile_fx_inner

    assert torch._inductor.config.fx_graph_cache
    seen: list[tuple[bool, bool]] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        holds = not torch._inductor.config.fx_graph_cache
        seen.append((holds, bool(kwargs.get("is_backward"))))
        return compile_fx_inner(*args, **kwargs)

    compile_product({"fx_graph_cache": False}, inner)
    assert seen == [(True, False), (True, True)]


@pytest.mark.private(
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch._inductor.config.post_grad_custom_post_pass",
    need="Inductor's last pass on a stretch is ours, and so a part of the keys of Inductor's and "
    "AOTAutograd's caches; in the latter it has our code, the plan's options and the graph's marks",
    instead="a plain function in its place, with which Inductor caches nothing",
)
@pytest.mark.private(
    "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "torch._inductor.config.custom_partitioner_fn",
    need="our partition below Inductor, as a part of the key of AOTAutograd's cache",
    instead="an aot_autograd(partition_fn=...) of our own, with compile_fx_inner as its compiler",
)
@pytest.mark.private(
    "torch._inductor.config.fx_graph_cache",
    "torch._functorch.config.enable_autograd_cache",
    need="no graph comes from a cache while graphs are shown, and no rank then waits for another",
    instead="torch.compiler.config.force_disable_caches, which also compiles C++ headers anew",
)
@pytest.mark.parametrize("what", ["pass", "partition"])
def test_what_changes_a_graph_is_a_part_of_the_cache_key(what: str) -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

    class Counted(CustomGraphPass, CustomPartitionerFn):
        def __init__(self, key: str) -> None:
            self.key = key
            self.calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return None if what == "pass" else partition(*args, **kwargs)

        def uuid(self) -> str:
            return self.key

        def __reduce__(self) -> tuple[Any, ...]:  # torch pickles a partition for the key
            return (str, ())

    setting = {"pass": "post_grad_custom_post_pass", "partition": "custom_partitioner_fn"}[what]
    one, equal, other = (Counted(key) for key in "aab")
    for each in (one, equal, other):
        compile_product({setting: each})
    graphs = 2 if what == "pass" else 1  # forward and backward, or the joint graph
    assert [one.calls, equal.calls, other.calls] == [graphs, 0, graphs]
    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compile_product({setting: equal})
    assert equal.calls == graphs
