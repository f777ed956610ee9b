"""Build units from a module and the user's arguments: ``FSDP``, ``fully_shard`` and policies.

The names exported here are those of ``torch.distributed.fsdp.wrap``.
"""

from fsdp_dynamo.wrap.attributes import enable_wrap, wrap
from fsdp_dynamo.wrap_policy import (
    CustomPolicy,
    ModuleWrapPolicy,
    WrapPolicy,
    _or_policy,  # noqa: F401  # other people's scripts import it
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "WrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
