"""Collectives as users write them for ``set_custom_all_gather`` and ``_reduce_scatter``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_dynamo.comm import collectives


class UserCollective:
    """FSDP2's ``AllGather`` or ``ReduceScatter``, of torch's collective; it counts its calls.

    Attributes:
        allocated: size, dtype and device of each tensor that it has made.
        is_own: of each call, whether it got tensors that it has made, or views of them.
    """

    def __init__(self, name: str, *, has_handle: bool = False) -> None:
        self._name, self._has_handle = name, has_handle
        self._made: set[int] = set()
        self.allocated: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = []
        self.is_own: list[bool] = []

    @property
    def calls(self) -> int:
        return len(self.is_own)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.full(size, float("nan"), dtype=dtype, device=device)
        self.allocated.append((tuple(size), dtype, device))
        self._made.add(made.untyped_storage().data_ptr())
        return made

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        *op: Any,
        async_op: bool = False,
        **named_op: Any,
    ) -> Any:
        used = {one.untyped_storage().data_ptr() for one in (output_tensor, input_tensor)}
        self.is_own.append(used <= self._made)
        # Looked up now: tests that record what runs replace it.
        collective: Callable[..., Any] = getattr(collectives, self._name)
        given = (output_tensor, input_tensor, *op)
        return collective(*given, group=group, async_op=self._has_handle, **named_op)


def gather_of_the_user(*, has_handle: bool = False) -> Any:
    return UserCollective("all_gather_single", has_handle=has_handle)


def scatter_of_the_user(*, has_handle: bool = False) -> Any:
    return UserCollective("reduce_scatter_single", has_handle=has_handle)
