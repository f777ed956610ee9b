"""Faults of checkpoints: the error names the fault, nothing is changed, nothing is lost."""

from __future__ import annotations

import contextlib
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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path, PurePath
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import make_transformer, wrap
from pool import on_ranks
from shardings import assert_same, fit_tokens
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.utils._pytree import tree_leaves

from fsdp_dynamo import CheckpointError, DivergenceError, FSDPValueError, checkpoint
from fsdp_dynamo.checkpoint import coordination, manifest, storage
from fsdp_dynamo.core.dtensors import local_of

NEWEST = "000002-step-2"
_INIT = metadata.Metadata.__init__


def _model(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    first, last = nn.Linear(3, width), nn.Linear(width, 2)
    model = nn.Sequential(OrderedDict(first=first, norm=nn.LayerNorm(width), last=last))
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


def _flip_a_weight(path: Path) -> None:
    model, _ = _model()
    checkpoint.load(path.parents[1], model)
    _flip(path, path.read_bytes().index(model.last.weight.detach().numpy().tobytes()))


def _flip_near_the_end(path: Path) -> None:
    _flip(path, int(path.stat().st_size * 0.9))


def _in_the_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change with a checksum that fits."""

    def make(path: Path) -> None:
        path = path.parent / "manifest.json"
        content = json.loads(path.read_text())["content"]
        change(content)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        whole = {"crc32": zlib.crc32(canonical.encode()), "content": content}
        path.write_text(json.dumps(whole))

    return make


def _name_above(content: dict[str, Any]) -> None:
    content["files"]["../shared.pt"] = content["files"].pop("shared.pt")


def _link(path: Path) -> None:
    path.rename(path.parents[1] / "elsewhere.pt")
    path.symlink_to(path.parents[1] / "elsewhere.pt")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


Damage = Callable[[Path], object]
TENSORS, MANIFEST, SHARED, OWN = "__0_0.distcp", "manifest.json", "shared.pt", "rank-0.pt"
FAULTS: dict[str, tuple[str, Damage, str]] = {
    "flipped byte of a weight": (
        TENSORS,
        _flip_a_weight,
        r"tensors of one rank: expected checksum \w{8}, got checksum",
    ),
    "flipped byte of states": (OWN, _flip_near_the_end, "states of one rank: expected checksum"),
    "flipped byte of the manifest": (
        MANIFEST,
        _flip_near_the_end,
        "expected a manifest, got (content that does not fit its checksum|something unreadable)",
    ),
    "truncated tensors": (
        TENSORS,
        lambda path: os.truncate(path, 100),
        r"tensors of one rank: expected a file of \d+ bytes, got 100 bytes",
    ),
    "missing index": (".metadata", Path.unlink, "the index of all tensors.*got no such file"),
    "missing manifest": (MANIFEST, Path.unlink, "expected a manifest, got no such file"),
    "no manifest": (MANIFEST, _fifo, "expected a manifest, got another kind of file"),
    "a link": (SHARED, _link, "expected a file in this folder, got a link to '/"),
    "a device": (SHARED, _fifo, "expected a file in this folder, got another kind of file"),
    "newer format": (
        MANIFEST,
        _in_the_manifest(lambda content: content.update(format=99)),
        r"expected format 1 or older, got format 99\. It was .* upgrade",
    ),
    "no format": (
        MANIFEST,
        _in_the_manifest(lambda content: content.pop("format")),
        r"expected a manifest, got something unreadable \(KeyError\('format'\)\)",
    ),
    "a name above the folder": (
        SHARED,
        _in_the_manifest(_name_above),
        "expected an entry in the manifest, got none",
    ),
    "a field is missing": (
        MANIFEST,
        _in_the_manifest(lambda content: content.pop("shared")),
        r"expected a manifest, got something unreadable \(KeyError\('shared'\)\)",
    ),
    "no size": (
        MANIFEST,
        _in_the_manifest(lambda content: content["files"][SHARED].pop("size")),
        r"expected a manifest, got something unreadable \(KeyError\('size'\)\)",
    ),
    "a file that is not listed": (
        OWN,
        _in_the_manifest(lambda content: content["files"].pop(OWN)),
        "states of one rank: expected an entry in the manifest, got none",
    ),
}


def test_fields_of_later_versions_are_ignored(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["written_by"] = "fsdp_dynamo 9"
        content["files"]["shared.pt"]["sha256"] = "0"

    _in_the_manifest(change)(folder / NEWEST / MANIFEST)
    model, optimizer = _model()
    loaded = checkpoint.load(folder, model, optimizer)
    assert loaded is not None
    assert loaded.step == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named_and_nothing_changed(folder: Path, fault: str) -> None:
    file, damage, message = FAULTS[fault]
    damage(folder / NEWEST / file)
    model, optimizer = _model()
    before, random = _copies(model, optimizer), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=f"{re.escape(file)}'.*{message}"):
        checkpoint.load(folder, model, optimizer)
    assert_same(_copies(model, optimizer), before)
    assert torch.equal(random, torch.get_rng_state())
    assert checkpoint.load(folder, model, optimizer, step=1) is not None
    _step(model, optimizer)
    again = checkpoint.save(folder, model, optimizer, step=2)
    assert checkpoint.complete(folder)[-1] == (2, again)
    checkpoint.load(folder, model, optimizer)


def test_another_models_checkpoint(folder: Path) -> None:
    wider, renamed = _model(width=5)[0], _model()[0]
    renamed.add_module("head", renamed.last)
    del renamed.last
    names = (
        r"2 that the model lacks \('last.bias', 'last.weight'\) and 2 that the checkpoint lacks "
        r"\('head.bias', 'head.weight'\)"
    )
    shapes = r"'model.first.\w+': expected shape \(5.*, got \(4.* in the"
    for model, message in ((wider, shapes), (renamed, names)):
        before = copy.deepcopy(dict(model.state_dict()))
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(folder, model)
        assert_same(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    ("files", "got"),
    [
        ((), "no such folder"),
        (("log.txt", "000001-step-1.part/.metadata"), "none in this folder"),
        ((".metadata",), "a checkpoint of torch.distributed.checkpoint, '{}'"),
        (("step-1/.metadata",), "a checkpoint of torch.distributed.checkpoint, '{}/step-1'"),
    ],
)
def test_no_checkpoint(tmp_path: Path, files: tuple[str, ...], got: str) -> None:
    """One of torch's is never taken for the first start of a run."""
    folder = tmp_path / "run"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    model, _ = _model()
    calls: list[dict[str, Any]] = [{}, {"step": 1}, {"step": 1, "missing_ok": True}]
    if "torch" in got:
        calls.append({"missing_ok": True})
    else:
        assert checkpoint.load(folder, model, missing_ok=True) is None
    for arguments in calls:
        with pytest.raises(CheckpointError, match=re.escape(got.format(folder))):
            checkpoint.load(folder, model, **arguments)


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


def test_storage_that_returns_other_bytes(folder: Path) -> None:
    model, optimizer = _model()
    system = storage._ChecksummingFileSystem
    create_stream = system.create_stream

    @contextlib.contextmanager
    def lying(self: Any, path: Path, mode: str) -> Iterator[Any]:
        with create_stream(self, path, mode) as stream:
            yield stream
        if path.suffix == ".distcp":
            _flip(path, 1000)

    message = r"__0_0.distcp': expected \d+ bytes with checksum \w{8}, as written, got"
    with (
        mock.patch.object(system, "create_stream", lying),
        pytest.raises(CheckpointError, match=message),
    ):
        checkpoint.save(folder, model, optimizer, step=3)
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
    with pytest.raises(CheckpointError, match=r"refers to 'posix.mkdir'|weights_only|Weights only"):
        checkpoint.load(folder, model)
    assert not mark.exists()
    assert_same(dict(model.state_dict()), dict(_model()[0].state_dict()))


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


def _run(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(make_transformer(num_blocks=2))
    optimizer = torch.optim.AdamW(model.parameters())
    fit_tokens(model, optimizer, rank)
    return model, optimizer


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


@on_ranks(2)
def test_full_disk(rank: int, small_disk: Path) -> None:
    """All ranks learn it; what had been saved is as it was; with room again, saving works."""
    model, optimizer = _run(rank)
    checkpoint.save(small_disk, model, optimizer, step=1)
    ballast = small_disk / "ballast"
    if rank == 0:
        found = os.statvfs(small_disk)
        ballast.write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - 100_000)))
    dist.barrier()
    message = r"(?s)\.distcp': expected to write the whole file, got"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(small_disk, model, optimizer, step=2)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.async_save(small_disk, model, optimizer, step=2).result()
    names = {path.name for path in small_disk.iterdir()}
    assert names == {"000001-step-1", "ballast", "owner.json"}
    checkpoint.load(small_disk, model, optimizer)
    if rank == 0:
        ballast.unlink()
    dist.barrier()
    checkpoint.save(small_disk, model, optimizer, step=2)
    assert [step for step, _ in checkpoint.complete(small_disk)] == [1, 2]


