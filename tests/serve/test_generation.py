"""Greedy answers of every served layout equal transformers' `generate` in one process: alone, many
at a time, where room runs out, and where the cache knows how a prompt begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.models import save_model, save_start
from tests.oracle import round_matrices
from tests.run_ranks import run_ranks

VOCAB, CONTEXT = 250, 112
FAST = [("LL", 1), ("LL321T", 2), ("ODD", 3), ("MI_SW", 2), ("G3", 2), ("OSS", 1), ("DS", 1)]
CASES = [
    *FAST,
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("LL", 2),
            ("LLB", 2),
            ("MI", 2),
            ("MI_SW", 1),
            ("Q2_SW", 2),
            ("Q2", 2),
            ("Q3", 2),
            ("Q3_321", 2),
            ("G3", 1),
            ("G3_321", 2),
            ("PHI", 2),
            ("GPT2", 1),
            ("MIX", 1),
            ("MOE", 1),
            ("LLW+qlora", 2),
            ("PHIW+qlora", 1),
        ]
    ),
]


@dataclass
class Outcome:
    """What one rank has of a scenario."""

    answers: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    num_preempted: int = 0
    num_cached: int = 0
    num_free: int = 0


def prompts_of(number: int) -> list[list[int]]:
    """Prompts of many lengths, some of which begin alike."""
    common = [(11 * i * i + 3) % VOCAB for i in range(40)]
    prompts = [[5, 17, 3, 200, 9], list(range(40, 73)), [7], common, [*common[:33], 4, 9]]
    for row in range(number - len(prompts)):
        size = (7 * row) % 45 + 1
        prompts.append([(31 * row + 13 * i * i + i) % VOCAB for i in range(size)])
    return prompts


def answer_on_rank(
    rank: int, model_dir: str, tp: int, prompts: list[list[int]], new: list[int], serve: Any
) -> Outcome:
    """Answer all prompts at once (the first rank), or follow."""
    import torch

    from shardwise.config import Layout, Plan, Serve
    from shardwise.models.read import read_facts
    from shardwise.parallel.mesh import build_mesh
    from shardwise.server.blocks import BLOCK_TOKENS
    from shardwise.server.engine import Engine
    from shardwise.server.kvcache import KVCache
    from shardwise.server.messages import Event, Request, Sampling
    from shardwise.server.runner import Runner
    from shardwise.weights.load import load_model
    from tests.tokenizer import byte_tokenizer

    settings = Serve(**serve)
    plan = Plan(model=model_dir, task="serve", layout=Layout(tp=tp), serve=settings)
    mesh = build_mesh(plan.layout, "cpu")
    model = load_model(plan, mesh, torch.float32).model.eval()
    num_blocks = (settings.kv_tokens or 0) // BLOCK_TOKENS
    facts = read_facts(model_dir)
    cache = KVCache(
        facts, plan.layout, num_blocks=num_blocks, dtype=torch.float32, device=mesh.device
    )
    for room in (*cache.keys, *cache.values):  # what nobody has written must never be read
        room.fill_(float("nan"))
    runner = Runner(model, mesh, cache)
    if rank > 0:
        with torch.inference_mode():
            runner.follow()
        return Outcome()
    engine = Engine(runner, byte_tokenizer(), settings, end_ids=frozenset(), num_blocks=num_blocks)
    events: list[list[Event]] = [[] for _ in prompts]
    for prompt, count, sent in zip(prompts, new, events, strict=True):
        sampling = Sampling(temperature=0, logprobs=1)
        request = Request(prompt=prompt, max_tokens=count, sampling=sampling, send=sent.append)
        assert engine.submit(request)
    engine.close()
    engine.run()
    tokens = [[event.token for event in sent if event.token is not None] for sent in events]
    return Outcome(
        answers=[[token.id for token in answer] for answer in tokens],
        logprobs=[[token.logprob for token in answer] for answer in tokens],
        num_preempted=engine.load.preempted,
        num_cached=engine.load.cached_tokens,
        num_free=round((1 - engine.load.cache_used) * num_blocks),
    )


def reference(
    name: str, folder: Path, prompts: list[list[int]], new: list[int]
) -> tuple[str, list[list[int]], list[list[float]]]:
    """What transformers generates, one prompt at a time, with log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    if name.endswith("+qlora"):
        base, start = save_start(name, folder)
    else:
        base = start = save_model(name, folder / name)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if base != start:
        from peft import PeftModel

        round_matrices(plain)
        plain = PeftModel.from_pretrained(plain, start).merge_and_unload()
    answers, logprobs = [], []
    for prompt, count in zip(prompts, new, strict=True):
        output = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answer = output.sequences[0, len(prompt) :].tolist()
        answers.append(answer)
        rows = [logits[0].log_softmax(-1) for logits in output.logits]
        logprobs.append([float(row[token]) for row, token in zip(rows, answer, strict=True)])
    return str(start), answers, logprobs


