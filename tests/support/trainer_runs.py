"""What test_trainer runs on each rank, under torchrun: tiny Trainers, and what came of them."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_dynamo import FSDPStateError, ShardingStrategy, UnsupportedError, record_events
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.integrations import trainer
from fsdp_dynamo.integrations import trainer as integration
from fsdp_dynamo.integrations.sharding import Sharding
from fsdp_dynamo.integrations.trainer import FSDPTrainer

STEPS = 6
GRAPH = {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True}
HOOKS = {"backend": "aot_eager"}


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


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    return TrainingArguments(**{**settings(folder), **changed})


def settings(folder: Path) -> dict[str, Any]:
    """Two epochs, clipped hard, each step logged."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "ddp_backend": "gloo",
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


def make(
    kind: type[Trainer], args: TrainingArguments, dropout: float = 0.0, **named: Any
) -> Trainer:
    """A Trainer of a new model, the same in all runs."""
    model: nn.Module = hf_models.make("llama")[0]
    model.config.attention_dropout = dropout
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return kind(model, args, train_dataset=Tokens(1), eval_dataset=Tokens(2, 10), **named)


def logged(trainer: Trainer, what: str = "loss") -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if what in entry]


def numbers(trainer: Trainer) -> dict[str, Any]:
    """What a run is compared by."""
    return {
        "losses": logged(trainer),
        "norms": logged(trainer, "grad_norm"),
        "rates": logged(trainer, "learning_rate"),
        "eval": trainer.evaluate()["eval_loss"],
        "flos": trainer.state.total_flos,
    }


def same_as_ddp(folder: Path) -> dict[str, Any]:
    """The same run with DistributedDataParallel and sharded."""
    grad_op = Sharding(layers={LlamaDecoderLayer}, strategy=ShardingStrategy.SHARD_GRAD_OP)
    found: dict[str, Any] = {}
    for name, sharding in (("ddp", None), ("eager", Sharding()), ("grad op", grad_op)):
        args = arguments(folder / name)
        trainer = _new(args, sharding)
        with record_events() as log:
            trainer.train()
        found[name] = {
            **numbers(trainer),
            "gathers": len(log.keys("all_gather")),
            "scatters": len(log.keys("reduce_scatter")),
            "numel": sum(local_of(p).numel() for p in trainer.model.parameters()),
        }
    return found


def _new(args: TrainingArguments, sharding: Sharding | None) -> Trainer:
    return make(Trainer, args) if sharding is None else make(FSDPTrainer, args, sharding=sharding)


def graph(folder: Path) -> dict[str, Any]:
    """The same in graph mode."""
    return _compiled(folder, Sharding(compile=GRAPH))


def hooks(folder: Path) -> dict[str, Any]:
    """The same on the hooks mode."""
    return _compiled(folder, Sharding(layers=["LlamaDecoderLayer"], compile=HOOKS))


