"""Context parallelism: each rank has a part of every sequence, and gathers keys and values.

A sequence is cut into twice as many chunks as there are ranks; rank r has chunk r and, from the
end, its counterpart, so that under a causal mask all ranks have equally much to attend to. The
mask is made here from the positions that the chunks really have, whatever mask the model makes
for its part: causal, within the sliding window of the layers that have one, and where rows are
packed within the row of the query: its position there says how far back that begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardwise.parallel.mesh import Mesh

ATTENTION = "shardwise_context"
"""name of this attention among transformers' own"""
_NUM_MASKS = 4
"""of two chunks, in layers with and without a window"""


@dataclass(kw_only=True)
class Context:
    """Who has which part of a sequence."""

    group: dist.ProcessGroup
    rank: int
    num_ranks: int
    packed: bool
    """whether the model is given the positions of this rank's tokens, each in its own row"""
    _masks: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict, repr=False)
    _masked: torch.Tensor | None = field(default=None, repr=False)
    """the positions that the masks are of"""

    def starts(self, chunk: int) -> tuple[int, int]:
        """First position of each of this rank's two chunks of so many tokens."""
        return self.rank * chunk, (2 * self.num_ranks - 1 - self.rank) * chunk

    def positions(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Positions [tokens] in the whole sequence of this rank's part of it."""
        chunk = num_tokens // 2
        steps = torch.arange(chunk, device=device)
        return torch.cat([steps + start for start in self.starts(chunk)])

    def mask(
        self,
        before: int,
        part: slice,
        window: int | None,
        query: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """What a chunk of queries may see of `before` earlier keys and of its own: 0, else -inf.

        Args:
            part: the chunk, as columns of this rank's part of the sequence.
            positions: [rows, tokens of this rank], each in its own row of those that are packed;
                None if a sequence is one row.

        Returns:
            [rows or 1, 1, chunk, before + chunk] in the dtype of the queries, one tensor for all
            layers (from a boolean one, attention would make and keep its own in each); None where
            plain causal attention says the same.
        """
        chunk = part.stop - part.start
        if positions is None and before == 0 and (window is None or window >= chunk):
            return None
        key = (before, chunk, window, query.dtype, None if positions is None else part.start)
        # of rows of another length, or other rows packed
        if positions is not self._masked or (
            key not in self._masks and len(self._masks) == _NUM_MASKS
        ):
            self._masks.clear()
            self._masked = positions
        if key not in self._masks:
            steps = torch.arange(before + chunk, device=query.device) - before
            ahead = steps - torch.arange(chunk, device=query.device)[:, None]  # of a query
            hidden = (ahead > 0) if window is None else (ahead > 0) | (ahead <= -window)
            hidden = hidden[None]
            if positions is not None:
                hidden = hidden | (ahead < -positions[:, part, None])
            mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return self._masks[key]


def own_columns(mesh: Mesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes this rank's columns of [rows, tokens] tensors, in its order."""
    num_ranks = mesh.layout.cp
    if num_ranks == 1:
        return lambda rows: rows
    rank = mesh.rank("cp")

    def take(rows: torch.Tensor) -> torch.Tensor:
        chunks = rows.chunk(2 * num_ranks, dim=1)
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim=1)

    return take


def apply_context_parallel(model: PreTrainedModel, mesh: Mesh, *, packed: bool) -> None:
    """Let a model's attention see the whole sequence, and its rotary embedding the positions.

    Args:
        packed: whether sequences hold several rows, and the model is given their positions.
    """
    context = Context(
        group=mesh.group("cp"), rank=mesh.rank("cp"), num_ranks=mesh.layout.cp, packed=packed
    )
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.shardwise_context = context
    if packed:
        return

    def true_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0]
        given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        positions = context.positions(given.shape[-1], hidden.device)[None]
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (hidden, positions, *args[2:]), kwargs

    model.base_model.rotary_emb.register_forward_pre_hook(true_positions, with_kwargs=True)


def _context_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of this rank's queries [rows, heads, tokens, head_dim] to all keys before them."""
    context: Context = module.shardwise_context
    keys, values = _GatherSequence.apply(torch.stack((key, value)), context)
    chunk = query.shape[2] // 2
    outputs = []
    for number, start in enumerate(context.starts(chunk)):
        part, end = slice(number * chunk, (number + 1) * chunk), start + chunk
        begin = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        output, _ = sdpa_attention_forward(
            module,
            query[:, :, part],
            keys[:, :, begin:end],
            values[:, :, begin:end],
            context.mask(
                start - begin, part, sliding_window, query, position_ids if context.packed else None
            ),
            **options,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


class _GatherSequence(torch.autograd.Function):
    """Every rank's chunks [2, rows, heads, tokens, head_dim], in the order of the sequence; the
    gradients are summed, and each rank gets those of its own chunks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: Context) -> torch.Tensor:
        ctx.context = context
        first = x.movedim(3, 0).contiguous()  # collectives join dimension 0
        whole = first.new_empty(context.num_ranks * first.shape[0], *first.shape[1:])
        dist.all_gather_into_tensor(whole, first, group=context.group)
        front, back = whole.unflatten(0, (context.num_ranks, 2, -1)).unbind(1)
        return torch.cat((front.flatten(0, 1), back.flip(0).flatten(0, 1))).movedim(0, 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        context: Context = ctx.context
        front, back = grad.movedim(3, 0).chunk(2)
        chunks = (context.num_ranks, -1)
        pairs = (front.unflatten(0, chunks), back.unflatten(0, chunks).flip(0))
        whole = torch.stack(pairs, dim=1).flatten(0, 2).contiguous()
        part = whole.new_empty(len(whole) // context.num_ranks, *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=context.group)
        return part.movedim(0, 3), None


AttentionInterface.register(ATTENTION, _context_attention)
