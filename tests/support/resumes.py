"""Ways by which the state of one run enters another: every form of state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from fsdp_dynamo import FSDP, StateDictType, checkpoint


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
