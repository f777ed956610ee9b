"""What scripts do beside training: counts, names, attributes, hooks, compiling."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
import transformers
from loops import different, fit, make_classifier, shard
from models import Block, Transformer, batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

# -- attributes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_attributes_through_the_wrapper(rank: int, mode: str) -> None:
    """Compiled or not. Nothing runs."""
    plain = make_transformer(num_blocks=2)
    named = {name: p.numel() for name, p in plain.named_parameters()}
    model = in_mode(wrap(plain), mode)
    here = torch.tensor(sum(p.to_local().numel() for p in model.parameters()))
    dist.all_reduce(here)
    first = next(model.parameters())
    llama, layer = hf_models.make("llama")
    wrapped_llama = in_mode(FSDP(llama, auto_wrap_policy=ModuleWrapPolicy({layer})), mode)
    model.note = "set by a script"
    assert sum(p.numel() for p in model.parameters()) == sum(named.values()) == here.item()
    assert [name for name, _ in model.named_parameters()] == list(named)
    assert (first.device.type, first.dtype) == ("cpu", torch.float32)
    assert isinstance(model.module, Transformer)
    assert len(model.blocks) == 2
    assert isinstance(model.blocks[0].module, Block)
    assert model.blocks[1].heads == 2
    assert model.note == "set by a script"
    assert wrapped_llama.config.num_hidden_layers == 2
    assert wrapped_llama.get_input_embeddings() is llama.model.embed_tokens


# -- hooks of modules ------------------------------------------------------------------------------


def _hook(model: Any, backward: bool) -> tuple[list[Any], dict[str, Any]]:
    """Hooks of three kinds on layers inside blocks, in the last on the block; what they see."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for i, block in enumerate(model.blocks):

        def note(what: str, tensor: torch.Tensor, i: int = i) -> None:
            seen.setdefault(f"{what} of block {i}", []).append(tensor.detach())

        def before(module: Any, args: Any, note: Any = note) -> None:
            note("input", args[0])

        def after(module: Any, args: Any, output: Any, note: Any = note) -> None:
            note("output", output)

        def with_gradient(module: Any, grad_input: Any, grad_output: Any, note: Any = note) -> None:
            note("gradient", grad_output[0])

        up, down = (block.up, block.down) if i < 2 else (block, block)
        handles.append(up.register_forward_pre_hook(before))
        if i:  # not in the block that is traced first
            handles.append(up.register_forward_hook(after))
            if backward:
                handles.append(down.register_full_backward_hook(with_gradient))
    return handles, seen


@pytest.mark.parametrize(
    ("mode", "late"), [("eager", True), ("hooks", False), ("hooks", True), ("graph", False)]
)
@on_ranks(2)
def test_hooks_of_modules_see_activations(rank: int, mode: str, late: bool) -> None:
    """Each is called in its block, once a step until it is removed; ``late``: after a step."""
    backward = mode != "graph"  # Dynamo puts no backward hooks of modules into a whole graph
    plain, wrapped = make_transformer(num_blocks=3), wrap(make_transformer(num_blocks=3))
    found = []
    for model, run in ((plain, plain), (wrapped, in_mode(wrapped, mode))):
        if late:
            loss_of(run, batch(rank, 0)).backward()
        handles, seen = _hook(model, backward)
        loss_of(run, batch(rank, 0)).backward()
        for handle in handles:
            handle.remove()
        loss_of(run, batch(rank, 0)).backward()
        assert {len(tensors) for tensors in seen.values()} == {1}
        found.append({name: tensor for name, (tensor,) in seen.items()})
        assert {type(tensor) for tensor in found[-1].values()} == {torch.Tensor}
    assert different(found[1], found[0]) == []


@on_ranks(2)
def test_hooks_of_transformers_leave_units_compiled(rank: int) -> None:
    """The library sets them in the first forward."""
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        output_router_logits=True,
    )
    torch.manual_seed(0)
    plain = transformers.MixtralForCausalLM(config)
    layers = {type(layer) for layer in plain.model.layers}
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy(layers))
    run = torch.compile(model, backend="aot_eager")
    tokens = batch(rank, 0) % config.vocab_size
    for _ in range(2):
        run(input_ids=tokens, labels=tokens).loss.backward()
    assert any(module._forward_hooks for module in plain.model.layers.modules())
    units = FSDP.fsdp_modules(model)
    assert [len(unit._fsdp_compiled_bodies) for unit in units] == [1, 1, 1]


# -- compiled first --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["torch.compile, wrap", "module.compile, wrap", "wrap, compile"])
@on_ranks(2)
def test_compiled_before_or_after_wrapping(rank: int, order: str) -> None:
    """For one graph, in graph mode; on hooks: test_state_dict.py and test_composable.py."""
    how: dict[str, Any] = {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True}
    plain: Any = make_classifier()
    if order == "torch.compile, wrap":
        plain = torch.compile(plain, **how)
    elif order == "module.compile, wrap":
        plain.compile(**how)
    model = shard(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if order == "wrap, compile":
        model.compile(**how)
    ddp = DistributedDataParallel(make_classifier())
    expected = fit(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank, range(5))
    assert fit(model, optimizer, rank, range(5)) == pytest.approx(expected, rel=1e-5)
