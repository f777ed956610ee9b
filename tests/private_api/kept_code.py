"""Results of a compiler that AOTAutograd keeps in its cache.

For tests to import inside their functions: what is imported here may be gone.
"""

from __future__ import annotations

import pickle
from copy import copy
from typing import Any

import torch
from torch import fx
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants, OutputCode

happened: list[str] = []
"""What torch has asked of results, in order."""


class GraphCode(OutputCode):
    """A graph, run by its Python code."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self._boxed_call = True
        self.code = gm.code
        self._run: Any = None
        self._load()

    def _load(self) -> None:
        names: dict[str, Any] = {"torch": torch}
        exec(self.code, names)
        self._run = names["forward"]

    def __call__(self, inputs: Any) -> Any:
        assert isinstance(inputs, list)
        results = self._run(None, *inputs)
        inputs.clear()
        return results

    def prepare_for_serialization(self) -> None:
        happened.append("prepared")
        self._run = None  # cannot be pickled

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        if self._run is None:
            happened.append("loaded")
            self._load()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing here is Triton's."""


class InductorsCode(OutputCode):
    """What Inductor has compiled; in the cache, its bytes."""

    def __init__(self, compiled: CompiledFxGraph) -> None:
        super().__init__()
        self._boxed_call = True
        self.compiled: CompiledFxGraph | None = compiled
        self.kept = b""

    def __call__(self, inputs: Any) -> Any:
        assert self.compiled is not None
        return self.compiled(inputs)

    def prepare_for_serialization(self) -> None:
        compiled = copy(self.compiled)
        assert compiled is not None
        compiled.prepare_for_serialization()
        self.kept, self.compiled = pickle.dumps(compiled), None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        if self.compiled is None:
            of_code = CompiledFxGraphConstants()
            kept = pickle.loads(self.kept)
            self.compiled, _ = FxGraphCache.cache_hit_post_compile(kept, {}, of_code)
            assert self.compiled is not None
            self.compiled.post_compile((), of_code, graph_kwargs)
            happened.append("loaded")

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """It has its own."""
