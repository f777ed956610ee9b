"""Imports go downward only, file by file (those of ``graph_passes``: see ``pyproject.toml``)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS: dict[str, dict[str, int]] = {
    "fsdp_dynamo": {
        "errors": 0,
        "help": 0,
        "tree": 0,
        "registry": 0,
        "layout": 0,
        "api": 1,
        "training_state": 1,
        "events": 1,
        "point_to_point": 0,
        "rendezvous": 1,
        "groups": 2,
        "accumulation": 1,
        "boxes": 0,
        "versions": 0,
        "order_log": 1,
        "lost_rank": 1,
        "ranges": 0,
        "artifacts": 1,
        "failing": 0,
        "order_check": 2,
        "flight_text": 2,
        "flight": 3,
        "flight_recorder": 2,
        "from_first": 0,
        "tensor_part": 1,
        "tensor_parallel": 1,
        "watching": 2,
        "agreement": 3,
        "collectives": 3,
        "wrap_policy": 1,
        "trace_order": 1,
        "segments": 1,
        "dynamo_glue": 1,
        "original_parameter": 2,
        "flat_parameter": 3,
        "late_parameters": 3,
        "graph_ops": 4,
        "unit": 4,
        "schedule": 5,
        "traced": 7,
        "lowering": 5,
        "hooks": 6,
        "grad_clip": 6,
        "deferred_init": 4,
        "starting_values": 5,
        "full_params": 6,
        "comm_hooks": 4,
        "copying": 5,
        "execution_order": 4,
        "user_methods": 8,
        "original_shards": 6,
        "arguments": 6,
        "build": 7,
        "breaks": 2,
        "findings": 3,
        "explain_run": 8,
        "explain_text": 4,
        "explain_views": 4,
        "explain": 9,
        "construct": 8,
        "unit_module": 12,
        "composable": 13,
        "graph_options": 2,
        "generated_code": 2,
        "probe": 4,
        "planning": 5,
        "graph_entry": 5,
        "compile": 7,
        "hooks_path": 7,
        "parts": 4,
        "state_dict": 8,
        "optim_state": 9,
        "state_dict_methods": 10,
        "optim_state_variants": 11,
        "dcp_glue": 11,
        "warmup": 11,
        "untouched": 5,
        "planner.hardware": 1,
        "planner.inventory": 1,
        "planner.models": 2,
        "planner.predict": 2,
        "planner.text": 3,
        "planner": 4,
        "planner.__main__": 5,
        "inspection.listings": 2,
        "inspection.decompiled": 2,
        "inspection.stages": 3,
        "inspection.recorded": 2,
        "inspection.page": 5,
        "inspection": 9,
        "inspection.__main__": 10,
        "checkpoint.pace": 0,
        "checkpoint.reading": 2,
        "checkpoint.folder": 1,
        "checkpoint.small_states": 1,
        "checkpoint.manifest": 2,
        "checkpoint.damage": 3,
        "checkpoint.writing": 3,
        "checkpoint.concert": 1,
        "checkpoint.tensors": 11,
        "checkpoint.saving": 12,
        "checkpoint.loading": 13,
        "checkpoint": 14,
        "wrapper": 13,
        "__init__": 15,
        "integrations": 16,
        "integrations.sharding": 16,
        "integrations.trainer_files": 16,
        "integrations.trainer": 17,
        "integrations.lightning": 17,
    },
    "benchmarks": {
        "__init__": 0,
        "errors": 0,
        "decoder": 0,
        "toy": 0,
        "wire": 0,
        "report": 0,
        "cluster_model": 0,
        "arguments": 0,
        "step_profile": 0,
        "cluster_link": 1,
        "workloads": 1,
        "bound": 1,
        "ranks": 1,
        "pictures": 1,
        "cluster_group": 2,
        "peers.base": 2,
        "dynamo": 2,
        "dynamo.extras": 2,
        "link": 2,
        "cluster": 3,
        "peers.upstream": 3,
        "peers.simple_fsdp": 3,
        "peers.deepspeed": 3,
        "peers.ours": 3,
        "peers": 4,
        "rounds": 5,
        "comparison_report": 6,
        "host_overhead": 6,
        "compile_time": 6,
        "saving": 6,
        "planner_error": 6,
        "checks": 6,
        "bench": 6,
        "gpu": 6,
        "compare": 7,
        "scaling": 7,
        "dynamo.distributed": 7,
    },
}
MAY_IMPORT = {
    "fsdp_dynamo": {"fsdp_dynamo", "graph_passes"},
    "benchmarks": {"benchmarks", "fsdp_dynamo"},
}


def _files(package: str) -> dict[str, Path]:
    """A package's files by dotted name; a subpackage's ``__init__`` goes by the folder's name."""
    files = {}
    for path in (ROOT / package).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / package).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    return files


def _imports(path: Path) -> set[tuple[str, str]]:
    """``(package, file)`` of every import of our own packages."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.partition(".")
            folder = ROOT / package / module
            whole = module and not folder.is_dir()
            names = [module] if whole else [alias.name for alias in node.names]
            prefix = f"{module}." if module and not whole else ""
            for name in names:
                file = folder / f"{name}.py"
                inside = whole or not prefix or file.exists()
                found.add((package, f"{prefix}{name}" if inside else module))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                package, _, module = alias.name.partition(".")
                found.add((package, module or "__init__"))
    return {(p, m) for p, m in found if p in (*LAYERS, "graph_passes")}


@pytest.mark.parametrize("package", LAYERS)
def test_every_file_has_a_layer(package: str) -> None:
    assert set(_files(package)) == set(LAYERS[package])


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_downward(package: str) -> None:
    for name, path in _files(package).items():
        for other, module in _imports(path):
            where = f"{package}/{name} imports {other}.{module}"
            assert other in MAY_IMPORT[package], where
            if other == package:
                assert LAYERS[package][module] < LAYERS[package][name], where


@pytest.mark.parametrize("package", [*LAYERS, "graph_passes"])
def test_files_stay_small(package: str) -> None:
    for name, path in _files(package).items():
        assert len(path.read_text().splitlines()) <= 500, name


def test_the_leaf_imports_nothing_of_the_wrapper() -> None:
    assert _imports(ROOT / "fsdp_dynamo" / "api.py") == {("fsdp_dynamo", "errors")}
