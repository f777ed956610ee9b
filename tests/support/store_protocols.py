"""Everything that ranks do together through their store, as jobs of simulated ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fsdp_dynamo.checkpoint import coordination
from fsdp_dynamo.comm import collective_log, watchdog
from fsdp_dynamo.health import graph_agreement, late_ranks
from fsdp_dynamo.health.collective_order import find_order_mismatch
from fsdp_dynamo.health.comparison import awaited, require_same, share_from_first, texts_over
from fsdp_dynamo.health.store import shared_store
from graph_passes.text.listing import SEPARATOR

_NUM_UNITS = 100


def _entries(group: Any, odd: bool) -> list[str]:
    """A graph's collectives; the last rank's last one is another, if asked for."""
    entries = [f"all_gather_into_tensor blocks.{i}#0 bfloat16 10 - - g" for i in range(_NUM_UNITS)]
    if odd and group.rank() == group.size() - 1:
        entries[-1] = entries[0]
    return entries


def _options(group: Any) -> None:
    require_same(group, "options", "bucket=True " * 20)


def _late(group: Any) -> None:
    """The last rank is late: the others look more than once what the first one waits for."""
    group.meeting.wait()
    if group.rank() == group.size() - 1:
        time.sleep(2.5 * watchdog.PERIOD_S)
    _options(group)


def _graph(group: Any, odd: bool = False) -> None:
    graph_agreement._compare(group, shared_store(group), SEPARATOR.join(_entries(group, odd)))


def _other_graph(group: Any) -> None:
    _graph(group, odd=True)


def _rates(group: Any) -> str:
    return share_from_first(group, "rates", lambda: "1.0 " * 100)


def _failure(group: Any) -> dict[int, str]:
    own = "ValueError: no such width" if group.rank() == 1 else ""
    return texts_over([group], "wrapping", own, awaited("wrapping"))


def _waiting(group: Any, odd: bool = False) -> str | None:
    """Ranks that wait for each other, and compare what they have issued."""
    store = shared_store(group)
    for entry in _entries(group, odd):
        collective_log.record(group, "all_gather", entry.split()[1], 10)
    find_order_mismatch(group, store, "1")
    group.meeting.wait()
    return find_order_mismatch(group, store, "1")


def _begin_save(group: Any) -> None:
    channel = coordination._Channel(group)  # torch would create another group
    coordination.STATE.channels[group] = channel
    coordination._group_of(group, "checkpoint to save: step 3")


def _announce(group: Any) -> None:
    late_ranks.publish_state()


PROTOCOLS: dict[str, Callable[[Any], Any]] = {
    "options are compared": _options,
    "options are compared, one rank is late": _late,
    "a graph of 100 units is compared": _graph,
    "one rank has another graph": _other_graph,
    "rates that one rank has measured": _rates,
    "one rank fails while it wraps": _failure,
    "ranks that wait compare collectives": _waiting,
    "a save begins": _begin_save,
    "a rank begins to compile": _announce,
}
