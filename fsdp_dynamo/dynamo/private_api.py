"""All uses of Dynamo's private API, and the one method of its that is replaced.

Touched, and why: ``InstructionTranslator.current_tx`` (which backend and mode is tracing now),
``TracingContext.extract_stack`` (whether a nested unit's call is the frame being compiled),
``OutputGraph.current_tracer`` (in the body of which operator a unit is called),
``_disable_side_effect_safety_checks_for_current_subtracer`` (a unit in such a body changes modules
and restores them),
``get_eval_frame_callback`` and ``innermost_backend`` (which backend runs around this frame),
``torch._dynamo.optimize`` (compile a callable with that very backend object, so that compiled
code is shared), ``cached_backends`` (to let go of such an object with what it compiled),
``reset_code`` (to drop what was compiled for a model that is gone),
``skip_code`` (a frame that only chooses the code object of the next one is not compiled),
``OptimizedModule.dynamo_ctx`` (which backend a model was compiled with),
``GraphModule.compile_subgraph_reason`` (whether a graph break ends the graph that is compiled),
``invoke_subgraph.gen_schema`` (torch traces a region's body again at each of its calls, in search
of mutations, and keeps no result), ``OptimizedModule._load_from_state_dict`` (a compiled wrapper's
state dict has plain names, so it must also load them; there is no hook on a class),
``compiled_autograd.in_compiled_autograd_region`` (whether a backward runs in a graph of its own),
``is_fx_symbolic_tracing`` (whether ``torch.fx`` traces a sharded model).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any, NoReturn
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
import torch._functorch.config
from torch._C import _functorch
from torch._C._dynamo.eval_frame import get_eval_frame_callback, reset_code
from torch._C._functorch import TransformType
from torch._dynamo.eval_frame import (
    OptimizedModule,
    cached_backends,
    innermost_backend,
    skip_code,
)
from torch._dynamo.exc import PackageError
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from fsdp_dynamo.dynamo.untraced import Function
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError

GRAPH_MODE = "graph"
LEAF_MODE = "leaf"
HOOKS_MODE = "hooks"
NO_BACKEND = -1

with_side_effects = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer
"""Calls a function that may change objects from outside of the body that Dynamo traces."""

_MODE_ATTRIBUTE = "_fsdp_dynamo_mode"

Backend = Callable[..., Any]
_Shapes = Sequence[Sequence[int]]


class CompileRefusedError(FSDPStateError, PackageError):
    """A use of torch.compile that cannot work.

    Dynamo hands errors of its own to the user as they are and wraps all others; ``PackageError`` is
    one of the former that breaks no graph.
    """


_numbers = itertools.count()
_backends: WeakValueDictionary[int, Backend] = WeakValueDictionary()
_keys: dict[int, int] = {}  # of the backends that are alive, by id


def in_compiled_autograd() -> bool:
    """Whether hooks and backwards are called by a graph that torch has made of a backward."""
    return torch._dynamo.compiled_autograd.in_compiled_autograd_region


def refuse_tracers() -> None:
    """Raise if something other than Dynamo makes a program of a sharded model.

    Raises:
        UnsupportedError: names it.
    """
    if torch.compiler.is_exporting():
        raise tracer_error("torch.export")
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise tracer_error("torch.jit.trace")
    if is_fx_symbolic_tracing():
        raise tracer_error("torch.fx")


def tracer_error(tracer: str) -> UnsupportedError:
    """The error of a program that is to be made of a sharded model."""
    return UnsupportedError(
        f"{tracer}: expected an unsharded model to make a program of, got one whose parameters are "
        "sharded, and gathered by hooks. Build the model anew without sharding it, and load into "
        "it what get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
        "torch.distributed.checkpoint.state_dict returns, which all ranks call."
    )


def declare_mode(backend: Backend, mode: str) -> None:
    """Declare the mode in which a backend of ours compiles units."""
    setattr(backend, _MODE_ATTRIBUTE, mode)


def key_of(backend: Backend) -> int:
    """A number that stands for a backend in traced code, which Dynamo keeps no longer than it."""
    key = _keys.get(id(backend))
    if key is None:  # backends need not be hashable
        key = _keys[id(backend)] = next(_numbers)
        _backends[key] = backend
        finalize(backend, _keys.pop, id(backend)).atexit = False
    return key


def backend_of(key: int) -> Backend:
    """The backend that ``key_of`` gave this number."""
    return _backends[key]


def mode_of(backend: Backend) -> str:
    """The declared mode of a backend, or of the one that torch.compile has put into its own."""
    inner = getattr(backend, "compiler_fn", backend)
    return str(getattr(inner, _MODE_ATTRIBUTE, HOOKS_MODE))


_called_in: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Names of the units called so far, by trace."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_first_call(name: str) -> bool:
    """Whether the trace that runs now asks for the first time with this unit's name."""
    names = _called_in.setdefault(TracingContext.get(), set())
    is_first = name not in names
    names.add(name)
    return is_first


