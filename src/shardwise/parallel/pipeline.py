"""Pipeline parallelism: a model cut into stages, run by torch's pipeline schedules.

A stage is the whole transformers model with what it does not own taken out, so that parameter
names stay those of the model, and so do positions and masks, which the model itself derives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from transformers import PreTrainedModel

from shardwise.models.build import Absent, decoder_layers
from shardwise.parallel.mesh import Mesh
from shardwise.planner.stages import SCHEDULES, StageSpec

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Received(Absent):
    """Stands where the layer before a stage's first one was, and gives what was received."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """The hidden states of the stage before, whatever the (absent) embedding has made."""
        if self.hidden is None:
            raise RuntimeError("a stage's model was run without its stage")
        return self.hidden


class Stage(nn.Module):
    """A part of a causal language model: token ids or hidden states in, hidden states out.

    The last stage gives the input of the head, whose logits are made with the loss.
    """

    def __init__(self, model: PreTrainedModel, spec: StageSpec, *, sequence_parts: int) -> None:
        """Take out of `model` what the stage does not own.

        Args:
            sequence_parts: ranks that split the sequence of the hidden states between them.
        """
        super().__init__()
        self.model = model
        self._received: Received | None = None
        self._sequence_parts = sequence_parts
        layers = decoder_layers(model)
        for index in set(range(len(layers))) - set(spec.layers):
            layers[index] = Absent()
        if not spec.is_first:
            model.set_input_embeddings(Absent())
            self._received = Received()
            layers[spec.layers.start - 1] = self._received
        if not spec.is_last:
            model.base_model.norm = Absent()
            model.set_output_embeddings(Absent())

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Run the stage.

        Args:
            x: ids [rows, tokens] for the first stage, else hidden states
                [rows, tokens / sequence parts, hidden].
            position_ids: [rows, tokens], where rows are packed; None: each token's column.
        """
        body = self.model.base_model
        options = {"position_ids": position_ids, "use_cache": False}
        if self._received is None:
            return body(input_ids=x, **options).last_hidden_state
        # positions and masks are made for the length of this; its values are never used
        rows, tokens, width = x.shape
        carrier = x.new_zeros(()).expand(rows, tokens * self._sequence_parts, width)
        self._received.hidden = x
        try:
            return body(inputs_embeds=carrier, **options).last_hidden_state
        finally:
            self._received.hidden = None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of this rank, and how micro-batches go through them."""

    mesh: Mesh
    schedule: str
    stages: Sequence[tuple[StageSpec, nn.Module]]
    ranks: Sequence[int]
    """position on the `pp` axis of each stage of the model"""
    hidden_size: int
    sequence_parts: int
    dtype: torch.dtype
    """of the hidden states that are sent"""

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are made in two passes."""
        return SCHEDULES[self.schedule].splits_backward

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        targets: torch.Tensor,
        loss_function: LossFunction,
        num_micro_batches: int,
    ) -> torch.Tensor:
        """Send all micro-batches through the pipeline, forward and backward.

        Args:
            ids: [micro-batches x rows, tokens]; the same on every rank of the `pp` axis.
            positions: of the same shape, for every stage; None: each token's column.
            targets: of the same shape.
            loss_function: (input of the head, targets) of a micro-batch -> scalar.

        Returns:
            The sum of the losses on the rank that has the last stage, zero elsewhere.
        """
        rows = len(ids) // num_micro_batches
        stages = [self._stage(spec, module, rows, ids) for spec, module in self.stages]
        several = SCHEDULES[self.schedule].stages_per_rank > 1
        runner = _CLASSES[self.schedule](
            stages if several else stages[0],
            n_microbatches=num_micro_batches,
            loss_fn=loss_function,
            scale_grads=False,
        )
        specs = [spec for spec, _ in self.stages]
        arguments = (ids,) if any(spec.is_first for spec in specs) else ()
        has_loss = any(spec.is_last for spec in specs)
        losses: list[torch.Tensor] = []
        runner.step(
            *arguments,
            **({} if positions is None else {"position_ids": positions}),
            target=targets if has_loss else None,
            losses=losses if has_loss else None,
            return_outputs=False,
        )
        return sum((loss.detach() for loss in losses), torch.zeros((), device=ids.device))

    @torch.no_grad()
    def run_forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        targets: torch.Tensor,
        loss_function: LossFunction,
        num_micro_batches: int,
    ) -> torch.Tensor:
        """As `run`, without the backward pass, which torch's V-shaped schedules cannot leave out:
        one micro-batch after the other, each through all stages of the rank, so that what two ranks
        send each other is received in the order in which it is sent."""
        group = self.mesh.group("pp")
        total = torch.zeros((), device=ids.device)
        sent = []
        num = num_micro_batches
        where = [None] * num if positions is None else positions.chunk(num)
        chunks = zip(ids.chunk(num), where, targets.chunk(num), strict=True)
        for batch_ids, batch_positions, batch_targets in chunks:
            hidden = batch_ids
            for spec, module in self.stages:
                if not spec.is_first and self.ranks[spec.index - 1] != spec.rank:
                    hidden = self._empty(batch_ids)
                    dist.recv(hidden, group=group, group_src=self.ranks[spec.index - 1])
                hidden = module(hidden, batch_positions)
                if spec.is_last:
                    total += loss_function(hidden, batch_targets)
                elif self.ranks[spec.index + 1] != spec.rank:
                    hidden = hidden.contiguous()
                    work = dist.isend(hidden, group=group, group_dst=self.ranks[spec.index + 1])
                    sent.append((work, hidden))
        for work, _ in sent:
            work.wait()
        return total

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(self._hidden_shape(like), dtype=self.dtype, device=like.device)

    def _hidden_shape(self, ids: torch.Tensor) -> tuple[int, int, int]:
        return len(ids), ids.shape[1] // self.sequence_parts, self.hidden_size

    def _stage(
        self, spec: StageSpec, module: nn.Module, rows: int, ids: torch.Tensor
    ) -> PipelineStage:
        """torch's view of a stage; shapes are told, so that none is found out by a trial run."""
        hidden = torch.empty(
            self._hidden_shape(ids[:rows]), dtype=self.dtype, device="meta", requires_grad=True
        )
        first = torch.empty(rows, ids.shape[1], dtype=ids.dtype, device="meta")
        return PipelineStage(
            module,
            spec.index,
            spec.num_stages,
            ids.device,
            input_args=first if spec.is_first else hidden,
            output_args=hidden,
            group=self.mesh.group("pp"),
        )
