"""Copies that checkpoints make of a device's tensors, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from fsdp_dynamo.checkpoint import saving


@contextmanager
def as_if_on_a_device() -> Iterator[None]:
    """All tensors are taken for a device's, and copied by torch's stager."""
    stager = StateDictStager()
    with (
        mock.patch.object(saving, "_is_on_device", lambda leaf: isinstance(leaf, torch.Tensor)),
        mock.patch.object(saving, "_stager", return_value=stager),
        mock.patch.object(torch.accelerator, "synchronize"),
    ):
        yield
