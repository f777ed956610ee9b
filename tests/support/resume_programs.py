"""Random runs that save, and others that resume them, by every form of state dict.

Groups of optimizers are empty, reordered, added or in two optimizers; states have several dtypes;
parameters are frozen from the beginning or since they were trained; a model has gradients when it
loads. What is resumed must equal the run that was saved: states, settings of groups, and parameters
two steps later. Where it cannot, an error must say so and leave the optimizer as it was.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import classification_loss, examples, make_classifier, shard
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from fsdp_dynamo import FSDP, ShardingStrategy, StateDictType, checkpoint, fully_shard
from fsdp_dynamo.errors import FSDPError

# -- ways by which the state of one run enters another -------------------------------------------


class MixedStates(torch.optim.SGD):
    """States of several dtypes and sizes in one unit, as of optimizers that quantise some."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        kinds = (torch.bfloat16, torch.float32, torch.uint8, torch.float64)
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            count = self.state[param].get("count", 0) + 1
            value = (param.detach() * 100).abs().to(kinds[number % 4])
            self.state[param].update(count=count, kept=value, odd=torch.full((2, 1), 2.0))


Pair = tuple[nn.Module, torch.optim.Optimizer]
Resume = Callable[[Pair, Pair, str], None]
"""Save the first pair, perhaps into a folder, and load the second one."""


def _by_fqn(form: StateDictType) -> Resume:
    def resume(trained: Pair, fresh: Pair, folder: str) -> None:
        with FSDP.state_dict_type(trained[0], form):
            model, optim = trained[0].state_dict(), FSDP.optim_state_dict(*trained)
        with FSDP.state_dict_type(fresh[0], form):
            fresh[0].load_state_dict(model)
            fresh[1].load_state_dict(FSDP.optim_state_dict_to_load(*fresh, optim))

    return resume


def _through_template(trained: Pair, fresh: Pair, folder: str) -> None:
    """FSDP1's recipe: ``optim_state_dict`` of a fresh optimizer that has made a step."""
    for param in fresh[0].parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    fresh[1].step()
    fresh[1].zero_grad()
    states = []
    for pair in (trained, fresh):
        with FSDP.state_dict_type(pair[0], StateDictType.SHARDED_STATE_DICT):
            optim = FSDP.optim_state_dict(*pair)
            states.append({"model": pair[0].state_dict(), "optim": optim})
    dcp.save(states[0], checkpoint_id=folder)
    dcp.load(states[1], checkpoint_id=folder)
    with FSDP.state_dict_type(fresh[0], StateDictType.SHARDED_STATE_DICT):
        fresh[0].load_state_dict(states[1]["model"])
        fresh[1].load_state_dict(FSDP.optim_state_dict_to_load(*fresh, states[1]["optim"]))


def _by_dcp(**options: Any) -> Resume:
    def resume(trained: Pair, fresh: Pair, folder: str) -> None:
        chosen = StateDictOptions(**options)
        model, optim = get_state_dict(*trained, options=chosen)
        if not chosen.full_state_dict:
            dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
            model, optim = get_state_dict(*fresh, options=chosen)
            state = {"model": model, "optim": optim}
            dcp.load(state, checkpoint_id=folder)
            model, optim = state["model"], state["optim"]
        elif chosen.broadcast_from_rank0 and dist.get_rank():
            model, optim = {}, {}
        set_state_dict(*fresh, model_state_dict=model, optim_state_dict=optim, options=chosen)

    return resume


def _by_checkpoint(trained: Pair, fresh: Pair, folder: str) -> None:
    checkpoint.save(folder, *trained, step=1)
    checkpoint.load(folder, *fresh)


