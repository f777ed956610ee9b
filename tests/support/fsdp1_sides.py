"""Runs of a program with FSDP1 and with ours, and what is seen of each."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import module_trees as trees
import torch
import torch.distributed as dist
from fsdp1_hooks import hook_of, on_cpu
from fsdp1_programs import Program
from modes import in_mode
from torch import nn
from torch.distributed import fsdp as fsdp1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import wrap as fsdp1_wrap

import fsdp_dynamo
from fsdp_dynamo import wrap_policy
from fsdp_dynamo.core.dtensors import local_of

_WIDE, _LOW = torch.float64, torch.bfloat16
PRECISIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "wide": {"param_dtype": _WIDE, "reduce_dtype": _WIDE},
    "wide reduce": {"reduce_dtype": _WIDE},
    "low": {"param_dtype": _LOW, "buffer_dtype": _LOW},
    "low reduce": {"reduce_dtype": _LOW},
    "kept": {"param_dtype": _LOW, "reduce_dtype": _LOW, "keep_low_precision_grads": True},
}
PREFIX = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class Api:
    """One of the two libraries."""

    name: str
    package: Any
    policies: Any

    @property
    def fsdp(self) -> Any:
        """The wrapper's class."""
        return self.package.FullyShardedDataParallel


FSDP1 = Api("FSDP1", fsdp1, fsdp1_wrap)
OURS = Api("ours", fsdp_dynamo, wrap_policy)


@dataclass
class Seen:
    """State after one call.

    Attributes:
        values: by what they are; tensors are equal on all ranks or of this rank only.
        parts: this rank's parts of tensors, whose whole values are to be compared.
        error: of the call.
    """

    values: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, torch.Tensor | None] = field(default_factory=dict)
    error: BaseException | None = None


