"""Hugging Face Trainer, which runs DDP when it is started on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks import workload
from benchmarks.meter import Meter
from benchmarks.run import Run


def train(run: Run, meter: Meter) -> None:
    """Train the whole workload in one call of `Trainer.train`."""
    model = workload.whole_model(Path(run.model), run.torch_device())
    num_steps = run.num_warmup + run.num_steps
    beta1, beta2 = workload.BETAS
    arguments = TrainingArguments(
        output_dir=f"{run.folder}/hf",
        use_cpu=run.device == "cpu",
        per_device_train_batch_size=1,
        max_steps=num_steps,
        learning_rate=workload.LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=workload.WEIGHT_DECAY,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=workload.EPS,
        max_grad_norm=workload.CLIP_NORM,
        bf16=run.dtype == "bf16",
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    timed = _TimedTrainer(model=model, args=arguments, train_dataset=_dataset(run))
    timed.add_callback(_Steps(timed, meter))
    timed.meter = meter
    timed.train()


def _dataset(run: Run) -> list[dict[str, torch.Tensor]]:
    """Rows in the order in which the sampler deals them to ranks: one to each in turn."""
    by_rank = [run.rows(rank) for rank in range(workload.NUM_RANKS)]
    rows = [ids[0].cpu() for step in zip(*by_rank, strict=True) for ids in step]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


class _TimedTrainer(Trainer):
    """The Trainer, with the clock around what a step calls and the rows in their given order."""

    meter: Meter
    last_loss: torch.Tensor

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.meter.clock.section("forward"):
            loss = super().compute_loss(*args, **kwargs)
        self.last_loss = loss.detach()
        return loss


class _Steps(TrainerCallback):
    def __init__(self, trainer: _TimedTrainer, meter: Meter) -> None:
        self._trainer = trainer
        self._meter = meter

    def on_train_begin(self, *_: Any, **objects: Any) -> None:
        clock, accelerator = self._meter.clock, self._trainer.accelerator
        accelerator.backward = clock.timed("backward", accelerator.backward)
        accelerator.clip_grad_norm_ = clock.timed("optimizer", accelerator.clip_grad_norm_)
        optimizer = objects["optimizer"]
        optimizer.step = clock.timed("optimizer", optimizer.step)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._meter.end(self._trainer.last_loss)
