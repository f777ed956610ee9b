"""Dynamo's and AOTAutograd's private API, and every replacement of a function of torch's compiler.

Other modules also use private names (``docs/decisions/records/private-api.md`` lists all, each with
a test). Functions that this module replaces:

- ``OptimizedModule._load_from_state_dict``, permanently: the state dict of a compiled unit has
  plain names, so it must load them, and a class has no hook for that.
- ``invoke_subgraph.gen_schema``, while compiling (``one_schema_a_region``): torch traces a region's
  body again at each of its calls, in search of mutations, and keeps no result.
- ``collect_bw_donated_buffer_idxs``, while compiling (``nothing_donated``).
- ``AsyncCompile.wait`` and ``AsyncCompile.submit``, while compiling (``builds_put_off``).
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
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
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import _worker_compile_cpp
from torch._inductor.cpp_builder import CppBuilder
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from fsdp_dynamo.dynamo.untraced import Function
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError

GRAPH_MODE = "graph"
LEAF_MODE = "leaf"
HOOKS_MODE = "hooks"
NO_BACKEND = -1

with_side_effects = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer
"""Call a function that may change objects from outside of the operator body that Dynamo traces."""

_MODE_ATTRIBUTE = "_fsdp_dynamo_mode"

Backend = Callable[..., Any]
_Shapes = Sequence[Sequence[int]]


class CompileRefusedError(FSDPStateError, PackageError):
    """A use of torch.compile that cannot work.

    Dynamo wraps most errors and passes its own on unchanged. ``PackageError`` is one that causes no
    graph break.
    """


_numbers = itertools.count()
_backends: WeakValueDictionary[int, Backend] = WeakValueDictionary()
_keys: dict[int, int] = {}  # of the backends that are alive, by id


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs the current backward."""
    return torch._dynamo.compiled_autograd.in_compiled_autograd_region


def refuse_tracers() -> None:
    """Raise ``UnsupportedError`` if a tracer other than Dynamo traces a sharded model."""
    if torch.compiler.is_exporting():
        raise tracer_error("torch.export")
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise tracer_error("torch.jit.trace")
    if is_fx_symbolic_tracing():
        raise tracer_error("torch.fx")


def tracer_error(tracer: str) -> UnsupportedError:
    """Return the error of a tracer that would make a program of a sharded model."""
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
    """Return a number that stands for a backend in traced code, without keeping it alive."""
    key = _keys.get(id(backend))
    if key is None:  # backends need not be hashable
        key = _keys[id(backend)] = next(_numbers)
        _backends[key] = backend
        finalize(backend, _keys.pop, id(backend)).atexit = False
    return key


def backend_of(key: int) -> Backend:
    """Return the backend with this number."""
    return _backends[key]


def mode_of(backend: Backend) -> str:
    """Return the mode of a backend, or of the backend inside torch.compile's wrapper."""
    inner = getattr(backend, "compiler_fn", backend)
    return str(getattr(inner, _MODE_ATTRIBUTE, HOOKS_MODE))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_first_call(name: str) -> bool:
    """Whether the current trace reaches this unit for the first time."""
    names: set[str] = vars(TracingContext.get()).setdefault("fsdp_dynamo_called_units", set())
    is_first = name not in names
    names.add(name)
    return is_first


def number_of_body() -> int:
    """Return a number of the body that is traced now: the graph's own, or an operator's."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = InstructionTranslator.current_tx()
    return id(translator.output.current_tracer)


def made_to_require_grad() -> bool:
    """Whether the trace so far has called ``requires_grad_()`` on an intermediate tensor."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output: Any = InstructionTranslator.current_tx().output
    leaves = getattr(output, "leaf_var_creation_order", ())  # torch 2.11 refuses the call itself
    return any(leaf.source is None for leaf in leaves)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traced_mode() -> tuple[str, int]:
    """Return the mode of the current trace, and the number of its backend.

    A nested unit whose own call is the compiled frame is no leaf: the graph around it ended at this
    call, which has an argument that no node can take (a dataclass, say).

    Raises:
        CompileRefusedError: for ``fullgraph=True`` with a backend that does not know units, and for
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
    """Raise if a unit is called in an operator's body, which may run any number of times.

    Bodies of activation checkpointing are allowed: they become part of the graph.
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
    """Raise for a wrapper with ``use_orig_params=False``."""
    raise CompileRefusedError(
        "FullyShardedDataParallel: expected use_orig_params=True under torch.compile, got "
        "use_orig_params=False. Leave the argument out: the compiler must see the original "
        "parameters.",
        see="compiled-without-original-parameters",
    )


