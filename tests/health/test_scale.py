"""What goes through the store grows with the number of ranks, at worst times its logarithm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from simulated_ranks import simulate
from store_protocols import PROTOCOLS

from fsdp_dynamo import CheckpointError, DivergenceError
from fsdp_dynamo.checkpoint import storage
from fsdp_dynamo.checkpoint.manifest import SHARED_FILE, FileChecksum, Manifest, rank_file
from fsdp_dynamo.checkpoint.storage import INDEX_FILE
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.health import late_ranks
from fsdp_dynamo.health.collective_order import find_order_mismatch
from fsdp_dynamo.health.comparison import require_same
from fsdp_dynamo.health.flight_recorder import listed
from fsdp_dynamo.health.store import shared_store

FEW, MANY = 16, 128
MOST = MANY * math.log2(MANY) / (FEW * math.log2(FEW))
SLACK = 1.5  # numbers of ranks have more digits; some ranks look before others have written


@pytest.mark.parametrize("name", PROTOCOLS)
def test_traffic(name: str) -> None:
    _, few = simulate(FEW, PROTOCOLS[name])
    found, many = simulate(MANY, PROTOCOLS[name])
    assert many.looked_at <= SLACK * MOST * few.looked_at
    assert many.num_bytes <= SLACK * MOST * few.num_bytes
    assert many.longest_key <= few.longest_key + 3  # digits
    if name == "a graph of 100 units is compared":
        assert set(found) == {None}
    elif name == "one rank has another graph":
        assert {type(error) for error in found} == {DivergenceError}
        assert len(set(map(str, found))) == 1
        assert f"expected rank {MANY - 1} to issue what rank 0 does" in str(found[0])
    elif name == "one rank fails while it wraps":
        failures = {rank: "ValueError: no such width" if rank == 1 else "" for rank in range(MANY)}
        assert all(each == failures for each in found)


@pytest.mark.parametrize("odd", [{0}, {31, 32}, set(range(0, MANY, 2))])
def test_any_ranks_that_issue_something_else_are_found(odd: set[int]) -> None:
    def job(group: Any) -> str | None:
        store = shared_store(group)
        label = "other" if group.rank() in odd else "block"
        collective_log.record(group, "all_gather", label, 10)
        find_order_mismatch(group, store, "1")
        group.meeting.wait()
        return find_order_mismatch(group, store, "1")

    messages = [found for found in simulate(MANY, job)[0] if found is not None]
    assert messages
    assert all("unit 'other'" in str(one) and "unit 'block'" in str(one) for one in messages)


def test_the_rank_that_reads_for_all_is_stopped() -> None:
    """Before it has published: it shows no life, so it is late."""

    def job(group: Any) -> None:
        if group.rank() == 1:
            shared_store(group).compare_set("same/plan/1/digest/first", "", "1")
        group.meeting.wait()
        if group.rank() != 1:
            require_same(group, "plan", "text")

    first, stopped, other = simulate(3, job, timeout_s=0.2)[0]
    assert stopped is None
    for error in (first, other):
        assert isinstance(error, DivergenceError)
        assert "the plan of rank(s) 1" in str(error)


def test_messages_are_short_however_many_ranks_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_ranks, "WARN_S", 0.1)

    def job(group: Any) -> None:
        if group.rank() == 0:
            require_same(group, "plan", "text")

    with pytest.warns(UserWarning, match=r"rank 0 has waited 0 s for rank\(s\) 1 \(") as told:
        error, *_ = simulate(MANY, job, timeout_s=0.5)[0]
    assert f"the plan of rank(s) 1 to {MANY - 1}, got" in str(error)
    assert f", 5 to {MANY - 1}. They" in str(told[0].message)
    assert len(str(error)) + len(str(told[0].message)) < 1500


def test_ranks_in_messages() -> None:
    assert listed([4, 0, 1]) == "0, 1, 4"
    assert listed([0, 1, 2, 5, *range(7, 4096)]) == "0 to 2, 5, 7 to 4095"
    evens = listed(range(0, 4096, 2))
    assert evens == "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 2036 more"


def _checkpoint(folder: Path, num_ranks: int) -> Manifest:
    names = [INDEX_FILE, SHARED_FILE, *map(rank_file, range(num_ranks))]
    names += [f"__{rank}_0.distcp" for rank in range(num_ranks)]
    for name in names:
        (folder / name).write_bytes(b"1234")
    return Manifest(3, num_ranks, (), (), {name: FileChecksum(4, 0) for name in names})


@pytest.mark.parametrize(("saved_by", "num_ranks"), [(16, 16), (3, 16), (16, 3), (1, 1)])
def test_each_file_is_looked_at_by_some_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_by: int, num_ranks: int
) -> None:
    manifest, sizes = _checkpoint(tmp_path, saved_by), storage._size
    looked_at: list[str] = []
    monkeypatch.setattr(storage, "_size", lambda path: looked_at.append(path.name) or sizes(path))
    for rank in range(num_ranks):
        storage.require_complete_files(tmp_path, manifest, rank, num_ranks)
    assert set(looked_at) == set(manifest.files)
    assert len(looked_at) == 2 * saved_by + 2 * num_ranks


def test_a_rank_that_sees_other_storage(tmp_path: Path) -> None:
    """It does not find the files of the first rank, whichever rank it is."""
    manifest = _checkpoint(tmp_path, 4)
    for rank in range(4):
        own = tmp_path / str(rank)
        own.mkdir()
        for name in (rank_file(rank), f"__{rank}_0.distcp"):
            (own / name).write_bytes(b"1234")
        with pytest.raises(CheckpointError, match="no such file"):
            storage.require_complete_files(own, manifest, rank, 4)
