"""Faults of checkpoints: the error names the fault, nothing is changed, nothing is lost."""

from __future__ import annotations

import copy
import dataclasses
import errno
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import nn
from torch.distributed.checkpoint import metadata

from fsdp_dynamo import CheckpointError, DivergenceError, FSDPValueError, checkpoint
from fsdp_dynamo.checkpoint import coordination, manifest, storage

NEWEST = "000002-step-2"
_INIT = metadata.Metadata.__init__


def _model(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = {
        "first": nn.Linear(3, width),
        "norm": nn.LayerNorm(width),
        "last": nn.Linear(width, 2),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model, torch.optim.AdamW(model.parameters())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, the newer one of two steps."""
    model, optimizer = _model()
    for step in (1, 2):
        _step(model, optimizer)
        checkpoint.save(tmp_path, model, optimizer, step=step)
    return tmp_path


def _flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 16]))


def _position_of(path: Path, tensor: torch.Tensor) -> int:
    """Where a tensor's first byte is in a file."""
    return path.read_bytes().index(tensor.detach().numpy().tobytes())


def _flip_in(name: str, fraction: float) -> Callable[[Path], None]:
    return lambda path: _flip(path / name, int((path / name).stat().st_size * fraction))


def _flip_weight(path: Path) -> None:
    model, _ = _model()
    checkpoint.load(path.parent, model)
    _flip(path / "__0_0.distcp", _position_of(path / "__0_0.distcp", model.last.weight))


def _cut_off(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 100)


def _in_the_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change with a checksum that fits."""

    def make(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())["content"]
        change(content)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        whole = {"crc32": zlib.crc32(canonical.encode()), "content": content}
        (path / "manifest.json").write_text(json.dumps(whole))

    return make


def _rename(new: str) -> Callable[[Path], None]:
    def change(content: dict[str, Any]) -> None:
        content["files"][new] = content["files"].pop("shared.pt")

    return _in_the_manifest(change)


def _link(path: Path) -> None:
    (path / "shared.pt").rename(path.parent / "elsewhere.pt")
    (path / "shared.pt").symlink_to(path.parent / "elsewhere.pt")


def _fifo(path: Path) -> None:
    (path / "shared.pt").unlink()
    os.mkfifo(path / "shared.pt")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte of a weight": (
        _flip_weight,
        r"__0_0.distcp', containing 'model.last.weight': expected checksum \w{8}, got checksum",
    ),
    "flipped byte of an index": (
        _flip_in(".metadata", 0.5),
        r".metadata', the index of all tensors: expected checksum",
    ),
    "flipped byte of shared states": (
        _flip_in("shared.pt", 0.5),
        r"shared.pt', states shared by all ranks: expected checksum",
    ),
    "flipped byte of a rank's states": (
        _flip_in("rank-0.pt", 0.9),
        r"rank-0.pt', states of one rank: expected checksum",
    ),
    "flipped byte of the manifest": (
        _flip_in("manifest.json", 0.9),
        r"manifest.json': expected (content that fits its checksum|a manifest), got",
    ),
    "truncated tensors": (
        _cut_off("__0_0.distcp"),
        r"__0_0.distcp', containing '[\w.]+': expected a file of \d+ bytes, got \d+ bytes",
    ),
    "truncated index": (_cut_off(".metadata"), r".metadata', the index of all tensors: expected a"),
    "missing tensors": (
        lambda path: (path / "__0_0.distcp").unlink(),
        r"__0_0.distcp', containing '[\w.]+', .* and \d+ more: expected a file of .* no such file",
    ),
    "missing index": (
        lambda path: (path / ".metadata").unlink(),
        r".metadata', .*got no such file",
    ),
    "missing states": (lambda path: (path / "rank-0.pt").unlink(), r"rank-0.pt', .*no such file"),
    "missing manifest": (
        lambda path: (path / "manifest.json").unlink(),
        r"manifest.json': expected a manifest, got no such file",
    ),
    "newer format": (
        _in_the_manifest(lambda content: content.update(format=99)),
        r"manifest.json': expected format 1 or older, got format 99. It was .* upgrade",
    ),
    "a name above the folder": (
        _rename("../shared.pt"),
        r"manifest.json': expected names of files in this folder, got '../shared.pt'",
    ),
    "an absolute name": (_rename("/dev/zero"), r"names of files in this folder, got '/dev/zero'"),
    "no file": (
        lambda path: ((path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")),
        r"manifest.json': expected a manifest, got another kind of file",
    ),
    "a field is missing": (
        _in_the_manifest(lambda content: content.pop("shared")),
        r"manifest.json': expected a field 'shared', list, got None",
    ),
    "no format": (
        _in_the_manifest(lambda content: content.pop("format")),
        r"manifest.json': expected a manifest with a format",
    ),
    "no size": (
        _in_the_manifest(lambda content: content["files"]["shared.pt"].pop("size")),
        r"manifest.json': expected size and crc32 of file 'shared.pt'",
    ),
    "a file that is not listed": (
        _in_the_manifest(lambda content: content["files"].pop("rank-0.pt")),
        r"rank-0.pt', states of one rank: expected an entry in the manifest, got none",
    ),
    "a link": (_link, r"shared.pt', .*expected a file in this folder, got a link to '/"),
    "a device": (_fifo, r"shared.pt', .*expected a file in this folder, got another kind of file"),
}


def test_fields_of_later_versions_are_ignored(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["written_by"] = "fsdp_dynamo 9"
        content["files"]["shared.pt"]["sha256"] = "0"

    _in_the_manifest(change)(folder / NEWEST)
    model, optimizer = _model()
    loaded = checkpoint.load(folder, model, optimizer)
    assert loaded is not None
    assert loaded.step == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named_and_nothing_changed(folder: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(folder / NEWEST)
    model, optimizer = _model()
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert torch.equal(random, torch.get_rng_state())
    loaded = checkpoint.load(folder, model, optimizer, step=1)
    assert loaded is not None
    _step(model, optimizer)
    again = checkpoint.save(folder, model, optimizer, step=2)
    assert checkpoint.complete(folder)[-1] == (2, again)
    checkpoint.load(folder, model, optimizer)


def _renamed() -> nn.Module:
    model, _ = _model()
    model.add_module("head", model.last)
    del model.last
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _model(width=5)[0], r"'model.first.\w+': expected shape \(5.*, got \(4.* in the"),
        (
            _renamed,
            r"2 that the model lacks \('last.bias', 'last.weight'\) and 2 that the checkpoint "
            r"lacks \('head.bias', 'head.weight'\)",
        ),
    ],
)
def test_another_models_checkpoint(
    folder: Path, make: Callable[[], nn.Module], message: str
) -> None:
    model = make()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, model)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("missing_ok", [False, True])
@pytest.mark.parametrize(
    ("files", "got"),
    [
        ((), "no such folder"),
        (("log.txt", "000001-step-1.part/.metadata"), "none in this folder"),
        ((".metadata",), "a checkpoint of torch.distributed.checkpoint, '{}'"),
        (("step-1/.metadata",), "a checkpoint of torch.distributed.checkpoint, '{}/step-1'"),
    ],
)
def test_no_checkpoint(tmp_path: Path, files: tuple[str, ...], got: str, missing_ok: bool) -> None:
    """One of torch's is never taken for the first start of a run."""
    for name in files:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).touch()
    model, _ = _model()
    if missing_ok and "torch" not in got:
        assert checkpoint.load(tmp_path / "run", model, missing_ok=True) is None
    for step in (1,) if missing_ok and "torch" not in got else (1, None):
        with pytest.raises(CheckpointError, match=re.escape(got.format(tmp_path / "run"))):
            checkpoint.load(tmp_path / "run", model, step=step, missing_ok=missing_ok)


def test_what_was_not_saved(tmp_path: Path) -> None:
    model, optimizer = _model()
    checkpoint.save(tmp_path, model, step=1)
    with pytest.raises(CheckpointError, match="expected optimizer states, got none in the"):
        checkpoint.load(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="expected one of the steps 1, got step 3"):
        checkpoint.load(tmp_path, model, step=3)
    generator = torch.Generator()
    with pytest.raises(CheckpointError, match="a checkpoint without 'noise'"):
        checkpoint.load(tmp_path, model, per_rank={"noise": generator})
    with torch.no_grad():
        model.first.weight.fill_(1.0)
    part, _ = _model()
    checkpoint.save(tmp_path, model, torch.optim.AdamW(model.first.parameters()), step=2)
    checkpoint.load(tmp_path, part, torch.optim.AdamW(part.first.parameters()))
    part, _ = _model()
    with pytest.raises(FSDPValueError, match="saved group"):
        checkpoint.load(tmp_path, part, torch.optim.AdamW(part.parameters()))
    assert not torch.equal(part.first.weight, model.first.weight)


def test_storage_that_returns_other_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _model()
    close = storage._ChecksummingFileSystem.__dict__["create_stream"].__wrapped__

    def lying(self: Any, path: Path, mode: str) -> Iterator[Any]:
        yield from close(self, path, mode)
        if path.suffix == ".distcp":
            _flip(path, 1000)

    from contextlib import contextmanager

    monkeypatch.setattr(storage._ChecksummingFileSystem, "create_stream", contextmanager(lying))
    message = r"__0_0.distcp': expected \d+ bytes with checksum \w{8}, as written, got"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(folder, model, optimizer, step=3)
    monkeypatch.undo()
    assert {path.name for path in folder.iterdir()} == {"000001-step-1", NEWEST, "owner.json"}
    checkpoint.load(folder, model, optimizer)


# -- files that want to run code -----------------------------------------------------------------


class _Evil:
    """Creates a folder when it is unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _replace(path: Path, name: str, content: bytes) -> None:
    """Put other content into a file, and make the manifest agree."""
    (path / name).write_bytes(content)
    found = manifest.read(path)
    files = {**found.files, name: manifest.checksum_of(path / name)}
    manifest.write(dataclasses.replace(found, files=files), path)


@pytest.mark.parametrize("name", [".metadata", "rank-0.pt", "shared.pt"])
def test_no_code_is_run(folder: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "was here"
    buffer = io.BytesIO()
    torch.save(_Evil(mark), buffer)
    evil = pickle.dumps(_Evil(mark)) if name == ".metadata" else buffer.getvalue()
    _replace(folder / NEWEST, name, evil)
    model, _ = _model()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=r"refers to 'posix.mkdir'|weights_only|Weights only"):
        checkpoint.load(folder, model)
    assert not mark.exists()
    assert all(map(torch.equal, before, model.parameters()))


def _gives_attributes_to(target: Any) -> bytes:
    """A pickle with BUILD on a class, or on another object that outlives the file."""
    state = pickle.dumps((None, {"planted": 1, "__init__": None}), 2)[2:-1]
    return pickle.dumps(target, 2)[:-1] + state + pickle.BUILD + pickle.STOP


@pytest.mark.parametrize(
    "target",
    [
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
        Path,
    ],
)
def test_no_class_is_changed(folder: Path, target: Any) -> None:
    planted = _gives_attributes_to(target)
    if target is metadata.Metadata:  # the plant works: torch's own reader would be changed
        pickle.loads(planted)
        assert target.planted == 1  # type: ignore[attr-defined]
        del target.planted  # type: ignore[attr-defined]
        target.__init__ = _INIT  # type: ignore[method-assign]
    _replace(folder / NEWEST, ".metadata", planted)
    model, _ = _model()
    before = dict(vars(target))
    with pytest.raises(CheckpointError, match="expected an index of tensors, got one that changes"):
        checkpoint.load(folder, model)
    assert vars(target) == before
    assert not hasattr(PurePath, "planted")
    assert checkpoint.load(folder, model, step=1) is not None


def test_no_code_of_an_entry_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _model()
    optimizer.param_groups[0]["evil"] = _Evil(Path("was here"))
    monkeypatch.chdir(tmp_path)
    entry = r"'optim.param_groups.0.evil': expected"
    with pytest.raises(CheckpointError, match=f"{entry} a state of tensors, numbers"):
        checkpoint.save(tmp_path, model, optimizer, step=1)
    assert checkpoint.complete(tmp_path) == []
    monkeypatch.setattr(storage, "require_readable", lambda *_: None)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    with pytest.raises(CheckpointError, match=f"{entry} tensors, numbers"):
        checkpoint.load(tmp_path, model, optimizer)
    assert not (tmp_path / "was here").exists()


# -- with ranks ----------------------------------------------------------------------------------


def _error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _run(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(make_transformer(num_blocks=2))
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    return model, optimizer


def _full_disk(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    model, optimizer = _run(rank)
    checkpoint.save(folder, model, optimizer, step=1)
    rest = Path(folder) / "ballast"
    if rank == 0:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        rest.write_bytes(bytes(max(0, free - 100_000)))
    torch.distributed.barrier()
    in_place = _error_of(lambda: checkpoint.save(folder, model, optimizer, step=2))
    saving = checkpoint.async_save(folder, model, optimizer, step=2)
    behind = _error_of(saving.result)
    names = sorted(path.name for path in Path(folder).iterdir())
    torch.distributed.barrier()
    checkpoint.load(folder, model, optimizer)
    if rank == 0:
        rest.unlink()
    torch.distributed.barrier()
    checkpoint.save(folder, model, optimizer, step=2)
    return {"errors": [in_place, behind], "names": names}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("cannot mount a small file system here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk(ranks: RankPool, small_disk: Path) -> None:
    """All ranks learn it; what had been saved is as it was; with room again, saving works."""
    for found in ranks.run(_full_disk, 2, str(small_disk)):
        for kind, message in found["errors"]:
            assert kind == "CheckpointError"
            assert ".distcp', while writing 'optim." in message or "'model." in message
            assert "expected to write the whole file, got" in message
        assert found["names"] == ["000001-step-1", "ballast", "owner.json"]
    assert [step for step, _ in checkpoint.complete(small_disk)] == [1, 2]


def _a_rank_differs(rank: int, world_size: int, folder: str) -> list[tuple[str, str]]:
    model, optimizer = _run(rank)
    errors = []
    path = checkpoint.save(folder, model, optimizer, step=1)
    torch.distributed.barrier()
    if rank == 1:  # each rank compares some of the files
        _flip(path / "__0_0.distcp", 3000)
    torch.distributed.barrier()
    errors.append(_error_of(lambda: checkpoint.load(folder, model, optimizer)))
    torch.distributed.barrier()
    if rank == 0:
        (path / "__1_0.distcp").unlink()
    torch.distributed.barrier()
    errors.append(_error_of(lambda: checkpoint.load(folder, model, optimizer)))
    torch.distributed.barrier()
    errors.append(_error_of(lambda: checkpoint.save(folder, model, optimizer, step=rank)))
    return errors


def test_all_ranks_learn_it(ranks: RankPool, tmp_path: Path) -> None:
    for flipped, missing, step in ranks.run(_a_rank_differs, 2, str(tmp_path)):
        assert step[0] == DivergenceError.__name__
        assert "step 0" in step[1]
        assert "step 1" in step[1]
        assert flipped[0] == missing[0] == CheckpointError.__name__
        assert "__0_0.distcp', containing 'model." in flipped[1]
        assert "__1_0.distcp', containing '" in missing[1]
        assert "no such file" in missing[1]


def test_what_cannot_be_removed_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader on NFS keeps files: saving goes on, says so once, and removes it when it can."""
    model, optimizer = _model()
    _step(model, optimizer)
    remove = shutil.rmtree

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="'.*000001-step-1', could not be removed"):
        checkpoint.save(folder, model, optimizer, step=3, keep_last=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpoint.save(folder, model, optimizer, step=4)
        assert [step for step, _ in checkpoint.complete(folder)] == [2, 3, 4]
        assert (folder / "000001-step-1.gone").is_dir()
        monkeypatch.setattr(shutil, "rmtree", remove)
        checkpoint.save(folder, model, optimizer, step=5)
    assert not (folder / "000001-step-1.gone").exists()
    assert not any("could not be removed" in str(one.message) for one in told)


def _after_one_that_failed(rank: int, world_size: int, folder: str) -> tuple[list[int], str]:
    model, optimizer = _run(rank)
    write = storage.Writer.write_data

    def fail(*_: Any) -> Any:
        raise OSError("the storage went away")

    storage.Writer.write_data = fail if rank == 1 else write  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            failed = checkpoint.async_save(folder, model, optimizer, step=1)
            while not failed.done():
                time.sleep(0.01)
    finally:
        storage.Writer.write_data = write  # type: ignore[method-assign]
    texts = [str(one.message) for one in told]
    assert sum("was not saved" in text and "went away" in text for text in texts) == 1
    assert checkpoint.load(folder, model, optimizer, missing_ok=True) is None
    checkpoint.save(folder, model, optimizer, step=2)
    return [step for step, _ in checkpoint.complete(folder)], _error_of(failed.result)[1]


def test_saving_after_one_that_failed(ranks: RankPool, tmp_path: Path) -> None:
    """A failed save in the background has told so; it keeps nothing from being saved or loaded."""
    for steps, told in ranks.run(_after_one_that_failed, 2, str(tmp_path)):
        assert steps == [2]
        assert "went away" in told


def test_a_failed_save_completes_if_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.Writer, "write_data", _gone)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a checkpoint was not saved")
        failed = checkpoint.async_save(tmp_path, _model()[0], step=1)
        with pytest.raises(CheckpointError, match="removed by another process"):
            failed.result(60)


