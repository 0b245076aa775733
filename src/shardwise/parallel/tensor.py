"""Tensor parallelism: transformers' rules turned into sharded parameters and local forwards.

A rule names a module and a style. The style says which dimension of the weight is sharded, and
what is communicated before and after the module's own, unchanged forward. Parameters rest as
DTensors, so that saving and norms know the layout; during the forward the module sees its local
tensors, which costs a third of DTensor dispatch and keeps the embedding's gradient sharded.

With sequence parallelism the ranks split the sequence wherever they do not split the matrices:
what goes into a split region is gathered, what comes out of it is summed and scattered again.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.errors import UserError
from shardwise.models.adapters import LORA_A, LORA_B
from shardwise.models.build import Absent, decoder_layers
from shardwise.models.facts import ModelFacts
from shardwise.models.families import Family
from shardwise.parallel.collectives import (
    copy_to_group,
    gather_last_dim,
    gather_sequence,
    scatter_sequence,
    split_sequence,
    sum_over_group,
)
from shardwise.parallel.fused import Fused, take_apart
from shardwise.parallel.mesh import KV_REPLICAS, Mesh

Forward = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where the `tp` ranks split matrices: an attention, an MLP, the head."""

    ranks: dist.ProcessGroup
    split_outside: bool
    """whether the ranks split the sequence everywhere else (sequence parallelism)"""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What every rank reads: the whole of x [rows, tokens, hidden].

        It is done once for all matrices of the region, so that their gradients are added up
        locally and cross the ranks once.
        """
        if self.split_outside:
            return gather_sequence(x, self.ranks)
        return copy_to_group(x, self.ranks)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks have made, or this rank's part of the sequence of it."""
        if self.split_outside:
            return scatter_sequence(y, self.ranks)
        return sum_over_group(y, self.ranks)

    def enter_at(self, module: nn.Module) -> None:
        """Let a module be entered: transformers gives it its input first or as `hidden_states`."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (self.enter(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self.enter(kwargs["hidden_states"])}

        module.register_forward_pre_hook(enter, with_kwargs=True)


Wrap = Callable[[nn.Module, Forward, Region], Forward]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one kind of module is split over the `tp` axis."""

    dims: Mapping[str, int]
    """parameter of the module -> its dimension that is sharded; the others are replicated"""
    wrap: Wrap
    """builds the forward that communicates around the module's own"""
    partial: tuple[str, ...] = ()
    """parameters of which each rank's gradient is only a part"""


def tensor_rules(model: nn.Module, family: Family) -> dict[str, str]:
    """Module name -> style name: transformers' table for this model and the family's own rules,
    expanded and checked.

    Raises:
        UserError: the table is empty, matches nothing, or names a style that is not built.
    """
    own = {f"{model.base_model_prefix}.{path}": style for path, style in family.tp_rules.items()}
    table: Mapping[str, str] = {**(getattr(model, "tp_plan", None) or {}), **own}
    name = type(model).__name__
    if not table:
        raise UserError(f"{name} has no tensor-parallel table in transformers; use fsdp instead.")
    modules = [path for path, _ in model.named_modules()]
    rules: dict[str, str] = {}
    for pattern, style in table.items():
        if ".mlp.experts" in pattern:
            continue  # experts work on whole tokens: each rank on its own
        if style == FUSED:  # `take_apart` has made a module of each matrix in one
            pattern, style = f"{pattern}.*", COLUMN
        if style not in STYLES:
            raise UserError(f"{name}: the style {style!r} of {pattern} is not built; use fsdp.")
        found = fnmatch.filter(modules, pattern)
        if not found and family.experts is None and pattern not in own:
            raise UserError(f"{name}: the rule {pattern}: {style} matches no module; use fsdp.")
        rules.update(dict.fromkeys(found, style))
    return rules


