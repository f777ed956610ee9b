"""The benchmark harness: peers agree, books balance, the link holds, bad input is refused."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn

from benchmarks import checks, cluster_check, final_loss, pictures, saving
from benchmarks.measure.bound import flat_cluster, lower_bound, wire_bytes
from benchmarks.measure.comparison_report import (
    Row,
    compare_losses,
    comparison_table,
    memory_table,
    rows,
)
from benchmarks.measure.rounds import Comparison
from benchmarks.measure.step_profile import Collective, StepProfiler
from benchmarks.peers import Peer, Setting, Trainee, named, simple_fsdp
from benchmarks.workloads import catalogue
from fsdp_dynamo import checkpoint
from fsdp_dynamo.comm import collectives

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@on_ranks(2)
def test_peers_agree_and_are_counted_alike(rank: int) -> None:
    """SimpleFSDP is the small one also where torchtitan is installed."""
    sharded = ["fsdp1", "fsdp2", "ours", "ours_graph_aot_eager"]
    keys = ["plain", "ddp", *sharded, "simple_fsdp_aot_eager"]
    task = catalogue.decoder("small", 2, 16)
    num_blocks = catalogue.DECODER_SIZES["small"].num_blocks
    with mock.patch.object(simple_fsdp, "torchtitan", return_value=None):
        comparison = Comparison(named(keys), Setting(task, CPU), rank)
        comparison.start()
        comparison.run(1)
        comparison.profile()
    made = {row["key"]: row for row in rows(comparison)}
    assert [row["reason"] for row in made.values()] == [None] * len(keys)
    for key in keys[1:]:
        assert made[key]["loss_agrees"], made[key]["losses"]
    for key in sharded:
        kinds = made[key]["collectives"]
        assert kinds.pop("all_gather") == 2 * num_blocks + 1  # the root stays unsharded
        assert list(kinds.values()) == [num_blocks + 1], key
    sizes = [p.numel() for p in task.seeded_model().parameters()]
    per_matrix = {"all_gather": len(sizes), "reduce_scatter": len(sizes)}
    assert made["simple_fsdp_aot_eager"]["collectives"] == per_matrix
    assert made["ddp"]["collective_bytes"] == {"all_reduce": 4 * sum(sizes)}
    # Two ranks: a whole gather costs half its bytes; ours sends less than gloo's reduce-scatter.
    assert made["ours"]["counted_bytes"] < 0.8 * made["fsdp2"]["counted_bytes"]
    assert made["ddp"]["peak_bytes"]["shards"] == 4 * sum(sizes)
    for key in ("fsdp2", "ours"):
        assert made[key]["peak_bytes"]["shards"] == pytest.approx(2 * sum(sizes), rel=0.01)
        assert made[key]["peak_bytes"]["optimizer"] == pytest.approx(4 * sum(sizes), rel=0.01)
        assert 0 < made[key]["most_bytes"]["unsharded"] < 4 * sum(sizes)
    shown = comparison_table(list(made.values()))
    assert all(row["title"] in shown for row in made.values())
    assert "DIFFERS" not in shown
    assert "FSDP1" in memory_table(list(made.values()))


@on_ranks(2)
def test_a_peer_that_fails_on_one_rank_says_why_everywhere(rank: int) -> None:
    """All leave it out, and the others go on."""

    def build(setting: Setting) -> Trainee:
        if rank == 1:
            raise RuntimeError("no memory left")
        return Trainee(nn.Linear(2, 2), setting.workload)

    peers = [Peer("broken", "Broken", build), *named(["ours"])]
    comparison = Comparison(peers, Setting(catalogue.toy(4, small=True), CPU), rank)
    comparison.start()
    comparison.run(1)
    broken, ours = rows(comparison)
    assert broken["reason"] == "rank 1: RuntimeError: no memory left"
    assert ours["reason"] is None
    assert "Broken: did not run: rank 1" in comparison_table([broken, ours])


def test_a_wrong_loss_is_shown() -> None:
    right: Row = {"losses": [1.0, 0.5], "communicates": True, "key": "ddp"}
    wrong: Row = {"losses": [1.0, 0.6], "communicates": True, "key": "fast"}
    compare_losses({"ddp": right, "fast": wrong}, low_precision=False)
    assert right["loss_agrees"]
    assert not wrong["loss_agrees"]
    others = {"one": dict(right, key="one"), "two": dict(wrong, key="two")}
    compare_losses(others, low_precision=False)
    assert [row["loss_agrees"] for row in others.values()] == [True, False]
    assert wrong["loss_distance"] == pytest.approx(0.2)


def test_peak_bytes_of_a_known_step() -> None:
    """A matrix, its input, its output: everything has a known size."""
    model = nn.Linear(256, 1024, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(1, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    profiler = StepProfiler(model, optimizer)
    with profiler.recording() as profile:
        model(torch.zeros(4, 256)).sum().backward()
        profiler.note_gradients()
    matrix = 4 * 256 * 1024
    assert profile.peak_bytes["shards"] == matrix
    assert profile.peak_bytes["optimizer"] == matrix
    assert profile.peak_bytes["gradients"] == matrix
    assert profile.peak_bytes["unsharded"] == 0
    assert 0 < profile.most_bytes["activations"] < matrix / 4
    assert profile.collectives == []


@on_ranks(3)
def test_sends_and_receives_are_counted_as_collectives(rank: int) -> None:
    """Of two gathers, a reduction, and a user's own message, which is not counted."""
    group = dist.group.WORLD
    assert group is not None
    model = nn.Linear(1, 1)
    profiler = StepProfiler(model, torch.optim.SGD(model.parameters()))
    shard = torch.ones(1 << 10)
    message = torch.zeros(1)
    with profiler.recording() as profile:
        for _ in range(2):
            unsharded = torch.empty(3 << 10)
            collectives.issue_all_gather(unsharded, shard, group).wait()
        sent = dist.isend(torch.ones(1), (rank + 1) % 3)
        dist.recv(message, (rank - 1) % 3)
        assert sent is not None
        sent.wait()
        collectives.issue_reduce_mean(torch.empty(1 << 10), unsharded, group).wait()
    whole = 3 * 4096
    assert profile.counts() == {"all_gather": 2, "all_to_all": 1}
    assert profile.num_bytes() == {"all_gather": 2 * whole, "all_to_all": whole}
    assert profile.most_bytes["unsharded"] == 2 * whole  # the second one replaces the first
    assert profile.most_bytes["gradients"] == whole - 4096  # what others send


