"""The benchmark harness: peers agree, books balance, the link holds, bad input is refused."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import nn

from benchmarks import checks, pictures, saving
from benchmarks.measure.bound import flat_cluster, lower_bound, wire_bytes
from benchmarks.measure.comparison_report import Row, comparison_table, memory_table, rows
from benchmarks.measure.report import table
from benchmarks.measure.rounds import Comparison
from benchmarks.measure.step_profile import Collective, StepProfiler
from benchmarks.peers import Setting, Trainee, named, simple_fsdp
from benchmarks.workloads import catalogue
from fsdp_dynamo import checkpoint
from fsdp_dynamo.comm import collectives

ROOT = Path(__file__).parents[2]
DISTRIBUTED = ROOT / "benchmarks" / "dynamo" / "distributed.py"
CPU = torch.device("cpu")


def _compare(keys: list[str], rank: int, rounds: int = 1) -> list[Row]:
    comparison = Comparison(named(keys), Setting(catalogue.decoder("small", 2, 16), CPU), rank)
    comparison.start()
    comparison.run(rounds)
    comparison.profile()
    return rows(comparison)


def compare_job(rank: int, world_size: int, keys: list[str]) -> list[Row]:
    return _compare(keys, rank)


def compare_small_simple_fsdp(rank: int, world_size: int) -> list[Row]:
    """With the small SimpleFSDP also where torchtitan is installed."""
    found, simple_fsdp.torchtitan = simple_fsdp.torchtitan, lambda: None
    try:
        return _compare(["ddp", "simple_fsdp_aot_eager"], rank)
    finally:
        simple_fsdp.torchtitan = found


def failing_peer_job(rank: int, world_size: int) -> list[Row]:
    """One rank alone cannot build a peer: all leave it out, and the others go on."""
    from benchmarks.peers import Peer

    def build(setting: Setting) -> Trainee:
        if rank == 1:
            raise RuntimeError("no memory left")
        return Trainee(nn.Linear(2, 2), setting.workload)

    comparison = Comparison(
        [Peer("broken", "Broken", build), *named(["ours"])],
        Setting(catalogue.toy(4, small=True), CPU),
        rank,
    )
    comparison.start()
    comparison.run(1)
    return rows(comparison)


def test_peers_agree_and_are_counted_alike(ranks: RankPool) -> None:
    keys = ["plain", "ddp", "fsdp1", "fsdp2", "ours", "ours_hooks_aot_eager"]
    keys += ["ours_graph_aot_eager", "fsdp2_aot_eager"]
    made = {row["key"]: row for row in ranks.run(compare_job, 2, keys)[0]}
    assert [row["reason"] for row in made.values()] == [None] * len(keys)
    for key in keys[1:]:
        assert made[key]["loss_agrees"], made[key]["losses"]
    num_blocks = catalogue.DECODER_SIZES["small"].num_blocks
    gathers = 2 * num_blocks + 1  # the root stays unsharded between forward and backward
    for key in keys[2:]:
        kinds = made[key]["collectives"]
        assert kinds.pop("all_gather") == gathers
        assert list(kinds.values()) == [num_blocks + 1], key
    parameters = sum(p.numel() for p in catalogue.decoder("small").seeded_model().parameters())
    assert made["ddp"]["collective_bytes"] == {"all_reduce": 4 * parameters}
    # Two ranks: a whole gather costs half its bytes; ours sends less than gloo's reduce-scatter.
    assert made["ours"]["counted_bytes"] < 0.8 * made["fsdp2"]["counted_bytes"]
    assert made["ddp"]["peak_bytes"]["shards"] == 4 * parameters
    for key in ("fsdp2", "ours"):
        assert made[key]["peak_bytes"]["shards"] == pytest.approx(2 * parameters, rel=0.01)
        assert made[key]["peak_bytes"]["optimizer"] == pytest.approx(4 * parameters, rel=0.01)
        assert 0 < made[key]["most_bytes"]["unsharded"] < 4 * parameters
    shown = comparison_table(list(made.values()))
    assert all(row["title"] in shown for row in made.values())
    assert "DIFFERS" not in shown
    assert "FSDP1" in memory_table(list(made.values()))


def test_the_small_simple_fsdp_trains_as_ddp_does(ranks: RankPool) -> None:
    ddp, simple = ranks.run(compare_small_simple_fsdp, 2)[0]
    assert simple["reason"] is None
    assert simple["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    matrices = sum(1 for _ in catalogue.decoder("small").seeded_model().parameters())
    assert simple["collectives"] == {"all_gather": matrices, "reduce_scatter": matrices}


def test_a_peer_that_fails_on_one_rank_says_why_everywhere(ranks: RankPool) -> None:
    for broken, ours in ranks.run(failing_peer_job, 2):
        assert broken["reason"] == "rank 1: RuntimeError: no memory left"
        assert ours["reason"] is None
        assert "Broken: did not run: rank 1" in comparison_table([broken, ours])


def test_a_wrong_loss_is_shown() -> None:
    right: Row = {"losses": [1.0, 0.5], "communicates": True, "key": "ddp"}
    wrong: Row = {"losses": [1.0, 0.6], "communicates": True, "key": "fast"}
    from benchmarks.measure import comparison_report

    comparison_report.compare_losses({"ddp": right, "fast": wrong}, low_precision=False)
    assert right["loss_agrees"]
    assert not wrong["loss_agrees"]
    others = {"one": dict(right, key="one"), "two": dict(wrong, key="two")}
    comparison_report.compare_losses(others, low_precision=False)
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


def profile_collectives(rank: int, world_size: int) -> dict[str, Any]:
    """Two gathers, a reduction and a user's own message; what of it the profile shows."""
    group = dist.group.WORLD
    assert group is not None
    model = nn.Linear(1, 1)
    profiler = StepProfiler(model, torch.optim.SGD(model.parameters()))
    shard = torch.ones(1 << 10)
    message = torch.zeros(1)
    with profiler.recording() as profile:
        for _ in range(2):
            unsharded = torch.empty(world_size << 10)
            collectives.issue_all_gather(unsharded, shard, group).wait()
        message_out = dist.isend(torch.ones(1), (rank + 1) % world_size)
        dist.recv(message, (rank - 1) % world_size)
        assert message_out is not None
        message_out.wait()
        collectives.issue_reduce_mean(torch.empty(1 << 10), unsharded, group).wait()
    return {
        "counts": profile.counts(),
        "bytes": profile.num_bytes(),
        "unsharded": profile.most_bytes["unsharded"],
        "gradients": profile.most_bytes["gradients"],
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_sends_and_receives_are_counted_as_collectives(ranks: RankPool, world_size: int) -> None:
    whole = world_size * 4096
    for seen in ranks.run(profile_collectives, world_size):
        assert seen["counts"] == {"all_gather": 2, "all_to_all": 1}
        assert seen["bytes"] == {"all_gather": 2 * whole, "all_to_all": whole}
        assert seen["unsharded"] == 2 * whole  # the first is alive until the second one replaces it
        assert seen["gradients"] == whole - 4096  # what others send


def _saving(rank: int, world_size: int, folder: str) -> tuple[list[list[str]], str, list[int]]:
    """One round of both modes of saving, of a small decoder."""
    found = saving.measure(Setting(catalogue.decoder("small", 2, 16), CPU), 1, Path(folder))
    steps = [step for step, _ in checkpoint.complete(Path(folder) / "ours")]
    return [sorted(rounds[0]) for rounds in found.values()], saving.report(found), steps


def test_saving_is_measured(ranks: RankPool, tmp_path: Path) -> None:
    for names, shown, steps in ranks.run(_saving, 2, str(tmp_path)):
        assert names == [["blocking", "call", "during", "step_ms", "steps"]] * 2
        assert "checkpoint.async_save" in shown
        assert "dcp.async_save" in shown
        assert len(steps) == 1  # the last one is kept
        assert steps[0] >= saving.WARMUP + 2 * saving.BEFORE


def _checks(rank: int, world_size: int) -> tuple[list[dict[str, float]], str]:
    """One round with and without the checks, of a small decoder."""
    found = checks.measure(Setting(catalogue.decoder("small", 1, 8), CPU), 1)
    return [rounds[0] for rounds in found.values()], checks.report(found)


def test_checks_for_divergence_are_measured(ranks: RankPool) -> None:
    for found, shown in ranks.run(_checks, 2):
        assert [row["collectives"] for row in found] == [14, 14]
        assert all(0 < row["direct"] < 0.05 for row in found)  # of a step of a few milliseconds
        assert "graph mode" in shown


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


@pytest.mark.parametrize("name", catalogue.HUGGING_FACE)
def test_models_of_transformers_are_built_and_have_blocks(name: str) -> None:
    task = catalogue.hugging_face(name, 1, 8, small=True)
    model = task.seeded_model()
    assert any(isinstance(module, task.block_classes) for module in model.modules())
    task.loss(model, task.batch_of(0, 0, CPU)).backward()
    with torch.device("meta"):  # the real size, without the memory
        real = catalogue.hugging_face(name).build()
    assert sum(p.numel() for p in real.parameters()) > 5e7


def test_table_aligns() -> None:
    first = f"a (torch {torch.__version__})"
    dashes, spaces = "-" * len(first), " " * (len(first) - len("long"))
    expected = [f"{first}  bc", f"{dashes}  --", f"long{spaces}   1"]
    assert table(("a", "bc"), [("long", "1")]).splitlines() == expected


def test_pictures(tmp_path: Path) -> None:
    times = {"median": 2.0, "min": 1.0, "max": 3.0}
    row = {
        "key": "ours",
        "title": "ours",
        "ours": True,
        "communicates": True,
        "reason": None,
        "forward_backward_ms": times,
        "bound_ms": {"total_ms": 1.0},
        "peak_bytes": dict.fromkeys("abcde", 5),
    }
    point = {"reason": None, "step_ms": times, "bound_ms": 1.0}
    scaling_row = row | {"points": [point | {"world_size": n} for n in (2, 4)]}
    depth = {"4": {"first_step_s": 1.0}, "8": {"reason": "took too long"}}
    titles = {"ours": "ours"}
    records: dict[str, dict[str, Any]] = {
        "comparison": {"rows": [row, row | {"reason": "x"}], "workload": "w", "world_size": 2},
        "compile_time": {"rows": {"ours": depth}, "titles": titles, "depths": [4, 8]},
        "scaling": {"rows": [scaling_row], "sizes": [2, 4], "cluster": "c", "workload": "w"},
        "final_loss": {"losses": {"none": [1.0, 1.1], "int8": [1.2]}, "steps": 10},
    }
    for kind, data in records.items():
        (tmp_path / f"{kind}.json").write_text(json.dumps({"kind": kind, **data}))
    drawn = {path.name for path in pictures.draw_all(tmp_path)}
    names = ("comparison", "comparison_memory", "compile_time", "final_loss", "scaling")
    assert drawn == {f"{name}.png" for name in names}
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)


