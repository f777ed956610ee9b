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
from loops import classification_loss, examples, fit, make_classifier, shard
from models import Block, Transformer, batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import profile
from torch.profiler import schedule as profiler_schedule

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

# -- attributes ------------------------------------------------------------------------------------


def _looked_at(rank: int, world_size: int, mode: str) -> dict[str, bool]:
    """Through the wrapper, compiled or not. Nothing runs."""
    plain = make_transformer(num_blocks=2)
    named = {name: p.numel() for name, p in plain.named_parameters()}
    model = in_mode(wrap(plain), mode)
    here = torch.tensor(sum(p.to_local().numel() for p in model.parameters()))
    dist.all_reduce(here)
    first = next(model.parameters())
    llama, layer = hf_models.make("llama")
    wrapped_llama = in_mode(FSDP(llama, auto_wrap_policy=ModuleWrapPolicy({layer})), mode)
    model.note = "set by a script"
    return {
        "numbers": sum(p.numel() for p in model.parameters()) == sum(named.values()),
        "numbers add up over ranks": here.item() == sum(named.values()),
        "names": [name for name, _ in model.named_parameters()] == list(named),
        "device and dtype": (first.device.type, first.dtype) == ("cpu", torch.float32),
        "module": isinstance(model.module, Transformer),
        "blocks": len(model.blocks) == 2 and isinstance(model.blocks[0].module, Block),
        "an attribute of a block": model.blocks[1].heads == 2,
        "own attributes": model.note == "set by a script",
        "config": wrapped_llama.config.num_hidden_layers == 2,
        "a method": wrapped_llama.get_input_embeddings() is llama.model.embed_tokens,
        "printed": "Transformer(" in repr(model) and "(qkv): Linear" in repr(model),
    }


@pytest.mark.parametrize("mode", MODES)
def test_attributes_through_the_wrapper(ranks: RankPool, mode: str) -> None:
    for found in ranks.run(_looked_at, 2, mode):
        assert [what for what, holds in found.items() if not holds] == []


def _as_vectors(rank: int, world_size: int) -> tuple[list[float], list[float]]:
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
    return losses[:3], losses[3:]


def test_parameters_as_a_vector(ranks: RankPool) -> None:
    for expected, got in ranks.run(_as_vectors, 2):
        assert got == pytest.approx(expected, rel=1e-5)


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


def _collected(rank: int, world_size: int, mode: str) -> tuple[list[str], list[str]]:
    backward = mode != "graph"  # Dynamo puts no backward hooks of modules into a whole graph
    plain, wrapped = make_transformer(num_blocks=2), wrap(make_transformer(num_blocks=2))
    expected = _step_with_hooks(plain, plain, rank, backward)
    got = _step_with_hooks(wrapped, in_mode(wrapped, mode), rank, backward)
    wrong = [n for n in got if not torch.allclose(got[n], expected[n], rtol=1e-4, atol=1e-6)]
    return wrong, sorted(expected.keys() ^ got.keys())


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_modules_see_activations(ranks: RankPool, mode: str) -> None:
    for wrong, missing in ranks.run(_collected, 2, mode):
        assert (wrong, missing) == ([], [])


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


def _inside(rank: int, world_size: int, mode: str, late: bool) -> list[str]:
    """Hooks inside units that are not called once, with the plain model's tensors."""
    plain, wrapped = make_transformer(num_blocks=3), wrap(make_transformer(num_blocks=3))
    expected = _hooked_steps(plain, plain, rank, late)
    got = _hooked_steps(wrapped, in_mode(wrapped, mode), rank, late)
    assert len(expected) == 3 + 2 + 2
    return [
        f"{name}: {len(got.get(name, []))} calls"
        for name, (tensor,) in expected.items()
        if len(got.get(name, [])) != 1
        or type(got[name][0]) is not torch.Tensor
        or not torch.allclose(got[name][0], tensor, 1e-4, 1e-6)
    ]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_hooks_inside_equal_blocks(ranks: RankPool, mode: str, late: bool) -> None:
    """Each is called in its block, once a step; graph mode has no backward hooks."""
    for wrong in ranks.run(_inside, 2, mode, late):
        assert wrong == []


def _routed(rank: int, world_size: int) -> tuple[bool, list[int]]:
    """Whether layers have hooks that transformers sets in the first forward; compiled bodies."""
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
    units = FSDP.fsdp_modules(model)
    is_hooked = any(module._forward_hooks for module in plain.model.layers.modules())
    return is_hooked, [len(unit._fsdp_compiled_bodies) for unit in units]


