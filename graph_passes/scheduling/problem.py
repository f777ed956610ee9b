"""A graph as a scheduling problem: steps of compute in a fixed order, and transfers to place.

    step 0   step 1   step 2   ...   step S-1
   ^        ^        ^                       ^
 gap 0    gap 1    gap 2                   gap S

A *step* is any node that is neither an input, a collective, a wait, nor part of a collective's
chain (the cast of a shard before its all-gather, the cast of a reduced gradient behind its wait).
Steps keep their order. A *transfer* is one collective with its chain. It may be issued in any gap
from ``ready``, where its input is there, to ``need``, before which its result is read. The decision
is how early to issue an all-gather, and how late to wait for a reduction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from graph_passes.cost_model import CostModel, messages_bytes, tensor_bytes, wire_bytes
from graph_passes.graph_utils import (
    collectives,
    group_of,
    is_collective,
    is_gather,
    is_view,
    is_wait,
    mutates,
    num_bytes,
    op_name,
    order_index,
    payload_bytes,
    wait_of,
)
from graph_passes.markers import Mark, mark_of, unit_of, wire_of
from graph_passes.wire_format import text_of

_MARGIN = 1.5
"""Factor on the time of a reduction whose result another collective sends."""

_CASTS = frozenset(
    {"aten::_to_copy", "aten::clone", "prims::convert_element_type", "fsdp_dynamo::to_device"}
)


@dataclass(frozen=True)
class Transfer:
    """One collective to place.

    Attributes:
        mark: identity of the collective.
        group: registered name of its process group; all ranks issue its transfers in one order.
        ms: duration when it has the link to itself.
        latency_ms: the part of ``ms`` that does not depend on the bytes.
        wire_bytes: bytes that this rank sends.
        ready: earliest gap for the issue.
        need: latest gap for the wait.
        held_bytes: of an all-gather, the bytes alive from its issue to ``need`` beyond those of a
            graph that issues it at ``need``; of a reduction, the bytes alive from ``ready`` to its
            wait beyond those of a graph that waits for it at once.
        dtype: dtype of what is sent.
        is_dependent: whether it sends the result of another transfer.
        link_name: name of a link shared with other groups; ``""``: its group has a link of its own.
        payload_bytes: bytes of the unsharded tensor.
        wire: format in which it travels, as text; ``""`` for none.
        tensor_bytes: bytes that this rank would send without a format.
        encode_ms: compute time at the issue.
        decode_ms: compute time at the wait.
    """

    mark: Mark
    group: str
    ms: float
    latency_ms: float
    wire_bytes: int
    ready: int
    need: int
    held_bytes: int
    dtype: str = ""
    is_dependent: bool = False
    link_name: str = ""
    payload_bytes: int = 0
    wire: str = ""
    tensor_bytes: int = 0
    encode_ms: float = 0.0
    decode_ms: float = 0.0

    @property
    def link(self) -> str:
        """Name of the link, on which transfers follow one another."""
        return self.link_name or self.group

    def may_share_launch(self, other: Transfer) -> bool:
        """Whether the two may be one launch: alike, and neither sends another one's result.

        Within a gap, transfers that send results are issued behind the others.
        """
        alike = self._launch_key == other._launch_key
        return alike and not self.is_dependent and not other.is_dependent

    @property
    def _launch_key(self) -> tuple[str, ...]:
        return self.mark.kind, self.group, self.dtype, self.wire

    @property
    def is_gather(self) -> bool:
        """Whether it is an all-gather, not a reduction."""
        return self.mark.kind == "all_gather"


@dataclass(frozen=True)
class Problem:
    """The transfers to place in one graph, between its steps.

    Attributes:
        compute_ms: duration of each step.
        units: FQN of the unit that each step belongs to.
        base_bytes: bytes alive during each step, with every gather issued where it is needed and
            every reduction waited for at once.
        transfers: in the order in which the unscheduled graph issues them.
    """

    compute_ms: tuple[float, ...]
    units: tuple[str, ...]
    base_bytes: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def step_starts_ms(self) -> tuple[float, ...]:
        """Start of each step if nothing had to be waited for; the last entry is the end."""
        return tuple(accumulate(self.compute_ms, initial=0.0))

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.compute_ms)

    def segment_starts(self) -> list[int]:
        """Return the gaps in which the computing unit changes; the first is 0."""
        return [g for g, u in enumerate(self.units) if g == 0 or u != self.units[g - 1]]


@dataclass(frozen=True)
class Chain:
    """The nodes of one transfer.

    Attributes:
        before: nodes on which only the collective depends, in order.
        collective: the collective.
        wait: its wait.
        after: nodes that depend on the wait alone, in order; no step reads them.
    """

    before: tuple[fx.Node, ...]
    collective: fx.Node
    wait: fx.Node
    after: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Dissection:
    """Parts of a graph: inputs, steps and chains, each in graph order."""

    placeholders: tuple[fx.Node, ...]
    steps: tuple[fx.Node, ...]
    chains: tuple[Chain, ...]


def dissect(graph: fx.Graph) -> Dissection:
    """Divide a graph whose collectives have marks and one wait each into steps and chains."""
    issued = list(collectives(graph))
    taken: set[fx.Node] = set()
    chains = []
    for node in issued:
        before = _private_inputs(node)
        after = _private_users(wait_of(node)) if not is_gather(node) else ()
        chains.append(Chain(before, node, wait_of(node), after))
        taken.update((*before, node, wait_of(node), *after))
    inputs = tuple(n for n in graph.nodes if n.op in ("placeholder", "get_attr"))
    fixed = {*inputs, *taken}
    steps = tuple(n for n in graph.nodes if n not in fixed and n.op != "output")
    return Dissection(inputs, steps, tuple(chains))


def _private_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes that lead from an input of the graph to an all-gather only."""
    if not is_gather(node):
        return ()
    chain: list[fx.Node] = []
    current = node
    while len(current.all_input_nodes) == 1:
        source = current.all_input_nodes[0]
        if source.op == "placeholder":
            return tuple(reversed(chain))
        if not (is_view(source) or op_name(source) in _CASTS) or len(source.users) > 1:
            return ()
        chain.append(source)
        current = source
    return ()