@on_ranks(2)
def test_saving_and_checks_are_measured(rank: int, tmp_path: Path) -> None:
    """One round each, of a small decoder."""
    setting = Setting(catalogue.decoder("small", 1, 8, num_blocks=2), CPU)
    saved = saving.measure(setting, 1, tmp_path)
    columns = ["blocking", "call", "during", "step_ms", "steps"]
    assert [sorted(rounds[0]) for rounds in saved.values()] == [columns] * 2
    assert "dcp.async_save" in saving.report(saved)
    ((step, _),) = checkpoint.complete(tmp_path / "ours")  # the last one is kept
    assert step >= saving.WARMUP + 2 * saving.BEFORE
    with mock.patch.multiple(checks, LOOPS=20, PAIRS=2):
        found = checks.measure(setting, 1)
    assert [rounds[0]["collectives"] for rounds in found.values()] == [8, 8]
    assert "graph mode" in checks.report(found)
    row = cluster_check.measured("ours", setting, steps=1, tokens=8)
    assert 5.0 < row["loss"] < 6.0
    assert f"| {row['tokens_per_s']:,} |" in cluster_check.report([row], "small")


@on_ranks(2)
def test_formats_train_as_fp32_does(rank: int) -> None:
    """On the same windows, from 5.5 before the first step."""
    exact, int8 = (
        final_loss.final_loss(final_loss.FORMATS[name], seed=0, steps=15)
        for name in ("none", "int8")
    )
    assert exact < 4.8
    assert int8 == pytest.approx(exact, rel=0.05)
    assert int8 != exact


def test_bound_by_hand() -> None:
    """1000 bytes a second: 100 bytes gathered over two ranks take 50 ms."""
    cluster = flat_cluster(2, 1000.0, gloo=False)
    gather, reduce = Collective("all_gather", 100), Collective("reduce_scatter", 200)
    collectives = [gather, gather, reduce]
    assert wire_bytes(collectives, cluster) == 50 + 50 + 100
    hidden = lower_bound(collectives, compute_ms=500.0, cluster=cluster)
    assert hidden.first_ms == pytest.approx(50)
    assert hidden.last_ms == pytest.approx(100)
    assert hidden.total_ms == pytest.approx(650)
    assert lower_bound(collectives, 10.0, cluster).total_ms == pytest.approx(200)
    gloo = flat_cluster(2, 1000.0, gloo=True)
    assert wire_bytes([reduce], gloo) == 200
    assert wire_bytes([Collective("all_to_all", 200)], gloo) == 100