def _main(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    """Run a script's command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / script), *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert isinstance(left.value.code, int)
    return left.value.code


TOY = ("--toy_model", "--device", "cpu")


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("dynamo/distributed.py", ("--torchbench_model", "hf_Nobody", "--fsdp"), "hf_Bert"),
        ("dynamo/distributed.py", (*TOY, "--fsdp", "--dynamo", "aot_eage"), "aot_eager"),
        ("dynamo/distributed.py", (*TOY, "--fsdp", "--ddp"), "not allowed with"),
        ("dynamo/distributed.py", ("--fsdp",), "required"),
        ("dynamo/distributed.py", (*TOY, "--gpu_memory_stats"), "--device cuda"),
        ("dynamo/distributed.py", (*TOY, "--batch_size", "0"), "from 1"),
        ("dynamo/distributed.py", (*TOY, "--deepspeed", "--dynamo", "eager"), "no --dynamo"),
        ("dynamo/distributed.py", (*TOY, "--sequence_length", "64"), "no sequences"),
        ("dynamo/distributed.py", (*TOY, "--fsdp", "--dynamo_no_optimize_ddp"), "--ddp"),
        ("dynamo/distributed.py", ("--decoder", "29m", "--model_size", "small"), "--decoder small"),
        ("dynamo/distributed.py", (*TOY, "--json", "/dev/null/r.json"), "can be written"),
        ("dynamo/distributed.py", (*TOY, "--trace_file", "/dev/null/t.json"), "can be written"),
        ("compare.py", ("--model_size", "small"), "--decoder small"),
        ("compare.py", ("--json", "/dev/null/r.json"), "can be written"),
        ("compare.py", ("--peers", "fsdp3"), "fsdp2"),
        ("compare.py", ("--decoder", "huge"), "29m"),
        ("compare.py", ("--link", "fast"), "gbit"),
        ("compare.py", ("--link", "1gbit", "--world_size", "4"), "2 ranks"),
        ("scaling.py", ("--sizes", "64", "--global_batch", "32"), "--weak"),
        ("scaling.py", ("--sizes", "2,x"), "whole number"),
        ("compile_time.py", ("--peers", "nobody"), "expected some of"),
        ("pictures.py", ("nowhere",), "folder"),
        ("link.py", (), "after '--'"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("script", ["gpu.py", "compare.py --device cuda"])
def test_no_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], script: str
) -> None:
    assert _main(monkeypatch, *script.split()) == 2
    assert "expected a CUDA device, got none" in capfd.readouterr().err


def test_a_missing_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _main(monkeypatch, "dynamo/distributed.py", *TOY, "--deepspeed") == 2
    assert "package 'deepspeed' is not installed" in capfd.readouterr().err
    assert _main(monkeypatch, "dynamo/distributed.py", "--torchbench_model", "hf_T5") == 2
    assert "'transformers'" in capfd.readouterr().err
    assert _main(monkeypatch, "dynamo/distributed.py", *TOY, "--torchviz") == 2
    assert "'torchviz'" in capfd.readouterr().err


def test_distributed_writes_what_was_asked_for(tmp_path: Path) -> None:
    """The command as one rank of one: losses, order of issue, trace, record."""
    arguments = ["--toy_model", "--model_size", "small", "--fsdp", "--fsdp_wrap", "--device", "cpu"]
    arguments += ["--dynamo", "aot_eager", "--repeat", "2", "--profile", "--verbose"]
    arguments += ["--trace_file", str(tmp_path / "t.json"), "--json", str(tmp_path / "r.json")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(DISTRIBUTED), *arguments],
        env=os.environ | rank | address,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "losses of rank 0:" in done.stdout
    assert "forward   forward         net.0" in done.stdout
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["command"].startswith("python benchmarks/dynamo/distributed.py --toy_model")
    assert data["versions"]["torch"] == torch.__version__
    assert len(data["rows"][0]["step_ms"]["samples"]) == 2
