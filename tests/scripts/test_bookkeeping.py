"""What scripts do beside training: counts, names, attributes, hooks, vectors, a profiler, modes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
import transformers
from loops import classification_loss, different, examples, fit, make_classifier, shard
from models import Block, Transformer, batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import profile
from torch.profiler import schedule as profiler_schedule

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

# -- attributes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
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
    assert "Transformer(" in repr(model)
    assert "(qkv): Linear" in repr(model)


@on_ranks(2)
def test_parameters_as_a_vector(rank: int) -> None:
    """All weights as one vector of whole parameters: halved, and put back."""
    losses = []
    plain = make_classifier()
    for model in (plain, shard(make_classifier())):
        with nullcontext() if model is plain else FSDP.summon_full_params(model):
            vector = parameters_to_vector(model.parameters())
            vector_to_parameters(0.5 * vector.detach(), model.parameters())
        with torch.no_grad():
            losses.append(classification_loss(model, examples(rank)).item())
        if model is plain:
            model = DistributedDataParallel(model)
        losses += fit(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)


# -- hooks of modules ------------------------------------------------------------------------------


def _step_with_hooks(model: Any, run: nn.Module, rank: int, backward: bool) -> dict[str, Any]:
    """Forward and backward hooks on blocks, which are units."""
    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen[name] = output.detach().clone()

        return hook

    def note_gradient(name: str) -> Any:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            seen[name] = grad_output[0].detach().clone()

        return hook

    for i, block in enumerate(model.blocks):
        block.register_forward_hook(note(f"block {i}"))
        if backward:
            block.register_full_backward_hook(note_gradient(f"gradient of block {i}"))
    loss_of(run, batch(rank, 0)).backward()
    return seen


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_hooks_of_modules_see_activations(rank: int, mode: str) -> None:
    backward = mode != "graph"  # Dynamo puts no backward hooks of modules into a whole graph
    plain, wrapped = make_transformer(num_blocks=2), wrap(make_transformer(num_blocks=2))
    expected = _step_with_hooks(plain, plain, rank, backward)
    got = _step_with_hooks(wrapped, in_mode(wrapped, mode), rank, backward)
    assert different(got, expected) == []


def _hook_layers(model: Any) -> tuple[list[Any], dict[str, list[torch.Tensor]]]:
    """Hooks of three kinds on layers inside units; what they see, by layer."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for i, block in enumerate(model.blocks):

        def note(what: str, tensor: torch.Tensor, i: int = i) -> None:
            seen.setdefault(f"{what} of block {i}", []).append(tensor.detach())

        def before(module: Any, args: Any, note: Any = note) -> None:
            note("input", args[0])

        def after(module: Any, args: Any, output: Any, note: Any = note) -> None:
            note("output", output)

        def backward(module: Any, grad_input: Any, grad_output: Any, note: Any = note) -> None:
            note("gradient", grad_output[0])

        handles.append(block.up.register_forward_pre_hook(before))
        if i:  # not in the block that is traced first
            handles.append(block.up.register_forward_hook(after))
            handles.append(block.down.register_full_backward_hook(backward))
    return handles, seen


