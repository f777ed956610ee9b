"""What scripts for FSDP1 do with state dicts, beyond saving and loading them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from fsdp_dynamo import (
    FSDP,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
    checkpoint,
)

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
Pair = tuple[nn.Module, torch.optim.Optimizer]


def _made(scale: float = 1.0, **arguments: Any) -> Pair:
    plain = make_transformer(num_blocks=2)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(scale)
    model = wrap(plain, **arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(pair: Pair, seed: int) -> None:
    loss_of(pair[0], batch(seed, 0)).backward()
    pair[1].step()
    pair[1].zero_grad()


def _whole(pair: Pair) -> dict[str, torch.Tensor]:
    states = FSDP.optim_state_dict(*pair)["state"]
    return {
        **pair[0].state_dict(),
        **{f"{fqn}/{name}": v for fqn, state in states.items() for name, v in state.items()},
    }


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


# -- a model on some of the ranks ------------------------------------------------------------------


def _on_two_of_four(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    """All ranks write a checkpoint; two of them, not the first, load it and go on alone."""
    trained = _made()
    _step(trained, rank)
    expected = _whole(trained)
    full = FSDP.full_optim_state_dict(*trained, rank0_only=False)
    with FSDP.state_dict_type(trained[0], SHARDED):
        dcp.save({"model": trained[0].state_dict()}, checkpoint_id=folder)
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return {}
    found = {}
    pair = _made(0.5, process_group=group)
    model, optimizer = pair
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=group)
        model.load_state_dict(state["model"])
    given = full if rank == 1 else None
    scattered = FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer, group=group)
    optimizer.load_state_dict(scattered)
    found["loaded"] = _same(_whole(pair), expected)

    _step(pair, rank)
    later = _whole(pair)
    found["trained"] = not torch.equal(later["head.weight"], expected["head.weight"])
    with FSDP.state_dict_type(
        model, FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    ):
        states = (model.state_dict(), FSDP.optim_state_dict(*pair))
        found["first"] = [bool(one) for one in states] == [rank == 1] * 2
    with FSDP.state_dict_type(model, SHARDED):
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/own", process_group=group)
    alone = get_state_dict(*pair, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    found["first, by torch"] = all(bool(one) is (rank == 1) for one in alone)
    other = _made(0.5, process_group=group)
    set_state_dict(
        *other,
        model_state_dict=alone[0],
        optim_state_dict=alone[1],
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    found["received"] = _same(_whole(other), later)
    checkpoint.save(f"{folder}/run", *pair, step=1, process_group=group)
    another = _made(0.5, process_group=group)
    loaded = checkpoint.load(f"{folder}/run", *another, process_group=group)
    assert loaded is not None
    found["fsdp_dynamo.checkpoint"] = _same(_whole(another), later) and loaded.world_size == 2
    return found


def test_on_two_of_four_ranks(ranks: RankPool, tmp_path: Any) -> None:
    for found in ranks.run(_on_two_of_four, 4, str(tmp_path)):
        assert [what for what, holds in found.items() if not holds] == []
