"""Parametrizations that a forward registers on the views that its modules hold.

``ParametrizationList`` calls ``set_()`` on the view, with itself. That writes nothing, but counts
as a write, after which autograd refuses all views of the buffer: its version is put back.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_dynamo.core.module_parameters import put_version_back
from fsdp_dynamo.dynamo.private_api import never_compiled_itself
from fsdp_dynamo.untraced import untraced


@functools.cache
def let_forwards_register_parametrizations() -> None:
    """Let parametrizations be registered on views, from now on.

    Graphs of other models in which buffers are registered go through the hook and stay whole.
    """
    register_module_buffer_registration_hook(_buffer_registered)


@never_compiled_itself
def _buffer_registered(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    if type(module) is ParametrizationList and tensor is not None:
        _registered(tensor)


@untraced("Dynamo traces no registration of a parametrization")
def _registered(tensor: torch.Tensor) -> None:
    if tensor._base is not None:
        put_version_back(tensor._base)