def _compiled(folder: Path, sharding: Sharding) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, given in (("ddp", None), ("compiled", sharding)):
        counters.clear()
        trainer = _new(arguments(folder / name, gradient_accumulation_steps=1), given)
        trainer.train()
        found[name] = {**numbers(trainer), "graphs": counters["stats"]["unique_graphs"]}
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Whole, stopped after 3 steps, and gone on with, in the middle of an epoch, with dropout."""
    saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    whole = make(FSDPTrainer, arguments(folder / "whole", **saving), dropout=0.2)
    whole.train()
    args = arguments(folder / "parts", **saving)
    make(FSDPTrainer, args, dropout=0.2, callbacks=[StopAt(3)]).train()
    if dist.get_rank() == 0:  # a run that was killed left these
        (folder / "parts" / "checkpoint-5" / "fsdp_dynamo" / "000001-step-5.part").mkdir(
            parents=True
        )
    dist.barrier()
    newest = trainer.newest(folder / "parts")
    torch.manual_seed(99)
    again = make(FSDPTrainer, args, dropout=0.2)
    again.train(resume_from_checkpoint=True)
    names = sorted(path.name for path in (folder / "whole").glob("checkpoint-*/*"))
    return {
        "newest": Path(str(newest)).name,
        "whole": numbers(whole),
        "again": numbers(again),
        "files": names,
        "equal": all(
            torch.equal(local_of(a), local_of(b))
            for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True)
        ),
    }


def saved(folder: Path) -> dict[str, Any]:
    """save_model() writes what from_pretrained() reads, as a plain model."""
    trainer = make(FSDPTrainer, arguments(folder / "run"), sharding=Sharding())
    trainer.train()
    trainer.save_model(str(folder / "model"))
    dist.barrier()
    plain = AutoModelForCausalLM.from_pretrained(folder / "model")
    expected = {key: value.full_tensor() for key, value in trainer.model.state_dict().items()}
    loss = trainer.evaluate()["eval_loss"]
    args = arguments(folder / "plain")
    alone = Trainer(plain, args, eval_dataset=Tokens(2, 10)).evaluate()["eval_loss"]
    return {
        "class": type(plain).__name__,
        "keys": plain.state_dict().keys() == expected.keys(),
        "values": all(torch.equal(v, expected[k]) for k, v in plain.state_dict().items()),
        "losses": [loss, alone],
        "files": sorted(path.name for path in (folder / "model").iterdir()),
    }


class LaterIsBetter(FSDPTrainer):
    """Has a metric that grows with each step."""

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        found = super().evaluation_loop(*arguments, **named)
        found.metrics["eval_latest"] = float(self.state.global_step)
        return found


def last_is_best(folder: Path) -> str:
    """The name of the best checkpoint of a run that becomes better and better."""
    each = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "latest",
        "save_total_limit": 1,
    }
    trainer = make(LaterIsBetter, arguments(folder, **each, **best))
    trainer.train()
    return Path(str(trainer.state.best_model_checkpoint)).name


def best(folder: Path) -> dict[str, Any]:
    """The best model comes back at the end, out of our checkpoint and out of whole ones."""
    found: dict[str, Any] = {}
    for only_model in (False, True):
        args = arguments(
            folder / str(only_model),
            learning_rate=0.05,  # what it learns of random tokens helps with no others
            lr_scheduler_type="constant",
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            save_only_model=only_model,
        )
        trainer = make(FSDPTrainer, args)
        trainer.train()
        losses = logged(trainer, "eval_loss")
        found[str(only_model)] = [losses, trainer.evaluate()["eval_loss"]]
    return found


def others(folder: Path) -> dict[str, Any]:
    """Label smoothing, activation checkpointing, low precision, evaluation before training."""
    found: dict[str, Any] = {}
    for name, changed in {
        "smoothing": {"label_smoothing_factor": 0.1},
        "checkpointing": {"activation_checkpointing": True},
        "bf16": {"bf16": True},
        "no clipping": {"max_grad_norm": 0.0},
        "sync each batch": {
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        },
    }.items():
        runs: list[Any] = []
        for kind in (Trainer, FSDPTrainer):
            trainer = make(kind, arguments(folder / name, max_steps=2, **copy.deepcopy(changed)))
            if kind is FSDPTrainer:  # Trainer would not wrap the model afterwards
                trainer.evaluate()
            trainer.train()
            runs.append([*logged(trainer), *logged(trainer, "grad_norm")])
        found[name] = runs
    return found


class FSDPSeq2SeqTrainer(FSDPTrainer, Seq2SeqTrainer):
    """What the documentation tells to write."""


def generated(folder: Path) -> dict[str, Any]:
    """Predictions with generate(), which ends after other lengths on each rank."""
    found: dict[str, Any] = {}
    for kind in (Seq2SeqTrainer, FSDPSeq2SeqTrainer):
        args = Seq2SeqTrainingArguments(
            **{**settings(folder), "predict_with_generate": True, "per_device_eval_batch_size": 2}
        )
        model = hf_models.make("t5")[0]
        for param in model.parameters():  # or it says the same all the time
            nn.init.normal_(param, std=0.3)
        trainer = kind(model, args, data_collator=default_data_collator)
        found[kind.__name__] = trainer.predict(Tokens(2, 8), max_length=8).predictions.tolist()
    return found


def stopped(folder: Path) -> dict[str, Any]:
    """A run that ends early, and the losses of a whole one."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    args = arguments(folder, **saving)
    make(FSDPTrainer, args, callbacks=[StopAt(3)]).train()
    whole = make(FSDPTrainer, arguments(folder / "whole"))
    whole.train()
    return {"losses": logged(whole)}


def fewer(folder: Path) -> dict[str, Any]:
    """One rank goes on with what two have stopped, with their batches in one."""
    args = arguments(folder.parent / "stopped", per_device_train_batch_size=4)
    trainer = make(FSDPTrainer, args)
    trainer.train(resume_from_checkpoint=True)
    return {"losses": logged(trainer)}


def refused(folder: Path) -> dict[str, str]:
    """Errors by what is wrong."""
    found: dict[str, str] = {}
    for name, changed in {
        "fp16": {"fp16": True},
        "compile": {"torch_compile": True},
        "batch": {"auto_find_batch_size": True},
    }.items():
        try:
            make(FSDPTrainer, arguments(folder, **changed))
        except UnsupportedError as error:
            found[name] = str(error)
    with mock.patch.object(Trainer, "_clip_grad_norm"):
        del Trainer._clip_grad_norm
        try:
            integration._check_trainer()
        except FSDPStateError as error:
            found["version"] = str(error)
    plain = make(Trainer, arguments(folder / "plain", save_strategy="steps", save_steps=6))
    plain.train()
    for name, sharding, path in (
        ("layers", Sharding(layers=["Llama"]), None),
        ("other", Sharding(), str(folder / "plain" / "checkpoint-6")),
    ):
        try:
            trainer = make(FSDPTrainer, arguments(folder / name), sharding=sharding)
            trainer.train(path)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


_ALL = (same_as_ddp, graph, hooks, resumed, saved, best, last_is_best, others, generated, refused)
RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    run.__name__: run for run in (*_ALL, stopped, fewer)
}


def main() -> None:
    """Run those named; each rank writes its results."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    results: dict[str, Any] = {}
    for name in sys.argv[2:]:
        results[name] = RUNS[name](folder / name)
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
