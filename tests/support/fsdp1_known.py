"""Differences from FSDP1 that are deliberate: each has a sentence in docs/migration.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp1_hooks import COMPRESSING
from fsdp1_programs import Call, Program, leaves_of

Applies = Callable[["Place"], bool]


_STEPS = ("forward", "backward", "train")


@dataclass(frozen=True)
class _State:
    """After a call: forwards without a backward, and gradients that are not reduced."""

    pending: bool = False
    after_forward: bool = False
    reduced: bool = False
    unsynced: bool = False

    def after(self, call: Call) -> _State:
        name = call[0]
        if name == "forward":
            return replace(self, pending=True, after_forward=True)
        if name == "predict":
            return replace(self, after_forward=True)
        if name == "train" or (name == "backward" and self.pending):
            return _State(reduced=True)
        if name == "accumulate":
            return _State(reduced=self.reduced, unsynced=True)
        if name == "zero_grad" and not self.unsynced:
            return replace(self, reduced=False)
        return self


@dataclass(frozen=True)
class Place:
    """A call of a program, and what came before it."""

    program: Program
    calls: Sequence[Call]
    number: int

    @property
    def call(self) -> Call:
        return self.calls[self.number]

    @property
    def is_after_forward(self) -> bool:
        """Whether the last forward was not followed by a backward."""
        return self._states()[-1].after_forward

    @property
    def is_unsynced(self) -> bool:
        """Whether gradients wait for a reduction."""
        return self._states()[-1].unsynced

    @property
    def has_reduced(self) -> bool:
        """Whether there may be reduced gradients."""
        return self._states()[-1].reduced

    @property
    def was_used_after_forward(self) -> bool:
        """Whether a call used parameters or gradients where a forward was the last."""
        calls = zip(self.calls, self._states(), strict=False)
        return any(
            state.after_forward and call[0] not in ("forward", "predict", "mode")
            for call, state in calls
        )

    @property
    def was_changed_unsynced(self) -> bool:
        """Whether a call used gradients that waited for a reduction beside reduced ones."""
        calls = zip(self.calls, self._states(), strict=False)
        return any(
            state.unsynced
            and (state.reduced or call[0] not in ("scale_grad", "zero_grad"))
            and call[0] not in (*_STEPS, "accumulate", "predict", "mode")
            for call, state in calls
        )

    def was_called(self, name: str) -> bool:
        """Whether a call of that name is or was made."""
        return any(call[0] == name for call in self.calls[: self.number + 1])

    @property
    def has_compressing_hook(self) -> bool:
        hooks = {("hook", kind) for kind in COMPRESSING}
        return bool(hooks & {*self.calls[: self.number + 1]})

    @property
    def was_reduced_twice(self) -> bool:
        """Whether a hook that is no mean may have seen what it had reduced before."""
        before = [_State(), *self._states()]
        return ("hook", "user") in self.calls and any(
            state.reduced and call[0] in ("backward", "train")
            for call, state in zip(self.calls, before, strict=False)
        )

    @property
    def was_written_without_writeback(self) -> bool:
        """Whether this call discards what it writes; where parameters are not seen, or another."""
        last = self.number if self.program.use_orig_params else 0
        return any(
            call[0] == "summon" and call[2].startswith("write") and "writeback" not in call[1]
            for call in self.calls[last : self.number + 1]
        )

    def _states(self) -> list[_State]:
        """After each call until this one."""
        state, found = _State(), []
        for call in self.calls[: self.number + 1]:
            state = state.after(call)
            found.append(state)
        return found

    @property
    def has_kinds(self) -> set[str]:
        """Kinds of leaves; "frozen" where one is."""
        leaves = leaves_of(self.program.tree)
        frozen = any(leaf.frozen != "none" for leaf in leaves)
        frozen |= self.was_called("freeze")
        doubled = any(leaf.double for leaf in leaves)
        flags = {"frozen"} if frozen else set()
        return {leaf.kind for leaf in leaves} | flags | ({"double"} if doubled else set())

    @property
    def has_ties(self) -> bool:
        return any(leaf.tied_to is not None for leaf in leaves_of(self.program.tree))

    @property
    def is_low(self) -> bool:
        return self.program.precision in ("low", "kept")


@dataclass(frozen=True)
class Known:
    """A deliberate difference.

    Attributes:
        name: as in docs/migration.md.
        text: what a description of it matches, from its beginning.
        applies: whether it is to be expected of a call.
        ends: whether the two are not compared any more after it.
    """

    name: str
    text: str
    applies: Applies = lambda place: True
    ends: bool = False


_GRADIENT = r"(at the end: |inside: |nested: )?gradient of .*: "

KNOWN = (
    Known(
        "scalar parameters", r"raised by FSDP1: ValueError: FSDP doesn't support scalar", ends=True
    ),
    Known(
        "dtypes in one unit",
        r"raised by FSDP1: ValueError: (Must flatten tensors with|Invalid usage of tensors)",
        lambda place: "double" in place.has_kinds or place.is_low,
        ends=True,
    ),
    Known(
        "float64 gradients",
        r"raised by FSDP1: RuntimeError: linalg.vector_norm",
        lambda place: place.call[0] == "clip",
        ends=True,
    ),
    Known(
        "a policy that matches nothing",
        r"raised by FSDP1: nothing; by ours: FSDPValueError: argument 'auto_wrap_policy': expected "
        ".*a policy that matches nothing",
        ends=True,
    ),
    Known(
        "summon_full_params inside itself",
        r"raised by FSDP1: AssertionError: Cannot manually unshard parameters when already",
        lambda place: place.call[-1] == "nested",
        ends=True,
    ),
    Known(
        "combinations of arguments of summon_full_params",
        r"(raised by FSDP1|kinds of errors): NotImplementedError: (writeback=True and rank0_only"
        "=True|with_grads=True)",
        ends=True,
    ),
    Known(
        "summon_full_params without writeback",
        r".*: \[.*, ours \[",
        lambda place: place.program.strategy == "NO_SHARD" and place.was_written_without_writeback,
        ends=True,
    ),
    Known(
        "a forward with gradients inside summon_full_params",
        r"(raised by FSDP1: nothing; by ours: |kinds of errors: .*; )FSDPStateError: ",
        lambda place: place.call[-1] == "train",
        ends=True,
    ),
    Known(
        "a forward without gradients inside summon_full_params",
        "(?!raised|kinds|output)",
        lambda place: place.call[-1] == "forward",
        ends=True,
    ),
    Known(
        "a forward without gradients inside summon_full_params",
        r"output: dtype|raised by FSDP1: .*; by ours: nothing",
        lambda place: place.call[-1] == "forward" and place.program.precision != "none",
        ends=True,
    ),
    Known(
        "a forward without gradients inside summon_full_params",
        r"raised by FSDP1: nothing; by ours: CompileRefusedError: .*inside summon_full_params",
        lambda place: place.call[-1] == "forward" and place.program.mode == "graph",
        ends=True,
    ),
    Known(
        "buffers in low precision",
        r"(buffer|state of|output).*: (dtype |\(\(.*\), )torch.b?float(64|32|16)\)?, ours",
        lambda place: place.is_low,
    ),
    Known("parameters without a part in the loss", _GRADIENT + r"\[(-?0\.0(, )?)+\] .*, ours None"),
    Known(
        "parameters without a part in the loss",
        r"names: |.*: is there on one side only",
        lambda place: bool({"spare", "frozen"} & place.has_kinds),
        ends=True,
    ),
    Known(
        "parameters without a part in the loss",
        r"raised by FSDP1: AssertionError: FSDP assumes .* is in the state_dict but",
        lambda place: bool({"spare", "frozen"} & place.has_kinds),
        ends=True,
    ),
    Known(
        "gradients under no_sync",
        _GRADIENT + "dtype",
        lambda place: place.is_unsynced and place.program.precision != "none",
    ),
    Known(
        "gradients under no_sync",
        _GRADIENT + r"\[.*, ours \[",
        lambda place: place.is_unsynced and place.has_reduced,
    ),
    Known(
        "parameters without a part in the loss",
        _GRADIENT + r"\[.*, ours None",
        lambda place: place.is_unsynced and "frozen" in place.has_kinds,
    ),
    Known(
        "gradients under no_sync",
        "",
        lambda place: place.was_changed_unsynced,
        ends=True,
    ),
    Known(
        "gradients under no_sync",
        _GRADIENT + r"\[.*, ours \[",
        lambda place: place.was_called("accumulate") and place.was_called("drop_grad"),
        ends=True,
    ),
    Known(
        "gradients in low precision",
        _GRADIENT + r"\[.*, ours \[",
        lambda place: place.program.precision == "kept" and place.call[0] == "summon",
        ends=True,
    ),
    Known(
        "communication hooks",
        _GRADIENT + "dtype torch.float32, ours",
        lambda place: place.program.precision == "kept" and place.has_compressing_hook,
        ends=True,
    ),
    Known(
        "communication hooks",
        r"raised by FSDP1: RuntimeError: .*dtype 'float' .*'Double'.*; by ours: nothing",
        lambda place: "double" in place.has_kinds and place.has_compressing_hook,
        ends=True,
    ),
    Known(
        "communication hooks",
        r"(.*gradient of|norm).*: \[.*, ours \[",
        lambda place: place.program.strategy == "NO_SHARD" and place.was_reduced_twice,
        ends=True,
    ),
    Known(
        "gradients under no_sync",
        r"raised by FSDP1: AssertionError: Expects tensor to be sharded",
        lambda place: place.is_unsynced,
        ends=True,
    ),
    Known("local state dicts", r"raised by FSDP1: .*_flat_param.*; by ours: nothing", ends=True),
    Known(
        "local state dicts",
        r"raised by FSDP1: RuntimeError: Found state_dict_type LOCAL.*; by ours: nothing",
        ends=True,
    ),
    Known(
        "gradients inside summon_full_params",
        "",
        lambda place: any(
            call[0] == "summon" and call[2] == "write_grad" and "with_grads" not in call[1]
            for call in place.calls[: place.number + 1]
        ),
        ends=True,
    ),
    Known(
        "parameters after a forward",
        r".*: (dtype|None|True|False)",
        lambda place: place.is_after_forward and place.call[0] in ("forward", "predict", "summon"),
    ),
    Known(
        "parameters after a forward",
        "",
        lambda place: place.was_used_after_forward,
        ends=True,
    ),
    Known(
        "freezing",
        _GRADIENT + r"(None|\[.*), ours \[|raised by FSDP1: AssertionError: Invalid: ``_post",
        lambda place: place.was_called("freeze"),
        ends=True,
    ),
    Known(
        "replaced parameters",
        r"raised by FSDP1: (.*; by ours: nothing|nothing; by ours: FSDPStateError: .*expected "
        "parameters of the sharded model, got one of shape .* that a DTensor has replaced)",
        lambda place: place.was_called("replace"),
        ends=True,
    ),
    Known(
        "tied parameters",
        r"names: |keys: ",
        lambda place: not place.program.use_orig_params or place.has_ties,
        ends=True,
    ),
    Known(
        "norms without gradients",
        r"norm: dtype torch.float32, ours",
        lambda place: place.is_low or "double" in place.has_kinds,
    ),
    Known(
        "parameters without a part in the loss",
        r"parts\S*: dtype",
        lambda place: bool({"spare", "frozen"} & place.has_kinds),
    ),
    Known("conversions", "", lambda place: place.was_called("convert"), ends=True),
)


FSDP1_DIES = "programs that end FSDP1's process"


def split_known(place: Place, texts: Sequence[str]) -> tuple[list[Known], list[str]]:
    """Known differences among those of a call, and the texts of the others."""
    known, others = [], []
    for text in texts:
        found = [k for k in KNOWN if re.match(k.text, text, re.DOTALL) and k.applies(place)]
        known += found[:1]
        others += [] if found else [text]
    return known, others
