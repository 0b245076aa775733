"""Run real training steps on n ranks and bring everything back as full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardwise.config import Layout
from tests.oracle import Row
from tests.run_ranks import run_ranks

Overrides = dict[str, Any]


@dataclass
class RankStep:
    """What one rank saw of one optimizer step; tensors are full ones."""

    loss: float
    norm: float
    num_tokens: int
    named: list[tuple[str, Any, Any]]
    """name in the files, gradient and value of every parameter of this rank's stages"""
    held: list[tuple[tuple[str, str], str]]
    """name and the box of it that this rank holds, and a digest of its bytes"""

    @property
    def grads(self) -> dict[str, Any]:
        return {name: grad for name, grad, _ in self.named}

    @property
    def params(self) -> dict[str, Any]:
        return {name: param for name, _, param in self.named}


def random_rows(lengths: Sequence[int], vocab: int = 300, seed: int = 1) -> list[Row]:
    """Rows of random tokens (the padding token among them) with so many trained targets."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(0, vocab, (length + 1,), generator=generator).tolist()
        rows.append((ids, [0] + [1] * length))
    return rows


RAGGED = (5, 61, 17, 64, 3, 40, 9, 33)


def run_steps(
    model_dir: Path,
    layout: dict[str, int],
    batches: Sequence[Sequence[Row]],
    *,
    timeout_s: float = 60.0,
    kept: Sequence[int] | None = None,
    **train: Any,
) -> list[list[RankStep]]:
    """Train on each batch in turn; result[rank][step].

    Args:
        kept: numbers of the steps of which tensors are brought back; None: of all.
    """
    num_ranks = Layout(**layout).world_size
    return run_ranks(
        num_ranks, _train_on_rank, str(model_dir), layout, batches, train, kept, timeout_s=timeout_s
    )


def _train_on_rank(
    rank: int,
    model_dir: str,
    layout: dict[str, int],
    batches: Sequence[Any],
    train: Overrides,
    kept: Sequence[int] | None = None,
) -> list[RankStep]:
    import torch

    from shardwise.config import Lora, Plan, Precision, Train
    from shardwise.models.adapters import ADAPTER_CONFIG
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer.optim import make_optimizer
    from shardwise.trainer.step import train_step
    from shardwise.weights.load import load_model

    formats = {name: train.pop(name) for name in ("compute", "reduce") if name in train}
    precision = Precision(**formats)
    lora = Lora(**train.pop("lora")) if "lora" in train else None
    settings = Train(**{"clip_norm": None, "global_batch": 8, "learning_rate": 1e-3, **train})
    plan = Plan(
        model=model_dir,
        task="lora" if lora is not None or (Path(model_dir) / ADAPTER_CONFIG).exists() else "full",
        layout=Layout(**layout),
        precision=precision,
        train=settings,
        lora=lora,
    )
    mesh = build_mesh(plan.layout, "cpu")
    sharded = load_model(plan, mesh, torch.float32)
    optimizer = make_optimizer(sharded, settings)
    steps = []
    for number, rows in enumerate(batches):
        micro = _micro_batches(rows, plan, mesh)
        result = train_step(sharded, optimizer, micro, mesh, settings, settings.learning_rate)
        steps.append(_collect(sharded, result, tensors=kept is None or number in kept))
    return steps


def _micro_batches(rows: Sequence[Row], plan: Any, mesh: Any) -> Any:
    import numpy as np

    from shardwise.parallel.context import own_columns
    from shardwise.trainer.data.batches import micro_batches
    from shardwise.trainer.data.order import sequences_of
    from shardwise.trainer.data.store import Rows

    store = Rows(
        ids=np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in rows]),
        trained=np.concatenate([np.asarray(marks, dtype=np.bool_) for _, marks in rows]),
        starts=np.cumsum([0, *(len(ids) for ids, _ in rows)]),
    )
    return micro_batches(
        store,
        sequences_of(store.lengths, range(len(rows)), plan.train),
        packing=plan.train.packing,
        micro_batch=plan.train.micro_batch,
        data_rank=mesh.data_rank,
        num_data_ranks=plan.layout.num_data_ranks,
        multiple=plan.layout.sequence_multiple,
        same_shape=plan.layout.pp > 1,
        least=plan.train.num_micro_batches(plan.layout) if plan.layout.pp > 1 else 1,
        columns=own_columns(mesh),
        device=mesh.device,
    )


def _collect(sharded: Any, result: Any, *, tensors: bool = True) -> RankStep:
    from shardwise.parallel.grads import local_part
    from shardwise.weights.load import local_box

    params = [(name, p) for name, p in sharded.stored_names() if p.requires_grad]
    missing = [name for name, p in params if p.grad is None]
    assert not missing, f"no gradient: {missing}"
    params = params if tensors else []
    return RankStep(
        loss=result.loss,
        norm=result.grad_norm,
        num_tokens=result.num_targets,
        named=[(name, _full(p.grad), _full(p)) for name, p in params],
        held=[
            (
                (name, str(local_box(p))),
                sha256(local_part(p).detach().numpy().tobytes()).hexdigest(),
            )
            for name, p in params
        ],
    )


def _full(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
