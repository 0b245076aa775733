"""Context parallelism: each rank has a part of every sequence, and gathers keys and values.

A sequence is cut into twice as many chunks as there are ranks; rank r has chunk r and, from the
end, its counterpart, so that under a causal mask all ranks have equally much to attend to. The
mask is made here from the positions that the chunks really have, whatever mask the model makes
for its part: causal, and within the sliding window of the layers that have one.

Where several rows are packed into a sequence, each attends to itself alone, one after the other:
what others have is not masked but never touched, which is less work the shorter the rows are. The
same code does that on one rank, which has the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from shardwise.models.attention import attend, causal_mask
from shardwise.parallel.mesh import Mesh

ATTENTION, PACKED_ATTENTION = "shardwise_context", "shardwise_packed"
"""names of this attention among transformers' own: of a row a sequence, and of several"""
_NUM_MASKS = 4
"""of two chunks, in layers with and without a window"""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Queries next to each other, of one row, that this rank has."""

    sequences: slice
    """which of the micro-batch they are of"""
    columns: slice
    """of this rank's part of the sequence"""
    start: int
    """column of the first of them in the whole sequence"""
    row: int
    """column in the whole sequence where their row begins"""


@dataclass(kw_only=True)
class Context:
    """Who has which part of a sequence, and what its queries may see."""

    group: dist.ProcessGroup | None
    """None: this rank has all of it"""
    rank: int
    num_ranks: int
    packed: bool
    """whether sequences hold several rows, and the model is given the positions in them"""
    _masks: dict[tuple[Any, ...], torch.Tensor | None] = field(default_factory=dict, repr=False)
    _of: torch.Tensor | None = field(default=None, repr=False)
    """the positions of which the pieces are, and the masks"""
    _pieces: list[Piece] = field(default_factory=list, repr=False)

    def starts(self, num_tokens: int) -> list[int]:
        """First column, in the whole sequence, of each chunk of a part of so many tokens."""
        if self.num_ranks == 1:
            return [0]
        chunk = num_tokens // 2
        return [self.rank * chunk, (2 * self.num_ranks - 1 - self.rank) * chunk]

    def columns(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Columns [tokens] in the whole sequence of this rank's part of it."""
        starts = self.starts(num_tokens)
        steps = torch.arange(num_tokens // len(starts), device=device)
        return torch.cat([steps + start for start in starts])

    def pieces(self, num_tokens: int, positions: torch.Tensor | None) -> list[Piece]:
        """What the queries of this rank's part of a sequence are cut into, in their order.

        Args:
            positions: [sequences, tokens], each in its own row, where rows are packed. All layers
                get the same tensor, and its pieces are found once.
        """
        starts = self.starts(num_tokens)
        chunk = num_tokens // len(starts)
        chunks = [(slice(i * chunk, (i + 1) * chunk), start) for i, start in enumerate(starts)]
        if not self.packed or positions is None:
            every = slice(None)
            return [Piece(sequences=every, columns=c, start=start, row=0) for c, start in chunks]
        if positions is not self._of:
            self._masks.clear()
            self._of, self._pieces = positions, []
            for number, row in enumerate(positions.tolist()):
                for columns, start in chunks:
                    self._pieces += _cut(number, row, columns, start)
        return self._pieces

    def mask(
        self, before: int, chunk: int, window: int | None, query: torch.Tensor
    ) -> torch.Tensor | None:
        """As `causal_mask`, one tensor for all layers."""
        key = (before, chunk, window, query.dtype)
        if key not in self._masks:
            if len(self._masks) >= _NUM_MASKS and not self.packed:  # of rows of another length
                self._masks.clear()
            self._masks[key] = causal_mask(before, chunk, window, query)
        return self._masks[key]


def _cut(number: int, positions: Sequence[int], chunk: slice, start: int) -> Iterator[Piece]:
    """The rows of a chunk of a sequence.

    Args:
        number: of the sequence.
        positions: of the tokens of this rank's part of it, each in its own row.
        start: column of the chunk in the whole sequence.
    """
    begins = [c for c in range(chunk.start + 1, chunk.stop) if positions[c] == 0]
    for begin, end in pairwise([chunk.start, *begins, chunk.stop]):
        column = start + begin - chunk.start
        yield Piece(
            sequences=slice(number, number + 1),
            columns=slice(begin, end),
            start=column,
            row=column - positions[begin],
        )


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


def apply_context(model: PreTrainedModel, mesh: Mesh, *, packed: bool) -> None:
    """Let a model's attention see all of a row and nothing else, and its rotary embedding the
    true positions.

    Args:
        packed: whether sequences hold several rows, and the model is given the positions in them.
    """
    num_ranks = mesh.layout.cp
    context = Context(
        group=mesh.group("cp") if num_ranks > 1 else None,
        rank=mesh.rank("cp") if num_ranks > 1 else 0,
        num_ranks=num_ranks,
        packed=packed,
    )
    model.set_attn_implementation(PACKED_ATTENTION if packed else ATTENTION)
    for module in model.modules():
        if hasattr(module, "is_causal"):  # every attention, and nothing else
            module.shardwise_context = context
        if hasattr(module, "expand_kv") and num_ranks > 1:
            module.expand_kv = _of_whole_sequence(module.expand_kv, context)
    if packed:
        return

    def true_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0]
        given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        positions = context.columns(given.shape[-1], hidden.device)[None]
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (hidden, positions, *args[2:]), kwargs

    model.base_model.rotary_emb.register_forward_pre_hook(true_positions, with_kwargs=True)


def _of_whole_sequence(expand: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Keys and values of a latent attention are made of a narrow latent that all heads share: it is
    what crosses ranks (of DeepSeek-V3 a seventieth), and each rank expands the whole of it."""

    def gather_and_expand(latent: torch.Tensor, shared_key: torch.Tensor) -> Any:
        both = torch.cat((latent, shared_key), dim=-1)
        sizes = latent.shape[-1], shared_key.shape[-1]
        return expand(*_GatherSequence.apply(both, context).split(sizes, dim=-1))

    return gather_and_expand


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
    """Attention of this rank's queries [sequences, heads, tokens, head_dim] to all keys before
    them in their row."""
    context: Context = module.shardwise_context
    if context.group is not None and key.shape[2] == query.shape[2]:  # else they are whole
        key, value = _GatherSequence.apply(torch.cat((key, value), dim=-1), context).chunk(2, -1)
    outputs = []
    for piece in context.pieces(query.shape[2], position_ids):
        queries = query[piece.sequences, :, piece.columns]
        end = piece.start + queries.shape[2]
        begin = piece.row
        if sliding_window is not None:
            begin = max(begin, piece.start - sliding_window + 1)
        output, _ = attend(
            module,
            queries,
            key[piece.sequences, :, begin:end],
            value[piece.sequences, :, begin:end],
            context.mask(piece.start - begin, end - piece.start, sliding_window, query),
            **options,
        )
        outputs.append(output)
    joined = torch.cat(outputs, dim=1)
    return joined.view(len(query), -1, *joined.shape[2:]), None


class _GatherSequence(torch.autograd.Function):
    """Every rank's chunks [rows, heads, tokens, numbers], in the order of the sequence; the
    gradients are summed, and each rank gets those of its own chunks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: Context) -> torch.Tensor:
        ctx.context = context
        first = x.movedim(2, 0).contiguous()  # collectives join dimension 0
        whole = first.new_empty(context.num_ranks * first.shape[0], *first.shape[1:])
        dist.all_gather_into_tensor(whole, first, group=context.group)
        front, back = whole.unflatten(0, (context.num_ranks, 2, -1)).unbind(1)
        return torch.cat((front.flatten(0, 1), back.flip(0).flatten(0, 1))).movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        context: Context = ctx.context
        front, back = grad.movedim(2, 0).chunk(2)
        chunks = (context.num_ranks, -1)
        pairs = (front.unflatten(0, chunks), back.unflatten(0, chunks).flip(0))
        whole = torch.stack(pairs, dim=1).flatten(0, 2).contiguous()
        part = whole.new_empty(len(whole) // context.num_ranks, *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=context.group)
        return part.movedim(0, 2), None


AttentionInterface.register(ATTENTION, _context_attention)
# how rows are packed is new in each step: a compiled layer calls this as it is
AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(_context_attention))
