"""Options of graph mode: ``torch.compile(model, backend="fsdp_dynamo", options={...})``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fsdp_dynamo.errors import FSDPTypeError, FSDPValueError
from graph_passes.cost_model import Device, Link
from graph_passes.graph_pass import GraphPass, as_pass
from graph_passes.pipeline import OPTIONAL_PASSES, REQUIRED_PASSES
from graph_passes.scheduling.plan import Plan, PlanError
from graph_passes.scheduling.schedule import Options
from graph_passes.scheduling.simulation import Limits

_SWITCHES = ("prefetch", "sink_waits", "bucket", "grad_buffer", "selective_unshard", "regions")
_BOOLEANS = (*_SWITCHES, "cuda_graphs")


@dataclass(frozen=True)
class GraphOptions:
    """Keys of ``options``; each has a default.

    They are checked when the first graph is compiled; so is whether a graph keeps the budget
    (``graph_passes.BudgetError``) and fits the plan (``graph_passes.PlanError``).

    Attributes:
        plan: a ``Plan``, or the path of a saved plan, to apply instead of deciding.
        memory_budget_bytes: most bytes that a graph may have alive. ``None``: what it needs without
            any prefetch, plus the largest unsharded buffer, plus the larger of that buffer and the
            largest unsharded gradient.
        max_in_flight: most gathers ahead of their use, and most reductions not yet waited for.
        link: ``"measured"`` (the default), a ``Link``, or a dict of its fields
            ``{"latency_ms": ..., "bytes_per_ms": ...}``.
        device: ``"measured"`` (the default), a ``Device``, or a dict of its fields
            ``{"flops_per_ms": ..., "bytes_per_ms": ...}``; ``encode_bytes_per_ms`` and
            ``decode_bytes_per_ms`` give the rates of coding, by wire format.
        prefetch, sink_waits, bucket: whether to take these decisions.
        grad_buffer: whether gradients are written into the flat gradient, not concatenated.
        selective_unshard: whether a memory budget may be used to keep units unsharded between
            forward and backward.
        regions: trace, differentiate and partition equal unit bodies once for all of them, so that
            the first step grows less with the number of units.
        cuda_graphs: whether the device replays captured graphs of forward and backward, after two
            steps; what cannot be captured runs as it is, with a warning that says why.
        passes: a user's own passes over the partitioned graphs, before collectives are placed:
            functions of a graph, or ``graph_passes.GraphPass`` objects.
        disabled_passes: names of passes, ours or the user's, and of the switches above, to leave
            out.
        inductor: settings of Inductor, by their names in ``torch._inductor.config``. In ``options``
            they stand beside ours: ``{"bucket": False, "max_autotune": True}``.
    """

    plan: Plan | None = None
    memory_budget_bytes: int | None = None
    max_in_flight: int = Limits.max_in_flight
    link: Link | None = None
    device: Device | None = None
    prefetch: bool = True
    sink_waits: bool = True
    bucket: bool = True
    grad_buffer: bool = True
    selective_unshard: bool = True
    regions: bool = True
    cuda_graphs: bool = False
    passes: tuple[GraphPass, ...] = field(default=())
    disabled_passes: tuple[str, ...] = ()
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> GraphOptions:
        """Check the options of ``torch.compile``.

        Raises:
            FSDPTypeError: a key that is not known, or a value of the wrong type.
            FSDPValueError: a value out of its bounds, a plan that cannot be read, or a pass to be
                disabled that is not known or cannot be left out.
        """
        given = dict(options or {})
        known = [f.name for f in fields(GraphOptions) if f.name != "inductor"]
        others = {name: given.pop(name) for name in sorted(set(given) - set(known))}
        given["inductor"] = _inductor(others, known)
        for name in _BOOLEANS:
            if not isinstance(given.get(name, True), bool):
                raise _wrong(FSDPTypeError, name, "True or False", repr(given[name]))
        given["plan"] = _plan(given.get("plan"))
        given["link"] = _model("link", Link, given.get("link"))
        given["device"] = _model("device", Device, given.get("device"))
        given["passes"] = _passes(given.get("passes", ()))
        given["disabled_passes"] = _disabled(given.get("disabled_passes", ()), given["passes"])
        given |= {name: False for name in given["disabled_passes"] if name in _SWITCHES}
        result = GraphOptions(**given)
        try:
            Limits(result.memory_budget_bytes, result.max_in_flight)
        except (ValueError, TypeError) as error:
            raise _wrong(FSDPValueError, "limits", "numbers within bounds", str(error)) from error
        return result

    def text(self) -> str:
        """Return canonical text: equal on two ranks iff their options are equal."""
        plan = None if self.plan is None else self.plan.digest()
        names = [pass_.identity() for pass_ in self.passes]
        rest = {f.name: repr(getattr(self, f.name)) for f in fields(self)}
        return json.dumps({**rest, "plan": plan, "passes": names}, sort_keys=True)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the pipeline's passes that do not run."""
        buffers = () if self.grad_buffer else ("grad_buffer", "group_writes")
        return (*self.disabled_passes, *buffers)

    def scheduling(self, **cost: Any) -> Options:
        """Return the planner's options; ``cost`` is its cost model."""
        limits = Limits(self.memory_budget_bytes, self.max_in_flight)
        return Options(self.prefetch, self.sink_waits, self.bucket, limits, **cost)


