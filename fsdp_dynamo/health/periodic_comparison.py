"""Comparison of what ranks issue on devices, now and then, whether or not a rank waits.

NCCL matches collectives by order and size alone. Ranks that run different units of equal size
exchange the wrong data, and if every rank issues as many collectives, no rank ever waits. So each
rank folds the collectives that it issues in a group into one number, and an all-reduce of 16 bytes
compares the numbers. No host waits for it, except before a checkpoint; the result is read at the
next comparison. With gloo none is needed, because each message carries a tag for its collective.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.streams import HostCopy, SideStreams, side_streams
from fsdp_dynamo.comm.watchdog import refuse_results
from fsdp_dynamo.dynamo.untraced import untraced
from fsdp_dynamo.errors import DivergenceError, with_section
from fsdp_dynamo.events import num_steps
from fsdp_dynamo.health.collective_order import CAUSE
from fsdp_dynamo.health.notices import difference_now, linked_groups, raise_on_all_ranks

_USE = "the comparison of collectives"


def compare_periodically(group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare the collectives of a group from now on, if hosts run ahead of the device."""
    if group.size() > 1 and side_streams(device) is not None:
        collective_log.compare_order(group, _Comparison(device))


def compare_before_saving() -> None:
    """Compare the collectives of all groups now, and wait for the results; all ranks must call it.

    Raises:
        DivergenceError: on every rank of a group: ranks have issued different collectives.
    """
    for group in linked_groups():
        compare = collective_log.comparison_of(group)
        if compare is not None:
            compare(group, waits=True)


class _Comparison:
    """Comparisons of a group's collectives, and those of which the results are to come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_flight: list[HostCopy] = []

    @untraced("ranks compare their collectives eagerly")
    def __call__(self, group: dist.ProcessGroup, *, waits: bool) -> None:
        """Start a comparison, and read the results that are there, or all.

        Raises:
            DivergenceError: on every rank of the group: ranks have issued different collectives.
        """
        streams = side_streams(self._device)
        if streams is None or streams.is_capturing:
            return
        self._in_flight.append(_started(group, self._device, streams))
        done = [copy for copy in self._in_flight if waits or copy.is_done]
        results = [copy.wait().tolist() for copy in done]
        self._in_flight = [copy for copy in self._in_flight if copy not in done]
        if any(largest != -negated_smallest for largest, negated_smallest in results):
            error = difference_now(group) or DivergenceError(_unknown())
            refuse_results(error)
            raise_on_all_ranks(error)


@torch.no_grad()
def _started(group: dist.ProcessGroup, device: torch.device, streams: SideStreams) -> HostCopy:
    """Start to compute the maxima of the ranks' numbers and of these negated."""
    number = collective_log.digest(group)
    values = torch.empty(2, dtype=torch.int64, device=device)
    for value, sign in zip(values, (1, -1), strict=True):
        value.fill_(sign * number)  # by kernels: the host must not wait for a copy
    collective_log.record(group, "all_reduce", "", 2, _USE)
    work = dist.all_reduce(values, dist.ReduceOp.MAX, group, async_op=True)
    return streams.copy_to_host(values, after=work)


def _unknown() -> str:
    return with_section(
        f"step {num_steps()}: expected the same collectives on all ranks, got others on some rank, "
        f"not among the last {collective_log.MAX_ENTRIES} that ranks have shown. {CAUSE}",
        "other-units-on-one-rank",
    )


__all__ = ["compare_before_saving", "compare_periodically"]
