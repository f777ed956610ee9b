r"""Hooks mode: every unit's body is compiled by itself, hooks run eagerly in between.

A unit without nested units is compiled as it is; equal units share a code object and so the
compiled code. A unit that holds nested units (usually the root) needs more: a graph break at each
nested call would fall into the loop over the blocks, and Dynamo leaves a frame that breaks inside a
loop uncompiled. So Dynamo records each nested unit's call as one opaque *leaf* of the graph, and
``SegmentBackend`` cuts the graph at the leaves::

    embed -> [leaf: blocks.0] -> [leaf: blocks.1] -> norm, head
    \_____/                                         \________/
    segment 0, compiled                              segment 1, compiled

At run time the segments are called in turn, and each leaf runs its unit's hooks and body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch._dynamo.exc import Unsupported
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_dynamo.core.unit_modules import UnitModuleProtocol, alike, registered
from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.dynamo.private_api import (
    LEAF_MODE,
    NO_BACKEND,
    Backend,
    backend_of,
    cannot_capture,
    compile_with,
    declare_mode,
    entry_of,
    key_of,
)
from fsdp_dynamo.eager import hooks
from fsdp_dynamo.errors import FSDPStateError, unit_name
from fsdp_dynamo.hooks_mode.segments import refuse_cuda_graphs, split_at_leaves
from fsdp_dynamo.hooks_mode.side_effects import (
    TABLES,
    ObjectStates,
    are_as_given,
    has_hooks,
    holds_containers,
    hook_tables,
    thawed,
)
from fsdp_dynamo.pytree import open_container, tensors_of

_rebuild: dict[str, Callable[[Any], Any]] = {}
"""Functions that rebuild the containers returned by nested units, by name."""
_active_key: ContextVar[int] = ContextVar("active_backend_key", default=NO_BACKEND)
_FLAGS = (bool, str, type(None))
_faking: ContextVar[bool] = ContextVar("faking", default=False)


def body_of(
    module: UnitModuleProtocol, key: int, recomputes: bool = False
) -> AbstractContextManager[Callable[..., Any]]:
    """Return a context with the unit's body: its module, or the module compiled by the backend.

    Args:
        module: the unit module.
        key: backend of the calling frame; ``NO_BACKEND``: that of the unit around.
        recomputes: whether activation checkpointing runs the body again in the backward. There is
            no calling frame then, and the code of the last forward is used.
    """
    if key == NO_BACKEND:
        key = _active_key.get()
    if recomputes and key == NO_BACKEND:
        key = module._fsdp_last_key
    elif module._fsdp_last_key != key and not recomputes:  # nn.Module's __setattr__ is slow
        module._fsdp_last_key = key
    if key == NO_BACKEND or _has_hooks(module):
        return nullcontext(module._fsdp_compiled_before or module._fsdp_body())
    return _compiled_body_of(module, key)


@contextmanager
def _compiled_body_of(module: UnitModuleProtocol, key: int) -> Iterator[Callable[..., Any]]:
    """Return the compiled body in a context in which nested units use the same backend."""
    backend = backend_of(key)
    if isinstance(backend, SegmentBackend):
        key = key_of(backend.inner)
    token = _active_key.set(key)
    unit = artifacts.unit_now.set(module._fsdp_unit.fqn)
    try:
        yield _compiled_body(module, key)
    finally:
        artifacts.unit_now.reset(unit)
        _active_key.reset(token)


def _has_hooks(module: UnitModuleProtocol) -> bool:
    """Whether a unit without nested units has hooks of the user inside."""
    if module._fsdp_hook_tables is None:
        nested = module._fsdp_has_nested
        module._fsdp_hook_tables = [] if nested else hook_tables(module._fsdp_inner())
    return has_hooks(module._fsdp_hook_tables)


def _compiled_body(module: UnitModuleProtocol, key: int) -> Callable[..., Any]:
    body = module._fsdp_compiled_bodies.get(key)
    nested = module._fsdp_has_nested
    if nested and module._fsdp_root.trained is None:
        module._fsdp_root.record_trained()
    if body is None:
        refuse_cuda_graphs(module, backend_of(key))
        backend = _segment_backend(key) if nested else backend_of(key)
        shapes = None if nested else module._fsdp_unit.shapes
        entry = entry_of(module._fsdp_body(), shapes, backend_of(key))
        body = compile_with(backend, entry)
        module._fsdp_compiled_bodies[key] = body
    return body


# -- nested units as leaves -------------------------------------------------------------------


def call_as_leaf(leaf_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward of a nested unit as Dynamo traces it."""
    outputs = leaf(leaf_id, args, kwargs)
    return _unflatten(_output_spec(leaf_id), outputs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def may_be_leaf(leaf_id: str, changes_state: bool, trained: str) -> bool:
    """Whether a nested unit may be a node of the graph that is traced. Constant in the trace.

    Python state that the code around the unit changes (a list that layers append to) would change
    only after the graph, and be read before. The graphs of such a model end at every unit;
    otherwise graphs end at units with hooks of the user inside.

    Args:
        leaf_id: registered name of the unit module.
        changes_state: whether code before it in the graph changes Python state.
        trained: ``Root.trained``. Unused; Dynamo guards it, and with it what leaves return.
    """
    module = registered(leaf_id)
    root = module._fsdp_root
    root.changes_state |= changes_state
    is_variable = leaf_id in root.variable
    return not (is_variable or root.changes_state or has_hooks(hook_tables(module._fsdp_inner())))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def flags_of(leaf_id: str) -> tuple[str, ...]:
    """Return attributes of a unit that Dynamo must guard, since its output may depend on them.

    Dynamo traces no code of a leaf, and guards attributes only if the code around reads them.
    """
    attributes = vars(registered(leaf_id)._fsdp_inner()).items()
    return tuple([n for n, v in attributes if n[0] != "_" and isinstance(v, _FLAGS)])


def leaf(leaf_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Run a nested unit's forward as one node of the graph; return the tensors of its output.

    Dynamo calls this once with fake tensors. ``SegmentBackend`` replaces it by ``run_leaf``.
    """
    module = registered(leaf_id)
    mode = detect_fake_mode([*tensors_of(args), *tensors_of(kwargs)])
    if mode is None:
        return run_leaf(None, leaf_id, args, kwargs)
    token = _faking.set(True)
    # Tensors that a module keeps as plain attributes stay real.
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    given = thawed((args, kwargs))
    error: Exception | None = None
    try:
        with mode:
            output = fake_forward(module, *given)
    except Unsupported:
        raise
    except Exception as raised:  # the code around the unit may catch it
        error = raised
    finally:
        mode.allow_non_fake_inputs = allowed
        _faking.reset(token)
    if error is not None:
        cannot_capture(f"a unit that raises {type(error).__name__}", "see the error, if it is one")
    if not are_as_given(given, (args, kwargs)):
        cannot_capture("a unit that changes a list or a dict that it is given", "return a new one")
    tensors: list[torch.Tensor] = []
    module._fsdp_output_spec = spec = _flatten(output, tensors)
    # A second call of the unit in the graph overwrites the module's spec. If Dynamo keeps the
    # tensor objects, they lead to the spec of their own call.
    for tensor in tensors:
        setattr(tensor, _SPECS, {**getattr(tensor, _SPECS, {}), leaf_id: spec})
    return tuple(tensors)


torch.compiler.allow_in_graph(leaf)

_SPECS = "_fsdp_dynamo_specs"
_Facts = tuple[torch.dtype, tuple[int | None, ...], bool]


class _Assumed(NamedTuple):
    """Assumptions of the graph around a leaf about its output.

    Attributes:
        spec: structure of the output.
        facts: dtype, sizes (``None`` where dynamic) and ``requires_grad`` of each tensor.
    """

    spec: Any
    facts: list[_Facts]


def _facts_of(tensor: torch.Tensor) -> _Facts:
    sizes = [size if isinstance(size, int) else None for size in tensor.shape]
    return tensor.dtype, tuple(sizes), tensor.requires_grad


def _put_runner(node: torch.fx.Node) -> None:
    """Let a leaf's node run the leaf and compare its output with what was assumed."""
    values, name = node.meta["example_value"], node.args[0]
    last = registered(str(name))._fsdp_output_spec
    spec = getattr(values[0], _SPECS, {}).get(name, last) if values else last
    assumed = _Assumed(spec, [_facts_of(value) for value in values])

    _, args, kwargs = node.args
    is_given_containers = holds_containers((*args, *kwargs.values()))  # type: ignore[union-attr,misc]

    def run(leaf_id: str, *given: Any) -> tuple[torch.Tensor, ...]:
        if not is_given_containers:
            return run_leaf(assumed, leaf_id, *given)
        before = thawed(given)
        result = run_leaf(assumed, leaf_id, *given)
        if not are_as_given(given, before):
            raise _refused(leaf_id, "a list or a dict that it was given, as it was")
        return result

    node.target = run


def run_leaf(
    assumed: _Assumed | None, leaf_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Run a nested unit with its hooks.

    Raises:
        FSDPStateError: the output is not as the graph around it assumes. The graphs of the next
            call end at units of this class.
    """
    tensors: list[torch.Tensor] = []
    module = registered(leaf_id)
    spec = _flatten(module(*args, **kwargs), tensors, is_running=True)
    if assumed is not None and not (
        spec == assumed.spec and all(map(_is_as_assumed, tensors, assumed.facts))
    ):
        raise _refused(leaf_id, "an output of the structure, shapes and dtypes that it had")
    return tuple(tensors)


def _is_as_assumed(tensor: torch.Tensor, facts: _Facts) -> bool:
    dtype, sizes, requires_grad = facts
    return (
        tensor.dtype is dtype
        and (requires_grad or not tensor.requires_grad)
        and len(tensor.shape) == len(sizes)
        and all(size is None or size == now for size, now in zip(sizes, tensor.shape, strict=True))
    )


def _refused(leaf_id: str, expected: str) -> FSDPStateError:
    """Return the error of a leaf that changed, and end later graphs at units of its class."""
    module = registered(leaf_id)
    module._fsdp_root.record_variable(alike(leaf_id))
    return FSDPStateError(
        f"{unit_name(module._fsdp_unit.fqn)}: expected {expected} when the graph around the unit "
        "was made, got another one, though its inputs are alike. Pass what decides it as an "
        "argument of the unit's forward. (The next call is compiled anew, with graphs that end at "
        "units of this class.)"
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _output_spec(leaf_id: str) -> Any:
    return registered(leaf_id)._fsdp_output_spec


def _flatten(value: Any, tensors: list[torch.Tensor], is_running: bool = False) -> tuple[Any, ...]:
    """Append the tensors of a nested output to ``tensors``; return its spec, made of constants.

    What no graph can hold breaks the graph. At run time it gets a spec that equals no other.
    """

    def each(items: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([_flatten(item, tensors, is_running) for item in items])

    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if type(value) in (tuple, list):
        return (type(value).__name__, each(value))
    if type(value) is dict:
        return ("dict", tuple(value), each(value.values()))
    if value is None or isinstance(value, (bool, str)):
        return ("constant", value)
    if (opened := open_container(value)) is not None:
        name = f"{type(value)} {opened[1].args}"
        _rebuild[name] = opened[1]
        return ("container", name, each(opened[0]))
    if is_running:
        return ("unknown", object())
    return cannot_capture(  # numbers too: Dynamo would not guard those that change between steps
        f"a unit that returns {type(value).__name__}",
        "return tensors, in dataclasses, or in containers that torch.utils._pytree knows",
    )


def _unflatten(spec: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    kind = spec[0]
    if kind == "tensor":
        return tensors[spec[1]]
    if kind == "constant":
        return spec[1]
    if kind == "tuple":
        return tuple([_unflatten(item, tensors) for item in spec[1]])
    if kind == "list":
        return [_unflatten(item, tensors) for item in spec[1]]
    items = [_unflatten(item, tensors) for item in spec[2]]
    if kind == "dict":
        return dict(zip(spec[1], items))  # noqa: B905  # traced by Dynamo
    return _rebuild[spec[1]](items)


# -- a leaf's output on fake tensors -----------------------------------------------------------


def is_faking() -> bool:
    """Whether a leaf runs on fake tensors."""
    return _faking.get()


def fake_forward(
    unit_module: UnitModuleProtocol, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a unit's forward on fake tensors, without collectives and hooks.

    Changes of Python state (a counter, a list of outputs) are undone, since the forward will run
    again. A unit that makes such changes cannot be a leaf: code around it may read them.
    """
    unit = unit_module._fsdp_unit
    dtype = unit_module._fsdp_input_dtype
    args, kwargs = hooks.prepare_inputs(unit.device, dtype, args, kwargs)
    modules = [*unit_module._fsdp_inner().modules()]
    states = ObjectStates(modules)
    if states.opaque is not None:
        _refuse_leaf(f"may change {states.opaque}")
    kept = [_tables_of(module) for module in modules]
    for module in modules:
        _make_fake(module._parameters)
        _make_fake(module._buffers)
    for flat in unit.flats:
        views = [
            torch.empty(
                slot.shape,
                dtype=flat.param_dtype,
                device=flat.device,
                requires_grad=original.param.requires_grad,
            )
            for slot, original in zip(flat.layout.slots, flat.originals, strict=True)
        ]
        shown = flat.module_parameters
        shown.set_views(shown.as_parallel(views))
    faked = [_tables_of(module) for module in modules]
    changed: str | None = None
    try:
        output = hooks.cast_output(unit.output_dtype, unit_module._fsdp_body()(*args, **kwargs))
    finally:
        if any(
            not _are_alike(_tables_of(m), before) for m, before in zip(modules, faked, strict=True)
        ):
            changed = "a parameter, a buffer or a module"
        try:
            changed = states.put_back() or changed
        finally:
            unit.use_sharded_views()
            for module, tables in zip(modules, kept, strict=True):
                for table, before in zip(TABLES, tables, strict=True):
                    module.__dict__[table].clear()
                    module.__dict__[table].update(before)
    if changed is not None:
        _refuse_leaf(f"changes {changed}")
    return output


def _refuse_leaf(problem: str) -> None:
    """End the graph at a unit."""
    cannot_capture(f"a unit whose forward {problem}", "return what is to be read outside")


def _tables_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [dict(module.__dict__[table]) for table in TABLES]


def _are_alike(tables: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return all(
        one.keys() == other.keys() and all(value is other[name] for name, value in one.items())
        for one, other in zip(tables, others, strict=True)
    )


def _make_fake(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, FakeTensor):
            fake = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            tensors[name] = fake.requires_grad_(tensor.requires_grad)


# -- cutting the graph at the leaves -------------------------------------------------------------


class SegmentBackend:
    """Dynamo backend that cuts a graph at its leaves and compiles the segments with ``inner``."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        declare_mode(self, LEAF_MODE)
        self._cache: dict[Any, Callable[..., Any]] = {}

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        cache = {} if artifacts.is_recording() else self._cache
        return split_at_leaves(gm, example_inputs, leaf, _put_runner, self.inner, cache)


_segment_backends: WeakValueDictionary[int, SegmentBackend] = WeakValueDictionary()


def _segment_backend(key: int) -> SegmentBackend:
    """Return the segment backend around a backend. The code that it compiles keeps it alive."""
    backend = _segment_backends.get(key)
    if backend is None:
        backend = _segment_backends[key] = SegmentBackend(backend_of(key))
    return backend
