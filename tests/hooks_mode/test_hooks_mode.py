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
    nothing_cached,
    train,
    wrap,
)
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


@on_ranks(2)
def test_all_matmuls_are_compiled(rank: int) -> None:
    torch.manual_seed(7)
    backend = CountingBackend()
    model = torch.compile(wrap(TiedHead(num_blocks=3)), backend=backend)
    train(model, rank, steps=2)
    with MatmulWatch(backend) as watch:
        model(batch(rank, 5))
    assert watch.outside == 0
    assert watch.inside == 3 * 5 + 2  # a block: four linear layers, one attention
    # Root: before, between (compiled once for all gaps), after the blocks; and the block.
    assert backend.graphs == 4


@on_ranks(2)
def test_graphs_grow_neither_with_depth_nor_with_steps(rank: int) -> None:
    for num_blocks in (2, 8):
        counters.clear()
        torch._dynamo.reset()
        expected, _ = train(wrap(make_transformer(num_blocks=num_blocks)), rank)
        model, backend = wrap(make_transformer(num_blocks=num_blocks)), CountingBackend()
        model.compile(backend=backend)  # in place
        losses, _ = train(model, rank, steps=2)
        assert backend.graphs == 3  # before the blocks, the block, after the blocks
        assert counters["stats"]["unique_graphs"] == 2  # the root's is counted before it is cut
        assert losses == pytest.approx(expected[:2], rel=1e-6)
        train(model, rank, steps=4)
        assert backend.graphs == 3
        with torch.no_grad():
            model(batch(rank, 0))
        without_gradients = counters["stats"]["unique_graphs"]
        assert without_gradients <= 2 + 2  # the root's and the block's
        for training in (False, True):
            model.train(training)
            loss_of(model, batch(rank, 0)).backward()
        assert counters["stats"]["unique_graphs"] <= without_gradients + 2


@pytest.mark.parametrize("kind", ["wrapper", "fully_shard", "wrapper, use_orig_params=False"])
@on_ranks(1)
def test_managed_modules_are_tagged(rank: int, kind: str) -> None:
    """What Dynamo looks for on managed modules, and on ignored ones."""
    model = make_transformer(num_blocks=2)
    ignored = [model.blocks[0].up, model.norm]
    managed = [module for module in model.modules() if module not in ignored]
    if kind == "fully_shard":
        fully_shard(model, policy=ModuleWrapPolicy({Block}), ignored_modules=ignored)
    else:
        wrap(model, ignored_modules=ignored, use_orig_params=kind == "wrapper")

    def tags(modules: list[nn.Module]) -> set[Any]:
        names = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
        return {tuple(vars(module).get(name) for name in names) for module in modules}

    assert len(managed) > 15
    assert tags(managed) == {(True, "False" not in kind)}
    assert tags(ignored) == {(None, None)}


class Breaking(Transformer):
    """A root whose forward Dynamo cannot capture whole."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(self.norm(x)) * self.scale


@on_ranks(2)
def test_a_root_that_breaks_keeps_its_hooks(rank: int) -> None:
    """A frame that Dynamo skips still trains right, its blocks compiled."""
    torch.manual_seed(7)
    plain, backend = Breaking(num_blocks=2), CountingBackend()
    model = torch.compile(wrap(copy.deepcopy(plain)), backend=backend)
    expected, _ = train(wrap(plain), rank, steps=3)
    assert train(model, rank, steps=3)[0] == pytest.approx(expected, rel=1e-6)
    assert backend.graphs >= 1


@on_ranks(2)
def test_many_models_in_one_process(rank: int) -> None:
    """More models than Dynamo keeps entries of one code object: all are compiled."""
    expected = loss_of(make_transformer(num_blocks=1), batch(rank, 0)).item()
    backend = CountingBackend()
    for _ in range(10):
        model = torch.compile(wrap(make_transformer(num_blocks=1)), backend=backend)
        with MatmulWatch(backend) as watch:
            loss = loss_of(model, batch(rank, 0))
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert watch.outside == 0 < watch.inside


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


@on_ranks(2)
def test_units_of_other_shapes_have_graphs_of_their_own(rank: int) -> None:
    """And none of them is dynamic."""
    sizes: list[Any] = []
    graphs = 0

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        sizes.extend(
            s for one in example_inputs if one is not None for s in getattr(one, "shape", [one])
        )
        return gm.forward

    torch.manual_seed(0)
    plain, x = _Pyramid(), torch.ones(2, 16, 8)
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({_Stage}))
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        loss = compiled(x)
        loss.backward()
        assert graphs == 3 + 4  # a stage of each width, and what is between stages
    torch.testing.assert_close(loss, plain(x))
    assert not any(isinstance(size, torch.SymInt) for size in sizes)


# -- models that a graph around units must not change ----------------------------------------------


@dataclass
class _State:
    hidden: torch.Tensor


class _StateBlock(nn.Module):
    """Takes and returns what cannot be an argument of a graph's node.

    It is compiled by itself, between its hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state: _State) -> _State:
        return _State(torch.relu(self.linear(state.hidden)))