class Side:
    """A model that one of the libraries shards."""

    def __init__(self, program: Program, api: Api, rank: int, fault: str | None = None) -> None:
        self.program, self.api, self.rank, self.fault = program, api, rank, fault
        self.losses: list[torch.Tensor] = []
        self.seen = Seen()
        # Its own, so that a collective that ranks do not share fails there, and by itself.
        self.group = None if self._is_hybrid else dist.new_group(timeout=timedelta(seconds=15))

    def call(self, name: str, *arguments: Any) -> Seen:
        """Run one call, and look at the model; an error on one rank stops all."""
        self.seen = Seen()
        method: Callable[..., None] = getattr(self, name)
        try:
            method(*arguments)
        except Exception as error:  # noqa: BLE001  # kinds of errors are compared
            self.seen.error = error
        failed = torch.tensor([float(self.seen.error is not None)])
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed.item() and self.seen.error is None:
            self.seen.error = RuntimeError("another rank has raised")
        if self.seen.error is None:
            self._look()
        return self.seen

    def wrap(self) -> None:
        program, api = self.program, self.api
        plain = trees.build(program.tree)
        policy = self._policy()
        kwargs = self._arguments(plain)
        make = functools.partial(api.fsdp, device_id=torch.device("cpu"), **kwargs)
        if program.policy == "hand":
            for name, child in reversed(list(plain.named_modules())):
                if child is not plain and trees.wants_unit(child):
                    owner, _, attribute = name.rpartition(".")
                    setattr(plain.get_submodule(owner), attribute, make(child))
        self.model = make(plain, auto_wrap_policy=policy)
        self.run: nn.Module = self.model
        if api is OURS:
            self.run = in_mode(self.model, program.mode)
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        parameters = list(self.model.parameters())
        momentum = self.program.momentum
        self.optimizer = parameters and torch.optim.SGD(parameters, lr=0.1, momentum=momentum)

    def _policy(self) -> Any:
        policies, chosen = self.api.policies, self.program.policy
        if chosen == "custom":
            return policies.CustomPolicy(trees.wants_unit)
        if chosen == "lambda":
            wants = trees.wants_unit
            return functools.partial(policies.lambda_auto_wrap_policy, lambda_fn=wants)
        if chosen == "module":
            return policies.ModuleWrapPolicy({trees.LeafModule})
        if chosen == "size":
            return functools.partial(policies.size_based_auto_wrap_policy, min_num_params=12)
        return None

    @property
    def _is_hybrid(self) -> bool:
        return "HYBRID" in self.program.strategy

    def _arguments(self, plain: nn.Module) -> dict[str, Any]:
        program, package = self.program, self.api.package
        precision = PRECISIONS[program.precision]
        forward, backward = program.prefetch
        kwargs: dict[str, Any] = {
            "process_group": self.group,
            "device_mesh": init_device_mesh("cpu", (2, 2)) if self._is_hybrid else None,
            "sharding_strategy": package.ShardingStrategy[program.strategy],
            "mixed_precision": precision and package.MixedPrecision(**precision),
            "use_orig_params": program.use_orig_params,
            "forward_prefetch": forward,
            "backward_prefetch": backward and package.BackwardPrefetch[backward],
        }
        if program.ignored is not None:
            number, argument = program.ignored
            leaves = [m for m in plain.modules() if isinstance(m, trees.LeafModule)]
            kwargs[argument] = [leaves[number % len(leaves)]]
        return kwargs

    # -- steps

    def forward(self, seed: int) -> None:
        self.losses.append(self._loss(seed))

    def backward(self) -> None:
        losses, self.losses = self.losses, []
        losses = [loss for loss in losses if loss.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
        if self.fault == "gradients twice as large":
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad.mul_(2)

    def train(self, seed: int) -> None:
        self.forward(seed)
        self.backward()

    def predict(self, seed: int) -> None:
        with torch.no_grad():
            self._loss(seed)

    def accumulate(self, seed: int) -> None:
        with contextlib.nullcontext() if self.fault == "no no_sync" else self.model.no_sync():
            self.train(seed)

    def step(self) -> None:
        if self.optimizer and self.fault != "no step":
            self.optimizer.step()

    def _loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + self.rank)
        output = self.run(torch.randn(3, trees.WIDTH, generator=generator))
        self.seen.values["output"] = output.detach().clone()
        return output.float().square().mean()

    def hook(self, kind: str) -> None:
        """Reduce by a communication hook from now on."""
        is_sharded = self.program.strategy != "NO_SHARD"
        self.model.register_comm_hook(*hook_of(kind, self.group, is_sharded))

    # -- gradients

    def zero_grad(self, of: str, to_none: bool) -> None:
        target = self.model if of == "model" else self.optimizer
        if target:
            target.zero_grad(set_to_none=to_none)

    def drop_grad(self, index: int) -> None:
        self._param(index).grad = None

    def scale_grad(self, index: int, factor: float) -> None:
        grad = self._param(index).grad
        if grad is not None:
            grad.mul_(factor)

    def clip(self, largest: float, norm_type: float) -> None:
        self.seen.values["norm"] = self.model.clip_grad_norm_(largest, norm_type).clone()

    def _param(self, index: int) -> nn.Parameter:
        parameters = list(self.model.parameters())
        return parameters[index % len(parameters)] if parameters else nn.Parameter(torch.ones(1))

    # -- values

    def set_data(self, index: int) -> None:
        param = self._param(index)
        if self.api is FSDP1:
            param.data = param.data * 0.5
        else:  # torch's DTensors do not take other data
            param.data.mul_(0.5)

    def replace(self, index: int) -> None:
        old = self._param(index)
        new = nn.Parameter(old.detach() * 0.5, old.requires_grad)
        for module in self.model.modules():
            for name, param in module._parameters.items():
                if param is old:
                    setattr(module, name, new)
        self._make_optimizer()

    def freeze(self, index: int, frozen: bool) -> None:
        self._param(index).requires_grad_(not frozen)

    def apply(self) -> None:
        visited: list[tuple[int, ...]] = []

        def initialise(module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                visited.append(tuple(param.shape))
                with torch.no_grad():
                    param.mul_(0.5)

        self.model.apply(initialise)
        self.seen.values["shapes in apply"] = sorted(visited)

    def summon(self, options: tuple[str, ...], inside: str) -> None:
        names = ("writeback", "rank0_only", "with_grads", "recurse")
        kwargs = {name: name in options for name in names}
        kwargs["with_grads"] &= self._shows_grads
        with self.api.fsdp.summon_full_params(self.model, **kwargs):
            self.see_whole("inside", kwargs["with_grads"])
            if inside == "write":
                with torch.no_grad():
                    for param in self.model.parameters():
                        param.mul_(0.5)
            elif inside == "write_grad":
                for param in self.model.parameters():
                    if param.grad is not None:
                        param.grad.mul_(0.5)
            elif inside == "forward":
                self.predict(0)
            elif inside == "train":
                self.train(0)
            elif inside == "nested":
                with self.api.fsdp.summon_full_params(self.model, writeback=False):
                    self.see_whole("nested", with_grads=False)

    def see_whole(self, where: str, with_grads: bool) -> None:
        """Parameters, and whole gradients, as they are under summon_full_params."""
        whole = {name: p.shape for name, p in trees.build(self.program.tree).named_parameters()}
        for name, param in self.model.named_parameters():
            held = local_of(param)
            if held.shape != whole[name.replace(PREFIX, "")]:
                continue  # of a unit that is not summoned, or of another rank
            self.seen.values[f"{where}: {name}"] = held.detach().clone()
            if not with_grads or not self.program.use_orig_params:
                continue
            grad = param.grad
            if grad is not None and grad.numel() == 0:
                grad = None
            self.seen.values[f"{where}: gradient of {name}"] = _copy_of(grad)

    @property
    def _shows_grads(self) -> bool:
        """FSDP1 ends the process where ranks hold gradients in several dtypes, or none."""
        converts = any(call[0] == "convert" for call in self.program.calls)
        return self.program.precision != "kept" and not converts

    def look_whole(self) -> None:
        """All values, and the gradients where FSDP1 can."""
        with_grads = self.program.use_orig_params and self._shows_grads
        fsdp = self.api.fsdp
        with fsdp.summon_full_params(self.model, writeback=False, with_grads=with_grads):
            self.see_whole("at the end", with_grads)

    # -- states

    @contextlib.contextmanager
    def _state_type(self, kind: str) -> Iterator[None]:
        wanted = self.api.package.StateDictType[f"{kind}_STATE_DICT"]
        with self.api.fsdp.state_dict_type(self.model, wanted):
            yield

    def save(self, kind: str) -> None:
        with self._state_type(kind):
            state = self.model.state_dict()
        if kind == "LOCAL":
            return  # flat parameters there, parameters here
        for name, value in state.items():
            local = self._local_of(value)
            if kind == "FULL":
                self.seen.values[f"state of {name}"] = local.clone()
            else:
                self.seen.values[f"state of {name}"] = (tuple(value.shape), value.dtype)
                self.seen.parts[f"state of {name}"] = local.clone()
        self.seen.values["keys"] = list(state)

    @staticmethod
    def _local_of(value: Any) -> torch.Tensor:
        """This rank's elements of a value."""
        if hasattr(value, "local_shards"):
            shards = value.local_shards()
            parts = [shard.tensor.detach().flatten() for shard in shards]
            return torch.cat(parts) if parts else torch.empty(0, dtype=value.dtype)
        if hasattr(value, "to_local"):
            return value.to_local().detach()
        return getattr(value, "local", value).detach()

    def load(self, kind: str) -> None:
        """A copy of the state, scaled where that can be, after a change of all values."""
        with self._state_type(kind):
            state = copy.deepcopy(self.model.state_dict())
            if kind == "FULL":
                state = {name: value * 0.75 for name, value in state.items()}
            with torch.no_grad():
                for param in self.model.parameters():
                    param.mul_(0.5)
            report = self.model.load_state_dict(state)
        self.seen.values["report"] = (list(report.missing_keys), list(report.unexpected_keys))

    def load_partial(self, index: int, lenient: bool) -> None:
        with self._state_type("FULL"):
            state = {name: value.clone() * 0.75 for name, value in self.model.state_dict().items()}
            names = list(state)
            for name in names[index % len(names) :][:1] if names else []:
                state[f"{name}_other"] = state.pop(name)
            report = self.model.load_state_dict(state, strict=not lenient)
        self.seen.values["report"] = (
            sorted(report.missing_keys),
            sorted(report.unexpected_keys),
        )

    # -- others

    def mode(self, training: bool) -> None:
        self.model.train(training)

    def convert(self, dtype: str) -> None:
        getattr(self.model, dtype)()

    def names(self) -> None:
        with self.api.fsdp.summon_full_params(self.model, writeback=False):
            values = self.seen.values
            values["parameters"] = [n for n, _ in self.model.named_parameters()]
            values["buffers"] = [n for n, _ in self.model.named_buffers()]

    # -- what is seen

    def _look(self) -> None:
        """Parameters, gradients and buffers, without any communication."""
        for name, buffer in self.model.named_buffers():
            self.seen.values[f"buffer {name.replace(PREFIX, '')}"] = buffer.detach().clone()
        if not self.program.use_orig_params:
            return  # flat parameters there
        for name, param in self.model.named_parameters():
            plain = name.replace(PREFIX, "")
            self.seen.values[f"{plain}.requires_grad"] = param.requires_grad
            self.seen.parts[plain] = _copy_of(param)
            self.seen.parts[f"gradient of {plain}"] = _copy_of(param.grad)


def _copy_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Of what this rank has of it."""
    return None if tensor is None else local_of(tensor).detach().clone()


def run_side(program: Program, api: Api, rank: int, fault: str | None = None) -> list[Seen]:
    """What is seen after each call, until one raises."""
    side = Side(program, api, rank, fault)
    seen: list[Seen] = []
    quiet = io.StringIO()  # FSDP1 prints stacks before it raises
    with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), on_cpu:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(quiet):
            for name, *arguments in (("wrap",), *program.calls, ("look_whole",)):
                seen.append(side.call(name, *arguments))
                if seen[-1].error is not None:
                    break
    if side.group is not None:
        dist.destroy_process_group(side.group)
    return seen
