"""The estimator: inventories against real models, memory and time by hand, bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import estimator_error
from benchmarks.peers import Setting
from benchmarks.workloads.catalogue import decoder
from fsdp_dynamo import CollectivePrecision, FSDPValueError, ShardingStrategy
from fsdp_dynamo.estimator import (
    Cluster,
    ElementSizes,
    Inventory,
    predict,
    recommend,
    take_inventory,
)
from fsdp_dynamo.estimator.__main__ import _parser, cluster_of, main
from fsdp_dynamo.estimator.inventory import UnitInventory, Work, build_of
from fsdp_dynamo.estimator.transfers import parse_bytes, parse_rate
from graph_passes.wire_format import WireFormat

# -- inventory ------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _Net(nn.Module):
    """A block that is called twice, a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


def _net() -> tuple[nn.Module, Mapping[str, Any]]:
    return _Net(), {"tokens": torch.zeros(4, 8, dtype=torch.int64)}


def _inventory(**kwargs: Any) -> Inventory:
    return take_inventory(_net, [], torch.float32, **kwargs)


def test_an_inventory_is_that_of_a_real_step() -> None:
    """Parameters and the order of units, operations, activations that are saved, and dtypes."""
    found, (model, kwargs) = _inventory(), _net()
    block = 16 * 64 + 64 + 64 * 16 + 16
    numels = {unit.fqn: unit.numel for unit in found.units.values()}
    assert numels == {"": 32 * 16, "blocks.0": block, "blocks.1": block}
    order = ["", "blocks.0", "blocks.1", "blocks.0", ""]
    assert [unit for unit, _ in found.segments] == order

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(**kwargs).sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert found.forward_flops == forward
    assert found.backward.flops == counter.get_total_flops() - forward
    saved = sum(unit.saved_bytes for unit in found.units.values())
    assert saved == sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert found.units["blocks.1"].input_bytes == 4 * 8 * 16 * 4
    assert found.units["blocks.0"].input_bytes == 2 * 4 * 8 * 16 * 4  # it is called twice

    low = sum(u.saved_bytes for u in take_inventory(_net, [], torch.bfloat16).units.values())
    tokens = 4 * 8 * 8
    assert (low - tokens) * 2 == saved - tokens
    fused, eager = (sum(w.traffic_bytes for _, w in _inventory(fused=f).segments) for f in (1, 0))
    assert fused < eager


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    def build() -> tuple[nn.Module, Mapping[str, Any]]:
        model, kwargs = _net()
        model.blocks.requires_grad_(False)
        return model, kwargs

    frozen, whole = take_inventory(build, [], torch.float32), _inventory()
    assert (frozen.numel, frozen.trained) == (whole.numel, 32 * 16)
    full = ShardingStrategy.FULL_SHARD
    few, all_ = (predict(i, _cluster(2), full, SIZES) for i in (frozen, whole))
    assert few.memory["optimizer"] == 32 * 16 * SIZES.optimizer_bytes // 2
    assert few.memory["shards"] == all_.memory["shards"]
    assert few.wire_bytes < all_.wire_bytes


def test_gradients_of_the_root_are_kept_to_the_end() -> None:
    found = predict(_blocks(4), _cluster(1), ShardingStrategy.NO_SHARD, SIZES)
    assert found.memory["gradients"] >= 4500 * SIZES.param_bytes