RESUMES: dict[str, Resume] = {
    "full": _by_fqn(StateDictType.FULL_STATE_DICT),
    "sharded": _by_fqn(StateDictType.SHARDED_STATE_DICT),
    "local": _by_fqn(StateDictType.LOCAL_STATE_DICT),
    "template": _through_template,
    "dcp": _by_dcp(),
    "dcp flat": _by_dcp(flatten_optimizer_state_dict=True),
    "dcp full": _by_dcp(full_state_dict=True),
    "dcp full flat": _by_dcp(full_state_dict=True, flatten_optimizer_state_dict=True),
    "dcp broadcast": _by_dcp(full_state_dict=True, broadcast_from_rank0=True),
    "dcp broadcast flat": _by_dcp(
        full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=True
    ),
    "checkpoint": _by_checkpoint,
}

TEMPLATES = ("template", "dcp", "dcp flat")
"""Those that read into what the second pair has, by torch.distributed.checkpoint."""


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Settings of an optimizer's groups."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Whole states on every rank, by ``FQN/name``."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        states = FSDP.optim_state_dict(model, optimizer)["state"]
    return {f"{fqn}/{name}": v for fqn, state in states.items() for name, v in state.items()}


# -- programs ------------------------------------------------------------------------------------

DOORS = ("wrapper", "one unit", "not sharded", "fully_shard", "dtensor")
SAME_SHARDING = ("sharded", "local")
SEVERAL_OPTIMIZERS = tuple(way for way in RESUMES if way.startswith("dcp") or way == "checkpoint")
KINDS = ("adamw", "amsgrad", "named", "sgd", "momentum", "mixed")
NAMES = ("0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias")
RATE = 0.01


@dataclass(frozen=True)
class ResumeProgram:
    """A run that saves, and one that resumes it.

    Attributes:
        way: how; a key of ``RESUMES``.
        door, into: how the model is sharded in both.
        kind: the optimizer.
        groups: numbers of the parameters in each of its groups, which may be empty.
        order: numbers of these groups in the optimizer that loads.
        is_last_apart: whether the last group is in an optimizer of its own, in both runs.
        num_added: empty groups behind those of the optimizer that loads.
        added: a parameter in no group of the run that saves, in an added group of the other.
        frozen: parameters that never have a gradient.
        frozen_since: parameters that are frozen after they were trained.
        with_gradients: whether the model that loads has gradients.
    """

    way: str
    door: str
    into: str
    kind: str
    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    is_last_apart: bool
    num_added: int
    added: int | None
    frozen: tuple[int, ...]
    frozen_since: tuple[int, ...]
    with_gradients: bool

    @property
    def errors(self) -> list[str]:
        """Parts of the message of the error that is due, one of which it has; empty if none is."""
        reads = self.way in TEMPLATES
        if reads and self.with_gradients and self.kind != "sgd" and self.way.startswith("dcp"):
            return ["zero_grad"]
        lacks = ["Missing key"] if reads else ["a saved group with parameter", "that has one in"]
        loses = reads and self.frozen_since and self.kind != "sgd"
        return [
            *(lacks if self.added is not None else ()),
            *([f"parameter '{NAMES[self.frozen_since[0]]}'"] if loses else ()),
        ]


def draw(seed: int) -> ResumeProgram:
    """The program of a seed."""
    rng = random.Random(seed)
    way = rng.choice(list(RESUMES))
    door = rng.choice(DOORS)
    into = door if way in SAME_SHARDING or rng.random() < 0.5 else rng.choice(DOORS)
    numbers = rng.sample(range(len(NAMES)), len(NAMES))
    added = numbers.pop() if rng.random() < 0.1 else None
    cuts = sorted(rng.sample(range(1, len(numbers)), rng.randint(0, 2)))
    bounds = zip([0, *cuts], [*cuts, len(numbers)], strict=True)
    groups = [tuple(numbers[begin:end]) for begin, end in bounds]
    kind = rng.choice(KINDS)
    for _ in range(0 if kind == "named" else rng.choice([0, 1, 1, 2])):  # torch allows none there
        groups.insert(rng.randint(0, len(groups)), ())
    order = list(range(len(groups)))
    is_last_apart = bool(way in SEVERAL_OPTIMIZERS and groups[-1] and len(groups) > 1)
    is_last_apart = is_last_apart and rng.random() < 0.5
    if way not in TEMPLATES and not is_last_apart and rng.random() < 0.4:
        rng.shuffle(order)
    can_add = way not in TEMPLATES and kind != "named" and all(groups) and not is_last_apart
    frozen = rng.choice(numbers) if rng.random() < 0.3 else None
    since = rng.choice(numbers) if rng.random() < 0.4 else None
    if way in TEMPLATES and (door == "not sharded" or into == "not sharded"):
        since = None  # values are plain, and torch ignores what a template lacks
    return ResumeProgram(
        way,
        door,
        into,
        kind,
        tuple(groups),
        tuple(order),
        is_last_apart,
        rng.randint(0, 2) if can_add else 0,
        added,
        () if frozen is None else (frozen,),
        () if since in (None, frozen) else (since,),
        rng.random() < 0.3,
    )