def apply_tensor_parallel(
    model: nn.Module, mesh: Mesh, facts: ModelFacts, *, gather_logits: bool
) -> dict[str, str]:
    """Shard a model on the meta device over the `tp` axis, in place.

    Args:
        facts: where there are fewer KV heads than ranks, each is held by as many as it takes.
        gather_logits: whether the head returns whole logits [..., vocab] or this rank's chunk.

    Returns:
        Parameter name -> the axis over which its gradients must still be summed after the
        backward pass, because each rank has seen only a part of its use.
    """
    region, num_kv_heads = region_of(mesh), facts.num_kv_heads
    take_apart(model, facts, mesh.size("tp"))
    rules = tensor_rules(model, facts.family)
    shards = _Shards(mesh)
    for path, name in rules.items():
        module = model.get_submodule(path)
        if isinstance(module, Absent):
            continue
        style = STYLES[name]
        if name == GATHERED_COLUMN and not gather_logits:
            style = HEAD_CHUNK
        replicated_heads = path.endswith(_KV_PROJECTIONS) and num_kv_heads < mesh.size("tp")
        for param, dim in style.dims.items():
            if replicated_heads:
                shards.replace_kv(module, param, path, num_kv_heads)
            else:
                shards.replace(module, param, dim)
        shards.partial_of(path, module, style.partial)
        module.forward = style.wrap(module, module.forward, region)
    for path, module in model.named_modules():
        if isinstance(module, Fused):
            shards.partial_of(path, module, (LORA_A,))
    for reader in {_reader(model, path) for path, name in rules.items() if name == COLUMN}:
        region.enter_at(reader)
    if num_kv_heads < mesh.size("tp"):
        _repeat_locally(model, facts.num_heads // mesh.size("tp"))
    if region.split_outside:
        _split_between_layers(model, mesh.group("tp"))
        for param_name, param in model.named_parameters():
            if not isinstance(param, DTensor):
                shards.partial[param_name] = "tp"
    return shards.partial


def region_of(mesh: Mesh) -> Region:
    """The split regions of a mesh."""
    return Region(ranks=mesh.group("tp"), split_outside=mesh.layout.sequence_parallel)


class _Shards:
    """Replaces parameters by sharded ones and notes whose gradients will be partial."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._done: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one parameter
        self.partial: dict[str, str] = {}

    def replace(self, module: nn.Module, name: str, dim: int) -> None:
        """Shard one dimension over the `tp` axis."""
        param = module._parameters.get(name)
        if param is None:
            return
        if param not in self._done:
            local = distribute_tensor(
                param.data, self._mesh.device_mesh["tp"], [Shard(dim)], src_data_rank=None
            )
            self._done[param] = nn.Parameter(local, requires_grad=param.requires_grad)
        module.register_parameter(name, self._done[param])

    def replace_kv(self, module: nn.Module, name: str, path: str, num_kv_heads: int) -> None:
        """Shard over the KV heads, each head on `tp / num_kv_heads` ranks with neighbouring
        query heads: every one of those has a part of its gradient."""
        param = module._parameters.get(name)
        if param is None:
            return
        heads = self._mesh.kv_view(num_kv_heads)
        local = distribute_tensor(param.data, heads, [Shard(0), Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
        self.partial[f"{path}.{name}"] = KV_REPLICAS

    def partial_of(self, path: str, module: nn.Module, names: Iterable[str]) -> None:
        """Note that each rank will have a part of the gradients of these, where there are such."""
        self.partial |= {
            f"{path}.{name}": "tp" for name in names if module._parameters.get(name) is not None
        }


_KV_PROJECTIONS = ("k_proj", "v_proj")


def _repeat_locally(model: nn.Module, num_heads: int) -> None:
    """Each rank has one KV head, which attention repeats for all its query heads."""
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = num_heads


def _split_between_layers(model: nn.Module, ranks: dist.ProcessGroup) -> None:
    """Cut the sequence where the first layer begins: the model has its positions and masks by
    then, which it derives from the length of the embeddings."""

    def cut(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = args
        return split_sequence(hidden, ranks), *others

    first = decoder_layers(model)[0]
    if not isinstance(first, Absent):  # a later pipeline stage receives what has been cut
        first.register_forward_pre_hook(cut)


def _reader(model: nn.Module, path: str) -> nn.Module:
    """The attention or MLP that a split projection belongs to."""
    parent = path.rpartition(".")[0]
    if isinstance(model.get_submodule(parent), Fused):
        parent = parent.rpartition(".")[0]
    return model.get_submodule(parent)


@contextmanager
def using(module: nn.Module, **tensors: torch.Tensor | None) -> Iterator[None]:
    """Let a module's forward see other tensors under its parameters' names."""
    kept = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)
    try:
        yield
    finally:
        module._parameters.update(kept)


def local_parameter(module: nn.Module, name: str) -> Any:
    """The local tensor of a sharded parameter (its gradient comes back as a sharded one)."""
    param = module._parameters.get(name)
    return param.to_local() if isinstance(param, DTensor) else param


def _column(module: nn.Module, inner: Forward, region: Region) -> Forward:
    """Split the output: every rank has some of the columns of y = x W, or of the heads."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {n: local_parameter(module, n) for n in module._parameters}
        with using(module, **weights):
            return inner(*args, **kwargs)

    return forward


def _head_chunk(module: nn.Module, inner: Forward, region: Region) -> Forward:
    """The head: a region of its own, whose output is this rank's chunk of the vocabulary."""
    column = _column(module, inner, region)
    return lambda x: column(region.enter(x))


def _gathered_column(module: nn.Module, inner: Forward, region: Region) -> Forward:
    """As column, with the output put together again (for inference)."""
    column = _column(module, inner, region)
    size = _weight(module).shape[0]
    return lambda x: gather_last_dim(column(x), size, region.ranks)


def _row(module: nn.Module, inner: Forward, region: Region) -> Forward:
    """Split the input: every rank has a partial sum of y; the bias is added once, after it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = module._parameters.get("bias")
        weights = {n: local_parameter(module, n) for n in module._parameters if n != "bias"}
        hidden = {"bias": None} if bias is not None else {}
        with using(module, **weights, **hidden):
            y = region.leave(inner(x))
        return y if bias is None else y + bias

    return forward


def _vocab_embedding(module: nn.Module, inner: Forward, region: Region) -> Forward:
    """Split the vocabulary: ids of other ranks' rows give zeros here, and the sum is the row."""
    rows = vocab_range(_weight(module).shape[0], region.ranks)
    padding = module.padding_idx
    # the row whose gradient the embedding leaves out, in this rank's numbering
    module.padding_idx = padding - rows.start if padding is not None and padding in rows else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < rows.start) | (ids >= rows.stop)
        with using(module, weight=local_parameter(module, "weight")):
            x = inner((ids - rows.start).masked_fill(elsewhere, 0))
        return sum_over_group(x.masked_fill(elsewhere.unsqueeze(-1), 0), region.ranks)

    return forward