def active_backend_key() -> int:
    """Return the number of the backend of the calling frame, or ``NO_BACKEND``."""
    callback = get_eval_frame_callback()
    if not callable(callback):
        return NO_BACKEND
    return key_of(innermost_backend(callback))


def is_graph_mode_active() -> bool:
    """Whether the backend of the calling frame compiles whole graphs."""
    key = active_backend_key()
    return key != NO_BACKEND and mode_of(backend_of(key)) == GRAPH_MODE


def compile_with(backend: Backend, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a callable with exactly this backend object; graph breaks are allowed.

    Dynamo keeps every backend until its reset. A backend that is new to it is removed again, and
    lives as long as ``compiled``.
    """
    with _not_kept():
        compiled: Callable[..., Any] = torch._dynamo.optimize(backend=backend)(fn)  # type: ignore[no-untyped-call]
    return compiled


@contextmanager
def _not_kept() -> Iterator[None]:
    """Let Dynamo forget the backends that it first sees in the context."""
    before = set(cached_backends)
    try:
        yield
    finally:
        for new in cached_backends.keys() - before:
            del cached_backends[new]


def compiled_parts(model: torch.nn.Module) -> tuple[torch.nn.Module, Backend | None, bool]:
    """Return model, backend and ``fullgraph`` of a result of ``torch.compile``.

    The backend of a model that is not compiled is ``None``.
    """
    if not isinstance(model, OptimizedModule):
        return model, None, False
    context: Any = model.dynamo_ctx
    return model._orig_mod, innermost_backend(context.callback), bool(context.fullgraph)


def compile_again(
    backend: Any, fn: Callable[..., Any], fullgraph: bool, options: Any = None
) -> Callable[..., Any]:
    """Compile a callable as another one was compiled.

    Args:
        backend: from ``compiled_parts``, or another backend.
        fn: the callable.
        fullgraph: whether a graph break is an error.
        options: options of the backend.
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
    """Return a unit's body compiled as ``torch.compile(module, fullgraph=True)`` requires.

    Hooks cannot be in a whole graph of a backend that does not know units, so they run around it.
    ``None`` for other modules, whose hooks run inside.
    """
    _, backend, fullgraph = compiled_parts(model)
    if backend is None or not fullgraph or mode_of(backend) != HOOKS_MODE:
        return None
    return compile_again(backend, entry_of(body, shapes), fullgraph)


def with_own_code(fn: Any) -> Any:
    """Copy a function together with its code object.

    Dynamo keeps compiled code, and counts recompiles, by code object. Without copies, all models of
    a process would share the few entries of a function that all of them call. The copy's entries
    are dropped with it: they hold its code object where the garbage collector cannot see it.
    """
    copy = FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    finalize(copy, reset_code, copy.__code__).atexit = False
    return copy


def never_compiled_itself(fn: Function) -> Function:
    """Let Dynamo skip a function's own frame, but compile the frames below it.

    A trace that begins further out goes through the function as through any other.
    """
    skip_code(fn.__code__)
    return fn


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def guarded(*constants: object) -> None:
    """Let Dynamo guard constants.

    Dynamo guards arguments of such a function, whereas values that are only read are guarded when
    used.
    """


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def changes_python_state() -> bool:
    """Whether the code traced so far has changed objects that existed before.

    Dynamo postpones such changes until its graph has run.
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
"""Code of the frame in between (``None``: no such frame), by forward and parameter shapes."""
_codes_apart: dict[int, dict[Any, dict[_Shapes, CodeType | None]]] = {}
"""``_codes`` of the backends within ``codes_apart``, by id of the backend."""


@contextmanager
def codes_apart(backend: Backend) -> Iterator[None]:
    """While open, modules compiled with this backend share no code with those of other backends."""
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
    """Drop on exit the compiled code of all functions that Dynamo compiled in the context."""
    compiled: list[CodeType] = []

    def record(code: CodeType, new_code: CodeType) -> None:
        compiled.append(code)

    handle = torch._dynamo.convert_frame.register_bytecode_hook(record)
    try:
        yield
    finally:
        handle.remove()
        for code in compiled:
            reset_code(code)


def entry_of(
    body: Callable[..., Any], shapes: _Shapes | None, backend: Backend | None = None
) -> Callable[..., Any]:
    """Return the callable to compile for a module.

    Dynamo never compiles the frames of ``torch.nn`` itself, so its modules get a frame in between.
    So do modules with other shapes than the first ones of their class: in one frame, Dynamo would
    make the sizes dynamic. (With window attention, that takes minutes in place of seconds.)

    Args:
        body: the module, or its bound ``_call_impl``.
        shapes: shapes of its parameters. Modules of one class and equal shapes share compiled code;
            ``None``: no sharing.
        backend: backend that compiles the module, if it may be within ``codes_apart``.
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
        # Another name: Dynamo also records by function name which sizes have changed.
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
    """Break the graph that is traced: the current call runs between two graphs."""
    from torch._dynamo.exc import unimplemented

    unimplemented(
        gb_type="unit that cannot be a node of the graph",
        context=what,
        explanation=f"{what} cannot be a node of the graph around it.",
        hints=[fix],
    )


@contextmanager
def one_schema_a_region() -> Iterator[None]:
    """While open, find a region's schema once for each body and kinds of operands."""
    operator: Any = torch.ops.higher_order.invoke_subgraph
    find = operator.gen_schema
    known: dict[Any, tuple[Any, Any]] = {}

    def find_once(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = (id(subgraph), identifier, *map(type, operands))
        if key not in known:  # keep the subgraph alive: its id must not be reused
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
    """Compile backwards that never overwrite what their forward has saved.

    AOTAutograd numbers the saved tensors that nothing else reads, and Inductor reuses their memory.
    The numbers are in the tracing context of the whole graph. In a segment or stretch the same
    numbers may mean a parameter or a buffer. (Code compiled with ``donated_buffer`` off refuses
    retained backwards once the setting is back.) By default, saved-tensor hooks that are graphs
    apply to donated tensors only. Nothing is donated here, so they apply to all saved tensors, as
    in eager mode.
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


# -- kernel builds ---------------------------------------------------------------------------------
# Builds of Inductor's C++ kernels, put off so that many kernels share one file.


Kernel = tuple[CppBuilder, "Future[None]"]
"""A kernel to build, and the future to complete once its library is there or Inductor is to try."""


@dataclass(frozen=True)
class PutOffBuilds:
    """Builds of kernels, and the waits for them, that Inductor has asked for."""

    kernels: list[Kernel] = field(default_factory=list)
    waits: list[Callable[[], None]] = field(default_factory=list)


@contextmanager
def builds_put_off() -> Iterator[PutOffBuilds]:
    """Collect the builds of kernels and the waits for them while open.

    Inductor starts a compiler for each kernel (0.6 s before its first line) and waits for it before
    the next graph: a cold compile of a decoder takes 1.7 times as long. Builds of other threads go
    on as usual. After an error, the kernels are left to Inductor.
    """
    wait, submit, thread = AsyncCompile.wait, AsyncCompile.submit, threading.get_ident()
    found = PutOffBuilds()

    def wait_later(builds: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            found.waits.append(partial(wait, builds, scope))
        else:
            wait(builds, scope)

    def submit_later(task: Callable[..., Any]) -> Any:
        is_kernel = isinstance(task, partial) and task.func is _worker_compile_cpp
        builders: Sequence[CppBuilder] = task.args[1] if is_kernel else ()  # type: ignore[attr-defined]
        if len(builders) != 1 or threading.get_ident() != thread:
            return submit(task)
        built: Future[None] = Future()
        found.kernels.append((builders[0], built))
        return built

    with (
        patch.object(AsyncCompile, "wait", wait_later),
        patch.object(AsyncCompile, "submit", staticmethod(submit_later)),
    ):
        try:
            yield found
        except BaseException:
            for _, built in found.kernels:
                built.set_result(None)
            raise


# -- garbage ---------------------------------------------------------------------------------------


_THRESHOLDS = (50_000, 50, 100)


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Let Python's garbage collector run seldom while a graph is traced and compiled.

    Nearly all objects made there stay, and every full collection visits them: 1.5 s with 64 blocks.
    Higher thresholds of the user are kept, and so is a disabled collector.
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
# ``torch.func``'s transforms around a unit. Collectives, views and hooks stay outside of them.
#
# Inside, new tensors are wrappers without memory to send, and hooks would be on wrappers that an
# outer backward never sees.


_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Leave all active transforms while open."""
    if _functorch.peek_interpreter_stack() is None:
        return _NOTHING
    return temporarily_clear_interpreter_stack()


def is_in_reverse_mode() -> bool:
    """Whether ``torch.func.grad``, ``vjp`` or ``jacrev`` is active; they run their own backward."""
    return _functorch.peek_interpreter_stack() is not None and any(
        one.key() == TransformType.Grad for one in retrieve_all_functorch_interpreters()
    )


def below_transforms(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what a tensor is made of below all transforms: its value, and in ``jvp`` a tangent."""
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
