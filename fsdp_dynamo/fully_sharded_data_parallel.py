"""The name that ``torch.distributed.fsdp`` gives to the module of its wrapper."""

from fsdp_dynamo.api import *  # noqa: F403
from fsdp_dynamo.state_dict.methods import OptimStateKeyType
from fsdp_dynamo.wrap.wrapper import FullyShardedDataParallel
from fsdp_dynamo.wrap_policy import CustomPolicy as CustomPolicy
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy as ModuleWrapPolicy

__all__ = ["FullyShardedDataParallel", "OptimStateKeyType"]
