"""What the state of an optimizer must not lose on its way into another run, by every way."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import resume_programs
import torch
import torch.distributed as dist
from loops import classification_loss, examples, fit, make_classifier, shard
from pool import RankPool, on_ranks
from resume_programs import RESUMES, Pair, whole_states
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp_dynamo import (
    FSDP,
    FSDPValueError,
    OptimStateKeyType,
    ShardingStrategy,
    UnsupportedError,
    fully_shard,
)


def _folder() -> str:
    """A new one, the same for all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, src=0)
    return made[0]


def _adamw() -> Pair:
    model = shard(make_classifier())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("of_group", [False, True])
@pytest.mark.parametrize("is_flat", [False, True])
@on_ranks(2)
def test_a_state_that_is_missing(rank: int, is_flat: bool, of_group: bool) -> None:
    """strict=False leaves the parameter without a state, and the others as they were saved.

    A parameter that the checkpoint does not know is in none of its groups either.
    """
    trained, fresh = _adamw(), _adamw()
    fit(*trained, rank, range(2))
    form = {"full_state_dict": True, "flatten_optimizer_state_dict": is_flat}
    saved: dict[str, Any] = get_optimizer_state_dict(*trained, options=StateDictOptions(**form))
    states = saved if is_flat else saved["state"]
    for key in [key for key in states if "1.0.bias" in key]:
        if of_group or "param_groups" not in key:
            del states[key]
    for group in saved["param_groups"] if of_group and not is_flat else ():
        group["params"].remove("1.0.bias")
    with pytest.raises(FSDPValueError, match=r"parameter '1\.0\.bias'"):
        set_optimizer_state_dict(*fresh, saved, options=StateDictOptions(**form))
    assert not fresh[1].state
    set_optimizer_state_dict(*fresh, saved, options=StateDictOptions(**form, strict=False))
    expected = {k: v for k, v in whole_states(*trained).items() if not k.startswith("1.0.bias")}
    torch.testing.assert_close(whole_states(*fresh), expected, rtol=0, atol=0)


class _WithTable(nn.Module):
    """A table that each rank has of its own, outside of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6)
        self.body = make_classifier()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x + self.table.weight.sum(0))
        return out


def _with_table(door: str) -> Pair:
    model: nn.Module = _WithTable()
    if door == "wrapper":
        model = FSDP(model, ignored_modules=[model.table])
    else:
        fully_shard(model.body)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_states_that_each_rank_has_of_its_own(rank: int, door: str) -> None:
    trained = _with_table(door)
    fit(*trained, rank, range(2))
    trained[1].state[trained[0].table.weight]["step"] += rank  # as of a table with gradients seldom
    own = trained[1].state[trained[0].table.weight]["exp_avg"]
    for way in ("full", "sharded", "local", "dcp full", "dcp full flat"):
        fresh = _with_table(door)
        RESUMES[way](trained, fresh, _folder())
        torch.testing.assert_close(fresh[1].state[fresh[0].table.weight]["exp_avg"], own)
        torch.testing.assert_close(whole_states(*fresh), whole_states(*trained), rtol=0, atol=0)


@on_ranks(2)
def test_a_template_beside_a_gradient_of_one_rank(rank: int) -> None:
    model, optimizer = _with_table("wrapper")
    if rank == 0:
        model.table.weight.grad = torch.ones(4, 6)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert states.keys() == {name for name, _ in model.named_parameters()}
    assert (model.table.weight.grad is None) is (rank != 0)


@on_ranks(2)
def test_optim_input_is_not_changed(rank: int) -> None:
    trained = _adamw()
    fit(*trained, rank, range(1))
    saved = FSDP.full_optim_state_dict(*trained, rank0_only=False)
    model = trained[0]
    groups = [{"params": list(model.parameters()), "weight_decay": 0.5}]
    before = [dict(group) for group in groups]
    FSDP.shard_full_optim_state_dict(saved, model, groups)
    FSDP.scatter_full_optim_state_dict(saved, model, groups)
    FSDP.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, model, groups)
    assert [group.keys() for group in groups] == [group.keys() for group in before]
    assert all(groups[0][key] is value for key, value in before[0].items())


def _lbfgs(is_wrapped: bool) -> Pair:
    model: nn.Module = make_classifier()
    if is_wrapped:
        model = shard(model, sharding_strategy=ShardingStrategy.NO_SHARD)
    return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=2)


def _with_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = classification_loss(model, examples(0))
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)]  # type: ignore[arg-type]


@on_ranks(2)
def test_lbfgs(rank: int) -> None:
    """Its states are DTensors of all parameters together: they are of no parameter's shape.

    torch's runs on no DTensors whose rows do not divide.
    """
    plain = _lbfgs(is_wrapped=False)
    expected = _with_closure(*plain) + _with_closure(*plain)
    trained, fresh = _lbfgs(is_wrapped=True), _lbfgs(is_wrapped=True)
    losses = _with_closure(*trained)
    with pytest.raises(UnsupportedError, match=r"Save optimizer\.state_dict\(\) of each rank"):
        FSDP.optim_state_dict(*trained)
    fresh[0].load_state_dict(trained[0].state_dict())
    fresh[1].load_state_dict(trained[1].state_dict())
    losses += _with_closure(*fresh)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_groups_have_no_private_keys(rank: int) -> None:
    trained = _adamw()
    fit(*trained, rank, range(1))
    own = trained[1].param_groups[0].keys()
    assert trained[1].state_dict()["param_groups"][0].keys() == own


def test_random_resumes(ranks: RankPool, tmp_path: Path) -> None:
    """By every way; more by benchmarks/campaigns/random_resumes.py."""
    seeds = (*range(40), 53)  # the last one refuses what two optimizers share
    assert ranks.run(resume_programs.run_all, 2, seeds, str(tmp_path)) == [{}, {}]
