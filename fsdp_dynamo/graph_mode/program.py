"""Program: a scheduled graph as Python source that calls compiled stretches and collectives.

Inductor compiles only stretches, which hold no collective, so it cannot move one. Equal stretches
are compiled once. The source for two units looks like this::

    def run(args):
        shard_0, shard_1, x = args
        args.clear()
        gathered = graph_ops.all_gather([shard_0], 8, '0', [[...]], ['block0|...'], '...')
        waited = graph_ops.wait(gathered, 0, 'block0|...')
        given = [waited, x]
        x = None
        mm, = stretch_0(given)
        ...
        mm_1, = stretch_0(given)

Lifetimes: ``args`` is emptied at once, and each name is set to ``None`` at its last use. Before the
last stretch that reads a tensor, only ``given`` still refers to it; the stretch empties that list
and frees the tensor as soon as it has read it.
"""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants, OutputCode
from torch.fx.node import _get_qualified_name  # no public name of a call's target

from fsdp_dynamo.graph_mode.captures import Phase
from fsdp_dynamo.graph_mode.collective_operators import NAMESPACE
from fsdp_dynamo.graph_mode.lowering import BOUNDARIES
from fsdp_dynamo.graph_mode.operators import GraphOperators
from graph_passes.gradients.flat_gradient import FUNCTIONS, new_flat_on, write_name
from graph_passes.scheduling.plan import GraphPlan
from graph_passes.scheduling.stretches import Cutting, Stretch, root_of


def is_boundary(node: fx.Node) -> bool:
    """Whether a node of a lowered graph stands between stretches.

    Collectives without a mark (tensor parallelism's) are boundaries too, so they keep their place.
    """
    namespace = getattr(node.target, "namespace", "")
    return node.target in BOUNDARIES or namespace in ("_c10d_functional", NAMESPACE)


_GLOBALS: dict[str, Any] = {
    "torch": torch,
    "_operator": operator,
    "math": math,
    "inf": math.inf,
    "nan": math.nan,
}


def _graph_ops(operators: GraphOperators) -> SimpleNamespace:
    """Return the functions that a program calls between its stretches."""
    functions = {function.__name__: function for function in (*FUNCTIONS.values(), new_flat_on)}
    methods = {function.__name__: getattr(operators, function.__name__) for function in BOUNDARIES}
    return SimpleNamespace(**functions, **methods)


class _Loading(NamedTuple):
    operators: GraphOperators
    programs: list[Program]


_loading: _Loading | None = None
"""Reaches programs that AOTAutograd loads from its cache, which gives them nothing of ours."""


@contextmanager
def loading(operators: GraphOperators) -> Iterator[list[Program]]:
    """Bind the programs that are compiled, or come from a cache, in the context; yield them."""
    global _loading
    before, _loading = _loading, _Loading(operators, [])
    try:
        yield _loading.programs
    finally:
        _loading = before


class Program(OutputCode):
    """A scheduled graph that can be run, and that AOTAutograd's cache can keep.

    Args:
        source: Python code of a function ``run(args)``.
        stretches: compiled code of the distinct stretches, by their names in the source.
        constants: tensors of the graph, by their names in the source.
        phase: facts about the graph.
        plan: places of its collectives; ``None`` for a graph without any.
    """

    def __init__(
        self,
        source: str,
        stretches: Mapping[str, Any],
        constants: Mapping[str, torch.Tensor],
        phase: Phase,
        plan: GraphPlan | None = None,
    ) -> None:
        super().__init__()
        self.phase = phase
        self.plan = plan
        self._boxed_call = True  # torch reads it from the object's __dict__, not from the class
        self.source = source
        self.stretches = dict(stretches)
        self.constants = dict(constants)
        self._run: Callable[[list[Any]], Any] | None = None
        self._load()

    def _load(self) -> None:
        assert _loading is not None, "a program is made or loaded inside loading()"
        operators = _loading.operators
        _loading.programs.append(self)
        graph_ops = _graph_ops(operators)
        names = {**_GLOBALS, "graph_ops": graph_ops, **self.constants, **self.stretches}
        exec(compile(self.source, "<fsdp_dynamo program>", "exec"), names)
        self._run = operators.runner(names["run"], self.phase)

    def __call__(self, inputs: Any) -> Any:
        assert self._run is not None
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Drop what cannot be pickled. AOTAutograd calls this on a shallow copy."""
        self._run = None
        stretches = {name: copy(code) for name, code in self.stretches.items()}
        for code in stretches.values():
            code.prepare_for_serialization()
        # As bytes, so that a truncated cache entry fails as a whole: half-loaded objects of torch
        # print errors of their own.
        self.stretches = {name: pickle.dumps(code) for name, code in stretches.items()}

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Load the code of all stretches of a program that comes from the cache."""
        from torch._inductor.codecache import FxGraphCache

        if self._run is not None:
            return
        for name, kept in self.stretches.items():
            code: CompiledFxGraph = pickle.loads(kept)
            of_code = CompiledFxGraphConstants()
            loaded, _ = FxGraphCache.cache_hit_post_compile(code, {}, of_code)
            if loaded is None:
                raise RuntimeError(f"{name}: expected code in the compile cache, got none")
            with no_output_strides():
                loaded.post_compile((), of_code, graph_kwargs)
            self.stretches[name] = loaded
        self._load()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Ignore the bundle: each stretch has its own."""


@contextmanager
def no_output_strides() -> Iterator[None]:
    """Keep compilations inside from reporting their outputs' strides as those of the graph."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        yield
        return
    strides, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = strides


