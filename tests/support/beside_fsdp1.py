"""A campaign: random programs with FSDP1 and with ours, compared call by call."""

from __future__ import annotations

import gc
import re
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from fsdp1_hooks import COMPRESSING
from fsdp1_known import FSDP1_DIES, Place, split_known
from fsdp1_programs import Program, shrunk
from fsdp1_sides import FSDP1, OURS, Seen, run_side
from module_trees import build
from pool import RankFailedError, RankPool

NUM_SHARDS = 2
LOWERING = {("convert", "bfloat16")} | {("hook", kind) for kind in COMPRESSING}
"""Calls after which values are compared as those of low precision."""

Outcome = tuple[str, str]
"""A kind ("same", "both raise", "known: ...", "different"), and a text."""


def run_programs(
    rank: int, world_size: int, programs: Iterable[Program], fault: str | None = None
) -> list[Outcome]:
    """Outcomes, equal on all ranks."""
    found = []
    for program in programs:
        theirs = run_side(program, FSDP1, rank)
        ours = run_side(program, OURS, rank, fault)
        found.append(_compare(program, theirs, ours))
        gc.collect()
    return found


def run_ours(rank: int, world_size: int, program: Program) -> None:
    """Our side alone."""
    run_side(program, OURS, rank)


def _compare(program: Program, theirs: list[Seen], ours: list[Seen]) -> Outcome:
    whole = {name: p.numel() for name, p in build(program.tree).named_parameters()}
    calls = (("wrap",), *program.calls, ("look_whole",))
    for number, (call, them, us) in enumerate(zip(calls, theirs, ours, strict=False)):
        failed = them.error is not None or us.error is not None  # on all ranks, or on none
        found = _errors(them, us) if failed else _differences(program, whole, them, us)
        texts = _agreed([*found])
        known, texts = split_known(Place(program, calls, number), texts)
        if texts:
            return "different", "\n".join([f"call {number}, {call}:", *texts[:6]])
        ending = next((one for one in known if one.ends), None)
        if ending is not None:
            return f"known: {ending.name}", str(call)
        if them.error is not None:
            return "both raise", f"{call}: {_last_line(them.error)} | {_last_line(us.error)}"
    return "same", ""


def _agreed(texts: list[str]) -> list[str]:
    """What any rank has found; of all ranks the same."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, texts)
    return list(dict.fromkeys(text for of_rank in gathered for text in of_rank))


def _last_line(error: BaseException | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {str(error)[:300]}"


def _errors(them: Seen, us: Seen) -> Iterable[str]:
    if them.error is None or us.error is None:
        lines = traceback.format_exception(us.error or them.error)[-4:-1]
        text = f"raised by FSDP1: {_last_line(them.error)}; by ours: {_last_line(us.error)}"
        yield f"{text}\n{''.join(lines)}"
        return
    kind = type(them.error)
    kinds = (RuntimeError, ValueError) if kind is AssertionError else kind
    if str(us.error) != "another rank has raised" and not isinstance(us.error, kinds):
        yield f"kinds of errors: {_last_line(them.error)}; {_last_line(us.error)}"


def _differences(program: Program, whole: dict[str, int], them: Seen, us: Seen) -> Iterable[str]:
    # The order of calls of collectives is the same on all ranks.
    yield from _of_values(program, them.values, us.values)
    names = list(dict.fromkeys([*them.parts, *us.parts]))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (them.parts, us.parts))
    absent = torch.empty(0)
    row = gathered[dist.get_rank() // NUM_SHARDS * NUM_SHARDS :][:NUM_SHARDS]
    for name in names:
        if name not in them.parts or name not in us.parts:
            yield f"{name}: is there on one side only"
            continue
        numel = whole.get(name.removeprefix("gradient of ").removeprefix("state of "), -1)
        theirs = _joined([parts[0].get(name, absent) for parts in row], numel)
        ours = _joined([parts[1].get(name, absent) for parts in row], numel)
        yield from _of_value(program, name, theirs, ours)


def _joined(parts: list[torch.Tensor | None], numel: int) -> torch.Tensor | None:
    """The whole of a tensor, flattened, or this rank's own where each has one."""
    have = [part for part in parts if part is not None]
    if not have:
        return None
    own = parts[dist.get_rank() % NUM_SHARDS]
    if own is not None and all(p is not None and p.numel() == numel for p in parts):
        return own.flatten()
    return torch.cat([part.flatten() for part in have])


