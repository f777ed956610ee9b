"""transformers.Trainer on fsdp_dynamo, beside itself with DistributedDataParallel."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import different, whole
from modes import MODES
from pool import RankPool, on_ranks
from torch import nn
from torch._dynamo.utils import counters

pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.23")  # on Python 3.10 pip finds older ones only

import hf_models  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from fsdp_dynamo import (  # noqa: E402
    FSDPStateError,
    ShardingStrategy,
    UnsupportedError,
    record_events,
)
from fsdp_dynamo.core.dtensors import local_of  # noqa: E402
from fsdp_dynamo.integrations import trainer as integration  # noqa: E402
from fsdp_dynamo.integrations.sharding import Sharding  # noqa: E402
from fsdp_dynamo.integrations.trainer import FSDPTrainer  # noqa: E402

STEPS = 6


def launched(body: Callable[..., None]) -> Callable[..., None]:
    """As under torchrun, but that the group is there already."""

    @functools.wraps(body)
    def run(rank: int, *arguments: Any) -> None:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}
        # Without the last one, accelerate sets the number of threads.
        names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1, "OMP_NUM_THREADS": 1}
        try:
            with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}):
                body(rank, *arguments)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)

    return run


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random rows of tokens."""

    def __init__(self, seed: int, num_rows: int = 32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(2, hf_models.VOCABULARY, (num_rows, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class StopAt(TrainerCallback):
    """End a run early: the schedule stays that of the whole one."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "ddp_backend": "gloo",
    "ddp_find_unused_parameters": False,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Two epochs, clipped hard, each step logged."""


def make(
    kind: type[Trainer],
    folder: Path,
    model: nn.Module | None = None,
    dropout: float = 0.0,
    named: dict[str, Any] | None = None,
    **changed: Any,
) -> Any:
    """A Trainer of a new model, the same in all runs; ``changed``: its training arguments."""
    args = TrainingArguments(**{"output_dir": str(folder), **SETTINGS, **changed})
    if model is None:
        model = hf_models.make("llama", attention_dropout=dropout)[0]
    data = {"train_dataset": Tokens(1), "eval_dataset": Tokens(2, 10)}
    return kind(model, args, **data, **(named or {}))


def logged(trainer: Trainer, what: str = "loss") -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if what in entry]


def _numbers(trainer: Trainer) -> list[float]:
    """What a run is compared by: losses, norms before clipping, rates, and an evaluation."""
    every = [*logged(trainer), *logged(trainer, "grad_norm"), *logged(trainer, "learning_rate")]
    return [*every, trainer.evaluate()["eval_loss"], trainer.state.total_flos]


LLAMA = ["LlamaDecoderLayer"]


@pytest.mark.parametrize(
    ("sharding", "gathers"),
    [
        ({}, 60),
        ({"layers": LLAMA, "strategy": ShardingStrategy.SHARD_GRAD_OP}, 36),
        pytest.param({"layers": LLAMA, "compile": MODES["hooks"]}, None, marks=pytest.mark.slow),
        pytest.param({"compile": MODES["graph"]}, None, marks=pytest.mark.slow),
    ],
    ids=["eager", "grad op", "hooks", "graph"],
)
@on_ranks(2)
@launched
def test_trains_as_ddp(
    rank: int, tmp_path: Path, sharding: dict[str, Any], gathers: int | None
) -> None:
    """Two batches a step are reduced once."""
    changed = {"gradient_accumulation_steps": 2 if gathers else 1}
    plain = make(Trainer, tmp_path, **changed)
    plain.train()
    if gathers:
        assert logged(plain)[-1] < logged(plain)[0]
        assert min(logged(plain, "grad_norm")) > 0.3  # clipped in each step
    counters.clear()
    ours = make(FSDPTrainer, tmp_path, named={"sharding": Sharding(**sharding)}, **changed)
    with record_events() as log:
        ours.train()
    if gathers:
        scatters = 3 * 6  # 3 units, 6 steps
        assert (len(log.keys("all_gather")), len(log.keys("reduce_scatter"))) == (gathers, scatters)
    assert _numbers(ours) == pytest.approx(_numbers(plain), rel=2e-6)
    assert (counters["stats"]["unique_graphs"] >= 2) == ("compile" in sharding)
    numels = [sum(local_of(p).numel() for p in one.model.parameters()) for one in (ours, plain)]
    assert 2 * numels[0] == numels[1]


class FSDPSeq2SeqTrainer(FSDPTrainer, Seq2SeqTrainer):
    """What the documentation tells to write."""


@on_ranks(2)
@launched
def test_generates_as_plain_trainer(rank: int, tmp_path: Path) -> None:
    """Predictions with generate(), which ends after other lengths on each rank."""
    found = []
    for kind in (Seq2SeqTrainer, FSDPSeq2SeqTrainer):
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            **{**SETTINGS, "predict_with_generate": True, "per_device_eval_batch_size": 2},
        )
        model = hf_models.make("t5")[0]
        for param in model.parameters():  # or it says the same all the time
            nn.init.normal_(param, std=0.3)
        trainer = kind(model, args, data_collator=default_data_collator)
        found.append(trainer.predict(Tokens(2, 8), max_length=8).predictions.tolist())
    assert found[0] == found[1]
    assert len(found[0]) == 8
    assert len({tuple(row) for row in found[0]}) > 4


@on_ranks(2)
@launched
def test_with_other_arguments(rank: int, tmp_path: Path) -> None:
    """As plain Trainer; in bfloat16 autocast keeps other operations in float32 than we do."""
    every_batch = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    for changed in (
        {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0, "accelerator_config": every_batch},
        {"activation_checkpointing": True},
        {"bf16": True},
    ):
        runs: list[list[float]] = []
        for kind in (Trainer, FSDPTrainer):
            trainer = make(kind, tmp_path, max_steps=2, **copy.deepcopy(changed))
            if kind is FSDPTrainer:  # Trainer would not wrap the model afterwards
                trainer.evaluate()
            trainer.train()
            runs.append([*logged(trainer), *logged(trainer, "grad_norm")])
        low = "bf16" in changed
        assert runs[1] == pytest.approx(runs[0], rel=1e-2 if low else 1e-6), changed
        assert not low or runs[1] != pytest.approx(runs[0], rel=1e-6)


# -- checkpoints -----------------------------------------------------------------------------------


@on_ranks(2)
@launched
def test_resumed_as_if_never_stopped(rank: int, tmp_path: Path) -> None:
    """In the middle of an epoch, with dropout; a checkpoint that is not complete is left out."""
    saving = {"dropout": 0.2, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    straight = make(FSDPTrainer, tmp_path / "whole", **saving)
    straight.train()
    parts = tmp_path / "parts"
    make(FSDPTrainer, parts, named={"callbacks": [StopAt(3)]}, **saving).train()
    if rank == 0:  # a run that was killed left these
        (parts / "checkpoint-5/fsdp_dynamo/000001-step-5.part").mkdir(parents=True)
    dist.barrier()
    assert Path(str(integration.newest(parts))).name == "checkpoint-3"
    torch.manual_seed(99)
    again = make(FSDPTrainer, parts, **saving)
    again.train(resume_from_checkpoint=True)
    assert _numbers(again) == _numbers(straight)
    for one, other in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(local_of(one), local_of(other))
    files = sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*/*"))
    assert files == ["fsdp_dynamo"] * 2 + ["trainer_state.json"] * 2


@on_ranks(2)
@launched
def test_saved_for_from_pretrained(rank: int, tmp_path: Path) -> None:
    """save_model() writes what from_pretrained() reads, as a plain model."""
    trainer = make(FSDPTrainer, tmp_path / "run", named={"sharding": Sharding()}, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    dist.barrier()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(plain) is LlamaForCausalLM
    expected = {key: whole(value) for key, value in trainer.model.state_dict().items()}
    torch.testing.assert_close(dict(plain.state_dict()), expected, rtol=0, atol=0)
    loss = make(Trainer, tmp_path / "plain", plain).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)


@on_ranks(2)
@launched
def _stopped(rank: int, folder: Path) -> None:
    """A run that ends early, and a whole one, whose losses are written."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    make(FSDPTrainer, folder / "run", named={"callbacks": [StopAt(3)]}, **saving).train()
    straight = make(FSDPTrainer, folder / "whole")
    straight.train()
    torch.save(logged(straight), folder / f"losses-{rank}")


@on_ranks(1)
@launched
def _fewer(rank: int, folder: Path) -> None:
    """One rank goes on with what two have stopped, with their batches in one."""
    trainer = make(FSDPTrainer, folder / "run", per_device_train_batch_size=4)
    trainer.train(resume_from_checkpoint=True)
    expected = torch.load(folder / "losses-0")
    assert logged(trainer) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_fewer_ranks_go_on(ranks: RankPool, tmp_path: Path) -> None:
    _stopped(ranks=ranks, folder=tmp_path)
    _fewer(ranks=ranks, folder=tmp_path)


class LaterIsBetter(FSDPTrainer):
    """Has a metric that grows with each step."""

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        found = super().evaluation_loop(*arguments, **named)
        found.metrics["eval_latest"] = float(self.state.global_step)
        return found


@on_ranks(2)
@launched
def test_best_model_comes_back(rank: int, tmp_path: Path) -> None:
    """At the end, out of our checkpoint and out of whole ones; the last one may be the best."""
    each = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    each |= {"load_best_model_at_end": True, "max_steps": 4}
    for only_model in (False, True):
        trainer = make(
            FSDPTrainer,
            tmp_path / str(only_model),
            learning_rate=0.05,  # what it learns of random tokens helps with no others
            lr_scheduler_type="constant",
            save_only_model=only_model,
            **each,
        )
        trainer.train()
        losses = logged(trainer, "eval_loss")
        assert min(losses) < losses[-1]
        assert trainer.evaluate()["eval_loss"] == min(losses)
    best = {"metric_for_best_model": "latest", "save_total_limit": 1}
    trainer = make(LaterIsBetter, tmp_path / "later", **each, **best)
    trainer.train()
    assert Path(str(trainer.state.best_model_checkpoint)).name == "checkpoint-4"


# -- adapters --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@on_ranks(2)
@launched
def test_peft(rank: int, tmp_path: Path) -> None:
    """The same run with DDP and sharded; both save the adapter."""
    import peft

    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    losses = []
    for name, kind in (("ddp", Trainer), ("sharded", FSDPTrainer)):
        model = peft.get_peft_model(hf_models.make("llama")[0], peft.LoraConfig(**lora))
        named = {} if kind is Trainer else {"sharding": Sharding(layers=LLAMA)}
        trainer = make(kind, tmp_path / name, model, named=named, learning_rate=0.5)
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        losses.append(logged(trainer))
    dist.barrier()
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("ddp", "sharded")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert different(*map(load_file, files), rtol=1e-3) == []


# -- what is refused -------------------------------------------------------------------------------


@on_ranks(2)
@launched
def test_refused(rank: int, tmp_path: Path) -> None:
    for name in ("fp16", "torch_compile", "auto_find_batch_size"):
        with pytest.raises(UnsupportedError, match=rf"without {name}, got {name}=True\. \w"):
            make(FSDPTrainer, tmp_path, **{name: True})
    with mock.patch.object(Trainer, "_clip_grad_norm"):
        del Trainer._clip_grad_norm
        with pytest.raises(FSDPStateError, match=r"the method _clip_grad_norm, got transformers 5"):
            integration._check_trainer()
    make(Trainer, tmp_path / "plain", save_strategy="steps", save_steps=6).train()
    for sharding, path, words in (
        (Sharding(layers=["Llama"]), None, r"got 'Llama'\. Name some of: .*LlamaDecoderL"),
        (Sharding(), str(tmp_path / "plain/checkpoint-6"), "got 'optimizer.pt' of another Trainer"),
    ):
        with pytest.raises(Exception, match=words):
            make(FSDPTrainer, tmp_path / "own", named={"sharding": sharding}).train(path)