def _as_it_is(module: nn.Module, inner: Forward, region: Region) -> Forward:
    """A replicated weight that each rank applies to its own heads."""
    return inner


def vocab_range(vocab_size: int, group: dist.ProcessGroup) -> range:
    """The ids whose rows (or logits) this rank holds: torch's chunk rule, the last one shorter."""
    width = -(-vocab_size // dist.get_world_size(group))
    start = min(dist.get_rank(group) * width, vocab_size)
    return range(start, min(start + width, vocab_size))


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module._parameters["weight"]
    if weight is None:
        raise UserError(f"{type(module).__name__} has no weight to shard.")
    return weight


COLUMN, GATHERED_COLUMN, FUSED = "colwise", "colwise_gather_output", "fused_colwise"

STYLES: dict[str, Style] = {
    COLUMN: Style(dims={"weight": 0, "bias": 0, LORA_B: 0}, wrap=_column, partial=(LORA_A,)),
    GATHERED_COLUMN: Style(dims={"weight": 0, "bias": 0}, wrap=_gathered_column),
    "rowwise": Style(dims={"weight": 1, LORA_A: 1}, wrap=_row, partial=(LORA_B,)),
    "embedding_rowwise": Style(dims={"weight": 0}, wrap=_vocab_embedding),
    "replicated_with_grad_allreduce": Style(
        dims={}, wrap=_as_it_is, partial=("weight", "bias", LORA_A, LORA_B)
    ),
    "sinks": Style(dims={"sinks": 0}, wrap=_column),
}
"""transformers' style names (see `transformers.distributed.tensor_parallel`), and one of our own ->
what they do."""

HEAD_CHUNK = Style(dims={"weight": 0, "bias": 0}, wrap=_head_chunk)
