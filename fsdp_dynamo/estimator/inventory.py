"""Inventory of a training step: parameters, FLOPs, memory traffic and saved activations.

The step runs once on fake tensors, so nothing is allocated and any model takes seconds. Each
operator counts for the unit whose module is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_dynamo.errors import FSDPError, FSDPValueError, how_to_install
from fsdp_dynamo.observe.training_step import sum_of
from fsdp_dynamo.pytree import tensors_of
from graph_passes.cost_model import operator_flops

Build = Callable[[], tuple[nn.Module, Mapping[str, Any]]]
"""Function that returns a model and the keyword arguments of its forward."""


@dataclass
class Work:
    """Costs of some operators, as pairs of FLOPs and bytes of memory traffic (read and written)."""

    costs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """FLOPs of all operators."""
        return sum(flops for flops, _ in self.costs)

    @property
    def traffic_bytes(self) -> int:
        """Memory traffic of all operators."""
        return sum(num_bytes for _, num_bytes in self.costs)


@dataclass
class UnitInventory:
    """Parameters and activations of one unit.

    Attributes:
        fqn: FQN, ``""`` for the root.
        numel: number of elements of its parameters.
        saved_bytes: activations that its forward saves for the backward.
        input_bytes: inputs with gradients, which activation checkpointing saves instead.
        trained_numel: number of elements that require gradients; ``None``: all.
    """

    fqn: str
    numel: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    trained_numel: int | None = None

    @property
    def trained(self) -> int:
        """Number of elements that require gradients."""
        return self.numel if self.trained_numel is None else self.trained_numel


@dataclass
class Inventory:
    """Units and work of one training step.

    Attributes:
        units: units by FQN, the root first.
        segments: forward work in order of execution, as (FQN of the unit, work). The root has
            several segments if it runs operators between other units.
        backward: work of the whole backward.
    """

    units: dict[str, UnitInventory]
    segments: list[tuple[str, Work]]
    backward: Work

    @property
    def numel(self) -> int:
        """Number of elements of all units."""
        return sum(unit.numel for unit in self.units.values())

    @property
    def trained(self) -> int:
        """Number of elements that require gradients, of all units."""
        return sum(unit.trained for unit in self.units.values())

    @property
    def forward_flops(self) -> int:
        """FLOPs of the whole forward."""
        return sum(work.flops for _, work in self.segments)


def take_inventory(
    build: Build, classes: Sequence[str], dtype: torch.dtype, fused: bool = True
) -> Inventory:
    """Run forward and backward once on fake tensors, and return the inventory.

    Args:
        build: called under a fake tensor mode; its inputs are one rank's batch.
        classes: names of module classes that become units; if empty, the class in a ``ModuleList``
            with the most parameters.
        dtype: dtype of parameters and compute.
        fused: count pointwise operators as fused into their neighbours, without traffic.

    Raises:
        FSDPValueError: no module has such a class, no output can be differentiated, or the model
            does not run on fake tensors.
    """
    try:
        with FakeTensorMode(), torch.device("cpu"):
            model, kwargs = build()
            _cast(model, dtype)
            wrapped = units_of(model, classes)
            counter = _Counter(model, wrapped, fused)
            with counter.forward():
                output = model(
                    **{name: _cast_input(value, dtype) for name, value in kwargs.items()}
                )
            with counter.backward():
                _loss_of(output).backward()  # type: ignore[no-untyped-call]
    except FSDPError:
        raise
    except Exception as error:  # the user's code may fail in any way on tensors without data
        raise FSDPValueError(
            "fsdp_dynamo.estimator: expected a model whose forward and backward run on tensors "
            f"without data, got {type(error).__name__}: {error}. Return (model, {{name: tensor}}) "
            "whose forward reads no values (.item())."
        ) from error
    return Inventory(counter.units, counter.segments, counter.backward_work)


def _cast_input(value: Any, dtype: torch.dtype) -> Any:
    """Cast a floating-point input, as mixed precision does."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all parameters; ``Module.to`` cannot replace fake ones. Tied parameters stay tied."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in cast:
                    other = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    cast[id(parameter)] = other
                module._parameters[name] = cast[id(parameter)]


def units_of(model: nn.Module, classes: Sequence[str]) -> dict[nn.Module, str]:
    """Return the modules that become units, with their FQNs; see ``take_inventory``."""
    names = set(classes) or _most_repeated_class(model)
    found = {m: name for name, m in model.named_modules() if type(m).__name__ in names and name}
    if not found:
        expected = f"a module of class {', '.join(sorted(names))}" if names else "--wrap"
        raise FSDPValueError(
            f"fsdp_dynamo.estimator: expected {expected}, got none in {type(model).__name__}. Name "
            "the class of your blocks: --wrap Block."
        )
    return found


def _most_repeated_class(model: nn.Module) -> set[str]:
    """Name of the class with the most parameters among those repeated in a ``ModuleList``."""
    numel: dict[str, int] = {}
    for module in model.modules():
        children = list(module.children()) if isinstance(module, nn.ModuleList) else []
        for child in children if len(children) > 1 else []:
            own = sum(p.numel() for p in child.parameters())
            numel[type(child).__name__] = numel.get(type(child).__name__, 0) + own
    return {max(numel, key=lambda name: numel[name])} if numel else set()


