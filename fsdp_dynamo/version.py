"""This package's version, and those of torch that it works with; looked at before other imports.

Private parts of torch are used (``docs/decisions/records/private-api.md`` lists them), so a
version counts when all tests have passed with it. An older one is refused: what is used is not all
there. A newer one gets a warning: most likely it works.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
import torch.distributed as dist

__version__ = "0.1.0"
"""``pyproject.toml`` reads it from here, and ``CHANGELOG.md`` says what is in it."""

OLDEST = (2, 11)
NEWEST = (2, 15)


def check_torch(version: str = torch.__version__) -> None:
    """Refuse or warn of a version of torch that is not tested.

    Raises:
        ImportError: it is older than the oldest tested one, or no version at all.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else (0, 0)
    if minor < OLDEST:
        raise ImportError(
            f"fsdp_dynamo: expected torch {_named(OLDEST)} or newer, got {version}. "
            f"Install one: pip install 'torch>={_named(OLDEST)}'."
        )
    if minor > NEWEST:
        warnings.warn(
            f"fsdp_dynamo: expected torch {_named(NEWEST)}, with which it is tested, got "
            f"{version}. It may work; if it does not, install that one.",
            stacklevel=2,
        )


def check_distributed() -> None:
    """Refuse a torch that was built without ``torch.distributed``.

    Raises:
        ImportError: there is none.
    """
    if not dist.is_available():
        raise ImportError(
            f"fsdp_dynamo: expected a torch with torch.distributed, got {torch.__version__} built "
            "without it. Install a build that has it: those of PyPI do; from source, build with "
            "USE_DISTRIBUTED=1."
        )


def _named(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))


# -- torch features --------------------------------------------------------------------------------
# What differs between the supported versions of torch, by feature.
#
# No other file of this package asks for a version, or whether torch has a name.


# Public since torch 2.12, where the older names warn. Without torch.distributed there is none, of
# which ``check_distributed`` tells.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)
