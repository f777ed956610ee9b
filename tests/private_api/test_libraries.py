"""Other libraries."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

NORM = 7.0  # of gradients, as the Trainer below finds it


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Trainers set variables of the environment, and seeds."""
    before = random.getstate()
    with mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}), torch.random.fork_rng():
        yield
    random.setstate(before)


# -- transformers and accelerate ------------------------------------------------------------------


@pytest.fixture
def transformers() -> Iterator[Any]:
    """The library; accelerate knows of nothing that ran before, and keeps nothing."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield pytest.importorskip("transformers")
    state._reset_state(reset_partial_state=True)


def _llama() -> Any:
    import hf_models  # of tests/support; needs transformers

    return hf_models.make("llama")[0]


def _trainer(transformers: Any, folder: Path, kind: type, **changed: Any) -> Any:
    """A Trainer of two steps."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = transformers.TrainingArguments(**{**settings, **changed})
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    return kind(_llama(), args, train_dataset=rows, eval_dataset=rows[:1])


def _own_trainer(transformers: Any, calls: list[Any]) -> type:
    """A Trainer with the methods replaced that FSDPTrainer replaces."""

    class Own(transformers.Trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            calls.append("create_accelerator_and_postprocess")
            super().create_accelerator_and_postprocess()

        def create_optimizer(self, model: nn.Module | None = None) -> Any:
            self.model._is_accelerate_prepared = True
            return super().create_optimizer(model)

        def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
            self.model._is_accelerate_prepared = True
            found = super().evaluation_loop(*arguments, **named)
            found.metrics["eval_step"] = self.state.global_step
            return found

        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            calls.append("_move_model_to_device")

        def floating_point_ops(self, inputs: dict[str, Any]) -> int:
            return int(inputs["input_ids"].numel())

        def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
            return torch.tensor(NORM)

        def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
            return torch.tensor(-NORM) if grad_norm is None else grad_norm

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            calls.append(("save_model", _internal_call))
            Path(str(output_dir)).mkdir()  # or the Trainer does not see the best one in it

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            Path(output_dir, "ours").write_text(str(self.state.global_step))

        def _save_rng_state(self, output_dir: str) -> None:
            pass

        def _load_from_checkpoint(self, path: str, model: nn.Module | None = None) -> None:
            calls.append(("_load_from_checkpoint", path))

        def _load_optimizer_and_scheduler(self, path: str | None) -> None:
            calls.append(("_load_optimizer_and_scheduler", path))

        def _load_rng_state(self, path: str | None) -> None:
            calls.append(("_load_rng_state", path))

        def _load_best_model(self) -> None:
            calls.append(("_load_best_model", self.state.best_model_checkpoint))

    return Own


@pytest.mark.private(
    "Trainer.create_accelerator_and_postprocess",
    "Trainer.create_optimizer",
    "Trainer.evaluation_loop",
    "Trainer._move_model_to_device",
    "Trainer.floating_point_ops",
    "Trainer._clip_grad_norm",
    "Trainer._get_grad_norm",
    need="methods that FSDPTrainer overrides: the model is sharded before the optimizer is made or "
    "it is evaluated, and norms are those of all ranks; transformers.Trainer has no extension "
    "point for another kind of sharding",
    instead="a model that users shard before they make the Trainer, max_grad_norm=0, and clipping "
    "in a callback; importing FSDPTrainer says which method is missing",
)
def test_a_trainer_trains_by_what_is_replaced(transformers: Any, tmp_path: Path) -> None:
    calls: list[Any] = []
    own = _own_trainer(transformers, calls)
    for max_grad_norm, norm in ((1.0, NORM), (0.0, -NORM)):
        trainer = _trainer(transformers, tmp_path, own, bf16=True, max_grad_norm=max_grad_norm)
        trainer.train()
        found = [one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one]
        assert found == [norm] * 2
        assert trainer.state.total_flos == 2 * 8
        assert "forward" not in vars(trainer.model)  # accelerate has left it as it is
    evaluated = _trainer(transformers, tmp_path, own, bf16=True)
    evaluated.evaluate()
    assert "forward" not in vars(evaluated.model)
    assert set(calls) >= {"create_accelerator_and_postprocess", "_move_model_to_device"}


@pytest.mark.private(
    "Trainer.save_model",
    "Trainer._save_optimizer_and_scheduler",
    "Trainer._save_rng_state",
    "Trainer._load_from_checkpoint",
    "Trainer._load_optimizer_and_scheduler",
    "Trainer._load_rng_state",
    "Trainer._load_best_model",
    need="methods that FSDPTrainer overrides: a checkpoint of the Trainer holds ours",
    instead="save_strategy='no', and a callback that saves our checkpoint; importing FSDPTrainer "
    "says which method is missing",
)
def test_a_trainer_saves_and_resumes_by_what_is_replaced(transformers: Any, tmp_path: Path) -> None:
    calls: list[Any] = []
    own = _own_trainer(transformers, calls)
    each = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "step"}
    trainer = _trainer(transformers, tmp_path, own, **each, **best)
    trainer.train()
    first, second = (tmp_path / f"checkpoint-{step}" for step in (1, 2))
    for step, folder in enumerate((first, second), 1):
        assert {path.name for path in folder.iterdir()} == {"ours", "trainer_state.json"}
        assert (folder / "ours").read_text() == str(step)
    assert calls.count(("save_model", True)) == 2
    assert calls[-1] == ("_load_best_model", str(second))
    calls.clear()
    resumed = _trainer(transformers, tmp_path / "resumed", own, **each)
    resumed.train(resume_from_checkpoint=str(first))
    assert resumed.state.global_step == 2
    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"):
        assert [one for one in calls if one[0] == name][-1] == (name, str(first))


