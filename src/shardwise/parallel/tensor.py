"""Tensor parallelism: transformers' rules turned into sharded parameters and local forwards.

A rule names a module and a style. The style says which dimension of the weight is sharded, and
what is communicated before and after the module's own, unchanged forward. Parameters rest as
DTensors, so that saving and norms know the layout; during the forward the module sees its local
tensors, which costs a third of DTensor dispatch and keeps the embedding's gradient sharded.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise.errors import UserError
from shardwise.parallel.collectives import copy_to_group, gather_last_dim, sum_over_group
from shardwise.parallel.mesh import Mesh

Forward = Callable[..., torch.Tensor]


class TensorGroup:
    """The ranks of the `tp` axis, as the modules below one parent see them.

    Column-parallel modules that read the same tensor (q, k and v; gate and up) share one copy of
    it, so that their gradients are added up locally and cross the ranks once.
    """

    def __init__(self, ranks: dist.ProcessGroup, num_columns: int) -> None:
        self.ranks = ranks
        self._num_columns = num_columns
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        self._num_left = 0

    def copy_input(self, x: torch.Tensor) -> torch.Tensor:
        """The copy of a column-parallel input; kept only until each sibling has had it."""
        if self._shared is None or self._shared[0] is not x:
            self._shared, self._num_left = (x, copy_to_group(x, self.ranks)), self._num_columns
        _, copy = self._shared
        self._num_left -= 1
        if self._num_left <= 0:
            self._shared = None
        return copy


Wrap = Callable[[nn.Module, Forward, TensorGroup], Forward]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one kind of module is split over the `tp` axis."""

    weight_dim: int | None
    """dimension of `weight` that is sharded; None: replicated"""
    bias_dim: int | None
    wrap: Wrap
    """builds the forward that communicates around the module's own"""


def tensor_rules(model: nn.Module) -> dict[str, str]:
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
        if style not in STYLES:
            raise UserError(f"{name}: the style {style!r} of {pattern} is not built; use fsdp.")
        found = fnmatch.filter(modules, pattern)
        if not found:
            raise UserError(f"{name}: the rule {pattern}: {style} matches no module; use fsdp.")
        rules.update(dict.fromkeys(found, style))
    return rules


def apply_tensor_parallel(model: nn.Module, mesh: Mesh, *, gather_logits: bool) -> None:
    """Shard a model on the meta device over the `tp` axis, in place.

    Args:
        gather_logits: whether the head returns whole logits [..., vocab] or this rank's chunk.
    """
    rules = tensor_rules(model)
    columns = Counter(_parent(path) for path, name in rules.items() if name == COLUMN)
    groups: dict[str, TensorGroup] = {}
    shared: dict[nn.Parameter, nn.Parameter] = {}  # so that tied weights stay one parameter
    for path, name in rules.items():
        parent = _parent(path)
        group = groups.setdefault(parent, TensorGroup(mesh.group("tp"), columns[parent]))
        module = model.get_submodule(path)
        if name == GATHERED_COLUMN and not gather_logits:
            name = COLUMN
        style = STYLES[name]
        _shard(module, "weight", style.weight_dim, mesh, shared)
        _shard(module, "bias", style.bias_dim, mesh, shared)
        module.forward = style.wrap(module, module.forward, group)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _shard(
    module: nn.Module,
    name: str,
    dim: int | None,
    mesh: Mesh,
    shared: dict[nn.Parameter, nn.Parameter],
) -> None:
    param = module._parameters.get(name)
    if param is None or dim is None:
        return
    if param not in shared:
        local = distribute_tensor(
            param.data, mesh.device_mesh["tp"], [Shard(dim)], src_data_rank=None
        )
        shared[param] = nn.Parameter(local, requires_grad=param.requires_grad)
    module.register_parameter(name, shared[param])


@contextmanager
def _using(module: nn.Module, **tensors: torch.Tensor | None) -> Iterator[None]:
    """Let a module's forward see other tensors under its parameters' names."""
    kept = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)
    try:
        yield
    finally:
        module._parameters.update(kept)


def _local(module: nn.Module, name: str) -> Any:
    """The local tensor of a sharded parameter (its gradient comes back as a sharded one)."""
    param = module._parameters.get(name)
    return param.to_local() if isinstance(param, DTensor) else param


def _column(module: nn.Module, inner: Forward, group: TensorGroup) -> Forward:
    """Split the output: every rank has some of the columns of y = x W."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        weights = {n: _local(module, n) for n in module._parameters}
        with _using(module, **weights):
            return inner(group.copy_input(x))

    return forward


def _gathered_column(module: nn.Module, inner: Forward, group: TensorGroup) -> Forward:
    """As column, with the output put together again (for inference)."""
    column = _column(module, inner, group)
    size = _weight(module).shape[0]
    return lambda x: gather_last_dim(column(x), size, group.ranks)


def _row(module: nn.Module, inner: Forward, group: TensorGroup) -> Forward:
    """Split the input: every rank has a partial sum of y; the bias is added once, after it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = module._parameters.get("bias")
        hidden = {"bias": None} if bias is not None else {}
        with _using(module, weight=_local(module, "weight"), **hidden):
            y = sum_over_group(inner(x), group.ranks)
        return y if bias is None else y + bias

    return forward


def _vocab_embedding(module: nn.Module, inner: Forward, group: TensorGroup) -> Forward:
    """Split the vocabulary: ids of other ranks' rows give zeros here, and the sum is the row."""
    rows = vocab_range(_weight(module).shape[0], group.ranks)
    padding = module.padding_idx
    # the row whose gradient the embedding leaves out, in this rank's numbering
    module.padding_idx = padding - rows.start if padding is not None and padding in rows else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < rows.start) | (ids >= rows.stop)
        with _using(module, weight=_local(module, "weight")):
            x = inner((ids - rows.start).masked_fill(elsewhere, 0))
        return sum_over_group(x.masked_fill(elsewhere.unsqueeze(-1), 0), group.ranks)

    return forward


def _partial_gradient(module: nn.Module, inner: Forward, group: TensorGroup) -> Forward:
    """A replicated weight that each rank applies to its own heads: its gradients are summed, in
    fp32 as all gradients of parameters are."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = _local(module, "weight")
        with _using(module, weight=copy_to_group(weight.float(), group.ranks).to(weight.dtype)):
            return inner(x)

    return forward


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
    "replicated_with_grad_allreduce": Style(weight_dim=None, bias_dim=None, wrap=_partial_gradient),
}
"""transformers' style names (see `transformers.distributed.tensor_parallel`) -> what they do."""
