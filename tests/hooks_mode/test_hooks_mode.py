"""The hooks mode: graph counts, recompiles, and that all compute is inside compiled graphs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from loops import different, whole_gradients
from models import (
    Block,
    Transformer,
    average_gradients,
    batch,
    loss_of,
    make_transformer,
    train,
    wrap,
)
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_dynamo import FSDP, UnsupportedError, fully_shard
from fsdp_dynamo.hooks_mode import segments
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_dot_product_flash_attention_for_cpu"}


class CountingBackend:
    """A backend that counts its graphs and says when one of them runs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.depth = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.depth += 1
            try:
                return gm.forward(*args)
            finally:
                self.depth -= 1

        return run


class MatmulWatch(TorchDispatchMode):
    """Counts matrix products inside and outside compiled graphs (forward)."""

    def __init__(self, backend: CountingBackend) -> None:
        super().__init__()
        self.backend = backend
        self.inside = self.outside = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.split("::")[1].split(".")[0] in MATMULS:
            if self.backend.depth:
                self.inside += 1
            else:
                self.outside += 1
        return func(*args, **(kwargs or {}))


class TiedHead(Transformer):
    """A root whose own frame multiplies matrices before, between and after its blocks."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x @ x.new_ones(x.shape[-1], x.shape[-1]) / x.shape[-1] + x
        for block in self.blocks:
            x = block(x) + 0.1 * x
        return nn.functional.linear(self.norm(x), self.embed.weight) * self.scale


def _watch(rank: int, world_size: int) -> tuple[int, int, int]:
    torch.manual_seed(7)
    backend = CountingBackend()
    model = torch.compile(wrap(TiedHead(num_blocks=3)), backend=backend)
    train(model, rank, steps=2)
    with MatmulWatch(backend) as watch:
        model(batch(rank, 5))
    return watch.inside, watch.outside, backend.graphs


def test_all_matmuls_are_compiled(ranks: RankPool) -> None:
    for inside, outside, graphs in ranks.run(_watch, 2):
        assert outside == 0
        assert inside == 3 * 5 + 2  # a block: four linear layers, one attention
        # Root: before, between (compiled once for all gaps), after the blocks; and the block.
        assert graphs == 4


def _count(rank: int, world_size: int, blocks: int) -> tuple[int, int]:
    backend = CountingBackend()
    model = torch.compile(wrap(make_transformer(num_blocks=blocks)), backend=backend)
    train(model, rank, steps=2)
    after_two = backend.graphs
    train(model, rank, steps=4)
    return after_two, backend.graphs


def test_graphs_do_not_grow_with_depth(ranks: RankPool) -> None:
    shallow = ranks.run(_count, 2, 2)
    deep = ranks.run(_count, 2, 24)
    assert shallow == deep
    for after_two, at_end in deep:
        assert after_two == at_end == 3  # before the blocks, the block, after the blocks


def _tagged(rank: int, world_size: int, kind: str) -> tuple[set[Any], set[Any], int]:
    """What Dynamo looks for on managed modules, and on ignored ones."""
    model = make_transformer(num_blocks=2)
    ignored = [model.blocks[0].up, model.norm]
    managed = [module for module in model.modules() if module not in ignored]
    if kind == "fully_shard":
        policy = ModuleWrapPolicy({Block})
        fully_shard(model, policy=policy, ignored_modules=ignored)
    else:
        wrap(model, ignored_modules=ignored, use_orig_params=kind == "wrapper")

    def tags(modules: list[nn.Module]) -> set[Any]:
        names = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
        return {tuple(vars(module).get(name) for name in names) for module in modules}

    return tags(managed), tags(ignored), len(managed)


@pytest.mark.parametrize("kind", ["wrapper", "fully_shard", "wrapper, use_orig_params=False"])
def test_managed_modules_are_tagged(ranks: RankPool, kind: str) -> None:
    for managed, ignored, count in ranks.run(_tagged, 2, kind):
        assert managed == {(True, "False" not in kind)}
        assert ignored == {(None, None)}
        assert count > 15


class TwoWidths(nn.Module):
    """Blocks of two shapes: equal class, equal code, other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.narrow = nn.ModuleList(Block(16) for _ in range(2))
        self.widen = nn.Linear(16, 32)
        self.wide = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.narrow:
            x = block(x)
        x = self.widen(x)
        for block in self.wide:
            x = block(x)
        return self.head(x)


