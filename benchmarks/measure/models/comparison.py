"""Comparison of two trainings.

Bitwise first. Where values differ, by the relative difference of whole tensors, ``|a - b| / |b|``
in float64: compiled code rounds otherwise, and single elements near zero say nothing. Tensors that
are small beside the largest of their kind are measured against a fraction of it, since what is zero
in exact arithmetic (the gradient of a key's bias in attention, or of one before a batch norm) is
rounding on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measure.models.cell import Outcome, Result
from benchmarks.measure.models.training import Trace

FLOOR = 1e-3
"""Fraction of the largest tensor's norm below which a norm is not relied upon."""

TOLERANCES = {"autocast": 0.03, "inductor": 1e-3}
"""Largest relative difference that is still ``close``. With autocast, eight bits of mantissa (4e-3)
are rounded at each operation, and compiled code may round at fewer places. Inductor fuses and
reorders sums and has its own exponentials."""
TOLERANCE = 1e-4
"""The same for all other settings: float32 (1e-7), decomposed operations, three steps."""


class Difference(NamedTuple):
    """A value that is not bitwise the same.

    Attributes:
        what: which value.
        relative: relative difference; infinite where there is no number for it.
        text: in words.
        is_zeros: ours is zeros, and the reference has ``None``.
    """

    what: str
    relative: float
    text: str
    is_zeros: bool = False


@dataclass
class Pair:
    """Values of one kind by name: ours and the reference's."""

    kind: str
    ours: Mapping[str, Tensor | None]
    reference: Mapping[str, Tensor | None]


def result_of(ours: Trace, reference: Trace, setting: str) -> Result:
    """Outcome of a training beside its reference."""
    found = [one for pair in _pairs(ours, reference) for one in _differences(pair)]
    zeros = [one for one in found if one.is_zeros]
    others = [one for one in found if not one.is_zeros]
    worst = max(others, key=lambda one: one.relative, default=None)
    largest = 0.0 if worst is None else worst.relative
    name = "" if worst is None else worst.what
    if worst is not None and not largest <= TOLERANCES.get(setting, TOLERANCE):
        count = sum(not one.relative <= TOLERANCE for one in others)
        more = f" (and {count - 1} more)" if count > 1 else ""
        finite = None if largest == float("inf") else largest
        return Result(Outcome.DIFFERS, f"{worst.text}{more}", finite, name)
    if zeros:
        more = f" (and {len(zeros) - 1} more)" if len(zeros) > 1 else ""
        return Result(Outcome.ZEROS, f"{zeros[0].text}{more}", largest, zeros[0].what)
    if worst is None:
        return Result(Outcome.EQUAL)
    return Result(Outcome.CLOSE, "", largest, name)


def _pairs(ours: Trace, reference: Trace) -> Iterator[Pair]:
    yield Pair("loss of step", _named(ours.losses), _named(reference.losses))
    for step, gradients in reference.gradients.items():
        yield Pair(f"step {step + 1}: gradient of", ours.gradients[step], gradients)
    yield Pair("buffer", ours.buffers, reference.buffers)


def _named(losses: list[float]) -> dict[str, Tensor]:
    return {str(i + 1): torch.tensor(v, dtype=torch.float64) for i, v in enumerate(losses)}


def _differences(pair: Pair) -> Iterator[Difference]:
    floor = FLOOR * max((_norm(b) for b in pair.reference.values() if b is not None), default=0.0)
    for name in {**pair.reference, **pair.ours}:
        what = f"{pair.kind} {name}"
        if name not in pair.ours or name not in pair.reference:
            side = "ours" if name in pair.reference else "the reference"
            yield Difference(what, float("inf"), f"{what} is missing in {side}")
            continue
        yield from _difference(what, pair.ours[name], pair.reference[name], floor)


def _difference(
    what: str, a: Tensor | None, b: Tensor | None, floor: float
) -> Iterator[Difference]:
    if a is None and b is None:
        return
    if b is None:
        assert a is not None
        if not a.any():
            yield Difference(what, 0.0, f"{what} is zeros, DDP has None", is_zeros=True)
        else:
            yield Difference(what, float("inf"), f"{what} has values, DDP has None")
    elif a is None:
        value = "zeros" if not b.any() else "values"
        yield Difference(what, float("inf"), f"{what} is None, DDP has {value}")
    elif a.shape != b.shape or a.dtype != b.dtype:
        ours, other = (f"{t.dtype} {tuple(t.shape)}" for t in (a, b))
        yield Difference(what, float("inf"), f"{what} is {ours}, DDP has {other}")
    elif not _same(a, b):
        relative = _relative(a, b, floor)
        yield Difference(what, relative, f"{what} differs by {relative:.1e}")


def _same(a: Tensor, b: Tensor) -> bool:
    """Bitwise, but for the sign of zero; NaN equals NaN."""
    equal = (a == b) | ((a != a) & (b != b))
    return bool(equal.all())


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double().flatten()))


def _relative(a: Tensor, b: Tensor, floor: float) -> float:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    scale = max(_norm(b), floor)
    found = _norm(a.double() - b.double()) / scale if scale > 0 else float("inf")
    return found if found == found else float("inf")
