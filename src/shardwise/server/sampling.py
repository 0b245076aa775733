"""Choose the next token of each sequence, by its own rules and its own random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from shardwise.server.messages import Sampling, Token


class Sampler:
    """The rules of one answer, what they depend on, and a random generator that nobody shares."""

    def __init__(self, rules: Sampling, prompt: Sequence[int]) -> None:
        self.rules = rules
        self._counts: Counter[int] = Counter()
        """how often the answer has each token"""
        self._seen = set(prompt) if rules.repetition_penalty != 1 else set()
        self._generator = torch.Generator()
        if rules.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(rules.seed)

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken, and nothing else is asked."""
        return self.rules.temperature == 0 and not self._changes and self.rules.logprobs is None

    @property
    def _changes(self) -> bool:
        rules = self.rules
        penalties = rules.presence_penalty or rules.frequency_penalty
        return bool(penalties or rules.logit_bias or rules.repetition_penalty != 1)

    def choose(self, logits: torch.Tensor) -> Token:
        """The next token, of logits [vocab] in fp32, which are not changed."""
        scores = self._penalised(logits) if self._changes else logits
        token = self._draw(scores)
        if self._changes:
            self._counts[token] += 1
            self._seen.add(token)
        number = self.rules.logprobs
        if number is None:
            return Token(id=token, logprob=0.0)
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(min(number, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Token(id=token, logprob=float(logprobs[token]), top=top)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        rules, scores = self.rules, logits.clone()
        if rules.repetition_penalty != 1 and self._seen:
            ids = torch.tensor(sorted(self._seen), device=logits.device)
            seen = scores[ids]
            factor = rules.repetition_penalty
            scores[ids] = torch.where(seen > 0, seen / factor, seen * factor)
        if self._counts and (rules.presence_penalty or rules.frequency_penalty):
            ids = torch.tensor(list(self._counts), device=logits.device)
            times = torch.tensor(list(self._counts.values()), device=logits.device)
            scores[ids] -= rules.presence_penalty + rules.frequency_penalty * times
        for token, bias in rules.logit_bias.items():
            scores[token] += bias
        return scores

    def _draw(self, scores: torch.Tensor) -> int:
        rules = self.rules
        if rules.temperature == 0:
            return int(scores.argmax())
        # from the largest, so that no temperature is too low for fp32
        probs = ((scores - scores.max()) / rules.temperature).softmax(-1)
        if 0 < rules.top_k < len(probs) or rules.top_p < 1 or rules.min_p > 0:
            ordered, ids = probs.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            drop = (before >= rules.top_p) & (before > 0)
            drop |= ordered < rules.min_p * ordered[0]
            if rules.top_k:
                drop[rules.top_k :] = True
            probs = torch.zeros_like(probs).scatter(0, ids, ordered.masked_fill(drop, 0))
        return int(torch.multinomial(probs.cpu(), 1, generator=self._generator))


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Token]:
    """The next token of each sequence, of logits [sequences, vocab]."""
    tokens: list[Token | None] = [None] * len(samplers)
    plain = [i for i, sampler in enumerate(samplers) if sampler.is_plain]
    if plain:
        rows = logits if len(plain) == len(samplers) else logits[plain]
        for i, token in zip(plain, rows.argmax(-1).tolist(), strict=True):
            tokens[i] = Token(id=token, logprob=0.0)
    return [
        token if token is not None else sampler.choose(row.float())
        for token, sampler, row in zip(tokens, samplers, logits, strict=True)
    ]
