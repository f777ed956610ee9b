"""torch.func's transforms."""

from __future__ import annotations

import pytest
import torch
from torch import func
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch.autograd import forward_ad

X = torch.ones(2)


@pytest.mark.private(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.TransformType",
    need="a unit's collectives and views are made outside of torch.func's transforms, in which new "
    "tensors have no memory to be sent; a transform that has a backward of its own is refused",
    instead="torch._C._DisableFuncTorch, which leaves autograd functions inside",
)
def test_transforms_may_be_left() -> None:
    seen = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append([one.key() for one in retrieve_all_functorch_interpreters()])
        with temporarily_clear_interpreter_stack():
            seen.append(_functorch.peek_interpreter_stack() is None)
            seen.append(torch.zeros(2).data_ptr() != 0)
        return 2 * x

    assert _functorch.peek_interpreter_stack() is None
    assert func.jvp(func.grad(lambda x: call(x).sum()), (X,), (X,))[0].tolist() == [2, 2]
    assert seen == [[TransformType.Jvp, TransformType.Grad], True, True]


@pytest.mark.private(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.maybe_get_level",
    "torch._C._functorch.get_unwrapped",
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack",
    need="the outer graph's tensors in a unit's output: its backward starts with their gradients",
    instead="an autograd function with setup_context around the output, whose jvp is its forward",
)
def test_a_dual_tensor_is_two_of_the_outer_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        output = x * weight
        top = _functorch.peek_interpreter_stack()
        assert top is not None
        for one in (output, forward_ad.unpack_dual(output).tangent):
            assert one is not None
            assert _functorch.maybe_get_level(one) == top.level()
            seen.append(_functorch.get_unwrapped(one))
        with temporarily_pop_interpreter_stack():
            assert not any(map(_functorch.is_functorch_wrapped_tensor, seen))
        return output

    gradients: list[torch.Tensor] = []
    output, tangent = func.jvp(call, (X,), (3 * X,))
    for one in seen:
        one.register_hook(gradients.append)
    (output + 2 * tangent).sum().backward()
    assert sorted(gradient.tolist() for gradient in gradients) == [[1, 1], [2, 2]]
