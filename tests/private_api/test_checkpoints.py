"""Checkpoints."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import default_planner, filesystem, metadata, state_dict
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
)
from torch.distributed.checkpoint.planner import WriteItem

Options = state_dict.StateDictOptions

# -- torch.distributed.checkpoint.state_dict ------------------------------------------------------


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _info_of(patches: pytest.MonkeyPatch, model: nn.Module, *others: Any, **options: Any) -> Any:
    """What torch's functions pass on of a model and its options."""
    seen: list[Any] = []

    def note(*given: Any) -> dict[str, Any]:
        seen.append(given[-1])
        return {"a": 0}

    with patches.context() as patch:
        patch.setattr(state_dict, "_load_optim_state_dict", note)
        patch.setattr(state_dict, "_get_model_state_dict", note)
        if others:
            state: Any = {"state": {}, "param_groups": []}
            state_dict.set_optimizer_state_dict(model, *others, state, options=Options(**options))
        else:
            state_dict.get_model_state_dict(model, options=Options(**options))
    return seen[0]


@pytest.mark.private(
    "torch.distributed.checkpoint.state_dict._get_model_state_dict",
    need="replaced, so that get_model_state_dict and get_state_dict know our units; no other class "
    "of wrapper can be announced to them",
    instead="get_model_state_dict and get_state_dict of our own, which users call in place of "
    "torch's",
)
def test_model_states_come_from_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(model: nn.Module, info: Any) -> dict[str, Any]:
        assert info.handle_model
        return {f"{type(model).__name__} {info.full_state_dict}": torch.ones(1)}

    model, optimizer = _trained()
    monkeypatch.setattr(state_dict, "_get_model_state_dict", ours)
    options = Options(full_state_dict=True)
    assert list(state_dict.get_model_state_dict(model, options=options)) == ["Linear True"]
    assert list(state_dict.get_state_dict(model, optimizer)[0]) == ["Linear False"]


@pytest.mark.private(
    "DefaultLoadPlanner.set_up_planner",
    need="replaced, so that states of which a template has none are not ignored",
    instead="a planner of our own, which users pass to dcp.load",
)
def test_planners_are_told_what_is_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    original = default_planner.DefaultLoadPlanner.set_up_planner

    def ours(planner: Any, state_dict: Any, metadata: Any, *rest: Any) -> None:
        seen.append((list(state_dict), metadata.planner_data, planner.allow_partial_load))
        original(planner, state_dict, metadata, *rest)

    monkeypatch.setattr(default_planner.DefaultLoadPlanner, "set_up_planner", ours)
    dcp.save({"a": torch.ones(1), "b": {"c": 1}}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"a": torch.zeros(1)}, checkpoint_id=tmp_path, no_dist=True)
    assert seen == [(["a"], {"a": ("a",), "b.c": ("b", "c")}, False)]