def _of_values(program: Program, theirs: dict[str, Any], ours: dict[str, Any]) -> Iterable[str]:
    if list(theirs) != list(ours):
        yield f"names: {[*theirs]}, ours {[*ours]}"
    for name, value in theirs.items():
        if name in ours:
            yield from _of_value(program, name, value, ours[name])


def _of_value(program: Program, name: str, want: Any, got: Any) -> Iterable[str]:
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        if want is not got and (isinstance(want, torch.Tensor) or want != got):
            yield f"{name}: {_short(want)}, ours {_short(got)}"
        return
    if want.dtype != got.dtype:
        yield f"{name}: dtype {want.dtype}, ours {got.dtype}"
    elif want.shape != got.shape:
        yield f"{name}: shape {tuple(want.shape)}, ours {tuple(got.shape)}"
    else:
        low = "low" in program.precision or program.precision == "kept"
        low |= any(call[:2] in LOWERING for call in program.calls)
        largest = want.nan_to_num(0, 0, 0).abs().max().item() if want.numel() else 0.0
        relative = (
            0.1 if low or largest > 1e6 else 1e-4
        )  # training that explodes magnifies rounding
        close = 1e-6 + relative * largest
        if not torch.allclose(got.double(), want.double(), relative, close, equal_nan=True):
            yield f"{name}: {_short(want)}, ours {_short(got)}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        flat = [round(v, 5) for v in value.flatten().tolist()[:6]]
        return f"{flat} of shape {tuple(value.shape)}, {value.dtype}"
    return repr(value)


# -- in the process that tests --------------------------------------------------------------------


def campaign(
    ranks: RankPool,
    programs: Iterable[Program],
    world_size: int = 2,
    fault: str | None = None,
    batch: int = 25,
) -> tuple[Counter[str], list[tuple[Program, str]]]:
    """How many programs ended how, and those that differ."""
    counts: Counter[str] = Counter()
    different: list[tuple[Program, str]] = []
    waiting = list(programs)
    while waiting:
        some, waiting = waiting[:batch], waiting[batch:]
        outcomes = _outcomes(ranks, some, world_size, fault)
        for program, (kind, text) in zip(some, outcomes, strict=True):
            counts[kind] += 1
            if kind == "different":
                different.append((program, text))
    return counts, different


def _outcomes(
    ranks: RankPool, programs: list[Program], world_size: int, fault: str | None
) -> list[Outcome]:
    """Outcomes of programs; where ranks die, those of each by itself."""
    try:
        return ranks.run(run_programs, world_size, programs, fault, timeout=600.0)[0]
    except RankFailedError as error:
        if len(programs) == 1:
            return [_of_the_dead(ranks, programs[0], world_size, error)]
    return [_outcomes(ranks, [program], world_size, fault)[0] for program in programs]


def _of_the_dead(
    ranks: RankPool, program: Program, world_size: int, error: RankFailedError
) -> Outcome:
    """Outcome of a program that ends ranks: is it FSDP1 that does?"""
    with suppress(RankFailedError):
        ranks.run(run_ours, world_size, program)
        return f"known: {FSDP1_DIES}", ""
    return "different", f"ranks failed:\n{str(error)[-1500:]}"


def _sign(text: str) -> str:
    """What kind of difference a text is about, without names and numbers."""
    line = text.split("\n")[1]
    return re.sub(r"parts[.\w]*|[-\d.e]+", "", line)[:80]


def reproducer(ranks: RankPool, program: Program, world_size: int = 2) -> tuple[Program, str]:
    """A smaller program that differs as well."""
    [(_, first)] = _outcomes(ranks, [program], world_size, None)
    best, text, tries = program, first, 0
    found = True
    while found and tries < 60:
        found = False
        for candidate in shrunk(best):
            tries += 1
            [(kind, why)] = _outcomes(ranks, [candidate], world_size, None)
            if kind == "different":
                if _sign(why) != _sign(first):
                    continue
                best, text, found = candidate, why, True
                break
    return best, text
