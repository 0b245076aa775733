"""Faults of servers: caches that are shared, room that runs out, what is told of tokens."""

from __future__ import annotations

from tests.mutants.fault import Fault

_GENERATION = "tests/serve/test_generation.py::"
_SCHEDULER = "tests/unit/test_scheduler.py::"
_SAMPLING = "tests/serve/test_sampling.py::"

SERVING = (
    Fault(
        name="block-known-by-its-own-tokens-alone",
        history="vllm-project/vllm#8268",
        file="server/blocks.py",
        old="            table.content = self._known[block].number\n        return table",
        new="            table.content = _ROOT\n        return table",
        proof=_SCHEDULER + "test_a_hash_of_other_tokens_is_no_match",
    ),
    Fault(
        name="last-token-taken-from-the-cache",
        history="vllm-project/vllm#42245",
        file="server/blocks.py",
        old="if start + BLOCK_TOKENS >= len(tokens):",
        new="if start + BLOCK_TOKENS > len(tokens):",
        proof=_SCHEDULER + "test_the_last_token_is_never_taken_from_the_cache[32]",
    ),
    Fault(
        name="preempted-sequence-is-computed-all-the-same",
        history="vllm-project/vllm#16832",
        file="server/scheduler.py",
        old="            if last is sequence:\n                return False\n",
        new="",
        proof=_SCHEDULER + "test_everybody_ends_and_nothing_is_lost",
    ),
    Fault(
        name="served-window-one-key-too-wide",
        history="huggingface/transformers#47911",
        file="server/kvcache.py",
        old="max(0, span.start - sliding_window + 1)",
        new="max(0, span.start - sliding_window)",
        proof=_GENERATION + "test_how_requests_are_batched_changes_nothing[alone]",
    ),
    Fault(
        name="told-probabilities-after-the-rules",
        history="vllm-project/vllm#3251",
        file="server/sampling.py",
        old="logprobs = logits.log_softmax(-1)",
        new="logprobs = scores.log_softmax(-1)",
        proof=_SAMPLING + "test_told_probabilities_are_the_models_own",
    ),
)