# -- its source ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """One call in the source: its text without the assignment, what it reads, what it gives."""

    text: str
    reads: Sequence[fx.Node]
    gives: Sequence[fx.Node]
    is_stretch: bool = False


class _Writer:
    def __init__(self, cutting: Cutting, name_of: Mapping[Stretch, str]) -> None:
        self._cutting = cutting
        self._name_of = name_of
        self._lines: list[_Line] = []
        self._known: set[fx.Node] = set()
        self._taken = {*_GLOBALS, "graph_ops", *name_of.values(), "args", "given"}
        self.constants: dict[str, torch.Tensor] = {}

    def write(self, graph: fx.Graph) -> str:
        placeholders = list(graph.find_nodes(op="placeholder"))
        self._known.update(placeholders)
        for part in self._cutting.parts:
            if isinstance(part, fx.Node):
                self._call(part)
            elif part in self._name_of:
                self._call_stretch(part)
            else:
                self._call_nodes(part)
        (output,) = graph.find_nodes(op="output")
        for node in output.all_input_nodes:
            self._require(root_of(node))
        return "\n".join(self._text(placeholders, output)) + "\n"

    def _require(self, node: fx.Node) -> None:
        """Ensure that a value exists; views and sizes are emitted where they are first read."""
        if node in self._known:
            return
        assert node not in self._cutting.home, f"{node} is read before it is computed"
        self._call(node)

    def _call(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self._known.add(node)
            owner = node.graph.owning_module
            self.constants[self._name(node)] = operator.attrgetter(str(node.target))(owner)
            return
        if write_name(node) == "new_flat":
            _, *rest = node.args
            arguments = [repr(str(node.meta["val"].device)), *map(self._argument, rest)]
            function = f"graph_ops.{new_flat_on.__name__}"
            self._add(_Line(f"{function}({', '.join(arguments)})", (), [node]))
            return
        for source in node.all_input_nodes:
            self._require(root_of(source))
        arguments = [
            *map(self._argument, node.args),
            *(f"{name}={self._argument(value)}" for name, value in node.kwargs.items()),
        ]
        target: Any = node.target
        function = _get_qualified_name(target)
        if target in BOUNDARIES:
            function = f"graph_ops.{target.__name__}"
        gives = [node]
        if write_name(node):
            function, gives = f"graph_ops.{write_name(node)}", []
        sources = map(root_of, node.all_input_nodes)
        self._add(_Line(f"{function}({', '.join(arguments)})", list(sources), gives))

    def _call_nodes(self, stretch: Stretch) -> None:
        for node in stretch.nodes:
            if self._cutting.home.get(node) is stretch:
                self._call(node)

    def _call_stretch(self, stretch: Stretch) -> None:
        for node in stretch.inputs:
            self._require(node)
        text = f"{self._name_of[stretch]}(given)"
        self._add(_Line(text, stretch.inputs, stretch.outputs, is_stretch=True))

    def _add(self, line: _Line) -> None:
        self._lines.append(line)
        self._known.update(line.gives)

    def _name(self, node: fx.Node) -> str:
        taken = node.name in self._taken
        return f"{node.name}__" if taken else node.name

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._name(root_of(value))
        if isinstance(value, (list, tuple)):
            items = "".join(f"{self._argument(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, slice):
            bounds = map(self._argument, (value.start, value.stop, value.step))
            return f"slice({', '.join(bounds)})"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        return repr(value)

    def _text(self, placeholders: Sequence[fx.Node], output: fx.Node) -> list[str]:
        last: dict[fx.Node, int] = {}
        for position, line in enumerate(self._lines):
            last.update(dict.fromkeys((*line.gives, *line.reads), position))
        for node in output.all_input_nodes:
            last[root_of(node)] = len(self._lines)
        unread = [node for node in placeholders if node not in last]
        ending: dict[int, list[str]] = {}
        for node, position in last.items():
            ending.setdefault(position, []).append(self._name(node))
        text = ["def run(args):"]
        if placeholders:
            text.append(f"    {', '.join(map(self._name, placeholders))}, = args")
        text += ["    args.clear()", *_free([self._name(node) for node in unread])]
        for position, line in enumerate(self._lines):
            over = [name for name in ending.get(position, ()) if name not in self.constants]
            given = "".join(f"{self._name(node)}, " for node in line.gives)
            if line.is_stretch:
                reads = ", ".join(map(self._name, line.reads))
                gives = set(map(self._name, line.gives))
                text += [f"    given = [{reads}]", *_free([n for n in over if n not in gives])]
                text.append(f"    {given}= {line.text}" if given else f"    {line.text}")
                text += _free([name for name in over if name in gives])
            else:
                result = f"{given.removesuffix(', ')} = " if given else ""
                text += [f"    {result}{line.text}", *_free(over)]
        return [*text, f"    return {self._argument(output.args[0])}"]


def _free(names: Sequence[str]) -> list[str]:
    return [f"    {' = '.join(names)} = None"] if names else []


def source_of(
    graph: fx.Graph, cutting: Cutting, name_of: Mapping[Stretch, str]
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the Python code of a lowered graph, and the constants in it.

    Stretches without a name in ``name_of`` are called node by node.
    """
    writer = _Writer(cutting, name_of)
    return writer.write(graph), writer.constants


__all__ = ["Program", "is_boundary", "no_output_strides", "source_of"]