class _Reads(_Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * tokens.sum().item()


@pytest.mark.parametrize(
    ("classes", "make", "said"),
    [
        (["Nowhere"], _Net, "--wrap"),
        ([], nn.ReLU, "--wrap"),
        ([], _Reads, "without data"),
        ([], lambda: _Net().requires_grad_(False), "depends on the parameters"),
    ],
)
def test_models_that_are_refused(
    classes: list[str], make: Callable[[], nn.Module], said: str
) -> None:
    def build() -> tuple[nn.Module, Mapping[str, Any]]:
        return make(), {"tokens": torch.zeros(1, 2, dtype=torch.int64)}

    with pytest.raises(FSDPValueError, match=said):
        take_inventory(build, classes, torch.float32)


# -- predictions by hand --------------------------------------------------------------------------


def _work(flops: int) -> Work:
    return Work([(flops, 0)])


def _blocks(num: int, numel: int = 1000, flops: int = 100) -> Inventory:
    units = {"": UnitInventory("", 500, 40)}
    units |= {f"b{i}": UnitInventory(f"b{i}", numel, 400, 50) for i in range(num)}
    segments = [(name, _work(flops if name else 0)) for name in units]
    return Inventory(units, segments, _work(2 * num * flops))


def _cluster(world: int, per_node: int = 1, rate: float = 100.0) -> Cluster:
    return Cluster(world, per_node, 1.0, math.inf, rate, 10 * rate, 0.0, 10**6)


SIZES = ElementSizes(param_bytes=2, reduce_bytes=2, master_bytes=4, optimizer_bytes=8)


def test_one_rank_only_computes() -> None:
    found = predict(_blocks(3), _cluster(1), ShardingStrategy.FULL_SHARD, SIZES)
    assert (found.step_ms, found.exposed_ms, found.wire_bytes) == (900.0, 0.0, 0)
    assert found.memory["shards"] == 3500 * 4


def test_bytes_of_a_step() -> None:
    """Halves are sent on two ranks: gathers of all, again of the blocks, gradients of all."""
    sent = {
        strategy: predict(_blocks(3), _cluster(2), strategy, SIZES).wire_bytes
        for strategy in (
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        )
    }
    assert list(sent.values()) == [3500 + 3000 + 3500, 3500 + 3500, 2 * 3500]


def test_formats_pay_on_a_slow_link_only() -> None:
    """int8 halves what bf16 sends; encoding and decoding take memory traffic, also where the link
    is fast."""
    fewer = replace(SIZES, precision=CollectivePrecision("int8", "int8", block_numel=64))
    for rate, pays in ((1.0, True), (1e4, False)):
        cluster = replace(_cluster(2, rate=rate), memory_bytes_per_ms=1e3)
        plain, encoded = (
            predict(_blocks(3, numel=6400), cluster, ShardingStrategy.FULL_SHARD, sizes)
            for sizes in (SIZES, fewer)
        )
        assert 0.5 < encoded.wire_bytes / plain.wire_bytes < 0.56
        assert encoded.compute_ms > plain.compute_ms
        assert (encoded.step_ms < 0.7 * plain.step_ms) is pays
        assert (encoded.step_ms > plain.step_ms) is not pays


@pytest.mark.parametrize(("rate", "least", "most"), [(1.0, 10, 11), (100.0, 1, 9), (1e4, 0, 0)])
def test_formats_only_where_exposed(rate: float, least: int, most: int) -> None:
    """All of 4 + 3 + 4 collectives on a slow link, some on a faster one, none on a fast one."""
    cluster = replace(_cluster(2, rate=rate), memory_bytes_per_ms=1e3)
    precision = CollectivePrecision("int8", "int8", only_where_exposed=True)
    plain, chosen = (
        predict(_blocks(3, numel=6400), cluster, ShardingStrategy.FULL_SHARD, sizes)
        for sizes in (SIZES, replace(SIZES, precision=precision))
    )
    assert chosen.step_ms <= plain.step_ms
    assert plain.num_formatted == 0
    assert chosen.num_collectives == plain.num_collectives == 4 + 3 + 4
    assert least <= chosen.num_formatted <= most
    if not most:
        assert chosen == plain


def test_formats_of_replicas() -> None:
    """Of two replicas, each sends half a shard's message to the other, twice."""
    cluster = replace(_cluster(4, rate=1.0), per_node=2, memory_bytes_per_ms=1e6)
    fewer = replace(SIZES, precision=CollectivePrecision(all_reduce="int8"))
    plain, encoded = (
        predict(_blocks(3, numel=6400), cluster, ShardingStrategy.HYBRID_SHARD, sizes)
        for sizes in (SIZES, fewer)
    )
    shards = [numel // 2 for numel in (500, 6400, 6400, 6400)]
    saved = sum(SIZES.reduce_bytes * n - WireFormat("int8").num_bytes(n) for n in shards)
    assert plain.wire_bytes - encoded.wire_bytes == pytest.approx(saved, abs=4)
    assert encoded.step_ms < plain.step_ms
    assert encoded.compute_ms > plain.compute_ms


@pytest.mark.slow
def test_formats_of_a_large_model_never_cost_time() -> None:
    """The table of docs/fewer-bytes.md."""
    inventory = take_inventory(build_of("llama3-8b", 1, 4096), [], torch.bfloat16)
    precision = CollectivePrecision("int8", "int8", only_where_exposed=True)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        for link in ("25Gb/s", "400Gb/s"):
            for size in ("8", "64", "512"):
                options = ["--model", "llama3-8b", "--world-size", size, "--link", link]
                cluster = cluster_of(_parser().parse_args(options))
                plain, chosen = (
                    predict(inventory, cluster, strategy, sizes)
                    for sizes in (ElementSizes(), ElementSizes(precision=precision))
                )
                pays = link == "25Gb/s" and size != "8"
                assert chosen.step_ms <= plain.step_ms
                assert (chosen.step_ms < 0.6 * plain.step_ms) is pays
                assert (chosen.num_formatted > 0.9 * chosen.num_collectives) is pays
                assert pays or chosen.num_formatted <= 2


def test_hidden_but_for_the_ends() -> None:
    """A block computes for 100 ms and takes 10 to gather, the root 5. Nothing hides the root's and
    the first block's gather, the last block's in the backward, and the last two reductions."""
    found = predict(_blocks(4), _cluster(2), ShardingStrategy.FULL_SHARD, SIZES)
    assert found.compute_ms == pytest.approx(4 * 100 + 8 * 100)
    assert found.exposed_ms == pytest.approx((5 + 10) + 10 + (10 + 5))
    assert found.bound_ms < found.step_ms
    slow = predict(_blocks(4), _cluster(2, rate=1.0), ShardingStrategy.FULL_SHARD, SIZES)
    assert slow.exposed_ms > 0.8 * slow.step_ms  # everything waits for the link


def test_hybrid_sends_less_between_nodes() -> None:
    """Two nodes of two: gathers stay inside a node, where the link is ten times as fast."""
    full, hybrid = (
        predict(_blocks(2, flops=1), _cluster(4, 2), strategy, SIZES)
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
    )
    assert hybrid.step_ms < full.step_ms
    assert hybrid.memory["shards"] == 2 * full.memory["shards"]


def test_checkpointing_trades_time_for_memory() -> None:
    plain, again = (
        predict(_blocks(4, numel=1), _cluster(2), ShardingStrategy.FULL_SHARD, SIZES, checkpoint)
        for checkpoint in (False, True)
    )
    assert again.compute_ms - plain.compute_ms == pytest.approx(400)
    assert plain.memory["activations"] == 40 + 4 * 400
    assert again.memory["activations"] == 40 + 4 * 50 + 400


def test_the_fastest_that_fits_is_recommended() -> None:
    inventory, cluster = _blocks(4), _cluster(2)
    found = [predict(inventory, cluster, one, SIZES) for one in ShardingStrategy]
    best = recommend(found, 10**9)
    assert best is not None
    assert best.step_ms == min(one.step_ms for one in found)
    least = min(one.total_bytes for one in found)
    fits = recommend(found, least)
    assert fits is not None
    assert fits.total_bytes == least
    assert recommend(found, least - 1) is None


# -- against a step that was run ------------------------------------------------------------------


@on_ranks(2)
def test_bytes_are_those_of_a_real_step(rank: int) -> None:
    setting = Setting(decoder("small", 2, 16, num_blocks=2), torch.device("cpu"))
    full = ShardingStrategy.FULL_SHARD
    row = estimator_error.row_of(full, setting, 1, "ours_graph_aot_eager")
    if rank != 0:
        return
    expected, got = row["predicted"], row["measured"]
    for name in ("sent", "shards", "optimizer"):
        assert expected[name] == pytest.approx(got[name], rel=0.01)
    assert 0.5 < expected["peak"] / got["peak"] < 2
    assert "FULL_SHARD" in estimator_error.report({"FULL_SHARD": row})


# -- the command ----------------------------------------------------------------------------------


def test_sizes_and_rates() -> None:
    sizes = {"80GB": 80e9, "24GiB": 24 * 2**30, "1.5 TB": 1.5e12, "7B": 7}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    rates = {"400Gb/s": 50e9, "50GB/s": 50e9, "1 gb/s": 1.25e8, "8MiB/s": 2**23}
    assert {text: parse_rate(text) for text in rates} == rates
    for text in ("80", "GB", "80Gb", "-1GB", "0GB", "1.2.3GB"):
        with pytest.raises(FSDPValueError, match="80GB"):
            parse_bytes(text)
    for text in ("400Gb", "fast", "400Gb/h", "/s"):
        with pytest.raises(FSDPValueError, match="400Gb/s"):
            parse_rate(text)


MODULE = """
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

def stack():
    return Stack(), {"x": torch.zeros(8, 256)}
"""


def test_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_to_estimate.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    arguments = ["--module", "mine_to_estimate:stack", "--world-size", "16", "--json", "plan.json"]
    assert main([*arguments, "--dtype", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "263.2 k parameters in 5 units: the root of 0, 4 of 65.8 k\n" in said
    assert "recommended, as the fastest that fits: " in said
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["parameters"] == 4 * (256 * 256 + 256)
    names = {row["strategy"] for row in data["predictions"]}
    one_level = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"}
    assert names == one_level | {"HYBRID_SHARD", "HIERARCHICAL_SHARD"}
    assert main([*arguments, "--memory", "1kB"]) == 0
    assert "nothing fits" in capsys.readouterr().out


def test_a_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "gpt2", "--world-size", "512", "--memory", "80GB"]
    assert main([*arguments, "--link", "400Gb/s"]) == 0
    said = capsys.readouterr().out
    assert "126.8 M parameters in 13 units" in said
    assert "recommended, as the fastest that fits: FULL_SHARD" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama9"], "llama3-8b"),
        (["--module", "json:nothing"], "--module PKG:FN"),
        (["--module", "no_such_module:main"], "--module PKG:FN"),
        (["--module", ":main"], "--module PKG:FN"),
        (["--model", "gpt2", "--memory", "80"], "80GB"),
        (["--model", "gpt2", "--per-node", "3"], "multiple of --per-node"),
        (["--model", "gpt2", "--efficiency", "2"], "--efficiency"),
        (["--model", "gpt2", "--only-where-exposed"], "all_gather, reduce_scatter, all_reduce"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--world-size", "8"]) == 2
    assert said in capsys.readouterr().err