def test_workloads_are_the_same_for_everybody() -> None:
    task = catalogue.decoder("small")
    first, second = task.seeded_model(), task.seeded_model()
    for own, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(own, other)
    assert torch.equal(task.batch_of(1, 2, CPU)["tokens"], task.batch_of(1, 2, CPU)["tokens"])
    assert not torch.equal(task.batch_of(0, 2, CPU)["tokens"], task.batch_of(1, 2, CPU)["tokens"])


@pytest.mark.parametrize("name", ["hf_Bert", "hf_T5", "hf_GPT2", "hf_Llama"])
def test_models_of_transformers_are_built_and_have_blocks(name: str) -> None:
    task = catalogue.hugging_face(name, 1, 8, small=True)
    model = task.seeded_model()
    assert any(isinstance(module, task.block_classes) for module in model.modules())
    task.loss(model, task.batch_of(0, 0, CPU)).backward()


def test_pictures(tmp_path: Path) -> None:
    """Of the records in benchmarks/results, one of each kind."""
    for name in ("eager", "compile_time", "final_loss", "scaling"):
        shutil.copy(ROOT / "benchmarks" / "results" / f"{name}.json", tmp_path)
    drawn = {path.name for path in pictures.draw_all(tmp_path)}
    names = ("eager", "eager_memory", "compile_time", "final_loss", "scaling")
    assert drawn == {f"{name}.png" for name in names}
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)


def _main(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    """Run a script's command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / script), *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert isinstance(left.value.code, int)
    return left.value.code


SCRIPT = "dynamo/distributed.py"
TOY = ("--toy_model", "--device", "cpu")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (SCRIPT, ("--torchbench_model", "hf_Nobody", "--fsdp"), "hf_Bert"),
        (SCRIPT, (*TOY, "--fsdp", "--dynamo", "aot_eage"), "aot_eager"),
        (SCRIPT, (*TOY, "--fsdp", "--ddp"), "not allowed with"),
        (SCRIPT, (*TOY, "--gpu_memory_stats"), "--device cuda"),
        (SCRIPT, (*TOY, "--deepspeed", "--dynamo", "eager"), "no --dynamo"),
        (SCRIPT, (*TOY, "--sequence_length", "64"), "no sequences"),
        (SCRIPT, (*TOY, "--fsdp", "--dynamo_no_optimize_ddp"), "--ddp"),
        (SCRIPT, ("--decoder", "29m", "--model_size", "small"), "--decoder small"),
        (SCRIPT, (*TOY, "--json", "/dev/null/r.json"), "can be written"),
        ("compare.py", ("--peers", "fsdp3"), "fsdp2"),
        ("compare.py", ("--decoder", "huge"), "29m"),
        ("compare.py", ("--link", "fast"), "gbit"),
        ("compare.py", ("--link", "1gbit", "--world_size", "4"), "2 ranks"),
        pytest.param("gpu.py", (), "expected a CUDA device, got none", marks=NO_GPU),
        ("scaling.py", ("--sizes", "64", "--global_batch", "32"), "--weak"),
        ("compile_time.py", ("--peers", "nobody"), "expected some of"),
        ("final_loss.py", ("--formats", "none,int3"), "got 'int3'"),
        ("pictures.py", ("nowhere",), "folder"),
        ("link.py", ("--", "no-such-command"), "no-such-command"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    script: str,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None if name.startswith("no-") else name)
    assert _main(monkeypatch, script, *arguments) == 2
    printed = capfd.readouterr().err.strip().splitlines()
    assert words in printed[-1]
    assert printed[-1].count("error: ") == 1
    assert "Traceback" not in "".join(printed)


def test_a_missing_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _main(monkeypatch, SCRIPT, *TOY, "--deepspeed") == 2
    assert "package 'deepspeed' is not installed" in capfd.readouterr().err
    assert _main(monkeypatch, SCRIPT, "--torchbench_model", "hf_T5") == 2
    assert "'transformers'" in capfd.readouterr().err
    assert _main(monkeypatch, SCRIPT, *TOY, "--torchviz") == 2
    assert "'torchviz'" in capfd.readouterr().err