@pytest.mark.private(
    "Trainer._save",
    need="files for from_pretrained() of the whole state dict, which rank 0 has",
    instead="save_pretrained(folder, state_dict=...) of the model",
)
def test_a_trainer_saves_the_state_that_it_is_given(transformers: Any, tmp_path: Path) -> None:
    trainer = _trainer(transformers, tmp_path / "run", transformers.Trainer)
    state = {name: torch.ones_like(one) for name, one in trainer.model.state_dict().items()}
    trainer._save(str(tmp_path / "saved"), state_dict=state)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(bool((one == 1).all()) for one in loaded.parameters())


@pytest.mark.private(
    "Module._is_accelerate_prepared",
    need="accelerate takes a sharded model as it is; it would wrap it in DistributedDataParallel",
    instead="Accelerator.prepare_model, overridden in an Accelerator that FSDPTrainer makes",
)
def test_accelerate_leaves_a_prepared_model_alone(transformers: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    for is_prepared in (True, False):
        model: Any = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        if is_prepared:
            model._is_accelerate_prepared = True
        assert accelerator.prepare(model, optimizer)[0] is model
        assert ("forward" in vars(model)) != is_prepared


@pytest.mark.private(
    "Module._get_name",
    need="Trainer finds out by the name of the class whether labels are to be shifted, with "
    "label smoothing; fully_shard changes the class",
    instead="the name of the user's class for the subclass that fully_shard makes, too",
)
def test_a_trainer_asks_a_model_for_its_name(transformers: Any, tmp_path: Path) -> None:
    trainer = _trainer(transformers, tmp_path, transformers.Trainer, label_smoothing_factor=0.1)
    inputs = {name: one[None] for name, one in trainer.eval_dataset[0].items()}
    model = trainer.model
    losses = [trainer.compute_loss(model, dict(inputs)).item()]
    name = type(model).__name__
    model.__class__ = type(f"FSDP{name}", (type(model),), {})
    losses.append(trainer.compute_loss(model, dict(inputs)).item())
    model._get_name = partial(str, name)
    losses.append(trainer.compute_loss(model, dict(inputs)).item())
    assert losses[2] == losses[0] != losses[1]


@pytest.mark.private(
    "PreTrainedModel._no_split_modules",
    need="the classes of a transformers model whose modules become units, if none are named",
    instead="Sharding(layers=...), which users then have to give",
)
def test_a_model_names_the_classes_of_its_layers(transformers: Any) -> None:
    with torch.device("meta"):
        model = _llama()
    present = {type(module).__name__ for module in model.modules()}
    assert [name for name in model._no_split_modules if name in present] == ["LlamaDecoderLayer"]


# -- Lightning ------------------------------------------------------------------------------------


class _Stopped(Exception):  # noqa: N818
    """Raised to end a run."""


@pytest.fixture
def lightning(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``lightning.pytorch``, in a process that a launcher has started."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    return pytest.importorskip("lightning.pytorch")


def _module(lightning: Any, calls: list[str]) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            calls.append("configure_optimizers")
            return torch.optim.SGD(self.parameters())

    return Module()


def _lightning_trainer(lightning: Any, strategy: Any, **changed: Any) -> Any:
    plugins = pytest.importorskip("lightning.fabric.plugins.environments")
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        plugins=[plugins.LightningEnvironment()],
        strategy=strategy,
        **changed,
    )


@pytest.mark.private(
    "Strategy._setup_model",
    "Precision.clip_grad_by_norm",
    need="the module is sharded in place before optimizers are made, and its gradients are clipped "
    "by the norm over all ranks; a strategy has no public method for it",
    instead="setup() of our strategy without super(): its few lines, with sharding among them",
)
def test_a_strategy_sets_up_the_module_before_optimizers(lightning: Any) -> None:
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    calls: list[Any] = []

    class Own(strategies.DDPStrategy):  # type: ignore[misc]
        def setup(self, trainer: Any) -> None:
            strategies.Strategy.setup(self, trainer)
            self.precision_plugin.clip_grad_by_norm = lambda *given: calls.append(given[1:])

        def model_to_device(self) -> None:
            pass

        def _setup_model(self, model: nn.Module) -> nn.Module:
            calls.append("_setup_model")
            return model

    module = _module(lightning, calls)
    trainer = _lightning_trainer(lightning, Own(), gradient_clip_val=0.5)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(2, 2)))
    assert calls == ["_setup_model", "configure_optimizers", (0.5,)]
    assert trainer.strategy.model is module


