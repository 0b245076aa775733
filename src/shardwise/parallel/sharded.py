"""What a rank holds of a model, and what must be done to its gradients before they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardwise.config import Lora
from shardwise.models.facts import HEAD
from shardwise.parallel.grads import local_part, sum_in_one
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.routing import Routing
from shardwise.parallel.shards import SumShards
from shardwise.planner.stages import StageSpec


@dataclass(frozen=True, kw_only=True)
class Part:
    """One stage of a model: the whole of it without a pipeline."""

    model: PreTrainedModel
    root: nn.Module
    """what FSDP takes as one: the model, or the stage around it"""
    spec: StageSpec
    partial: Mapping[str, str]
    """parameter name -> axis over which its gradient is still to be summed after the backward
    pass, because each rank of the axis has seen only a part of its use"""
    sums: SumShards | None = None
    """what sums the shards of its gradients, where that is not left to the device's own library"""


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """The parts of a transformers model that this rank holds."""

    parts: tuple[Part, ...]
    mesh: Mesh
    tied: bool
    embedding: str
    """name of what the head may be tied to"""
    pipeline: Pipeline | None
    routing: Routing | None = None
    """of a mixture of experts with a balance loss"""
    adapters: Lora | None = None
    """what is trained in place of the model's own parameters"""

    @property
    def model(self) -> PreTrainedModel:
        """The model, where it is one part."""
        (part,) = self.parts
        return part.model

    def named_parameters(self, *, copies: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Names as in the whole model, and this rank's shards.

        Args:
            copies: also the copy of a tied embedding that is the head of the last stage.
        """
        for part in self.parts:
            for name, param in part.model.named_parameters():
                if copies or not self.is_copy(part, name):
                    yield name, param

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Those that training changes, by their names in the whole model, without copies."""
        named = self.named_parameters(copies=False)
        return {name: param for name, param in named if param.requires_grad}

    def stored_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter with the name under which files hold it."""
        for part in self.parts:
            for name, param in part.model.named_parameters():
                yield (self.embedding if self.is_copy(part, name) else name), param

    def stored_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What files hold besides parameters; nothing trains it, and every rank has it whole."""
        for part in self.parts:
            for path, module in part.model.named_modules():
                for name in set(module._buffers) - module._non_persistent_buffers_set:
                    yield f"{path}.{name}", module.get_buffer(name)

    def is_copy(self, part: Part, name: str) -> bool:
        """Whether a parameter is the last stage's copy of what the first one has."""
        return self.tied and name == HEAD and not part.spec.is_first

    def train(self, mode: bool = True) -> None:
        """Set every part to training, or to evaluation."""
        for part in self.parts:
            part.model.train(mode)

    def finish_gradients(self) -> None:
        """Sum what the ranks have each seen a part of. To be called after the last backward pass
        of a step and before the gradients are used."""
        self._sum_partial()
        if self.pipeline is not None and self.tied:
            self._sum_tied()

    def _sum_partial(self) -> None:
        by_axis: dict[str, list[nn.Parameter]] = {}
        for part in self.parts:
            params = dict(part.model.named_parameters())
            for name, axis in part.partial.items():
                by_axis.setdefault(axis, []).append(params[name])
        for axis in sorted(by_axis):
            grads = [local_part(p.grad) for p in by_axis[axis] if p.grad is not None]
            if grads:
                sum_in_one(grads, partial(self.mesh.sum_over, axes=[axis]))

    def _sum_tied(self) -> None:
        """The embedding and its copy get the sum of both gradients, so that they stay equal."""
        named = self.stored_names()
        both = [param for name, param in named if name == self.embedding and param.requires_grad]
        grads = [local_part(param.grad) for param in both]
        group = self.mesh.ends()
        if len(grads) == 2:  # on one rank, at the two ends of a V
            grads[0] += grads[1]
            grads[1].copy_(grads[0])
        elif grads:
            sum_in_one(grads, partial(dist.all_reduce, group=group))