def compare(outcome: Outcome, answers: list[list[int]], logprobs: list[list[float]]) -> None:
    assert outcome.answers == answers
    for got, want in zip(outcome.logprobs, logprobs, strict=True):
        assert got == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_greedy_tokens_equal_generate(tmp_path: Path, name: str, tp: int) -> None:
    """Sixteen prompts at once, long ones in parts, with room for a few of them: sequences are
    preempted, and beginnings shared (bug bank 5, 22, 23, 64, 65)."""
    prompts = prompts_of(16)
    new = [(5 * row) % 30 + 24 for row in range(16)]
    start, answers, logprobs = reference(name, tmp_path, prompts, new)
    serve = {"context": CONTEXT, "max_running": 16, "max_batch_tokens": 40, "kv_tokens": 192}
    outcome, *others = run_ranks(tp, answer_on_rank, start, tp, prompts, new, serve)
    assert len(others) == tp - 1
    compare(outcome, answers, logprobs)
    assert outcome.num_preempted > 0
    assert outcome.num_cached >= 32
    assert outcome.num_free == 192 // 16


@pytest.mark.parametrize(
    ("serve", "preempts", "shares"),
    [
        ({"max_running": 1, "kv_tokens": CONTEXT, "prefix_cache": False}, False, False),
        ({"max_running": 1, "kv_tokens": CONTEXT}, False, True),
        # all are computed in the first pass, so that there is nothing yet to share
        ({"max_running": 16, "kv_tokens": 1536, "max_batch_tokens": 4096}, False, False),
        ({"max_running": 16, "kv_tokens": 1536, "max_batch_tokens": 1}, False, True),
        ({"max_running": 2, "kv_tokens": CONTEXT}, True, True),
    ],
    ids=["alone", "alone with a memory", "all at once", "a token a pass", "7 blocks"],
)
def test_how_requests_are_batched_changes_nothing(
    tmp_path: Path, serve: dict[str, Any], preempts: bool, shares: bool
) -> None:
    """Also where one prompt is another's beginning, or the same again, of whole blocks or not, and
    where two that fit alone do not fit together at their ends (bug bank 64, 65)."""
    common = [(11 * i * i + 3) % VOCAB for i in range(48)]
    prompts = [common[:size] for size in (34, 34, 33, 32, 32, 31, 16, 17, 48, 1, 2)]
    new = [35, 35, 20, 9, 9, 9, 1, 40, 48, 30, 30]
    start, answers, logprobs = reference("MI_SW", tmp_path, prompts, new)
    (outcome,) = run_ranks(1, answer_on_rank, start, 1, prompts, new, {"context": CONTEXT, **serve})
    compare(outcome, answers, logprobs)
    assert (outcome.num_preempted > 0) == preempts
    assert (outcome.num_cached > 0) == shares
    assert outcome.num_free == serve["kv_tokens"] // 16