def number_of_body() -> int:
    """A number of the body that is traced now: the graph's own, or that of an operator in it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = InstructionTranslator.current_tx()
    return id(translator.output.current_tracer)


def made_to_require_grad() -> bool:
    """Whether the traced code so far has called ``requires_grad_()`` on an intermediate tensor."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output: Any = InstructionTranslator.current_tx().output
    leaves = getattr(output, "leaf_var_creation_order", ())  # torch 2.11 refuses the call itself
    return any(leaf.source is None for leaf in leaves)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traced_mode() -> tuple[str, int]:
    """The mode of the trace that runs now, and the number of its backend.

    A nested unit whose own call is the frame that is compiled is no leaf of a graph: the graph
    around it ended at this call, which takes what no node can (a dataclass, say).

    Raises:
        CompileRefusedError: for ``fullgraph=True`` with a backend that knows nothing of units, or
            ``torch.export``.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = InstructionTranslator.current_tx()
    backend = innermost_backend(translator.output.compiler_fn)
    mode = mode_of(backend)
    if mode == LEAF_MODE and len(TracingContext.extract_stack()) == 1:
        mode = HOOKS_MODE
    if torch.compiler.is_exporting():
        raise CompileRefusedError(*tracer_error("torch.export").args)
    if mode == HOOKS_MODE and translator.one_graph:
        raise CompileRefusedError(
            'torch.compile: expected backend="fsdp_dynamo" or "fsdp_dynamo_aot_eager" with '
            f'fullgraph=True, got backend "{getattr(backend, "compiler_name", backend)}". Name '
            "one of these backends, or leave fullgraph out: hooks then run between compiled "
            "regions.",
            see="another-backend-with-fullgraph",
        )
    if mode != HOOKS_MODE:
        _refuse_bodies_of_operators(translator.output.current_tracer)
    return mode, key_of(backend)


def _refuse_bodies_of_operators(tracer: Any) -> None:
    """Raise inside an operator's body; those of activation checkpointing become part of the graph.

    Raises:
        CompileRefusedError: a unit is called there.
    """
    while tracer.parent is not None:
        operator = tracer.source_target
        if operator is not torch.ops.higher_order.tag_activation_checkpoint:
            raise CompileRefusedError(
                "torch.compile: expected a unit called where it runs once a step, got a call in "
                f"the body of the operator {getattr(operator, '__name__', operator)}. Call it "
                "outside of the operator, let what holds the operator be the unit, or leave "
                "torch.compile out."
            )
        tracer = tracer.parent


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_without_orig_params() -> None:
    """Raise for a wrapper made with ``use_orig_params=False`` that is about to be compiled."""
    raise CompileRefusedError(
        "FullyShardedDataParallel: expected use_orig_params=True under torch.compile, got "
        "use_orig_params=False. Leave the argument out: the compiler must see the original "
        "parameters.",
        see="compiled-without-original-parameters",
    )


def active_backend_key() -> int:
    """The number of the backend around the calling frame, or ``NO_BACKEND``."""
    callback = get_eval_frame_callback()
    if not callable(callback):
        return NO_BACKEND
    return key_of(innermost_backend(callback))


def is_graph_mode_active() -> bool:
    """Whether the backend around the calling frame compiles whole graphs."""
    key = active_backend_key()
    return key != NO_BACKEND and mode_of(backend_of(key)) == GRAPH_MODE


def compile_with(backend: Backend, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a callable with exactly this backend object; graph breaks are allowed.

    Dynamo keeps every backend until its reset; one that it meets here first goes with ``compiled``.
    """
    with _not_kept():
        compiled: Callable[..., Any] = torch._dynamo.optimize(backend=backend)(fn)  # type: ignore[no-untyped-call]
    return compiled