@on_ranks(2)
def test_all_ranks_learn_it(rank: int, tmp_path: Path) -> None:
    model, optimizer = _run(rank)
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    dist.barrier()
    if rank == 1:  # each rank compares some of the files
        _flip(path / "__0_0.distcp", 3000)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp', tensors of one rank: "):
        checkpoint.load(tmp_path, model, optimizer)
    dist.barrier()
    if rank == 0:
        (path / "__1_0.distcp").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp', .* no such file"):
        checkpoint.load(tmp_path, model, optimizer)
    dist.barrier()
    with pytest.raises(DivergenceError, match=r"step 0.*step 1"):
        checkpoint.save(tmp_path, model, optimizer, step=rank)


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


@on_ranks(2)
def test_saving_after_one_that_failed(rank: int, tmp_path: Path) -> None:
    """A failed save in the background has told so; it keeps nothing from being saved or loaded."""
    model, optimizer = _run(rank)
    write = _gone if rank == 1 else storage.Writer.write_data
    with (
        mock.patch.object(storage.Writer, "write_data", write),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        failed = checkpoint.async_save(tmp_path, model, optimizer, step=1)
        while not failed.done():
            time.sleep(0.01)
    texts = [str(one.message) for one in told]
    assert sum("was not saved" in text and "removed by another" in text for text in texts) == 1
    assert checkpoint.load(tmp_path, model, optimizer, missing_ok=True) is None
    checkpoint.save(tmp_path, model, optimizer, step=2)
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [2]
    with pytest.raises(CheckpointError, match="removed by another process"):
        failed.result()


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


@on_ranks(2)
def test_the_folder_is_that_of_the_call(rank: int, tmp_path: Path) -> None:
    """``chdir`` while it is written does not move it, and all ranks must mean the same folder."""
    model, optimizer = _run(rank)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    may_write = threading.Event()
    write = storage.Writer.write_data

    def later(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    with contextlib.chdir(tmp_path), mock.patch.object(storage.Writer, "write_data", later):
        saving = checkpoint.async_save("run", model, optimizer, step=1)
        os.chdir(elsewhere)
        may_write.set()
        assert saving.result() == tmp_path / "run" / "000001-step-1"
        assert not (elsewhere / "run").exists()
        os.chdir(elsewhere if rank else tmp_path)
        others = rf"folder '{tmp_path}/run'.*folder '{tmp_path}/elsewhere/run'"
        with pytest.raises(DivergenceError, match=others):
            checkpoint.save("run", model, optimizer, step=2)


def _gone(*args: Any) -> Any:
    raise FileNotFoundError(errno.ENOENT, "removed by another process")


def _read_one_and_stop(reader: Any, plan: Any, planner: Any) -> Any:
    """Read the first tensor of a plan, as if the folder was removed then."""
    _READ_DATA(reader, dataclasses.replace(plan, items=plan.items[:1]), planner)
    return _gone()


_READ_DATA = storage.Reader.read_data
READS = {"the index": ("read_metadata", _gone), "the tensors": ("read_data", _read_one_and_stop)}


@pytest.mark.parametrize("what", READS)
@on_ranks(2)
def test_a_checkpoint_that_goes_while_it_is_read(rank: int, tmp_path: Path, what: str) -> None:
    """On the last rank: all get an error, and nothing is changed."""
    model, optimizer = _run(rank)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    fit_tokens(model, optimizer, rank)
    before = _copies(model, optimizer)
    name, fault = READS[what]
    if rank == 0:
        fault = getattr(storage.Reader, name)
    with mock.patch.object(storage.Reader, name, fault):
        for optimizers in ([optimizer], []):
            with pytest.raises(CheckpointError, match=r"rank 1.*removed by another process"):
                checkpoint.load(tmp_path, model, optimizers)
    assert_same(_copies(model, optimizer), before)
    checkpoint.load(tmp_path, model, optimizer)
    assert not torch.equal(before[0]["norm.weight"], model.state_dict()["norm.weight"])


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
    assert_same(_copies(model, optimizer), before)
    _step(model, optimizer)


def _copies(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], Any]:
    """The model's whole values, and this rank's states."""
    states = [local_of(one).clone() for one in tree_leaves(optimizer.state_dict()["state"])]
    return copy.deepcopy(dict(model.state_dict())), states
