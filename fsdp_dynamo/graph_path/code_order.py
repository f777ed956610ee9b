'''The order of calls in the code that Inductor generates, read from its text.

The code of a graph defines its kernels and then a function ``call`` that runs them; on CUDA::

    triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', """
    @triton_heuristics.pointwise(...) ...""", device_str='cuda')
    triton_tem_fused_mm_1 = async_compile.triton('triton_tem_fused_mm_1', """
    @triton_heuristics.template(...) ...""", device_str='cuda')
    def call(args):
        buf0 = torch.ops.fsdp_dynamo.all_gather.default(arg0_1, 8, '0', 'u|all_gather|...', '')
        triton_poi_fused_add_0.run(arg1_1, arg2_1, buf1, 64, stream=stream0)
        triton_tem_fused_mm_1.run(buf1, arg3_1, buf2, 8, 1, 1, stream=stream0)
        extern_kernels.mm(buf2, arg4_1, out=buf3)
        torch.ops.fsdp_dynamo.wait_.default(buf0, arg0_1, 'u|all_gather|...')

Loops (the first kernel) stand wherever their data allows. All others, templates and the user's own
kernels among them, have a place.
'''

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graph_passes.text.boundary_labels import Label

_OURS = "torch.ops.fsdp_dynamo."
_CALLS = (_OURS, "torch.ops.", "extern_kernels.", "aten.")
_KERNELS = "async_compile."
_LOOPS = frozenset({"cpp", "cpp_pybinding", "halide", "metal", "pallas"})
"""Compilers of code whose templates have no other name, or that has none."""
_MULTIPLE = frozenset({"multi_kernel", "size_hint_multi_kernel"})
_PLACED = re.compile(r"@triton_heuristics\.(template|user_autotune)\(")
_PARTITION = re.compile(r"self\.partitions\[(\d+)\]")


@dataclass(frozen=True)
class CodeCall:
    """One call in generated code.

    Attributes:
        name: the operator, without its namespace and overload: ``"all_gather"``, ``"mm"``; or the
            kernel: ``"triton_tem_fused_mm_1"``.
        labels: of the collectives that it issues or waits for; empty for compute.
        line: where, from 1.
    """

    name: str
    labels: tuple[Label, ...]
    line: int


def order_in_code(source: str) -> list[CodeCall]:
    """Collectives, waits, and calls of compute that is no fused loop, as they will run.

    Args:
        source: Python code of a graph, as Inductor generates it.
    """
    code = _Code(ast.parse(source))
    entry = code.functions.get("call")
    return [] if entry is None else list(code.calls_in(entry))


class _Code:
    """Functions and kernels of a graph's code."""

    def __init__(self, tree: ast.Module) -> None:
        defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self.functions = {node.name: node for node in defined}
        self._placed: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and self._is_placed(node.value):
                self._placed |= {ast.unparse(target) for target in node.targets}

    def _is_placed(self, value: ast.expr) -> bool:
        """Whether a kernel that is defined so has a place: all but loops."""
        compiler = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if not isinstance(value, ast.Call) or not compiler.startswith(_KERNELS):
            return False
        kind = compiler.removeprefix(_KERNELS)
        if kind in _MULTIPLE:  # several kernels for one purpose
            names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
            return bool(names & self._placed)
        if kind == "triton":
            texts = [one.value for one in value.args if isinstance(one, ast.Constant)]
            return any(isinstance(text, str) and _PLACED.search(text) for text in texts)
        return kind not in _LOOPS

    def calls_in(self, function: ast.FunctionDef) -> Iterator[CodeCall]:
        """Calls in a function and, in their place, those in the functions that it calls.

        Those are regions (``subgraph_0(args)``) and partitions (``self.partitions[0](args)``).
        """
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
            path = ast.unparse(node.func)
            partition = _PARTITION.fullmatch(path)
            inner = self.functions.get(f"partition_{partition[1]}" if partition else path)
            if inner is not None:
                yield from self.calls_in(inner)
            elif path.rpartition(".")[0] in self._placed:  # kernel.run, or kernel.kernel
                yield CodeCall(path.partition(".")[0], (), node.lineno)
            elif (call := _read(node, path)) is not None:
                yield call


def _read(node: ast.Call, path: str) -> CodeCall | None:
    prefix = next((prefix for prefix in _CALLS if path.startswith(prefix)), None)
    if prefix is None:
        return None
    parts = path.split(".")
    name = parts[-2] if parts[-1] in ("default", "out") else parts[-1]
    labels = _labels(node) if prefix == _OURS else ()
    return CodeCall(name, labels, node.lineno)


def _labels(node: ast.Call) -> tuple[Label, ...]:
    """Labels among the arguments, in a list or by themselves: the strings that can be read as one.

    (A fingerprint and a group's name are strings too.)
    """
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    items = [item for value in values for item in getattr(value, "elts", [value])]
    texts = [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)]
    return tuple(Label.decode(text) for text in texts if text.count("|") == _BARS)


_BARS = Label("", "all_gather", "forward", (), ()).encode().count("|")


__all__: Sequence[str] = ["CodeCall", "order_in_code"]