@contextmanager
def _not_kept() -> Iterator[None]:
    """Let Dynamo forget the backends again that it meets first in the context."""
    before = set(cached_backends)
    try:
        yield
    finally:
        for new in cached_backends.keys() - before:
            del cached_backends[new]


def compiled_parts(model: torch.nn.Module) -> tuple[torch.nn.Module, Backend | None, bool]:
    """Model, backend and ``fullgraph`` of a result of ``torch.compile``.

    For a model that is not compiled the backend is ``None``.
    """
    if not isinstance(model, OptimizedModule):
        return model, None, False
    context: Any = model.dynamo_ctx
    return model._orig_mod, innermost_backend(context.callback), bool(context.fullgraph)


def compile_again(
    backend: Any, fn: Callable[..., Any], fullgraph: bool, options: Any = None
) -> Callable[..., Any]:
    """Compile a callable as another was compiled.

    Args:
        backend: the object that ``compiled_parts`` gave, or another one.
        fn: what to compile.
        fullgraph: whether a graph break is an error.
        options: what the backend is called with.
    """
    dynamic = getattr(backend, "dynamic", None)
    compiled: Callable[..., Any]
    with _not_kept():
        if options is not None:
            compiled = torch.compile(
                fn, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options=dict(options)
            )
        else:
            optimize: Any = torch._dynamo.optimize
            compiled = optimize(backend=backend, nopython=fullgraph, dynamic=dynamic)(fn)
    return compiled


def compiled_as_one_graph(
    model: OptimizedModule, body: Callable[..., Any], shapes: _Shapes
) -> Callable[..., Any] | None:
    """The body of a unit, compiled as ``torch.compile(module, fullgraph=True)`` has asked for.

    Hooks cannot be in a whole graph of a backend that knows nothing of units: they run around it.
    ``None`` for other modules, whose hooks run inside.

    Args:
        model: the compiled module.
        body: see ``entry_of``.
        shapes: see ``entry_of``.
    """
    _, backend, fullgraph = compiled_parts(model)
    if backend is None or not fullgraph or mode_of(backend) != HOOKS_MODE:
        return None
    return compile_again(backend, entry_of(body, shapes), fullgraph)


def with_own_code(fn: Any) -> Any:
    """A copy of a function whose code object is its own.

    Dynamo keeps compiled code, and counts recompiles, by code object: all models of a process
    would share the few entries of the one that they all run through. Those of the copy go with it;
    by themselves they would stay, as they hold its code object out of the collector's sight.
    """
    copy = FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    finalize(copy, reset_code, copy.__code__).atexit = False
    return copy