@pytest.mark.private(
    "torch.distributed.checkpoint.state_dict._load_model_state_dict",
    need="replaced, so that set_model_state_dict and set_state_dict know our units",
    instead="set_model_state_dict and set_state_dict of our own, which users call in place of "
    "torch's",
)
def test_model_states_go_to_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def ours(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
        seen.append((model, list(state_dict), info.strict))
        return "report"

    model, optimizer = _trained()
    both = state_dict.get_state_dict(model, optimizer)
    monkeypatch.setattr(state_dict, "_load_model_state_dict", ours)
    options = Options(strict=False)
    assert state_dict.set_model_state_dict(model, both[0], options=options) == "report"
    found: Any = state_dict.set_state_dict(
        model, optimizer, model_state_dict=both[0], optim_state_dict=both[1]
    )
    assert found == "report"
    assert seen == [(model, ["weight", "bias"], strict) for strict in (False, True)]


@pytest.mark.private(
    "torch.distributed.checkpoint.state_dict._get_optim_state_dict",
    need="replaced, so that get_optimizer_state_dict and get_state_dict know our units: "
    "torch's own would save one rank's shard of a state as the whole",
    instead="get_optimizer_state_dict and get_state_dict of our own, which users call in place of "
    "torch's",
)
def test_optimizer_states_come_from_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(model: nn.Module, optimizers: Any, info: Any) -> dict[str, Any]:
        assert (list(optimizers), info.handle_optim) == ([optimizer], True)
        return {"state": {}, "param_groups": [info.full_state_dict]}

    model, optimizer = _trained()
    monkeypatch.setattr(state_dict, "_get_optim_state_dict", ours)
    options = Options(full_state_dict=True)
    alone = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    assert alone["param_groups"] == [True]
    assert state_dict.get_state_dict(model, optimizer)[1]["param_groups"] == [False]


@pytest.mark.private(
    "torch.distributed.checkpoint.state_dict._load_optim_state_dict",
    need="replaced, so that set_optimizer_state_dict and set_state_dict know our units",
    instead="set_optimizer_state_dict and set_state_dict of our own, which users call in place of "
    "torch's",
)
def test_optimizer_states_go_to_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def ours(model: nn.Module, optimizers: Any, state_dict: dict[str, Any], info: Any) -> None:
        seen.append((list(optimizers), list(state_dict), info.strict))

    model, optimizer = _trained()
    both: Any = state_dict.get_state_dict(model, optimizer)
    monkeypatch.setattr(state_dict, "_load_optim_state_dict", ours)
    state_dict.set_optimizer_state_dict(model, optimizer, both[1], options=Options(strict=False))
    state_dict.set_state_dict(model, optimizer, model_state_dict=both[0], optim_state_dict=both[1])
    assert seen == [([optimizer], ["state", "param_groups"], strict) for strict in (False, True)]


@pytest.mark.private(
    "torch.distributed.checkpoint.state_dict._load_optim_state_dict",
    need="the user's StateDictOptions, which the replaced functions get as attributes of an object",
    instead="the options themselves, in functions of our own that users call",
)
def test_options_reach_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _trained()
    defaults = {
        "full_state_dict": False,
        "cpu_offload": False,
        "ignore_frozen_params": False,
        "keep_submodule_prefixes": True,
        "strict": True,
        "broadcast_from_rank0": False,
        "flatten_optimizer_state_dict": False,
    }
    changed = {name: not value for name, value in defaults.items()}
    for options in (defaults, changed):
        info = _info_of(monkeypatch, model, optimizer, **options)
        assert {name: getattr(info, name) for name in options} == options
    assert (info.handle_model, info.handle_optim) == (False, True)
    assert list(info.submodule_prefixes) == []


@pytest.mark.private(
    "torch.distributed.checkpoint.state_dict._init_optim_state",
    need="the states that an optimizer makes in its first step, without that step",
    instead="a step of our own, with zero gradients and a learning rate of 0",
)
def test_states_are_made_without_a_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    before = model.weight.detach().clone()
    state_dict._init_optim_state(optimizer)
    assert all(set(optimizer.state[one]) >= {"exp_avg", "step"} for one in model.parameters())
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.25
    states = {one: dict(optimizer.state[one]) for one in model.parameters()}
    state_dict._init_optim_state(optimizer)
    assert all(
        optimizer.state[one][name] is value for one in states for name, value in states[one].items()
    )


class _Wrapper(nn.Module):
    """A wrapper whose own name is in no key."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"": "_fsdp_wrapped_module"}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_fsdp_wrapped_module"), name)


@pytest.mark.private(
    "Module._fqn_modifiers",
    need="torch asks a module for it: the wrapper's name is in no key of a state dict",
    instead="functions of our own that users call: torch's look for parameters by name before they "
    "come to the replaced ones",
)
def test_the_name_of_a_wrapper_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(_Wrapper(nn.Sequential(inner)), nn.Linear(2, 1))
    for whole in (model, _Wrapper(model)):
        info = _info_of(monkeypatch, whole)
        found = {name: one for name, one in info.fqn_param_mapping.items() if type(name) is str}
        assert found.keys() == {"0.0.weight", "1.weight", "1.bias"}
        assert found["0.0.weight"] is inner.weight


# -- tensors of which no rank has the whole --------------------------------------------------------


class _Refused(torch.Tensor):
    """A tensor of which no rank has the whole."""

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        raise NotImplementedError(f"written: {fqn}")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise NotImplementedError("read")


@pytest.mark.private(
    "Tensor.__create_write_items__",
    "Tensor.__create_chunk_list__",
    need="values of a LOCAL_STATE_DICT are refused: torch.distributed.checkpoint would keep one "
    "rank's",
    instead="a check of ours: nothing else tells a user that such a checkpoint is wrong",
)
def test_a_value_can_refuse_to_be_written_or_read(tmp_path: Path) -> None:
    plain, refused = torch.ones(2), torch.ones(2).as_subclass(_Refused)
    with pytest.raises(dcp.CheckpointException, match="written: a"):
        dcp.save({"a": refused}, checkpoint_id=tmp_path / "refused", no_dist=True)
    dcp.save({"a": plain}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(dcp.CheckpointException, match="read"):
        dcp.load({"a": refused}, checkpoint_id=tmp_path / "plain", no_dist=True)


# -- files ----------------------------------------------------------------------------------------

NESTED = {"model": {"a": torch.ones(2, 3)}, "others": {"list": [1, "two"], "b": [torch.ones(1)]}}


def _saved(folder: Path) -> Metadata:
    dcp.save(NESTED, checkpoint_id=folder, no_dist=True)
    return dcp.FileSystemReader(folder).read_metadata()


@pytest.mark.private(
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    need="the index of a checkpoint is a pickle: what it consists of is unpickled, and "
    "nothing else",
    instead="the names that this test finds, in storage_reader._ALLOWED_CLASSES",
)
def test_an_index_consists_of_few_classes(tmp_path: Path) -> None:
    names = (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
    )
    allowed = [getattr(metadata, name) for name in names.split()]
    allowed += [filesystem._StorageInfo, torch.serialization._get_layout, OrderedDict, torch.Size]
    found = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            value = super().find_class(module, name)
            is_constant = module == "torch" and isinstance(value, torch.dtype | torch.layout)
            is_path = module.split(".")[0] == "pathlib" and name.endswith("Path")
            if not is_constant and not is_path:
                found.add((module, name))
            return value

    expected = _saved(tmp_path)
    index: Metadata = Noting(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
    assert found <= {(one.__module__, one.__qualname__) for one in allowed}
    private = {"_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout"}
    assert private <= {name for _, name in found}
    assert index.state_dict_metadata == expected.state_dict_metadata
    assert torch.serialization._get_layout("torch.strided") is torch.strided


@pytest.mark.private(
    "FileSystemReader.read_metadata",
    "FileSystemReader.load_id",
    need="the restricted reading of an index, in the place of torch's",
    instead="a StorageReader of our own",
)
def test_a_reader_may_read_the_index_itself(tmp_path: Path) -> None:
    _saved(tmp_path)
    num_read = 0

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            nonlocal num_read
            num_read += 1
            index: Metadata = pickle.loads((Path(self.path) / ".metadata").read_bytes())
            assert index.storage_meta is not None
            index.storage_meta.load_id = self.load_id
            return index

    loaded = {"model": {"a": torch.zeros(2, 3)}}
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert torch.equal(loaded["model"]["a"], NESTED["model"]["a"])
    assert num_read == 1


@pytest.mark.private(
    "torch.distributed.checkpoint._traverse.set_element",
    "DefaultLoadPlanner.mappings",
    "DefaultLoadPlanner.original_state_dict",
    need="a value that was read with weights_only=True, put at its place of a nested state",
    instead="a loop over the path in planner_data of the index",
)
def test_a_value_is_put_at_its_place(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._traverse import set_element

    class Planner(default_planner.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            plain = torch.load(value, map_location="cpu", weights_only=True)
            path = self.mappings[read_item.dest_index.fqn]
            set_element(self.original_state_dict, path, plain)

    _saved(tmp_path)
    loaded: dict[str, Any] = {"others": {"list": [None, None]}}
    dcp.load(loaded, checkpoint_id=tmp_path, planner=Planner(), no_dist=True)
    assert loaded == {"others": {"list": [1, "two"]}}


@pytest.mark.private(
    "torch.distributed.checkpoint._nested_dict.unflatten_state_dict",
    need="a nested state from the flat keys and the paths of an index",
    instead="a loop over the paths in planner_data",
)
def test_a_state_is_nested_again(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    index = _saved(tmp_path)
    keys = [key for key in index.state_dict_metadata if index.planner_data[key][0] == "others"]
    assert {index.planner_data[key] for key in keys} >= {("others", "b", 0)}
    values = {key: key for key in keys}
    nested = unflatten_state_dict(values, {key: index.planner_data[key] for key in keys})
    assert nested["others"].keys() == {"list", "b"}
    assert nested["others"]["b"] == ["others.b.0"]


@pytest.mark.private(
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager",
    need="copies of a device's tensors in pinned memory that is kept; DefaultStager of torch 2.11 "
    "drops it after each copy, and fails at the second one",
    instead="copies without pinned memory, which take several times as long",
)
def test_a_stager_keeps_its_memory() -> None:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    stager = StateDictStager(pin_memory=False)
    tensor = torch.arange(4.0)
    first = stager.stage({0: tensor}, non_blocking=True)[0]
    tensor.add_(1)
    second = stager.stage({0: tensor}, non_blocking=True)[0]
    assert second.data_ptr() == first.data_ptr() != tensor.data_ptr()
    assert second.tolist() == [1, 2, 3, 4]


class _Stream:
    """The part of a file that a writer may use."""

    def __init__(self, stream: Any, write: Callable[[bytes], object]) -> None:
        self.flush, self.close, self.fileno = stream.flush, stream.close, stream.fileno
        self._stream, self._note, self._size = stream, write, 0

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._note(bytes(view))
        self._size += len(view)
        return int(self._stream.write(view))

    def tell(self) -> int:
        return self._size


@pytest.mark.private(
    "torch.distributed.checkpoint.filesystem.FileSystem",
    "FileSystemWriter.fs",
    need="the bytes of a writer's files while they are written, for checksums, and its renames",
    instead="checksums of the finished files, read again",
)
def test_a_writer_uses_the_file_system_that_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, bytes] = {}
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)

    def note(name: str, content: bytes) -> None:
        written[name] += content

    class Noting(filesystem.FileSystem):
        @contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            name = Path(path).name
            assert mode == "wb"
            written[name] = b""
            with super().create_stream(path, mode) as stream:
                yield _Stream(stream, partial(note, name))

        def rename(self, path: Any, new_path: Any) -> None:
            super().rename(path, new_path)
            written[Path(new_path).name] = written.pop(Path(path).name)

    writer = dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0)
    writer.fs = Noting()
    dcp.save(NESTED, storage_writer=writer, no_dist=True)
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == written
    assert ".metadata" in found
    assert len(synced) == len(found)
