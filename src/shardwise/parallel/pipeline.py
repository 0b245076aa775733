"""Pipeline parallelism: a model cut into stages, run by torch's pipeline schedules.

A stage is the whole transformers model with what it does not own taken out, so that parameter
names stay those of the model, and so do positions and masks, which the model itself derives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from shardwise.parallel.routing import Routing
from shardwise.planner.stages import SCHEDULES, StageSpec

Output: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""hidden states, and in a mixture with a balance loss what the routers chose (`routing.py`)"""
LossFunction = Callable[[Output, torch.Tensor], torch.Tensor]

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

    def __init__(
        self,
        model: PreTrainedModel,
        spec: StageSpec,
        *,
        sequence_parts: int,
        routing: Routing | None,
    ) -> None:
        """Take out of `model` what the stage does not own.

        Args:
            sequence_parts: ranks that split the sequence of the hidden states between them.
            routing: where the choices of the routers go on with the hidden states.
        """
        super().__init__()
        self.model = model
        self._routing = routing
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

    def forward(
        self,
        x: torch.Tensor,
        tally: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
    ) -> Output:
        """Run the stage.

        Args:
            x: ids [rows, tokens] for the first stage, else hidden states
                [rows, tokens / sequence parts, hidden].
            tally: what the routers of earlier stages chose.
            position_ids: [rows, tokens], where rows are packed; None: each token's column.
            real: [rows, tokens], of which tokens the choices count; None: of none.
        """
        output = self._run(x, position_ids)
        if self._routing is None or real is None:
            return output.last_hidden_state
        own = self._routing.tally(output.router_logits, real, position_ids)
        if not own.requires_grad:  # no layer here has experts
            own.requires_grad_()
        return output.last_hidden_state, own if tally is None else tally + own

    def _run(self, x: torch.Tensor, position_ids: torch.Tensor | None) -> Any:
        body = self.model.base_model
        options = {"position_ids": position_ids, "use_cache": False}
        if self._received is None:
            return body(input_ids=x, **options)
        # positions and masks are made for the length of this; its values are never used
        rows, tokens, width = x.shape
        carrier = x.new_zeros(()).expand(rows, tokens * self._sequence_parts, width)
        self._received.hidden = x
        try:
            return body(inputs_embeds=carrier, **options)
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
    routing: Routing | None
    """where what the routers chose is sent with them"""

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are made in two passes."""
        return SCHEDULES[self.schedule].splits_backward

    def run(
        self,
        ids: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        targets: torch.Tensor,
        loss_function: LossFunction,
        num_micro_batches: int,
    ) -> torch.Tensor:
        """Send all micro-batches through the pipeline, forward and backward.

        Args:
            ids: [micro-batches x rows, tokens]; the same on every rank of the `pp` axis.
            inputs: of the same shape, by name, what every stage gets besides (`Stage.forward`).
            targets: [micro-batches x rows, ...].
            loss_function: (output of the last stage, targets) of a micro-batch -> scalar.

        Returns:
            The sum of the losses on the rank that has the last stage, zero elsewhere.
        """
        rows = len(ids) // num_micro_batches
        packed = "position_ids" in inputs
        stages = [self._stage(spec, module, ids[:rows], packed) for spec, module in self.stages]
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
            **inputs,
            target=targets if has_loss else None,
            losses=losses if has_loss else None,
            return_outputs=False,
        )
        return sum((loss.detach() for loss in losses), torch.zeros((), device=ids.device))

    @torch.no_grad()
    def run_forward(
        self,
        ids: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
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
        rows = len(ids) // num_micro_batches
        for begin in range(0, len(ids), rows):
            own = slice(begin, begin + rows)
            batch_ids, options = ids[own], {name: x[own] for name, x in inputs.items()}
            hidden = batch_ids
            for spec, module in self.stages:
                if not spec.is_first and self.ranks[spec.index - 1] != spec.rank:
                    hidden = self._empty(batch_ids)
                    dist.recv(hidden, group=group, group_src=self.ranks[spec.index - 1])
                hidden = module(hidden, **options)
                if spec.is_last:
                    total += loss_function(hidden, targets[own])
                elif self.ranks[spec.index + 1] != spec.rank:
                    hidden = hidden.contiguous()
                    work = dist.isend(hidden, group=group, group_dst=self.ranks[spec.index + 1])
                    sent.append((work, hidden))
        for work, _ in sent:
            work.wait()
        return total

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(self._hidden_shape(like), dtype=self.dtype, device=like.device)

    def _hidden_shape(self, ids: torch.Tensor) -> tuple[int, ...]:
        return len(ids), ids.shape[1] // self.sequence_parts, self.hidden_size

    def _stage(
        self, spec: StageSpec, module: nn.Module, ids: torch.Tensor, packed: bool
    ) -> PipelineStage:
        """torch's view of a stage; shapes are told, so that none is found out by a trial run."""
        shapes = [(self._hidden_shape(ids), self.dtype)]
        if self.routing is not None:
            num_rows = self.routing.num_rows(ids, packed=packed)
            shapes.append(((num_rows, self.routing.width), torch.float32))
        between = tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            for shape, dtype in shapes
        )
        first = (torch.empty_like(ids, device="meta"),)
        return PipelineStage(
            module,
            spec.index,
            spec.num_stages,
            ids.device,
            input_args=first if spec.is_first else between,
            output_args=between,
            group=self.mesh.group("pp"),
        )
