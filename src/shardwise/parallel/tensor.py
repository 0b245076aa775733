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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.errors import UserError
from shardwise.models.build import Absent, decoder_layers
from shardwise.models.facts import ModelFacts
from shardwise.parallel.collectives import (
    copy_to_group,
    gather_last_dim,
    gather_sequence,
    scatter_sequence,
    split_sequence,
    sum_over_group,
)
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

    weight_dim: int | None
    """dimension of `weight` that is sharded; None: replicated"""
    bias_dim: int | None
    wrap: Wrap
    """builds the forward that communicates around the module's own"""
    partial: bool = False
    """whether each rank's gradient of the weight is only a part of it"""


def tensor_rules(model: nn.Module, *, has_experts: bool = False) -> dict[str, str]:
    """Module name -> style name: transformers' table for this model, expanded and checked.

    Raises:
        UserError: the table is empty, matches nothing, or names a style that is not built.
    """
    table: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    name = type(model).__name__
    if not table:
        raise UserError(f"{name} has no tensor-parallel table in transformers; use fsdp instead.")
    modules = [path for path, _ in model.named_modules()]
    rules: dict[str, str] = {}
    for pattern, style in table.items():
        if has_experts and pattern.removeprefix("model.").startswith(_EXPERT_BLOCK):
            continue  # experts work on whole tokens: each rank on its own
        if style not in STYLES:
            raise UserError(f"{name}: the style {style!r} of {pattern} is not built; use fsdp.")
        found = fnmatch.filter(modules, pattern)
        if not found:
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
    rules = tensor_rules(model, has_experts=facts.num_experts > 0)
    shards = _Shards(mesh)
    for path, name in rules.items():
        module = model.get_submodule(path)
        if isinstance(module, Absent):
            continue
        style = STYLES[name]
        if name == GATHERED_COLUMN and not gather_logits:
            style = HEAD_CHUNK
        replicated_heads = path.endswith(_KV_PROJECTIONS) and num_kv_heads < mesh.size("tp")
        for param, dim in (("weight", style.weight_dim), ("bias", style.bias_dim)):
            if replicated_heads:
                shards.replace_kv(module, param, path, num_kv_heads)
            else:
                shards.replace(module, param, path, dim)
        if style.partial:
            shards.partial[f"{path}.weight"] = "tp"
        module.forward = style.wrap(module, module.forward, region)
    for parent in {_parent(path) for path, name in rules.items() if name == COLUMN}:
        region.enter_at(model.get_submodule(parent))
    if num_kv_heads < mesh.size("tp"):
        _repeat_locally(model, mesh.size("tp"))
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

    def replace(self, module: nn.Module, name: str, path: str, dim: int | None) -> None:
        """Shard one dimension over the `tp` axis."""
        param = module._parameters.get(name)
        if param is None or dim is None:
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


_EXPERT_BLOCK = "layers.*.mlp."
_KV_PROJECTIONS = ("k_proj", "v_proj")


def _repeat_locally(model: nn.Module, num_ranks: int) -> None:
    """Each rank has one KV head, which attention repeats for all its query heads."""
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = module.config.num_attention_heads // num_ranks


def _split_between_layers(model: nn.Module, ranks: dist.ProcessGroup) -> None:
    """Cut the sequence where the first layer begins: the model has its positions and masks by
    then, which it derives from the length of the embeddings."""

    def cut(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = args
        return split_sequence(hidden, ranks), *others

    first = decoder_layers(model)[0]
    if not isinstance(first, Absent):  # a later pipeline stage receives what has been cut
        first.register_forward_pre_hook(cut)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


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
    """Split the output: every rank has some of the columns of y = x W."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        weights = {n: local_parameter(module, n) for n in module._parameters}
        with using(module, **weights):
            return inner(x)

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
        hidden = {"bias": None} if bias is not None else {}
        with using(module, weight=local_parameter(module, "weight"), **hidden):
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


COLUMN, GATHERED_COLUMN = "colwise", "colwise_gather_output"

STYLES: dict[str, Style] = {
    COLUMN: Style(weight_dim=0, bias_dim=0, wrap=_column),
    GATHERED_COLUMN: Style(weight_dim=0, bias_dim=0, wrap=_gathered_column),
    "rowwise": Style(weight_dim=1, bias_dim=None, wrap=_row),
    "embedding_rowwise": Style(weight_dim=0, bias_dim=None, wrap=_vocab_embedding),
    "replicated_with_grad_allreduce": Style(
        weight_dim=None, bias_dim=None, wrap=_as_it_is, partial=True
    ),
}
"""transformers' style names (see `transformers.distributed.tensor_parallel`) -> what they do."""

HEAD_CHUNK = Style(weight_dim=0, bias_dim=0, wrap=_head_chunk)