def _two_widths(rank: int, world_size: int) -> tuple[int, int, float, float]:
    torch.manual_seed(1)
    plain = TwoWidths()
    torch.manual_seed(1)
    backend = CountingBackend()
    wrapped = FSDP(TwoWidths(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    model = torch.compile(wrapped, backend=backend)
    expected = loss_of(plain, batch(rank, 0)).item()
    got = loss_of(model, batch(rank, 0)).item()
    first = backend.graphs
    train(model, rank, steps=2)
    return first, backend.graphs, expected, got


def test_other_shapes_get_their_own_graph(ranks: RankPool) -> None:
    for first, at_end, expected, got in ranks.run(_two_widths, 2):
        assert got == pytest.approx(expected, rel=1e-6)
        assert first == at_end == 3 + 2  # root: three segments; one graph for each width


class Breaking(Transformer):
    """A root whose forward Dynamo cannot capture whole."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(self.norm(x)) * self.scale


def _breaking(rank: int, world_size: int) -> tuple[list[float], list[float], int]:
    torch.manual_seed(7)
    expected, _ = train(wrap(Breaking(num_blocks=2)), rank, steps=3)
    torch.manual_seed(7)
    backend = CountingBackend()
    model = torch.compile(wrap(Breaking(num_blocks=2)), backend=backend)
    got, _ = train(model, rank, steps=3)
    return expected, got, backend.graphs


def test_a_root_that_breaks_keeps_its_hooks(ranks: RankPool) -> None:
    """A frame that Dynamo skips still trains right, its blocks compiled."""
    for expected, got, graphs in ranks.run(_breaking, 2):
        assert got == pytest.approx(expected, rel=1e-6)
        assert graphs >= 1


def _in_place(rank: int, world_size: int) -> tuple[list[float], list[float], int]:
    expected, _ = train(wrap(make_transformer(num_blocks=2)), rank)
    backend = CountingBackend()
    model = wrap(make_transformer(num_blocks=2))
    model.compile(backend=backend)
    got, _ = train(model, rank)
    return expected, got, backend.graphs


def test_module_compile_in_place(ranks: RankPool) -> None:
    for expected, got, graphs in ranks.run(_in_place, 2):
        assert got == pytest.approx(expected, rel=1e-6)
        assert graphs == 3


def _many_models(rank: int, world_size: int, mode: str) -> list[bool]:
    results = []
    for _ in range(10):
        expected, _ = train(make_transformer(num_blocks=1), 0, steps=1)
        got, _ = train(in_mode(wrap(make_transformer(num_blocks=1)), mode), 0, steps=1)
        results.append(got == pytest.approx(expected, rel=1e-6))
    counters.clear()
    backend = CountingBackend()
    with MatmulWatch(backend) as watch:
        model = torch.compile(wrap(make_transformer(num_blocks=1)), backend=backend)
        model(batch(rank, 0))
        model(batch(rank, 0))
    return [*results, watch.outside == 0]


@pytest.mark.parametrize("mode", ["hooks", pytest.param("graph", marks=pytest.mark.slow)])
def test_many_models_in_one_process(ranks: RankPool, mode: str) -> None:
    """More models than Dynamo keeps entries of one code object: all are compiled."""
    assert ranks.run(_many_models, 2, mode) == [[True] * 11] * 2


def _no_recompiles(rank: int, world_size: int) -> tuple[int, int, int]:
    counters.clear()
    model = torch.compile(wrap(make_transformer(num_blocks=2)), backend="aot_eager")
    train(model, rank, steps=2)
    before = counters["stats"]["unique_graphs"]
    train(model, rank, steps=4)
    with torch.no_grad():
        model(batch(rank, 0))
    without_grad = counters["stats"]["unique_graphs"]
    model.train(False)
    loss_of(model, batch(rank, 0)).backward()
    model.train(True)
    loss_of(model, batch(rank, 0)).backward()
    return before, without_grad, counters["stats"]["unique_graphs"]


def test_no_recompile_after_the_second_step(ranks: RankPool) -> None:
    for before, without_grad, at_end in ranks.run(_no_recompiles, 2):
        assert before == 2  # Dynamo counts the root's capture once, before it is cut
        assert without_grad - before <= 2  # inference graphs: the root's and the block's
        assert at_end - without_grad <= 2  # eval mode: the same


class _Counting(nn.Module):
    """Sets attributes in its forward: one that is there, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last: torch.Tensor = self.linear(x)
        return self.last


def _attributes(rank: int, world_size: int, mode: str) -> tuple[list[int], bool]:
    model = nn.Sequential(nn.Linear(4, 4), _Counting())
    run = in_mode(FSDP(model, auto_wrap_policy=ModuleWrapPolicy({_Counting})), mode)
    counts, is_real = [], True
    for _ in range(3):
        output = run(torch.ones(2, 4))
        output.sum().backward()
        counts.append(model[1].calls)
        is_real = is_real and torch.equal(model[1].last, output)
    return counts, is_real


@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_attributes_that_a_forward_sets(ranks: RankPool, mode: str) -> None:
    """Tracing runs a nested unit's forward on fake tensors: nothing of that is left."""
    assert ranks.run(_attributes, 2, mode) == [([1, 2, 3], True)] * 2


@dataclass
class _State:
    hidden: torch.Tensor


class _StateBlock(nn.Module):
    """Takes and returns what cannot be an argument of a graph's node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: _State) -> _State:
        return _State(torch.relu(self.linear(state.hidden)))


class _StateModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_StateBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = _State(x)
        for block in self.blocks:
            state = block(state)
        return state.hidden


def _dataclass_inputs(rank: int, world_size: int, kind: str) -> bool:
    torch.manual_seed(0)
    plain = _StateModel()
    model, policy = copy.deepcopy(plain), ModuleWrapPolicy({_StateBlock})
    if kind == "wrapper":
        model = FSDP(model, auto_wrap_policy=policy)
    else:
        fully_shard(model, policy=policy)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 4)  # the same on all ranks
    same = True
    for _ in range(2):
        expected = plain(x)
        output = compiled(x)
        expected.sum().backward()
        output.sum().backward()
        same &= torch.allclose(output, expected)
    with FSDP.summon_full_params(model, with_grads=True):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return same and all(torch.allclose(ours.grad, theirs.grad) for ours, theirs in pairs)


@pytest.mark.parametrize("kind", ["wrapper", "fully_shard"])
def test_a_unit_that_takes_a_dataclass(ranks: RankPool, kind: str) -> None:
    """It cannot be a node of the graph around: it is compiled by itself, between its hooks."""
    assert ranks.run(_dataclass_inputs, 2, kind) == [True, True]


class _Masked(nn.Module):
    """A layer with dropout that takes what came before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        return F.dropout(self.linear(x if memory is None else x + memory))


class _Encoder(nn.Module):
    """The second embedding does not depend on the first layer, and comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(8, 8), nn.Linear(8, 8)
        self.encoder, self.decoder = _Masked(), _Masked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(F.dropout(self.source(x)))
        return self.decoder(F.dropout(self.target(x)), memory).sum()


def _random_order(rank: int, world_size: int) -> tuple[float, float]:
    torch.manual_seed(1)
    plain = _Encoder()
    torch.manual_seed(0)
    expected = plain(torch.ones(2, 8)).item()
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({_Masked}))
    torch.manual_seed(0)
    return expected, in_mode(model, "hooks")(torch.ones(2, 8)).item()


def test_random_numbers_are_drawn_in_the_programs_order(ranks: RankPool) -> None:
    for expected, got in ranks.run(_random_order, 2):
        assert got == pytest.approx(expected, rel=1e-6)


class _Stage(nn.Module):
    """A layer whose width and number of positions are those of its place in the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class _Pyramid(nn.Module):
    """Stages of which each has half the positions and twice the width of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(_Stage(8 * 2 ** (i // 2)) for i in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i % 2:
                x = x.reshape(x.shape[0], x.shape[1] // 2, -1)
        return x.sum()


def _pyramid(rank: int, world_size: int) -> tuple[int, bool]:
    torch._dynamo.reset()
    sizes: list[Any] = []
    graphs = 0

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        sizes.extend(
            s for one in example_inputs if one is not None for s in getattr(one, "shape", [one])
        )
        return gm.forward

    model = FSDP(_Pyramid(), auto_wrap_policy=ModuleWrapPolicy({_Stage}))
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(torch.ones(2, 16, 8)).backward()
    return graphs, any(isinstance(size, torch.SymInt) for size in sizes)


def test_units_of_other_shapes_are_not_dynamic(ranks: RankPool) -> None:
    for graphs, is_dynamic in ranks.run(_pyramid, 2):
        assert not is_dynamic
        assert graphs <= 3 + 4  # a stage of each width, and what is between stages


class _Found:
    """What layers write down, and how much of it they pass on, as the model around them says."""

    scale = 1.0
    outputs: list[torch.Tensor] | None = None


class _Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * _Found.scale
        if _Found.outputs is not None:
            _Found.outputs.append(x)
        return x


class _Collecting(nn.Module):
    """Returns what its layers have written down, as ``output_hidden_states=True`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Writing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        _Found.scale, _Found.outputs = 2.0, []
        for layer in self.layers:
            x = layer(x)
        outputs = _Found.outputs
        _Found.scale, _Found.outputs = 1.0, None
        return x, outputs


def _collected(rank: int, world_size: int) -> list[tuple[list[float], list[float]]]:
    torch.manual_seed(0)
    plain = _Collecting()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({_Writing}))
    compiled = in_mode(model, "hooks")
    found = []
    for step in range(2):
        x = torch.full((2, 8), 1.0 + step)
        pair = []
        for each in (plain, compiled):
            output, outputs = each(x)
            output.sum().backward()
            pair.append([output.sum().item(), *(one.sum().item() for one in outputs)])
        found.append((pair[0], pair[1]))
    return found


def test_python_state_that_layers_share(ranks: RankPool) -> None:
    for steps in ranks.run(_collected, 2):
        for expected, got in steps:
            assert got == pytest.approx(expected, rel=1e-5)
            assert len(got) == 4


class _InPlace(nn.Module):
    """Changes what a unit has returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "whole":
            x.mul_(0.5)
        elif self.kind == "part":
            x[:, 0] += 1.0
        else:
            x[:, 0].mul_(2.0)
        return self.second(x).sum()


def _changed_in_place(rank: int, world_size: int, kind: str) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    plain = _InPlace(kind)
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    compiled = in_mode(model, "hooks")
    found = []
    for _ in range(2):
        losses = [each(torch.ones(2, 8)) for each in (plain, compiled)]
        for loss in losses:
            loss.backward()
        found.append((losses[0].item(), losses[1].item()))
    return found


@pytest.mark.parametrize("kind", ["whole", "part", "view"])
def test_outputs_of_units_changed_in_place(ranks: RankPool, kind: str) -> None:
    for steps in ranks.run(_changed_in_place, 2, kind):
        for expected, got in steps:
            assert got == pytest.approx(expected, rel=1e-6)


class _Tabled(nn.Module):
    """Adds a table that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = torch.linspace(0.0, 1.0, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table


def _plain_attributes(rank: int, world_size: int) -> tuple[float, float]:
    torch.manual_seed(0)
    plain = nn.Sequential(_Tabled(), _Tabled())
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({_Tabled}))
    found = []
    for each in (plain, in_mode(model, "hooks")):
        loss = each(torch.ones(2, 8)).sum()
        loss.backward()
        found.append(loss.item())
    return found[0], found[1]


def test_tensors_that_are_plain_attributes(ranks: RankPool) -> None:
    for expected, got in ranks.run(_plain_attributes, 2):
        assert got == pytest.approx(expected, rel=1e-6)


CAPTURED: dict[str, dict[str, Any]] = {
    "mode": {"mode": "reduce-overhead"},
    "another mode": {"mode": "max-autotune"},
    "option": {"options": {"triton.cudagraphs": True}},
    "backend": {"backend": "cudagraphs"},
}


def _captured(rank: int, world_size: int) -> dict[str, str]:
    """What a model says that is to be captured in CUDA graphs, on a device that has them."""
    said = {}
    for name, kwargs in CAPTURED.items():
        run = torch.compile(FSDP(nn.Linear(4, 4)), **kwargs)
        with (
            mock.patch.object(segments, "host_runs_ahead", return_value=True),
            pytest.raises(UnsupportedError) as error,
        ):
            run(torch.ones(2, 4))
        said[name] = str(error.value)
    return said


def test_cuda_graphs_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(_captured, 2):
        assert said.keys() == CAPTURED.keys()
        for message in said.values():
            assert "the root unit: expected a mode of torch.compile without CUDA graphs" in message


class Normed(nn.Module):
    """Batch norms of the root, whose statistics are fixed, before and behind units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.norm2 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.a, self.b = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(torch.relu(self.norm(self.first(x))))
        x = self.b(torch.relu(self.norm2(x)))
        h = torch.sigmoid(self.up(x))
        h = torch.tanh(self.down(h) * h[:, :8])
        return torch.exp(-h * h)


@on_ranks(2)
def test_inductor_writes_into_nothing_that_is_saved(rank: int) -> None:
    """Positions of what a segment may overwrite would be taken for those of another one's."""
    plain = Normed().eval()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})).eval()
    run = torch.compile(model)
    with fresh_cache():
        for step in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
            plain(x).square().sum().backward()
            run(x).square().sum().backward()
    average_gradients(plain)
    assert different(whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}) == []
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name


class _Flat(nn.Linear):
    """A unit whose output is a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten()


class _ChangesViews(nn.Module):
    """Changes its unit's output, and a view of it, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = _Flat(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.unit(x)
        y += 0.5
        view = y.unflatten(0, (-1, 4)).flatten()
        view += 0.5
        return view.square().sum()


@on_ranks(2)
def test_views_changed_in_place_between_units(rank: int) -> None:
    plain = _ChangesViews()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({_Flat}))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    plain(x).backward()
    torch.compile(model, backend="aot_eager")(x).backward()
    average_gradients(plain)
    assert different(whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}) == []


@on_ranks(2)
def test_graphs_are_explained(rank: int) -> None:
    """``explain`` reads from each graph why Dynamo ended it."""
    model = wrap(make_transformer(num_blocks=2))
    found = torch._dynamo.explain(model)(batch(rank, 0))  # type: ignore[no-untyped-call]
    assert found.graph_count == 3  # what is before, between and behind two blocks
    assert found.graph_break_count == 2