def never_compiled_itself(fn: Function) -> Function:
    """Let Dynamo compile the frames below a function, and never the function's own.

    A trace that begins further out goes through the function as through any other.
    """
    skip_code(fn.__code__)
    return fn


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def guarded(*constants: object) -> None:
    """Let the code that is traced be guarded by constants: by what it passes on here.

    Those that are only read are not, as Dynamo looks at them when they are used.
    """


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def changes_python_state() -> bool:
    """Whether the code traced so far has changed objects that were there before.

    Dynamo writes such changes down, and makes them only when its graph has run.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects: Any = InstructionTranslator.current_tx().output.side_effects
    return any(
        effects.is_modified(one)
        for one in effects.id_to_variable.values()
        if not isinstance(one.mutation_type, (AttributeMutationNew, ValueMutationNew))
    )


_codes: WeakKeyDictionary[Any, dict[_Shapes, CodeType | None]] = WeakKeyDictionary()
"""By forward function and shapes of parameters, the code of the frame in between, if any."""
_codes_apart: dict[int, dict[Any, dict[_Shapes, CodeType | None]]] = {}
"""Codes of backends that compile into code of their own, by the backends' ids."""


@contextmanager
def codes_apart(backend: Backend) -> Iterator[None]:
    """While open, modules that are compiled with a backend share no code with other backends'."""
    _codes_apart[id(backend)] = {}
    try:
        yield
    finally:
        del _codes_apart[id(backend)]