@pytest.mark.private(
    "ParallelStrategy._layer_sync",
    need="Trainer(sync_batchnorm=True) is refused: our setup() does not convert layers",
    instead="no refusal, and a sentence in the documentation",
)
def test_a_strategy_knows_whether_layers_are_synchronised(lightning: Any) -> None:
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    for is_asked in (False, True):
        strategy = strategies.DDPStrategy()
        _lightning_trainer(lightning, strategy, sync_batchnorm=is_asked)
        assert (strategy._layer_sync is not None) == is_asked


@pytest.mark.private(
    "LightningModule._compiler_ctx",
    need="a module that was given to torch.compile is refused: Lightning has compiled its steps",
    instead="a check of the module's own attributes: forward is among them",
)
@pytest.mark.usefixtures("fresh")
def test_a_strategy_knows_whether_the_module_is_compiled(lightning: Any) -> None:
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    found = []

    class Own(strategies.DDPStrategy):  # type: ignore[misc]
        def connect(self, model: Any) -> None:
            found.append(model._compiler_ctx is not None)
            raise _Stopped

    plain = _module(lightning, [])
    for module in (plain, torch.compile(_module(lightning, []), backend="eager")):
        with pytest.raises(_Stopped):
            _lightning_trainer(lightning, Own()).fit(module, torch.ones(2, 2))
    assert found == [False, True]
