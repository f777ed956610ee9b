"""Precision, evaluations, policies, conversions and groups of a wrapped model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import gradients, whole_gradients
from models import batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, MixedPrecision, record_events

# -- mixed precision ---------------------------------------------------------------------------


def _low_precision_mean() -> dict[str, torch.Tensor]:
    """Mean gradients of all ranks' batches, computed in bf16 except in LayerNorm."""
    means: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        model = make_transformer(num_blocks=1).to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
                module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
                module.register_forward_hook(lambda _, args, out: out.to(torch.bfloat16))
        loss_of(model, batch(rank, 0)).backward()
        for fqn, grad in gradients(model).items():
            means[fqn] = means.get(fqn, 0) + grad.float() / dist.get_world_size()
    return means


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_mixed_precision(rank: int, mode: str) -> None:
    """All-gathers send bf16, reduce-scatters fp32; norms are units of their own in fp32."""
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        _module_classes_to_ignore=(nn.LayerNorm,),
    )
    wrapped = wrap(make_transformer(num_blocks=1), mixed_precision=precision)
    model = in_mode(wrapped, mode)
    with record_events() as log:
        out = model(batch(rank, 0))
        loss_of(lambda _: out, batch(rank, 0)).backward()
    assert out.dtype == torch.bfloat16
    assert {t.dtype for p in wrapped.parameters() for t in (p, p.grad)} == {torch.float32}
    torch.testing.assert_close(
        whole_gradients(wrapped), _low_precision_mean(), rtol=1e-5, atol=1e-7
    )
    units = {u.fqn: u.flats for u in wrapped._fsdp_root.units if u.fqn.startswith("blocks.0")}
    assert units.keys() == {"blocks.0", "blocks.0.norm1", "blocks.0.norm2"}
    for fqn, (flat,) in units.items():
        collectives = [e for e in log if e.kind in ("all_gather", "reduce_scatter")]
        sent = {(e.kind, e.num_bytes) for e in collectives if e.unit == fqn}
        numel = flat.layout.padded_numel
        gathered_bytes = numel * (4 if "norm" in fqn else 2)
        assert sent == {("all_gather", gathered_bytes), ("reduce_scatter", numel * 4)}


# -- evaluation, hooks ----------------------------------------------------------------------------


def _num_allocated(wrapped: FSDP) -> int:
    return sum(flat.is_allocated for unit in wrapped._fsdp_root.units for flat in unit.flats)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_evaluations_and_abandoned_forwards(rank: int, mode: str) -> None:
    """A module's own pre-hooks see unsharded parameters; the root takes keyword inputs."""
    plain = make_transformer(num_blocks=1)
    expected = plain(batch(0, 0))
    seen: list[Any] = []
    plain.blocks[0].register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(m.qkv.weight.shape), with_kwargs=True
    )
    wrapped = wrap(plain)
    model = in_mode(wrapped, mode)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens=batch(0, 0)), expected)
    assert _num_allocated(wrapped) == 0
    assert isinstance(wrapped.blocks[0].qkv.weight, DTensor)
    loss_of(model, batch(rank, 0))  # a forward that no backward follows
    torch.testing.assert_close(model.eval()(batch(0, 0)), expected)
    model.train()
    loss_of(model, batch(rank, 0)).backward()
    assert _num_allocated(wrapped) == 0
    seen.clear()
    loss_of(model, batch(rank, 1)).backward()
    assert seen == [(48, 16)]


# -- construction ----------------------------------------------------------------------------------


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "storage": lambda model: model._apply(torch.clone),  # as a move to another device does
}


@pytest.mark.parametrize(("how", "mode"), [("double", "eager"), ("storage", "graph")])
@on_ranks(2)
def test_conversion_refreshes_views(rank: int, how: str, mode: str) -> None:
    """Parameters keep identity and gradients; training goes on, in float64 where converted."""
    convert = CONVERSIONS[how]
    wrapped, plain = wrap(make_transformer(num_blocks=1)), make_transformer(num_blocks=1)
    model = in_mode(wrapped, mode)
    assert train(model, 0, steps=2)[0] == pytest.approx(train(plain, 0, steps=2)[0], rel=1e-6)
    parameters = list(wrapped.parameters())
    grads = [p.grad.clone() for p in parameters]
    flats = [flat for unit in wrapped._fsdp_root.units for flat in unit.flats]
    shards = [flat.sharded for flat in flats]
    convert(wrapped)
    assert all(f.sharded.data_ptr() != s.data_ptr() for f, s in zip(flats, shards, strict=True))
    for before, grad, after in zip(parameters, grads, wrapped.parameters(), strict=True):
        assert after is before
        assert torch.equal(after.grad.float(), grad)
    got, _ = train(model, 0, steps=2)
    assert got == pytest.approx(train(convert(plain), 0, steps=2)[0], rel=1e-5)