def _loss_of(output: Any) -> torch.Tensor:
    """Return the output's ``loss``, or the sum of its differentiable tensors."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    return sum_of(output, "fsdp_dynamo.estimator", "Let the model return a loss or logits.")


class _Counter(TorchDispatchMode):
    """Dispatch mode that counts each operator for the unit whose module is running."""

    def __init__(self, model: nn.Module, wrapped: Mapping[nn.Module, str], fused: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_fused = fused
        self._model, self._wrapped = model, wrapped
        self._stack = [""]
        self._seen: set[int] = set()
        self._saved: list[torch.Tensor] = []  # keeps storages alive, so that no key is reused
        self._parameters: dict[int, nn.Parameter] = {}
        self.units = {"": UnitInventory("")} | {fqn: UnitInventory(fqn) for fqn in wrapped.values()}
        self.segments: list[tuple[str, Work]] = []
        self.backward_work = Work()
        self._is_backward = False
        self._assign_parameters(model, "")

    def _assign_parameters(self, module: nn.Module, unit: str) -> None:
        """Assign each parameter to the innermost unit that contains its first occurrence."""
        unit = self._wrapped.get(module, unit)
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = parameter
                mine = self.units[unit]
                mine.numel += parameter.numel()
                has_grad = parameter.numel() if parameter.requires_grad else 0
                mine.trained_numel = (mine.trained_numel or 0) + has_grad
        for child in module.children():
            self._assign_parameters(child, unit)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count the forward."""
        own = {_storage(p) for p in self._parameters.values()}
        with ExitStack() as stack:
            for module, fqn in self._wrapped.items():
                handles = (
                    module.register_forward_pre_hook(self._enter(fqn), with_kwargs=True),
                    module.register_forward_hook(self._leave),
                )
                for handle in handles:
                    stack.callback(handle.remove)
            pack = self._saver(own)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
            stack.enter_context(self)
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count the backward."""
        self._is_backward = True
        with self:
            yield

    def _enter(self, fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(fqn)
            given = {_storage(t): t for t in tensors_of((args, kwargs)) if t.requires_grad}
            self.units[fqn].input_bytes += sum(_storage_bytes(t) for t in given.values())

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _saver(self, parameters: set[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = _storage(tensor)
            if key not in self._seen and key not in parameters:
                self._seen.add(key)
                self._saved.append(tensor)
                num_bytes = _storage_bytes(tensor)
                self.units[self._stack[-1]].saved_bytes += num_bytes
                # A fused kernel keeps pointwise results in registers, except those that it saves:
                # the forward writes them and the backward reads them.
                if self._is_fused:
                    self._work().costs.append((0, num_bytes))
                    self.backward_work.costs.append((0, num_bytes))
            return tensor

        return pack

    def _work(self) -> Work:
        if self._is_backward:
            return self.backward_work
        unit = self._stack[-1]
        if not self.segments or self.segments[-1][0] != unit:
            self.segments.append((unit, Work()))
        return self.segments[-1][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not _is_free(func):
            moved = [*tensors_of((args, kwargs)), *tensors_of(output)]
            fused = self._is_fused and _is_pointwise(func)
            traffic = 0 if fused else sum(t.numel() * t.element_size() for t in moved)
            self._work().costs.append((operator_flops(func, args, kwargs, output), traffic))
        return output


_VIEWS = frozenset({"_unsafe_view", "detach", "lift_fresh", "alias"})
_COPIES = frozenset({"_to_copy", "clone", "copy_", "cat", "slice_backward", "select_backward"})


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _is_free(func: Any) -> bool:
    """Return whether an operator moves no data, because it is a view or a query."""
    if func.namespace != "aten" or _name(func) in _VIEWS:
        return True
    return any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)


def _is_pointwise(func: Any) -> bool:
    """Return whether a compiler would fuse an operator into its neighbours."""
    return torch.Tag.pointwise in func.tags or _name(func) in _COPIES


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


# -- models ----------------------------------------------------------------------------------------
# Models by name, built from configurations of ``transformers``; nothing is downloaded.


def _llama3(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }


CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "llama3-8b": ("LlamaConfig", _llama3(4096, 32, 32, 14336)),
    "llama3-70b": ("LlamaConfig", _llama3(8192, 80, 64, 28672)),
    "llama3-405b": ("LlamaConfig", _llama3(16384, 126, 128, 53248)),
    "gpt2": ("GPT2Config", {}),
    "gpt2-xl": ("GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
}
"""Configuration classes and non-default settings, by name. Source: the models' papers
(arXiv 2407.21783, table 3; Radford et al. 2019, table 2)."""


def build_of(name: str, batch: int, length: int) -> Build:
    """Return a function that builds a model of ``CONFIGS`` and a batch of tokens.

    Raises:
        FSDPValueError: unknown name.
        FSDPError: transformers is not installed.
    """
    if name not in CONFIGS:
        raise FSDPValueError(
            f"fsdp_dynamo.estimator: expected --model to be one of {', '.join(CONFIGS)}, got "
            f"{name!r}. For your own model: --module package.module:function."
        )
    try:
        import transformers
    except ImportError as error:
        raise FSDPError(
            "fsdp_dynamo.estimator: expected transformers to be installed, for a model by name, "
            f"got {error}. Run {how_to_install('estimator')}, or give your own model by --module."
        ) from error
    kind, changes = CONFIGS[name]

    def build() -> tuple[nn.Module, Mapping[str, Any]]:
        config = getattr(transformers, kind)(**changes)
        if kind == "GPT2Config":
            config.n_positions = max(config.n_positions, length)
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}

    return build
