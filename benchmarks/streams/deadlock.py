"""Searches programs of several ranks for deadlocks between collectives of different communicators.

A collective's kernel occupies a slot of its device from its start until all ranks of its
communicator have started theirs. Its stream is ready when all earlier work of the stream, the
events it waits for and the communicator's earlier collectives are complete. If more kernels are
ready than there are slots, the device may start any of them. Two ranks that fill their slots with
kernels of different communicators then wait for each other. Kernels that compute end by themselves;
they only order collectives.

What is searched, and why that is enough: the collectives that are complete form a *cut*, closed
under dependencies. Every cut can be reached with one slot by running one collective after the
other, so neither slots nor starts restrict the cuts, and a device's ready communicators depend on
the cut alone. A deadlock is a cut in which every rank can start kernels, until its slots are full
or no other kernel is ready, such that each communicator lacks a kernel. A rank with ``m`` ready
communicators and ``k`` slots leaves out ``m - k`` of them. So the communicators that are ready on
all of their ranks must be distributed over ranks that leave them out: a bipartite matching. The
search over all cuts is thus exact, for recorded programs of few ranks.

For any number of ranks: if all hosts issue collectives in one order, and at most ``k``
communicators can be ready at once on each device (``most_ready``), no deadlock exists with ``k``
slots, however late hosts and kernels are. The ranks of the first incomplete collective in that
order find it ready, and as at most ``k - 1`` other kernels are running on each of their devices, it
starts.

With ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` a kernel starts after those that the host issued earlier.
Where the hosts have one order, the first incomplete collective then finds a slot even if there is
only one. ``in_host_order=True`` checks that they have one order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.streams.program import HostWait, Launch, Program, Record, Wait

Done = Counter[str]
"""How many collectives of each communicator are complete."""
Needs = dict[str, list[Done]]
"""What must be complete before each collective of a communicator starts on a rank."""
Cut = tuple[int, ...]


def dependencies(program: Program, *, in_host_order: bool = False) -> Needs:
    """What each collective of a rank waits for.

    Args:
        program: the rank's.
        in_host_order: let it also wait for all collectives that the host has issued before.
    """
    needs: Needs = defaultdict(list)
    host, streams, events = Done(), defaultdict(Done), defaultdict(Done)
    for step in program:
        if isinstance(step, Launch):
            streams[step.stream] |= host
            if step.group:
                earlier = {g: len(n) for g, n in needs.items() if in_host_order or g == step.group}
                needs[step.group].append(streams[step.stream] | Counter(earlier))
                own = Counter({step.group: len(needs[step.group])})
                streams[step.stream] = needs[step.group][-1] | own
        elif isinstance(step, Record):
            events[step.event] = streams[step.stream] | host
        elif isinstance(step, Wait):
            streams[step.stream] |= events[step.event]
        elif isinstance(step, HostWait):
            known = streams.values() if step.event is None else [events[step.event]]
            for done in known:
                host |= done
    return needs


def _ready(needs: Needs, done: Done) -> list[str]:
    """Communicators whose next collective may start on a rank."""
    return [g for g, each in needs.items() if done[g] < len(each) and each[done[g]] <= done]


def _cuts(
    ranks: Sequence[Needs], members: Mapping[str, Sequence[int]]
) -> Iterator[tuple[Done, list[list[str]], list[str]]]:
    """Cuts with the communicators that are ready on each rank, and on all of their ranks."""
    names = sorted(members)
    stack: list[Cut] = [(0,) * len(names)]
    seen = set(stack)
    while stack:
        cut = stack.pop()
        done = Counter(dict(zip(names, cut, strict=True)))
        ready = [_ready(needs, done) for needs in ranks]
        everywhere = [g for g in names if all(g in ready[rank] for rank in members[g])]
        yield done, ready, everywhere
        for g in everywhere:
            i = names.index(g)
            following = (*cut[:i], cut[i] + 1, *cut[i + 1 :])
            if following not in seen:
                seen.add(following)
                stack.append(following)


def most_ready(program: Program) -> int:
    """The most communicators that can be ready at once on a device: slots that always suffice."""
    needs = dependencies(program)
    return max(len(ready) for _, (ready,), _ in _cuts([needs], {group: [0] for group in needs}))


def deadlock(
    programs: Sequence[Program],
    members: Mapping[str, Sequence[int]],
    slots: int,
    *,
    in_host_order: bool = False,
) -> str | None:
    """Describe a deadlock that can be reached; ``None`` if there is none.

    Args:
        programs: by rank.
        members: ranks of each communicator.
        slots: kernels of collectives that run at once on a device.
        in_host_order: whether collectives of a device start in the order in which its host issues
            them, as with ``NCCL_LAUNCH_ORDER_IMPLICIT=1``.
    """
    ranks = [dependencies(one, in_host_order=in_host_order) for one in programs]
    total = {g: max(len(ranks[rank][g]) for rank in of) for g, of in members.items()}
    for done, ready, everywhere in _cuts(ranks, members):
        left_out = _left_out(everywhere, members, [len(each) - slots for each in ready])
        if left_out is not None and any(done[g] < number for g, number in total.items()):
            return _described(done, ready, left_out, slots)
    return None


def _left_out(
    communicators: Sequence[str], members: Mapping[str, Sequence[int]], room: Sequence[int]
) -> list[set[str]] | None:
    """Distribute communicators over their ranks, with room for some each; ``None``: impossible."""
    taken: list[set[str]] = [set() for _ in room]

    def place(g: str, tried: set[int]) -> bool:
        for rank in sorted({*members[g]} - tried):
            tried.add(rank)
            if len(taken[rank]) < room[rank]:
                taken[rank].add(g)
                return True
            for other in sorted(taken[rank]):
                if place(other, tried):
                    taken[rank].symmetric_difference_update({other, g})
                    return True
        return False

    return taken if all(place(g, set()) for g in communicators) else None


def _described(
    done: Done, ready: Sequence[Sequence[str]], left_out: Sequence[set[str]], slots: int
) -> str:
    lines = []
    for rank, of in enumerate(ready):
        in_order = [f"'{g}' no. {done[g]}" for g in sorted(of, key=left_out[rank].__contains__)]
        running, waiting = (", ".join(x) or "none" for x in (in_order[:slots], in_order[slots:]))
        lines.append(f"rank {rank}: running {running}; without a slot {waiting}")
    return "\n".join(lines)