def _private_users(wait: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes that depend on a reduction's wait alone."""
    return tuple(_grow({wait}))[1:]


def _grow(inside: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the given nodes and, breadth first, all nodes whose only input is one of them."""
    pending = deque(inside)
    while pending:
        node = pending.popleft()
        yield node
        for user in node.users:
            if user in inside or user.op == "output" or is_collective(user) or is_wait(user):
                continue
            if len(user.all_input_nodes) == 1:  # a cast, a division
                inside.add(user)
                pending.append(user)


def problem_of(graph: fx.Graph, cost: CostModel, parts: Dissection | None = None) -> Problem:
    """Return the problem that a graph poses, without memory (``base_bytes`` are 0)."""
    parts = parts or dissect(graph)
    gaps = _Gaps(
        before={node: gap for gap, node in enumerate(parts.steps)},
        behind={node: gap + 1 for gap, node in enumerate(parts.steps)},
        last=len(parts.steps),
        position=order_index(graph),
    )
    compute_ms = tuple(cost.compute_ms(node) for node in parts.steps)
    pinned = _pinned_gaps(parts, gaps, cost, compute_ms)
    transfers = tuple(_transfer(chain, gaps, cost, pinned) for chain in parts.chains)
    return Problem(compute_ms, _units(parts.steps), (0,) * len(parts.steps), transfers)


class _Gaps(NamedTuple):
    """Gaps before and behind each step, the last gap, and the position of every node."""

    before: dict[fx.Node, int]
    behind: dict[fx.Node, int]
    last: int
    position: dict[fx.Node, int]


def _units(steps: tuple[fx.Node, ...]) -> tuple[str, ...]:
    """Return each step's unit; a node without a mark belongs to the unit before it."""
    units: list[str] = []
    for node in steps:
        unit = unit_of(node)
        units.append(unit if unit is not None else (units[-1] if units else ""))
    return tuple(units)


def _pinned_gaps(
    parts: Dissection, gaps: _Gaps, cost: CostModel, compute_ms: tuple[float, ...]
) -> dict[fx.Node, int]:
    """Return the gaps of collectives that send another collective's result: these do not move.

    Such a collective stays where it is. But a reduction whose result only leaves the graph (over
    replicas) goes to the gap in which the other one will have ended: issued earlier it has nothing
    to send, and both are held up.
    """
    bringers = {n: chain for chain in parts.chains for n in (chain.wait, *chain.after)}
    starts_ms = tuple(accumulate(compute_ms, initial=0.0))
    pinned: dict[fx.Node, int] = {}
    for chain in parts.chains:
        sources = (chain.before or (chain.collective,))[0].all_input_nodes
        other = next((bringers[n] for n in sources if n in bringers), None)
        if other is None:
            continue
        here = gaps.position[chain.collective]
        earlier = (gap for node, gap in gaps.behind.items() if gaps.position[node] < here)
        gap = max(earlier, default=0)
        if _only_leaves(chain):
            gap = max(gap, pinned.get(other.collective, 0))
            done_ms = starts_ms[gap] + _MARGIN * cost.collective_ms(other.collective)
            gap = min(bisect_left(starts_ms, done_ms), len(compute_ms))
        pinned[chain.collective] = gap
    return pinned


def _only_leaves(chain: Chain) -> bool:
    """Whether the result of a chain is only an output of the graph."""
    own = {chain.wait, *chain.after}
    return all(user in own or user.op == "output" for node in own for user in node.users)


def _transfer(chain: Chain, gaps: _Gaps, cost: CostModel, pinned: dict[fx.Node, int]) -> Transfer:
    node = chain.collective
    mark = mark_of(node)
    assert mark is not None  # dissect finds marked collectives only
    sources = (chain.before or (node,))[0].all_input_nodes
    writers = [
        user
        for source in sources
        for user in source.users
        if gaps.position[user] < gaps.position[node] and mutates(user, source)
    ]
    ready = max((gaps.behind.get(n, 0) for n in (*sources, *writers)), default=0)
    users = {user for n in (chain.wait, *chain.after) for user in n.users}
    readers = [gaps.before[user] for user in users if user in gaps.before]
    dependents = [pinned[user] for user in users if user in pinned]
    need = min([gaps.last, *readers, *dependents])
    if node in pinned:
        ready = max(ready, pinned[node])
    messages = messages_bytes(node)
    held = num_bytes(chain.wait) + sum(num_bytes(n) for n in chain.before) + messages
    if not is_gather(node):  # the gradient and what is received, or the messages of both
        arrives = wire_bytes(node) if cost.receives_apart else 0
        held = messages or payload_bytes(node) + arrives
    dtype = getattr(node.meta.get("val"), "dtype", "")
    return Transfer(
        mark,
        group_of(node),
        cost.collective_ms(node),
        cost.link_of(node).latency_ms,
        wire_bytes(node),
        ready,
        need,
        held,
        str(dtype).removeprefix("torch."),
        node in pinned,
        cost.link_of(node).name,
        payload_bytes(node),
        text_of(wire_of(node)),
        tensor_bytes(node),
        *cost.coding_ms(node),
    )


__all__ = ["Chain", "Dissection", "Problem", "Transfer", "dissect", "problem_of"]