def test_hooks_of_transformers_leave_units_compiled(ranks: RankPool) -> None:
    assert ranks.run(_routed, 2) == [(True, [1, 1, 1, 1])] * 2


def _in_graph(rank: int, world_size: int) -> list[bool]:
    seen: list[torch.Tensor] = []
    plain, wrapped = make_transformer(num_blocks=2), wrap(make_transformer(num_blocks=2))
    for model, run in ((plain, plain), (wrapped, in_mode(wrapped, "graph"))):
        layer = model.blocks[1].up
        layer.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
        loss_of(run, batch(rank, 0)).backward()
    expected, *got = seen
    return [torch.allclose(tensor, expected, 1e-4) for tensor in got]


def test_a_hook_inside_a_unit_of_a_graph(ranks: RankPool) -> None:
    assert ranks.run(_in_graph, 2) == [[True]] * 2


# -- a profiler ------------------------------------------------------------------------------------


def _profiled(rank: int, world_size: int, mode: str, folder: str) -> tuple[list[float], set[str]]:
    """A schedule of steps, with all that can be recorded."""
    file = Path(folder) / f"trace-{rank}.json"
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
    events = json.loads(file.read_text())["traceEvents"]
    return losses, {event.get("name", "") for event in events}


def _plain_losses(rank: int, world_size: int) -> list[float]:
    model = DistributedDataParallel(make_classifier())
    return fit(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(5))


@pytest.mark.parametrize("mode", MODES)
def test_a_profiler_around_steps(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    expected = ranks.run(_plain_losses, 2)
    for losses, (got, names) in zip(
        expected, ranks.run(_profiled, 2, mode, str(tmp_path)), strict=True
    ):
        assert got == pytest.approx(losses, rel=1e-5)
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


def _evaluated(rank: int, world_size: int, mode: str) -> tuple[Any, Any]:
    expected = _with_evaluations(DistributedDataParallel(_make_noisy()))
    return expected, _with_evaluations(in_mode(shard(_make_noisy()), mode))


@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_and_dropout_follow_train_and_eval(ranks: RankPool, mode: str) -> None:
    for (losses, variances, count), (got, got_variances, got_count) in ranks.run(
        _evaluated, 2, mode
    ):
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


def _under_inductor(rank: int, world_size: int, kind: str, dtype: torch.dtype) -> tuple[Any, Any]:
    eager = _evaluated_last(shard(_normalised(dtype)), rank, kind)
    return eager, _evaluated_last(in_mode(shard(_normalised(dtype)), "hooks-inductor"), rank, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [("SGD", torch.float32, 1e-5), ("AdamW", torch.float64, 1e-6)],
)
def test_batch_norm_under_inductor(
    ranks: RankPool, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Also the statistics. AdamW in float32 is no comparison: see the next test."""
    for (losses, means), (got, got_means) in ranks.run(_under_inductor, 2, kind, dtype):
        assert got == pytest.approx(losses, rel=tolerance)
        assert got_means == pytest.approx(means, rel=tolerance, abs=1e-7)


def test_a_bias_before_a_batch_norm_has_a_gradient_of_rounding() -> None:
    """AdamW makes steps of the learning rate of it, in another direction in each mode."""
    model = _normalised(torch.float32)
    classification_loss(model, examples(0, size=8)).backward()
    linear = model[0][0]  # type: ignore[index]
    assert linear.bias.grad.abs().max() < 1e-6 < 1e-2 < linear.weight.grad.abs().max()


# -- compiled first --------------------------------------------------------------------------------


def _orders(rank: int, world_size: int) -> tuple[list[float], dict[str, list[float]]]:
    """Compiled for one graph before or after wrapping."""
    how: dict[str, Any] = {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True}
    expected = _plain_losses(rank, world_size)
    found = {}
    for order in ("torch.compile, wrap", "module.compile, wrap", "wrap, module.compile"):
        plain = make_classifier()
        if order == "torch.compile, wrap":
            compiled = torch.compile(plain, **how)
        elif order == "module.compile, wrap":
            compiled = plain
            compiled.compile(**how)
        else:
            compiled = plain
        model = shard(compiled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if order == "wrap, module.compile":
            model.compile(**how)
        found[order] = fit(model, optimizer, rank, range(5))
    return expected, found


def test_compiled_before_wrapping(ranks: RankPool) -> None:
    """For graph mode; on hooks: test_state_dict.py and test_composable.py."""
    for expected, found in ranks.run(_orders, 2):
        for order, losses in found.items():
            assert losses == pytest.approx(expected, rel=1e-5), order
