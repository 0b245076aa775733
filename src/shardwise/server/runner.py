"""One pass of the sharded model on every rank: the first one says of what, the others follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardwise.parallel.mesh import Mesh
from shardwise.server.kvcache import KVCache, apply_cache
from shardwise.server.messages import Command, Span, decode, encode


class Runner:
    """A rank's model with its cache."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh, cache: KVCache) -> None:
        self._model, self._mesh, self._cache = model, mesh, cache
        self._header = torch.zeros(2, dtype=torch.long, device=mesh.device)
        apply_cache(model, cache)

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        """On the first rank: one pass on all ranks.

        Returns:
            Logits [spans that want them, vocab].
        """
        if self._mesh.size("tp") > 1:
            numbers = torch.tensor(encode(spans), device=self._mesh.device)
            self._tell(Command.RUN, len(numbers))
            self._broadcast(numbers)
        return self._run(spans)

    def stop(self) -> None:
        """On the first rank: let the others end."""
        self._tell(Command.STOP)

    def wait(self) -> None:
        """On the first rank: there is nothing to do yet; keeps the others from giving up."""
        self._tell(Command.WAIT)

    def follow(self) -> None:
        """On the other ranks: the same passes, until told to stop."""
        while True:
            self._broadcast(self._header)
            command, length = Command(int(self._header[0])), int(self._header[1])
            if command is Command.STOP:
                return
            if command is Command.RUN:
                numbers = torch.zeros(length, dtype=torch.long, device=self._mesh.device)
                self._broadcast(numbers)
                self._run(decode(numbers.tolist()))

    def _run(self, spans: Sequence[Span]) -> torch.Tensor:
        positions = self._cache.begin(spans)
        device = positions.device
        ids = torch.tensor([token for span in spans for token in span.tokens], device=device)
        ends, rows = 0, []
        for span in spans:
            ends += len(span.tokens)
            if span.wants_logits:
                rows.append(ends - 1)
        # a head that nobody asks still takes part where ranks share it
        kept = torch.tensor(rows or [0], device=device)
        output = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            cache=self._cache,
            use_cache=True,
            logits_to_keep=kept,
        )
        logits: torch.Tensor = output.logits[0, : len(rows)]
        return logits

    def _tell(self, command: Command, length: int = 0) -> None:
        self._header[0], self._header[1] = int(command), length
        self._broadcast(self._header)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self._mesh.size("tp") > 1:
            dist.broadcast(tensor, src=0, group=self._mesh.group("tp"))
