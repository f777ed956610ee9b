"""Split a Dynamo graph at leaves and compile the segments in between."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
import torch.compiler.config
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo.comm.streams import host_runs_ahead
from fsdp_dynamo.core.unit_modules import UnitModuleProtocol
from fsdp_dynamo.dynamo.private_api import Backend, nothing_donated
from fsdp_dynamo.errors import UnsupportedError, unit_name

_TAG = "fsdp_dynamo: nothing is donated"


def split_at_leaves(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    leaf: Callable[..., Any],
    put_runner: Callable[[fx.Node], None],
    backend: Backend,
    cache: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph with leaves: segments by ``backend``, leaves as plain calls.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its example inputs.
        leaf: target of the leaves.
        put_runner: replaces the target of a leaf by the function to call at run time.
        backend: compiles one segment.
        cache: compiled segments by key; equal segments are compiled once.
    """
    if not _leaf_nodes(gm, leaf):
        compiled: Callable[..., Any] = backend(gm, example_inputs)
        return compiled
    with _compiled_apart():
        return _split(gm, leaf, put_runner, backend, cache)


def _split(
    gm: fx.GraphModule,
    leaf: Callable[..., Any],
    put_runner: Callable[[fx.Node], None],
    backend: Backend,
    cache: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    parts, leaf_parts = _assign_parts(gm, leaf)
    _make_numbers_anew(parts)
    split: Any = split_module(gm, None, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    grad_mode = torch.is_grad_enabled()
    for node in split.graph.find_nodes(op="call_module"):
        part = split.get_submodule(node.target)
        _hand_on(gm, part)
        # Compiled code restores the grad mode relative to the mode in which it was compiled.
        with torch.set_grad_enabled(grad_mode):
            grad_mode = _grad_mode_after(part)
            if int(node.target.removeprefix("submod_")) in leaf_parts:
                _redirect(part, leaf, put_runner, backend, cache)
            else:
                split.register_module(node.target, _Segment(_compile(part, backend, cache)))
    forward: Callable[..., Any] = split.forward
    return forward


def _hand_on(gm: fx.GraphModule, part: fx.GraphModule) -> None:
    """Give a part what Dynamo has put on the whole graph for backends to read."""
    part.meta.update(gm.meta)
    if hasattr(gm, "compile_subgraph_reason"):  # no body of an operator has it
        part.compile_subgraph_reason = gm.compile_subgraph_reason


@contextmanager
def _compiled_apart() -> Iterator[None]:
    """Compile without donations, backwards too, and under cache keys of their own.

    Inductor's cache keys do not contain what is donated.
    """
    tag: str = torch.compiler.config.cache_key_tag  # type: ignore[attr-defined]
    with (
        nothing_donated(),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch.compiler.config.patch(cache_key_tag=f"{tag} {_TAG}"),  # type: ignore[attr-defined]
    ):
        yield


def _grad_mode_after(part: fx.GraphModule) -> bool:
    """Whether gradients are enabled after a part that begins with the current grad mode."""
    changes = part.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    return bool(changes[-1].args[0]) if changes else torch.is_grad_enabled()


def _leaf_nodes(gm: fx.GraphModule, leaf: Callable[..., Any]) -> set[fx.Node]:
    """Return the leaves: opaque nodes, and ``checkpoint`` calls whose bodies hold leaves."""
    found = set()
    for node in gm.graph.nodes:
        if node.target is leaf or (is_checkpoint(node) and _leaf_nodes(_body(gm, node), leaf)):
            found.add(node)
    return found


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph calls ``torch.utils.checkpoint``."""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def _body(gm: fx.GraphModule, node: fx.Node) -> Any:
    return gm.get_submodule(node.args[0].target)  # type: ignore[union-attr,arg-type]


def _assign_parts(
    gm: fx.GraphModule, leaf: Callable[..., Any]
) -> tuple[dict[fx.Node, int], set[int]]:
    """Return a part number for each node. A leaf, its body and what unpacks it are one part."""
    leaves = _leaf_nodes(gm, leaf)
    parts: dict[fx.Node, int] = {}
    leaf_parts: set[int] = set()
    current = 0
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node in leaves:
            current += 1
            parts.update(dict.fromkeys((n for n in node.all_input_nodes if _is_body(n)), current))
            parts[node] = current
            leaf_parts.add(current)
            current += 1
        elif node.target is operator.getitem and node.args[0] in leaves:
            parts[node] = parts[node.args[0]]
        else:
            parts[node] = current
    return parts, leaf_parts


def _make_numbers_anew(parts: dict[fx.Node, int]) -> None:
    """Compute floats anew in each part that uses them: parts exchange tensors and integers only.

    Dynamo passes a float that changes between calls as a tensor, and reads it with ``item()``. If
    that tensor may be written in the meantime, later parts read a copy.
    """
    for node in reversed([*parts]):  # a copy's inputs are visited after it
        if not isinstance(node.meta.get("example_value"), torch.SymFloat):
            continue
        copies: dict[int, fx.Node] = {}
        origin = node
        for user in sorted(node.users):
            part = parts.get(user, parts[node])
            if part == parts[node]:
                continue
            if part not in copies:
                if origin is node and _may_be_written(node):
                    origin = _with_a_copy(node, parts)
                with node.graph.inserting_before(user):
                    copies[part] = node.graph.node_copy(origin)
                parts[copies[part]] = part
            user.replace_input_with(node, copies[part])


def _may_be_written(node: fx.Node) -> bool:
    """Whether a number is read from a tensor other than one that Dynamo made for it."""
    if node.target != "item":
        return False
    holder = node.args[0]
    assert isinstance(holder, fx.Node)
    return not getattr(holder.meta.get("grapharg"), "pass_arg_as_tensor", False)


def _with_a_copy(node: fx.Node, parts: dict[fx.Node, int]) -> fx.Node:
    """Copy the tensor that an ``item()`` node reads; return an ``item()`` node of the copy."""
    (holder,) = node.args
    assert isinstance(holder, fx.Node)
    with node.graph.inserting_before(node):
        copied = node.graph.call_method("clone", (holder,))
        number = node.graph.call_method("item", (copied,))
    copied.meta["example_value"] = value = holder.meta["example_value"].detach().clone()
    value.item_memo = node.meta["example_value"]
    number.meta["example_value"] = node.meta["example_value"]
    parts[copied] = parts[number] = parts[node]
    return number


def _is_body(node: fx.Node) -> bool:
    return node.op == "get_attr" and all(is_checkpoint(user) for user in node.users)


def _redirect(
    part: Any,
    leaf: Callable[..., Any],
    put_runner: Callable[[fx.Node], None],
    backend: Backend,
    cache: dict[Any, Callable[..., Any]],
) -> None:
    """Let a part that consists of a leaf run it."""
    for node in list(part.graph.nodes):
        if node.target is leaf:
            put_runner(node)
        elif is_checkpoint(node):
            body = _body(part, node)
            run = _split(body, leaf, put_runner, backend, cache)
            part.checkpointed = _Checkpointed(run, node.kwargs, body)
            with part.graph.inserting_before(node):
                call = part.graph.call_module("checkpointed", node.args[1:])
            node.replace_all_uses_with(call)
            part.graph.erase_node(node)
    part.recompile()


class _Checkpointed(torch.nn.Module):
    """Compiled body with leaves, checkpointed at run time; non-reentrant as in a whole graph.

    Args:
        run: the compiled body.
        options: the user's options of ``checkpoint``.
        body: the traced body.
    """

    def __init__(
        self, run: Callable[..., Any], options: dict[str, Any], body: fx.GraphModule
    ) -> None:
        super().__init__()
        self.run = run
        self.options = {**options, "use_reentrant": False}
        if "_checkpoint_context_fn" in body.meta:
            self.options["context_fn"] = body.meta["_checkpoint_context_fn"]

    def forward(self, *args: Any) -> Any:
        call = _Recomputed(self.run, args)
        return checkpoint(call, *call.differentiable, **self.options)


class _Recomputed:
    """Body that runs again in the backward, with buffers as they are then.

    ``checkpoint`` would save every argument and report that batch norm's statistics have changed.
    In eager mode those are no arguments; here everything is. So only tensors with gradients are
    passed through ``checkpoint``, and the rest is kept here.
    """

    def __init__(self, run: Callable[..., Any], args: Sequence[Any]) -> None:
        self._run = run
        self._positions = [
            i for i, one in enumerate(args) if isinstance(one, torch.Tensor) and one.requires_grad
        ]
        self.differentiable = [args[i] for i in self._positions]
        self._args = [None if i in self._positions else one for i, one in enumerate(args)]
        self._unchanged: list[tuple[torch.Tensor, int]] | None = None

    def __call__(self, *differentiable: Any) -> Any:
        args = list(self._args)
        for position, one in zip(self._positions, differentiable, strict=True):
            args[position] = one
        if self._unchanged is not None:
            self._require_unchanged()
            return self._run(*args)
        before = [(one, one._version) for one in self._args if isinstance(one, torch.Tensor)]
        result = self._run(*args)
        self._unchanged = [(one, version) for one, version in before if one._version == version]
        return result

    def _require_unchanged(self) -> None:
        """Raise, as autograd does, if the user has changed an input in the meantime."""
        for tensor, version in self._unchanged or ():
            if tensor._version != version:
                raise RuntimeError(
                    f"an input of shape {tuple(tensor.shape)} of a checkpointed function has been "
                    "modified by an inplace operation between its forward and its backward"
                )


class _Segment(torch.nn.Module):
    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *args: Any) -> Any:
        return self.compiled(*args)


def _compile(
    part: Any, backend: Backend, cache: dict[Any, Callable[..., Any]]
) -> Callable[..., Any]:
    """Compile one segment. Backends expect a tuple of outputs, so a single output is wrapped."""
    single = _return_tuple(part)
    inputs = _inputs(part)
    key = _sharing_key(part, inputs)
    compiled = cache.get(key) if key is not None else None
    if compiled is None:
        compiled = backend(part, inputs)
        if key is not None:
            cache[key] = compiled
    if not single:
        return compiled
    whole = compiled
    return lambda *args: whole(*args)[0]


def _inputs(part: fx.GraphModule) -> list[Any]:
    """Return the example inputs of a part: the fake tensors of Dynamo's trace.

    AOTAutograd copies them into a fake mode of its own, and two things would get lost. A view whose
    base was written to computes its ``grad_fn`` lazily, which fails there, so it is read here. A
    number in a tensor would lose its symbol, so the tensor is copied here.
    """
    values: list[Any] = [n.meta["example_value"] for n in part.graph.nodes if n.op == "placeholder"]
    mode = TracingContext.get().fake_mode
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        _ = value.grad_fn
        number = getattr(value, "item_memo", None)
        if number is not None and mode is not None and isinstance(value, FakeTensor):
            copied = value if value.fake_mode is mode else mode.from_tensor(value)
            copied.item_memo = number
            values[position] = copied
    return values


def _return_tuple(part: fx.GraphModule) -> bool:
    output = part.graph.output_node()
    if isinstance(output.args[0], fx.Node):
        output.args = ((output.args[0],),)
        part.recompile()
        return True
    return False


def _sharing_key(part: fx.GraphModule, inputs: list[Any]) -> Any:
    """Return the key of segments that can share compiled code; ``None``: no sharing."""
    numbers: dict[fx.Node, int] = {}
    rows: list[Any] = []
    for node in part.graph.nodes:
        if node.op == "get_attr" or _gives_numbers(node):
            return None
        numbers[node] = len(numbers)
        args = fx.map_arg(
            (node.args, node.kwargs),
            lambda n: _Ref(numbers[n]),  # type: ignore[arg-type,return-value]
        )
        target = "" if node.op == "placeholder" else str(node.target)
        rows.append((node.op, target, repr(args)))
    metas: list[Any] = []
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            return None
        if any(not isinstance(s, int) for s in (*value.size(), *value.stride())):
            return None
        metas.append(
            (tuple(value.size()), value.stride(), value.dtype, value.device, value.requires_grad)
        )
    return (tuple(rows), tuple(metas), torch.is_grad_enabled())


def _gives_numbers(node: fx.Node) -> bool:
    """Whether a node returns symbolic numbers: its code may hold for one value of them only."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


class _Ref:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


# -- cuda graphs -----------------------------------------------------------------------------------


_SETTING = "triton.cudagraphs"


def refuse_cuda_graphs(module: UnitModuleProtocol, backend: Backend) -> None:
    """Raise if a backend would capture a unit's body in a CUDA graph.

    A unit's parameters are inputs of its body, at another address in each step.
    """
    flats = module._fsdp_unit.flats
    if not flats or not host_runs_ahead(flats[0].device) or not _captures(backend):
        return
    raise UnsupportedError(
        f"{unit_name(module._fsdp_unit.fqn)}: expected a mode of torch.compile without CUDA "
        "graphs, got one with them ('reduce-overhead', 'max-autotune', or an option). Leave the "
        "mode out, or choose 'max-autotune-no-cudagraphs'. A CUDA graph would copy the unit's "
        "parameters, which are at another address in each step, into memory of its own and keep "
        "that: every unit would stay unsharded."
    )


def _captures(backend: Backend) -> bool:
    if getattr(backend, "compiler_name", "") == "cudagraphs":
        return True
    config: Any = getattr(backend, "config", None)  # of Inductor, with what the user has chosen
    if not isinstance(config, dict):
        return False
    return bool(config.get(_SETTING, torch._inductor.config.triton.cudagraphs))