def _model(door: str) -> nn.Module:
    model: nn.Module = make_classifier()
    if door == "one process":
        return model
    if door == "fully_shard":
        return fully_shard(model)
    if door == "one unit":
        return FSDP(model)
    if door == "not sharded":
        return shard(model, sharding_strategy=ShardingStrategy.NO_SHARD)
    return shard(model)


def _optimizer(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if kind in ("adamw", "amsgrad", "named"):
        return torch.optim.AdamW(groups, amsgrad=kind == "amsgrad")
    momentum = 0.0 if kind == "sgd" else 0.9
    return (MixedStates if kind == "mixed" else torch.optim.SGD)(groups, momentum=momentum)


class Run:
    """A model and its optimizers."""

    def __init__(self, program: ResumeProgram, rank: int, *, loads: bool) -> None:
        self.program, self.rank = program, rank
        self.model = _model(program.into if loads else program.door)
        self.params = list(self.model.named_parameters())
        for number in (*program.frozen, *(program.frozen_since if loads else ())):
            self.params[number][1].requires_grad_(False)
        self.order = program.order if loads else tuple(range(len(program.groups)))
        groups = [self._group(program.groups[number], number) for number in self.order]
        if loads:
            groups += [self._group((), 7) for _ in range(program.num_added)]
            if program.added is not None:
                groups.append(self._group((program.added,), 7))
        apart = [groups.pop()] if program.is_last_apart else []
        self.optimizers = [_optimizer(program.kind, one) for one in (groups, apart) if one]

    def _group(self, numbers: Iterable[int], rate: int) -> dict[str, Any]:
        named = [self.params[number] for number in numbers]
        if self.program.kind != "named":
            named = [param for _, param in named]  # type: ignore[misc]
        return {"params": named, "lr": RATE * (rate + 1), "weight_decay": RATE * rate}

    def pair(self) -> Any:
        """The model with its optimizer, or all of them."""
        only_one = len(self.optimizers) == 1
        return self.model, self.optimizers[0] if only_one else self.optimizers

    def backward(self, step: int) -> None:
        """In one process, of the mean loss of all ranks."""
        alone = self.program.door == "one process"
        ranks = range(dist.get_world_size()) if alone else [self.rank]
        for rank in ranks:
            (classification_loss(self.model, examples(rank, step)) / len(ranks)).backward()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model.zero_grad()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.backward(step)
            for optimizer in self.optimizers:
                optimizer.step()
            self.zero_grad()

    def groups(self) -> list[dict[str, Any]]:
        """Settings of all groups."""
        every = [group for optimizer in self.optimizers for group in settings_of(optimizer)]
        return [{k: v for k, v in group.items() if k != "param_names"} for group in every]

    def states(self) -> dict[str, Any]:
        """Whole states of all optimizers."""
        every = [whole_states(self.model, optimizer) for optimizer in self.optimizers]
        return {name: value for states in every for name, value in states.items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters."""
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
            return self.model.state_dict()


def run(program: ResumeProgram, rank: int, folder: str) -> Iterator[str]:
    """What is wrong on this rank."""
    saved, fresh = Run(program, rank, loads=False), Run(program, rank, loads=True)
    saved.train(0, 1)
    for number in program.frozen_since:
        saved.params[number][1].requires_grad_(False)
    for optimizer in saved.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    if program.with_gradients and program.way != "template":
        fresh.backward(5)
    grads = [param.grad for _, param in fresh.params]
    before = fresh.groups()
    expected = saved.states()
    yield from _different_from_one_process(program, saved)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            RESUMES[program.way](saved.pair(), fresh.pair(), folder)
    except (FSDPError, CheckpointException) as error:
        if not any(text in str(error) for text in program.errors):
            yield f"{type(error).__name__}: {error}"
        is_read_into = program.way in TEMPLATES and program.errors != ["zero_grad"]
        if not is_read_into and (fresh.groups() != before or any(fresh.states())):
            yield "the optimizer has changed before the error"
        return
    if program.errors:
        yield f"no error, expected one of {program.errors}"
        return
    if program.way != "template" and any(  # which makes a step
        param.grad is not grad for grad, (_, param) in zip(grads, fresh.params, strict=True)
    ):
        yield "other gradients"
    settings = saved.groups()
    wanted = [
        settings[number] if program.groups[number] else own  # empty ones keep theirs
        for number, own in zip(fresh.order, before, strict=False)
    ]
    if fresh.groups() != wanted + before[len(wanted) :]:
        yield f"groups {fresh.groups()}, expected {wanted}"
    yield from _different("states", fresh.states(), expected)
    fresh.zero_grad()
    for one in (saved, fresh):
        for number in program.frozen_since:
            one.params[number][1].requires_grad_(True)
        one.train(2, 3)
    yield from _different("parameters later", fresh.parameters(), saved.parameters(), 1e-4)
    if program.kind != "mixed":  # whose states round
        yield from _different("states later", fresh.states(), saved.states(), 1e-3)


def _different_from_one_process(program: ResumeProgram, saved: Run) -> Iterator[str]:
    """Of optimizers whose states are sums of gradients, or values: dtypes and values."""
    if program.kind not in ("momentum", "mixed"):
        return
    plain = Run(replace(program, door="one process"), saved.rank, loads=False)
    plain.train(0, 1)
    names = {param: name for name, param in plain.params}
    expected = {
        f"{names[param]}/{name}": torch.as_tensor(value)
        for optimizer in plain.optimizers
        for param, state in optimizer.state.items()
        for name, value in state.items()
    }
    got = {name: torch.as_tensor(value) for name, value in saved.states().items()}
    if {k: v.dtype for k, v in expected.items()} != {k: v.dtype for k, v in got.items()}:
        yield "other dtypes than in one process"
    floats = {k: v for k, v in expected.items() if v.is_floating_point()}
    yield from _different(
        "one process's", {k: got[k] for k in floats.keys() & got.keys()}, floats, 1e-2
    )


def _different(
    what: str, got: dict[str, Any], wanted: dict[str, Any], rtol: float = 0.0
) -> Iterator[str]:
    if got.keys() != wanted.keys():
        yield f"{what}: only one has {sorted(got.keys() ^ wanted.keys())}"
    for name in got.keys() & wanted.keys():
        one, other = (torch.as_tensor(x[name]).detach().float() for x in (got, wanted))
        if one.shape != other.shape or not torch.allclose(one, other, rtol, 1e-6 if rtol else 0.0):
            yield f"{what}: {name}"


def run_all(rank: int, world_size: int, seeds: Iterable[int], folder: str) -> dict[int, list[str]]:
    """What is wrong with the programs of some seeds, on this rank."""
    found = {}
    for seed in seeds:
        try:
            wrong = list(run(draw(seed), rank, f"{folder}/{seed}"))
        except Exception as error:  # noqa: BLE001  # the other ranks get it, or another, as well
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            found[seed] = wrong
    return found
