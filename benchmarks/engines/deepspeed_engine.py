"""DeepSpeed ZeRO 1 to 3 with its own AdamW kernel, and its defaults for all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.meter import Meter
from benchmarks.run import Run


def train(run: Run, meter: Meter) -> None:
    """bf16 is DeepSpeed's own: bf16 weights and gradients, fp32 masters in its optimizer."""
    import deepspeed  # after the meter has wrapped the collectives: it keeps those that it finds

    deepspeed.init_distributed()
    model = workload.whole_model(Path(run.model), run.torch_device())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=workload.parameter_groups(model), config=_config(run)
    )
    clock = meter.clock
    for ids in run.rows():
        meter.begin()
        with clock.section("forward"):
            loss = engine(input_ids=ids, labels=ids).loss
        with clock.section("backward"):
            engine.backward(loss)
        with clock.section("optimizer"):
            engine.step()
        meter.end(loss.detach())


def _config(run: Run) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": workload.CLIP_NORM,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": workload.LEARNING_RATE,
                "betas": list(workload.BETAS),
                "eps": workload.EPS,
                "weight_decay": workload.WEIGHT_DECAY,
            },
        },
        "zero_optimization": {"stage": run.stage},
        "bf16": {"enabled": run.dtype == "bf16"},
        "steps_per_print": 10**9,
    }
