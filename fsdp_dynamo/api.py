"""The name that ``torch.distributed.fsdp`` gives to its configuration types."""

from fsdp_dynamo.config import *  # noqa: F403
from fsdp_dynamo.config import __all__ as __all__
