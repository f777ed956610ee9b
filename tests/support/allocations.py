"""The most bytes that stood at one time, of what was allocated meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._profiler import _EventType
from torch.profiler import profile


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """The list that it gives has one number when the block has ended.

    Without shapes, for which the profiler would hold weak references to tensors: a meta parameter
    could then not be exchanged.
    """
    found: list[int] = []
    with profile(profile_memory=True) as profiler:
        yield found
    results = profiler.profiler.kineto_results
    waiting = list(results.experimental_event_tree())
    events = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    alive: dict[int, int] = {}
    total = peak = 0
    for _, address, num_bytes in sorted(events):
        # What was there before does not count; what another thread freed, the profiler missed.
        total -= alive.pop(address, 0)
        if num_bytes > 0:
            alive[address] = num_bytes
            total += num_bytes
            peak = max(peak, total)
    found.append(peak)