class _StateModel(nn.Module):
    unit = _StateBlock

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_StateBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = _State(x)
        for block in self.blocks:
            state = block(state)
        return state.hidden


class _Masked(nn.Module):
    """A layer with dropout that takes what came before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        return F.dropout(self.linear(x if memory is None else x + memory))


class _Encoder(nn.Module):
    """The second embedding does not depend on the first layer, and draws after it."""

    unit = _Masked

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(8, 8), nn.Linear(8, 8)
        self.encoder, self.decoder = _Masked(), _Masked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(F.dropout(self.source(x)))
        return self.decoder(F.dropout(self.target(x)), memory).sum()


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

    unit = _Writing

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


class _InPlace(nn.Module):
    """Changes what units have returned: all of it, a part, and a view."""

    unit = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        x = first(x)
        x.mul_(0.5)
        x = second(x)
        x[:, 0] += 1.0
        x = third(x)
        x[:, 0].mul_(2.0)
        return last(x)


class _Tabled(nn.Module):
    """Adds a table that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = torch.linspace(0.0, 1.0, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table


class _Tables(nn.Sequential):
    unit = _Tabled

    def __init__(self) -> None:
        super().__init__(_Tabled(), _Tabled())


class _Flat(nn.Linear):
    """A unit whose output is a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten()


class _ChangesViews(nn.Module):
    """Changes its unit's output, and a view of it, in place."""

    unit = _Flat

    def __init__(self) -> None:
        super().__init__()
        self.flat = _Flat(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.flat(x)
        y += 0.5
        view = y.unflatten(0, (-1, 8)).flatten()
        view += 0.5
        return view


@pytest.mark.parametrize(
    ("kind", "door"),
    [
        (_StateModel, "fully_shard"),
        (_Encoder, "wrapper"),
        (_Collecting, "wrapper"),
        (_InPlace, "fully_shard"),
        (_Tables, "wrapper"),
        (_ChangesViews, "wrapper"),
    ],
)
@on_ranks(2)
def test_outputs_and_gradients_are_the_plain_models(rank: int, kind: Any, door: str) -> None:
    torch.manual_seed(1)
    plain = kind()
    model, policy = copy.deepcopy(plain), ModuleWrapPolicy({kind.unit})
    if door == "wrapper":
        model = FSDP(model, auto_wrap_policy=policy)
    else:
        fully_shard(model, policy=policy)
    compiled = in_mode(model, "hooks")
    for step in range(2):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        found = []
        for each in (plain, compiled):
            torch.manual_seed(step)  # of dropout
            found.append(each(x))
            sum(one.square().sum() for one in tree_leaves(found[-1])).backward()
        torch.testing.assert_close(found[1], found[0])
    average_gradients(plain)
    assert different(whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}) == []


CAPTURED: dict[str, dict[str, Any]] = {
    "mode": {"mode": "reduce-overhead"},
    "another mode": {"mode": "max-autotune"},
    "option": {"options": {"triton.cudagraphs": True}},
    "backend": {"backend": "cudagraphs"},
}


@pytest.mark.parametrize("kind", CAPTURED)
@on_ranks(1)
def test_cuda_graphs_are_refused(rank: int, kind: str) -> None:
    run = torch.compile(FSDP(nn.Linear(4, 4)), **CAPTURED[kind])
    expected = "the root unit: expected a mode of torch.compile without CUDA graphs"
    with (
        mock.patch.object(segments, "host_runs_ahead", return_value=True),
        pytest.raises(UnsupportedError, match=expected),
    ):
        run(torch.ones(2, 4))


class Normed(nn.Module):
    """A batch norm of the root, whose statistics are fixed, and operators behind a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.unit, self.last = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(self.unit(torch.relu(self.norm(self.first(x)))))
        return torch.exp(-h * torch.tanh(self.last(h)))


@on_ranks(2)
def test_inductor_writes_into_nothing_that_is_saved(rank: int) -> None:
    """Positions of what a segment may overwrite would be taken for those of another one's.

    Where something may be overwritten, torch refuses a second backward.
    """
    plain = Normed().eval()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})).eval()
    run = torch.compile(model)
    with nothing_cached():
        for step in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
            for each in (plain, run):
                loss = each(x).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
    average_gradients(plain)
    assert different(whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}) == []
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name


@on_ranks(2)
def test_graphs_are_explained(rank: int) -> None:
    """``explain`` reads from each graph why Dynamo ended it."""
    model = wrap(make_transformer(num_blocks=2))
    found = torch._dynamo.explain(model)(batch(rank, 0))  # type: ignore[no-untyped-call]
    assert found.graph_count == 3  # what is before, between and behind two blocks
    assert found.graph_break_count == 2