def is_skipped(fn: Callable[..., Any]) -> bool:
    """Whether Dynamo never compiles a function's own frame, as it does with those of torch.nn."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(fn))


@contextmanager
def forgotten_code() -> Iterator[None]:
    """Drop all compiled code of the functions that Dynamo compiles in the context."""
    compiled: list[CodeType] = []

    def note(code: CodeType, new_code: CodeType) -> None:
        compiled.append(code)

    handle = torch._dynamo.convert_frame.register_bytecode_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for code in compiled:
            reset_code(code)


def entry_of(
    body: Callable[..., Any], shapes: _Shapes | None, backend: Backend | None = None
) -> Callable[..., Any]:
    """The callable to compile for a module, whose frame Dynamo compiles.

    Dynamo never compiles the frames of ``torch.nn`` itself: its modules get a frame in between. So
    do modules of other shapes than the first ones of their class. (In one frame Dynamo would take
    the sizes for dynamic: with window attention, minutes for what takes seconds.)

    Args:
        body: the module, or its bound ``_call_impl``.
        shapes: of its parameters; modules of one class and equal shapes share their compiled code.
            ``None``: it shares with none.
        backend: which compiles it, if that may be within ``codes_apart``.
    """
    is_module = isinstance(body, torch.nn.Module)
    module: Any = body if is_module else body.__self__  # type: ignore[attr-defined]

    def call(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    if shapes is None:
        own: Callable[..., Any] = with_own_code(call)
        return own
    apart = _codes_apart.get(id(backend))
    codes = (_codes if apart is None else apart).setdefault(type(module).forward, {})
    if shapes not in codes:
        is_first = apart is None and not codes and not is_skipped(module.forward)
        # By the name, too, Dynamo looks up which sizes have changed.
        name = f"{type(module).__name__}_{len(codes)}"
        codes[shapes] = None if is_first else call.__code__.replace(co_name=name)
    code = codes[shapes]
    if code is None:
        return module.__call__ if is_module else body
    call.__code__ = code
    return call


def ends_with_a_break(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph break ends a graph that is to be compiled."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def cannot_capture(what: str, fix: str) -> NoReturn:
    """Break the graph that is being traced: what runs here runs between compiled graphs."""
    from torch._dynamo.exc import unimplemented

    unimplemented(
        gb_type="unit that cannot be a node of the graph",
        context=what,
        explanation=f"{what} cannot be a node of the graph around it.",
        hints=[fix],
    )


@contextmanager
def one_schema_a_region() -> Iterator[None]:
    """While open, a region's schema is found once a body and kind of operands, not once a call."""
    operator: Any = torch.ops.higher_order.invoke_subgraph
    find = operator.gen_schema
    known: dict[Any, tuple[Any, Any]] = {}

    def find_once(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = (id(subgraph), identifier, *map(type, operands))
        if key not in known:  # the subgraph is kept too, so that its id stays its own
            known[key] = (find(subgraph, identifier, *operands), subgraph)
        return known[key][0]

    operator.gen_schema = find_once
    try:
        yield
    finally:
        del operator.gen_schema


def _load_plain_names(
    module: OptimizedModule, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    inner = module._orig_mod
    if getattr(inner, "_is_fsdp_managed_module", False):
        for key in [k for k in state_dict if k.startswith(prefix)]:
            name = key[len(prefix) :]
            if not name.startswith("_orig_mod."):
                state_dict[f"{prefix}_orig_mod.{name}"] = state_dict.pop(key)
    torch.nn.Module._load_from_state_dict(module, state_dict, prefix, *rest)


OptimizedModule._load_from_state_dict = _load_plain_names  # type: ignore[method-assign,assignment]


# -- donations -------------------------------------------------------------------------------------
# Saved tensors that compiled backwards may overwrite: none.


@contextmanager
def nothing_donated() -> Iterator[None]:
    """Let no backward of what is compiled inside write into what its forward has saved.

    AOTAutograd numbers the saved tensors that nothing else reads, and Inductor reuses their memory.
    It takes the numbers from the tracing context, which is that of the whole graph: those of one
    segment or stretch are, in another one, a parameter or a buffer. With AOTAutograd's setting
    ``donated_buffer`` off, a backward would refuse to be retained: so it finds nothing to donate.
    Saved-tensor hooks that are graphs would then apply to nothing by AOTAutograd's default, which
    is what is donated; so they apply to all that is saved, as in eager.
    """
    mode = torch._functorch.config.saved_tensors_hooks_filtering_mode
    with (
        patch.object(graph_compile, "collect_bw_donated_buffer_idxs", _none_found),
        torch._functorch.config.patch(
            saved_tensors_hooks_filtering_mode="all" if mode == "donated" else mode
        ),
    ):
        yield


def _none_found(*_: Any) -> list[int]:
    return []


# -- garbage ---------------------------------------------------------------------------------------
# Garbage collection while a graph is traced and compiled.


_THRESHOLDS = (50_000, 50, 100)


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Let Python look for garbage seldom.

    Tracing and compiling make a graph of objects of which nearly all stay, and a full collection
    visits each of them: with 64 blocks that took 1.5 s. Thresholds that are higher already stay,
    and so does a collector that is off.
    """
    before = gc.get_threshold()
    if before[0] == 0:
        yield
        return
    gc.set_threshold(*(max(pair) for pair in zip(before, _THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)


# -- transforms ------------------------------------------------------------------------------------
# ``torch.func``'s transforms around a unit: its collectives, views and hooks are outside of them.
#
# Inside, new tensors are wrappers without memory that could be sent, and hooks would be on
# wrappers that an outer backward never sees.


_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Leave all transforms that are active while open."""
    if _functorch.peek_interpreter_stack() is None:
        return _NOTHING
    return temporarily_clear_interpreter_stack()


def is_in_reverse_mode() -> bool:
    """Whether ``torch.func.grad``, ``vjp`` or ``jacrev`` is active, whose backward is its own."""
    return _functorch.peek_interpreter_stack() is not None and any(
        one.key() == TransformType.Grad for one in retrieve_all_functorch_interpreters()
    )


def below_transforms(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of the outer graph that a tensor consists of: its value, and a tangent in ``jvp``."""
    top = _functorch.peek_interpreter_stack()
    if top is None or not _functorch.is_functorch_wrapped_tensor(tensor):
        return [tensor]
    found = [tensor]
    if _functorch.maybe_get_level(tensor) == top.level():
        if top.key() == TransformType.Jvp:
            tangent = forward_ad.unpack_dual(tensor).tangent  # its primal is another view
            found += [] if tangent is None else [tangent]
        found = [_functorch.get_unwrapped(one) for one in found]
    with temporarily_pop_interpreter_stack():
        return [below for one in found for below in below_transforms(one)]
