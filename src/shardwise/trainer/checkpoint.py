"""Write and read training checkpoints: safetensors and JSON only, resumed on any layout.

A checkpoint (see trainer/state.py) is written under another name and published by a rename.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardwise.config import PLAN_FILE, Lora, Plan
from shardwise.errors import UserError
from shardwise.models.adapters import ADAPTER_CONFIG, write_adapters
from shardwise.models.read import base_of, read_facts
from shardwise.parallel._torch import HuggingFaceStorageWriter, host_copy
from shardwise.parallel.grads import local_part
from shardwise.parallel.sharded import ShardedModel
from shardwise.planner.memory import CHECKPOINT_FILE_BYTES
from shardwise.trainer.state import STATE_FILE, State, digest_of, read_state
from shardwise.weights.index import open_index
from shardwise.weights.load import local_box, num_bytes_of, read_into
from shardwise.weights.names import join_parts
from shardwise.weights.progress import Loading
from shardwise.weights.save import copy_model_files

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class States:
    """The tensors of a checkpoint, of each rank its own shards."""

    model: Mapping[str, torch.Tensor]
    """what is trained, and buffers that files hold"""
    optimizer: Mapping[str, torch.Tensor]
    """its moments"""
    adapters: Lora | None
    """what is trained, if it is not the model"""

    @classmethod
    def of(cls, sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> States:
        """As they are now: they change with the next step."""
        mine = sharded.trained_parameters()
        model = {name: param.detach() for name, param in mine.items()}
        if sharded.adapters is None:
            model.update(sharded.stored_buffers())
        moments = {
            f"{moment}/{name}": optimizer.state[param][moment]
            for name, param in mine.items()
            for moment in _MOMENTS
        }
        return cls(model=model, optimizer=moments, adapters=sharded.adapters)

    def copied(self) -> States:
        """The same in host memory of their own: they stay what they are."""
        model = {name: host_copy(tensor) for name, tensor in self.model.items()}
        optimizer = {name: host_copy(tensor) for name, tensor in self.optimizer.items()}
        return States(model=model, optimizer=optimizer, adapters=self.adapters)


def save_checkpoint(
    path: Path,
    states: States,
    plan: Plan,
    state: State,
    model_files: Path,
    records: Mapping[str, bytes] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; every rank calls this and writes its own shards.

    Args:
        model_files: directory with the model's config and tokenizer.
        records: files of the run so far, such as its metrics.
        group: all ranks, with messages of their own; None: those of the training, which waits.
    """
    partial = path.with_name(f".{path.name}.partial")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group)
    for folder, tensors in (("model", states.model), ("optimizer", states.optimizer)):
        writer = HuggingFaceStorageWriter(
            str(partial / folder),
            fqn_to_index_mapping=_buckets(tensors, group),
            save_distributed=True,
        )
        if group is not None:  # all is on the host: no stream of the device is waited for
            writer.per_thread_copy_ahead = 0
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    if is_first:
        copy_model_files(model_files, partial / "model")
        if states.adapters is not None:
            base = base_of(Path(plan.model)) or Path(plan.model)
            write_adapters(partial / "model", states.adapters, base)
        plan.save(partial / PLAN_FILE)
        for name, content in (records or {}).items():
            (partial / name).write_bytes(content)
    dist.barrier(group)
    files = sorted(
        str(file.relative_to(partial))
        for file in partial.rglob("*")
        if file.is_file() and file.name != ADAPTER_CONFIG  # it says where the base is: may change
    )
    digests = _digests(partial, files, group)
    if is_first:
        sizes = {name: (partial / name).stat().st_size for name in files}
        _publish(partial, path, state.model_copy(update={"files": sizes, "digests": digests}))
    dist.barrier(group)


def _publish(partial: Path, path: Path, complete: State) -> None:
    """Give a checkpoint its name when all of it, and what says so, is on the disk."""
    (partial / STATE_FILE).write_text(complete.model_dump_json(indent=2), encoding="utf-8")
    _sync(partial)
    shutil.rmtree(path, ignore_errors=True)  # an incomplete one of an earlier attempt
    partial.rename(path)
    _sync_one(path.parent)


def check_digests(path: Path) -> None:
    """Read the files of a checkpoint, each rank its share, and compare them with what was written.

    Raises:
        UserError: on every rank, naming a file whose content is another one.
    """
    then = read_state(path).digests
    now = _digests(path, sorted(then))
    changed = [name for name, digest in then.items() if now[name] != digest]
    if changed:
        raise UserError(
            f"{path / changed[0]} is not what was written (its SHA-256 differs): move {path} away "
            "to continue from the checkpoint before it."
        )


def _digests(
    folder: Path, names: Sequence[str], group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """File -> SHA-256; every rank computes its share of what the first rank sees (on a shared file
    system another may see less for a while), and gets all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    agreed = [names]
    dist.broadcast_object_list(agreed, src=0, group=group)
    mine = {name: digest_of(folder / name) for name in agreed[0][rank::world]}
    everyone: list[dict[str, str]] = [{}] * world
    dist.all_gather_object(everyone, mine, group=group)
    return {name: value for one in everyone for name, value in one.items()}


def _buckets(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> dict[str, int]:
    """Tensor name -> number of the file (from 1) it goes to.

    The writer holds a file in memory until it is written, so each rank's part of it is bounded.
    Computed from what each rank has, so that they all find the same.
    """
    here = {name: local_part(tensor).nbytes for name, tensor in tensors.items()}
    ranks: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, here, group=group)
    numbers: dict[str, int] = {}
    number, held = 1, [0] * len(ranks)
    for name in sorted({name for one in ranks for name in one}):
        after = [size + one.get(name, 0) for size, one in zip(held, ranks, strict=True)]
        if any(held) and max(after) > CHECKPOINT_FILE_BYTES:
            number, after = number + 1, [one.get(name, 0) for one in ranks]
        numbers[name], held = number, after
    return numbers


def load_optimizer(
    path: Path,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    loading: Loading | None = None,
) -> None:
    """Read the moments of a checkpoint, each rank its own slices, whatever layout wrote them
    (`loading` is told of the bytes)."""
    index, facts = open_index(path / "optimizer"), read_facts(path / "model")
    for moment in _MOMENTS:
        index = join_parts(index, facts, prefix=f"{moment}/")
    for key, pieces in index.pieces.items():
        stored, whole = (sum(math.prod(p.shape) for p in pieces), math.prod(index.shape(key)))
        if stored != whole:
            raise UserError(
                f"{path}: the pieces of {key} hold {stored} values of {whole}; a file of another "
                "checkpoint lies beside it."
            )
    step = read_state(path).step
    for name, param in sharded.stored_names():
        if not param.requires_grad:
            continue
        state = optimizer.state[param]
        state["step"] = torch.tensor(float(step), device=local_part(param).device)
        for moment in _MOMENTS:
            key = f"{moment}/{name}"
            if key not in index:
                raise UserError(f"{path}: the optimizer state lacks {key}.")
            state[moment] = torch.zeros_like(param)
            box, pieces = local_box(param), index.pieces_of(key)
            if loading is not None:
                loading.expect(num_bytes_of(box, pieces))
            read_into(local_part(state[moment]), box, pieces, key, loading)


def _sync(folder: Path) -> None:
    """Make the files durable before the rename makes them visible."""
    for path in (*folder.rglob("*"), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