def _hooked_steps(model: Any, run: nn.Module, rank: int, late: bool) -> dict[str, Any]:
    """A step with hooks and one after they were removed; if they come late, one before, too."""
    if late:
        loss_of(run, batch(rank, 0)).backward()
    handles, seen = _hook_layers(model)
    loss_of(run, batch(rank, 0)).backward()
    for handle in handles:
        handle.remove()
    loss_of(run, batch(rank, 0)).backward()
    return seen


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["eager", "hooks"])
@on_ranks(2)
def test_hooks_inside_equal_blocks(rank: int, mode: str, late: bool) -> None:
    """Each is called in its block, once a step; graph mode has no backward hooks."""
    plain, wrapped = make_transformer(num_blocks=3), wrap(make_transformer(num_blocks=3))
    expected = _hooked_steps(plain, plain, rank, late)
    got = _hooked_steps(wrapped, in_mode(wrapped, mode), rank, late)
    assert {name: len(seen) for name, seen in got.items()} == dict.fromkeys(expected, 1)
    assert len(expected) == 3 + 2 + 2
    for name, (tensor,) in expected.items():
        assert type(got[name][0]) is torch.Tensor
        torch.testing.assert_close(got[name][0], tensor, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_hooks_of_transformers_leave_units_compiled(rank: int) -> None:
    """The library sets them in the first forward."""
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
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
    assert [len(unit._fsdp_compiled_bodies) for unit in units] == [1, 1, 1, 1]


@on_ranks(2)
def test_a_hook_inside_a_unit_of_a_graph(rank: int) -> None:
    seen: list[torch.Tensor] = []
    plain, wrapped = make_transformer(num_blocks=2), wrap(make_transformer(num_blocks=2))
    for model, run in ((plain, plain), (wrapped, in_mode(wrapped, "graph"))):
        layer = model.blocks[1].up
        layer.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
        loss_of(run, batch(rank, 0)).backward()
    expected, got = seen
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


# -- a profiler ------------------------------------------------------------------------------------


def _plain_losses(rank: int) -> list[float]:
    model = DistributedDataParallel(make_classifier())
    return fit(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(5))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_profiler_around_steps(rank: int, tmp_path: Path, mode: str) -> None:
    """A schedule of steps, with all that can be recorded."""
    file = tmp_path / f"trace-{rank}.json"
    model = in_mode(shard(make_classifier()), mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with profile(
        schedule=profiler_schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
    ) as profiler:
        for step in range(5):
            losses += fit(model, optimizer, rank, range(step, step + 1))
            profiler.step()
    assert losses == pytest.approx(_plain_losses(rank), rel=1e-5)
    names = {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"FSDP::all_gather (root)", "FSDP::all_gather 0"} <= names


# -- train() and eval() ----------------------------------------------------------------------------


def _make_noisy() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(12, 3))


def _with_evaluations(model: nn.Module) -> tuple[list[float], list[float], int]:
    """The same batches on all ranks, so DDP's exchange of statistics makes no difference."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        torch.manual_seed(step)
        losses += fit(model, optimizer, 0, range(step, step + 1))
        if step % 2:
            model.eval()
            with torch.no_grad():
                losses.append(classification_loss(model, examples(0, 9)).item())
            model.train()
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return losses, state["0.1.running_var"].tolist(), int(state["0.1.num_batches_tracked"])


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_batch_norm_and_dropout_follow_train_and_eval(rank: int, mode: str) -> None:
    losses, variances, count = _with_evaluations(DistributedDataParallel(_make_noisy()))
    got, got_variances, got_count = _with_evaluations(in_mode(shard(_make_noisy()), mode))
    assert got == pytest.approx(losses, rel=1e-5)
    assert got_variances == pytest.approx(variances, rel=1e-5)
    assert got_count == count == 6


def _normalised(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
    return nn.Sequential(first, nn.Linear(12, 3)).to(dtype)


def _evaluated_last(model: nn.Module, rank: int, kind: str) -> tuple[list[float], list[float]]:
    """Losses of six steps and of an evaluation; the running means."""
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(7):
        model.train(step < 6)
        x, y = examples(rank, step, size=8)
        loss = F.cross_entropy(model(x.to(dtype)), y)
        losses.append(loss.item())
        if step < 6:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    means = next(b for name, b in model.named_buffers() if name.endswith("running_mean"))
    return losses, means.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [("SGD", torch.float32, 1e-5), ("AdamW", torch.float64, 1e-6)],
)
@on_ranks(2)
def test_batch_norm_under_inductor(
    rank: int, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Also the statistics. AdamW in float32 is no comparison: see the next test."""
    losses, means = _evaluated_last(shard(_normalised(dtype)), rank, kind)
    model = in_mode(shard(_normalised(dtype)), "hooks-inductor")
    got, got_means = _evaluated_last(model, rank, kind)
    assert got == pytest.approx(losses, rel=tolerance)
    assert got_means == pytest.approx(means, rel=tolerance, abs=1e-7)


def test_a_bias_before_a_batch_norm_has_a_gradient_of_rounding() -> None:
    """AdamW makes steps of the learning rate of it, in another direction in each mode."""
    model = _normalised(torch.float32)
    classification_loss(model, examples(0, size=8)).backward()
    linear = model[0][0]  # type: ignore[index]
    assert linear.bias.grad.abs().max() < 1e-6 < 1e-2 < linear.weight.grad.abs().max()


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
    assert fit(model, optimizer, rank, range(5)) == pytest.approx(_plain_losses(rank), rel=1e-5)
