"""What goes through the store does not grow with the number of ranks, and does not flood it."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_ranks import Group, operations_of_waiting_ranks, simulated_ranks, wait

from fsdp_dynamo import CheckpointError, DivergenceError, RankFailedError
from fsdp_dynamo.checkpoint import storage
from fsdp_dynamo.checkpoint.manifest import SHARED_FILE, FileChecksum, Manifest, rank_file
from fsdp_dynamo.checkpoint.storage import INDEX_FILE
from fsdp_dynamo.comm.watchdog import _SpareLooks, is_look
from fsdp_dynamo.health import notices
from fsdp_dynamo.health.flight_recorder import listed

A_MINUTE = 60  # periods


@pytest.mark.filterwarnings("ignore:rank")
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_rank_that_is_late_for_five_minutes(runs_ahead: bool) -> None:
    """Each rank that waits for it makes ten operations a minute, whatever their number."""
    with simulated_ranks(8, over_tcp=True) as few, simulated_ranks(64) as many:
        most, of_many = (
            operations_of_waiting_ranks(ranks, 5 * A_MINUTE, runs_ahead) for ranks in (few, many)
        )
        assert 0 < most <= of_many <= most + 2 <= 50
        assert few[-1].store.num_operations <= 1


def test_ranks_that_do_notwait() -> None:
    """One look a minute, and some more after the last collective; each is two operations."""
    assert all(map(is_look, (notices._WARNED_AT, *notices._COMPARED_AT)))
    looks = _SpareLooks()
    assert sum(looks.take(0) for _ in range(10 * A_MINUTE)) <= 12
    assert [idle for idle in range(1, 30) if looks.take(idle)] == [3, 6, 12, 24]
    with simulated_ranks(2) as (rank, _):
        rank.begin()
        before = rank.store.num_operations
        with rank.acting():
            notices._monitor.look_in_passing()
        assert rank.store.num_operations == before + 2


@pytest.mark.parametrize("odd", [{0}, {31, 32}, set(range(0, 128, 2))])
def test_any_ranks_that_issue_something_else_are_found(odd: set[int]) -> None:
    """Every rank raises the same error within some periods."""
    with simulated_ranks(128) as ranks:
        for rank in ranks:
            rank.begin("other" if rank.number in odd else "block")
        errors = wait(ranks, 3)
    assert set(errors) == set(range(128))
    (message,) = set(errors.values())
    assert "unit 'other'" in message
    assert "unit 'block'" in message


def test_a_rank_whose_device_does_not_stand_still_compares_if_asked() -> None:
    with simulated_ranks(2) as (waiting, other):
        waiting.begin("block")
        other.begin("other")
        assert wait([waiting], 1, runs_ahead=True) == {}
        with other.acting(), pytest.raises(DivergenceError, match="unit 'other'"):
            notices._monitor.look_in_passing()
        assert set(wait([waiting], 2)) == {0}


def test_a_failure_reaches_ranks_that_share_a_group_with_others() -> None:
    """Two rows and columns, and a pair that shares nothing with them."""
    groups = [(0, 1), (2, 3), (0, 2), (1, 3), (4, 5)]
    with simulated_ranks(6) as ranks:
        for rank in ranks:
            own = [Group(group, rank.number) for group in groups if rank.number in group]
            rank.groups = own
            with rank.acting():
                notices.link_groups(own)  # type: ignore[arg-type]
        with ranks[0].acting(), pytest.raises(RankFailedError):
            notices.raise_on_all_ranks(RankFailedError("rank 0 has failed"))
        assert wait(ranks, 1) == dict.fromkeys((1, 2, 3), "rank 0 has failed")


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
