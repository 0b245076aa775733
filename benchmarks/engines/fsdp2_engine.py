"""Plain FSDP2: `fully_shard` on each layer and on the model, as torch's own tutorial does."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import workload
from benchmarks.engines.plain_loop import train_plainly
from benchmarks.meter import Meter
from benchmarks.run import Run


def train(run: Run, meter: Meter) -> None:
    """ZeRO-3 lets a layer's weights go after its forward pass, ZeRO-2 keeps them."""
    model = workload.whole_model(Path(run.model), run.torch_device())
    mesh = init_device_mesh(run.device, (workload.NUM_RANKS,))
    policy = MixedPrecisionPolicy()
    if run.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=run.stage == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        workload.parameter_groups(model),
        lr=workload.LEARNING_RATE,
        betas=workload.BETAS,
        eps=workload.EPS,
        fused=True,
    )
    train_plainly(run, meter, model, optimizer, nullcontext())
