"""DistributedDataParallel, with AdamW on every rank or sharded by ZeroRedundancyOptimizer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import workload
from benchmarks.engines.plain_loop import train_plainly
from benchmarks.meter import Meter
from benchmarks.run import Run


def train(run: Run, meter: Meter) -> None:
    """bf16 is autocast: the weights are the fp32 masters."""
    device = run.torch_device()
    model = workload.whole_model(Path(run.model), device)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settings: dict[str, Any] = {
        "lr": workload.LEARNING_RATE,
        "betas": workload.BETAS,
        "eps": workload.EPS,
        "fused": True,
    }
    groups = workload.parameter_groups(model)
    optimizer: torch.optim.Optimizer
    if run.stage == 1:
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(groups, **settings)
    is_bf16 = run.dtype == "bf16"
    precision = torch.autocast(device.type, dtype=torch.bfloat16) if is_bf16 else nullcontext()
    train_plainly(run, meter, wrapped, optimizer, precision)