def _wrong(kind: type[Exception], name: str, expected: str, got: str) -> Exception:
    return kind(
        f"torch.compile(options=...), '{name}': expected {expected}, got {got}. See "
        "fsdp_dynamo.graph_mode.options.GraphOptions."
    )


def _inductor(given: Mapping[str, Any], ours: Sequence[str]) -> dict[str, Any]:
    """Check settings of Inductor and return them under the names that it knows."""
    if not given:
        return {}
    from torch._inductor import config

    known, checked = config.get_config_copy(), {}
    for name, value in given.items():
        setting = name.replace("-", "_")  # as torch.compile takes them
        if setting not in known:
            expected = f"one of {ours}, or a setting of torch._inductor.config"
            raise _wrong(FSDPTypeError, name, expected, f"'{name}'")
        if isinstance(known[setting], bool) and not isinstance(value, bool):
            raise _wrong(FSDPTypeError, name, "True or False", repr(value))
        checked[setting] = value
    return checked


def _plan(value: Any) -> Plan | None:
    if value is None or isinstance(value, Plan):
        return value
    if not isinstance(value, str | Path):
        raise _wrong(FSDPTypeError, "plan", "a Plan or a path", repr(type(value)))
    try:
        return Plan.load(value)
    except (OSError, PlanError) as error:
        raise _wrong(FSDPValueError, "plan", "a plan that can be read", str(error)) from error


def _model(name: str, kind: type[Any], value: Any) -> Any:
    if value is None or value == "measured" or isinstance(value, kind):
        return None if value == "measured" else value
    if not isinstance(value, Mapping):
        raise _wrong(FSDPTypeError, name, "'measured' or a dict of numbers", repr(value))
    try:
        return kind(**value)
    except (TypeError, ValueError) as error:
        raise _wrong(FSDPValueError, name, f"the fields of {kind.__name__}", str(error)) from error


def _passes(value: Any) -> tuple[GraphPass, ...]:
    if not isinstance(value, Sequence) or not all(callable(item) for item in value):
        raise _wrong(FSDPTypeError, "passes", "a list of callables", repr(value))
    return tuple(map(as_pass, value))


def _disabled(value: Any, passes: Sequence[GraphPass]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(FSDPTypeError, "disabled_passes", "a list of names", repr(value))
    required = REQUIRED_PASSES | {pass_.name: pass_.required for pass_ in passes if pass_.required}
    optional = (*_SWITCHES, *(pass_.name for pass_ in (*OPTIONAL_PASSES, *passes)))
    known = sorted({*optional} - required.keys())
    for name in value:
        if name in required:
            kept = f"'{name}', which cannot be left out: {required[name]}"
            raise _wrong(FSDPValueError, "disabled_passes", f"some of {known}", kept)
        if name not in known:
            raise _wrong(FSDPValueError, "disabled_passes", f"some of {known}", repr(name))
    return tuple(value)


__all__ = ["GraphOptions"]