def test_a_forked_child_neither_waits_for_its_parents_save_nor_owns_its_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = coordination.STATE
    monkeypatch.setattr(state, "pending_save", Future())
    monkeypatch.setattr(state, "runs", {Path("run"): "parent"})
    child = os.fork()
    if child == 0:
        os._exit(state.pending_save is not None or bool(state.runs))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _moving(rank: int, world_size: int, folder: str) -> tuple[str, tuple[str, str]]:
    model, optimizer = _run(rank)
    elsewhere = Path(folder, "elsewhere")
    elsewhere.mkdir(exist_ok=True)
    before = Path.cwd()
    may_write = threading.Event()
    write = storage.Writer.write_data

    def later(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    os.chdir(folder)
    storage.Writer.write_data = later  # type: ignore[method-assign]
    try:
        saving = checkpoint.async_save("run", model, optimizer, step=1)
        os.chdir(elsewhere)
        may_write.set()
        path = saving.result()
        os.chdir(elsewhere if rank else folder)
        error = _error_of(lambda: checkpoint.save("run", model, optimizer, step=2))
    finally:
        storage.Writer.write_data = write  # type: ignore[method-assign]
        os.chdir(before)
    return str(path), error


def test_the_folder_is_that_of_the_call(ranks: RankPool, tmp_path: Path) -> None:
    """``chdir`` while it is written does not move it, and all ranks must mean the same folder."""
    for path, (kind, message) in ranks.run(_moving, 2, str(tmp_path)):
        assert path == str(tmp_path / "run" / "000001-step-1")
        assert kind == DivergenceError.__name__
        assert f"folder '{tmp_path}/run'" in message
        assert f"folder '{tmp_path}/elsewhere/run'" in message
    assert not (tmp_path / "elsewhere" / "run").exists()


def _gone(*args: Any) -> Any:
    raise FileNotFoundError(errno.ENOENT, "removed by another process")


def _read_one_and_stop(reader: Any, plan: Any, planner: Any) -> Any:
    """Read the first tensor of a plan, as if the folder was removed then."""
    _READ_DATA(reader, dataclasses.replace(plan, items=plan.items[:1]), planner)
    return _gone()


_READ_DATA = storage.Reader.read_data
READS = {"the index": ("read_metadata", _gone), "the tensors": ("read_data", _read_one_and_stop)}


def _cannot_read(rank: int, world_size: int, folder: str, what: str) -> tuple[str, list[bool]]:
    """The error where the last rank cannot read, and what is as it was."""
    model, optimizer = _run(rank)
    checkpoint.save(folder, model, optimizer, step=1)
    loss_of(model, batch(rank, 1)).backward()
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    moments = [
        value.clone() for state in optimizer.state.values() for _, value in sorted(state.items())
    ]
    name, fault = READS[what]
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setattr(storage.Reader, name, fault)
        _, error = _error_of(lambda: checkpoint.load(folder, model, optimizer))
        _, of_model = _error_of(lambda: checkpoint.load(folder, model))
    now = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    checks = [
        of_model != "",
        all(map(torch.equal, before, model.parameters())),
        all(map(torch.equal, moments, now)),
    ]
    checkpoint.load(folder, model, optimizer)
    checks.append(not all(map(torch.equal, before, model.parameters())))
    return error, checks


@pytest.mark.parametrize("what", READS)
def test_a_checkpoint_that_goes_while_it_is_read(
    ranks: RankPool, tmp_path: Path, what: str
) -> None:
    for error, checks in ranks.run(_cannot_read, 2, str(tmp_path), what):
        assert "rank 1" in error
        assert "removed by another process" in error
        assert checks == [True] * 4


def test_another_kind_of_optimizer(tmp_path: Path) -> None:
    """What the optimizer itself finds changes neither it nor the model."""
    model, _ = _model()
    saved = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _step(model, saved)
    checkpoint.save(tmp_path, model, [saved], step=1)
    model, optimizer = _model()
    _step(model, optimizer)
    before = _copies(model, optimizer)
    with pytest.raises(FSDPValueError, match="AdamW: expected a checkpoint of an optimizer"):
        checkpoint.load(tmp_path, model, [optimizer])
    torch.testing.assert_close(_copies(model, optimizer), before, rtol=0, atol=0)
    _step(model, optimizer)


def _copies(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))
