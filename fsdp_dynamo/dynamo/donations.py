"""Saved tensors that compiled backwards may overwrite: none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch._functorch.config
from torch._functorch._aot_autograd import graph_compile


@contextmanager
def nothing_donated() -> Iterator[None]:
    """Let no backward of what is compiled inside write into what its forward has saved.

    AOTAutograd numbers the saved tensors that nothing else reads, and Inductor reuses their memory.
    It takes the numbers from the tracing context, which is that of the whole graph: those of one
    segment or stretch are, in another one, a parameter or a buffer. With AOTAutograd's setting
    ``donated_buffer`` off, a backward would refuse to be retained: so it finds nothing to donate.
    Saved-tensor hooks that are graphs would then apply to nothing by AOTAutograd's default, which
    is what is donated; so they apply to all that is saved, as in eager.
    """
    mode = torch._functorch.config.saved_tensors_hooks_filtering_mode
    with (
        patch.object(graph_compile, "collect_bw_donated_buffer_idxs", _none_found),
        torch._functorch.config.patch(
            saved_tensors_hooks_filtering_mode="all" if mode == "donated" else mode
        ),
    ):
        yield


def _none_found(*_: Any) -> list[int]:
    return []


__all__ = ["nothing_donated"]
