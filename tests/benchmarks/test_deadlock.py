"""The search for deadlocks between communicators, on programs of a few steps."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from benchmarks.streams.deadlock import deadlock, most_ready
from benchmarks.streams.program import COMPUTING, HostWait, Launch, Program, Record, Step, Wait

Programs = list[Program]
Members = dict[str, tuple[int, ...]]
ANY = 9
"""More slots than kernels."""


def _run(group: str, stream: str | None = None) -> Launch:
    """A collective, on its communicator's stream unless told otherwise."""
    return Launch("all_reduce", stream or group, (), (), "all_reduce", group=group)


A, B, C, X, Y = map(_run, "ABCXY")
EVENT = [Record(1, "A"), Wait("B", 1)]
PAIR: Members = {"A": (0, 1), "B": (0, 1)}

# Slots with which no deadlock exists; None: no number of slots suffices.
PLANTED: dict[str, tuple[Programs, Members, int | None]] = {
    "no order": ([[A, B], [A, B]], PAIR, 2),
    "opposite orders of hosts": ([[A, B], [B, A]], PAIR, 2),
    "opposite orders of streams": (
        [[_run("A", "s"), _run("B", "s")], [_run("B", "s"), _run("A", "s")]], PAIR, None),
    "an event": ([[A, *EVENT, B]] * 2, PAIR, 1),
    "an event on one rank": ([[A, *EVENT, B], [A, B]], PAIR, 2),
    "an event too early": ([[Record(1, "A"), A, Wait("B", 1), B]] * 2, PAIR, 2),
    "an event over a third stream": (
        [[A, Record(1, "A"), Wait("t", 1), Record(2, "t"), Wait("B", 2), B]] * 2, PAIR, 1),
    "one stream": ([[_run("A", COMPUTING), _run("B", COMPUTING)]] * 2, PAIR, 1),
    "hosts wait": ([[A, Record(1, "A"), HostWait(1, ""), B], [A, HostWait(None, ""), B]], PAIR, 1),
    "one communicator": ([[_run("A", "s"), _run("A", "t")]] * 2, {"A": (0, 1)}, 1),
    "a rank leaves one out": ([[A, B], [A]], PAIR, None),
    # Each rank leaves out one of three kernels: three ranks can leave out all three, two cannot.
    "three, of two ranks": ([[A, B, C]] * 2, PAIR | {"C": (0, 1)}, 2),
    "three, of three ranks": ([[A, B, C]] * 3, dict.fromkeys("ABC", (0, 1, 2)), 3),
    "replicas": (
        [[A, B], [A, Y], [X, B], [X, Y]], {"A": (0, 1), "X": (2, 3), "B": (0, 2), "Y": (1, 3)}, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_planted(case: str) -> None:
    programs, members, slots = PLANTED[case]
    found = [deadlock(programs, members, k) is None for k in (1, 2, 3, ANY)]
    assert found == [slots is not None and k >= slots for k in (1, 2, 3, ANY)]
    if slots is not None:
        assert slots <= max(map(most_ready, programs))


def test_orders_of_hosts() -> None:
    """A device that starts kernels as its host issues them needs hosts of one order, and a slot."""
    blocked = {
        case: deadlock(programs, members, 1, in_host_order=True) is not None
        for case, (programs, members, _) in PLANTED.items()
    }
    of_hosts = {"opposite orders of hosts", "opposite orders of streams", "a rank leaves one out"}
    assert {case for case, is_blocked in blocked.items() if is_blocked} == of_hosts


def test_what_is_said() -> None:
    programs, members, _ = PLANTED["no order"]
    assert deadlock(programs, members, 1) == (
        "rank 0: running 'A' no. 0; without a slot 'B' no. 0\n"
        "rank 1: running 'B' no. 0; without a slot 'A' no. 0"
    )


# -- beside a search over every step of every rank -------------------------------------------------

Steps = tuple[frozenset[int], ...]
"""Numbers of steps, by rank."""


def _before(program: Program, i: int) -> set[int]:
    """Steps that must be complete before step ``i`` starts."""
    step, found = program[i], set()
    if step == HostWait(None, ""):
        return set(range(i))
    for n, other in enumerate(program[:i]):
        same = [getattr(step, what, "") for what in ("stream", "group")]
        named = [getattr(other, what, "") for what in ("stream", "group")]
        is_recorded = isinstance(other, Record) and getattr(step, "event", None) == other.event
        if isinstance(other, HostWait) or is_recorded or any(map(_equal, same, named)):
            found.add(n)
    return found


def _equal(one: str, other: str) -> bool:
    return bool(one) and one == other


def _gets_stuck(programs: Programs, members: Members, slots: int) -> bool:
    before = [[_before(program, i) for i in range(len(program))] for program in programs]
    nothing: Steps = (frozenset(),) * len(programs)
    stack = [(nothing, nothing)]  # complete and running
    seen = set(stack)
    while stack:
        complete, running = stack.pop()
        after = []
        kernels: dict[str, dict[int, int]] = {group: {} for group in members}
        for rank, program in enumerate(programs):
            for i in running[rank]:
                kernels[program[i].group][rank] = i  # type: ignore[union-attr]
            for i in set(range(len(program))) - complete[rank] - running[rank]:
                if not before[rank][i] <= complete[rank]:
                    continue
                if not isinstance(program[i], Launch):
                    after.append((_with(complete, {rank: i}), running))
                elif len(running[rank]) < slots:
                    after.append((complete, _with(running, {rank: i})))
        for group, at in kernels.items():
            if at.keys() == set(members[group]):
                ended = tuple(steps - {at.get(rank)} for rank, steps in enumerate(running))
                after.append((_with(complete, at), ended))
        if not after and any(len(c) < len(p) for c, p in zip(complete, programs, strict=True)):
            return True
        stack += set(after) - seen
        seen.update(after)
    return False


def _with(steps: Steps, more: dict[int, int]) -> Steps:
    return tuple(s | {more[rank]} if rank in more else s for rank, s in enumerate(steps))


def _random_programs(rng: random.Random) -> tuple[Programs, Members]:
    members: Members = rng.choice([
        {"A": (0, 1), "B": (0, 1)},
        {"A": (0, 1), "B": (0, 1), "C": (0, 1)},
        {"A": (0, 1), "B": (1, 2), "C": (0, 2)},
        {"A": (0, 1, 2), "B": (0, 1, 2)},
    ])  # fmt: skip
    issued = rng.choices([*members], k=rng.randint(2, 4))
    programs = []
    for rank in range(1 + max(chain(*members.values()))):
        order = [group for group in issued if rank in members[group]]
        if rng.random() < 0.2:
            rng.shuffle(order)
        program: list[Step] = [_run(group, rng.choice([group, group, "s"])) for group in order]
        for event in range(rng.randint(0, 2)):
            one, other = rng.choices([*members, "s"], k=2)
            at = sorted(rng.choices(range(len(program) + 1), k=2))
            wait = rng.choice([Wait(other, event), HostWait(event, ""), HostWait(None, "")])
            program.insert(at[1], wait)
            program.insert(at[0], Record(event, one))
        programs.append(program)
    return programs, members


def test_all_that_can_happen() -> None:
    """The search over cuts finds a deadlock exactly where some order of all steps ends in one."""
    rng = random.Random(0)
    found = {True: 0, False: 0}
    for _ in range(300):
        programs, members = _random_programs(rng)
        for slots in (1, 2):
            stuck = _gets_stuck(programs, members, slots)
            assert (deadlock(programs, members, slots) is not None) == stuck, programs
            found[stuck] += 1
    assert min(found.values()) > 50, found
