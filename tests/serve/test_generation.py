"""Greedy answers of every served layout equal transformers' `generate` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import save_model, save_start
from tests.oracle import round_matrices
from tests.run_ranks import run_ranks

PROMPTS = [[5, 17, 3, 200, 9], list(range(40, 73)), [7]]
NUM_NEW = 20
CASES = [
    ("LL", 1),
    ("LL", 2),
    ("LL321T", 2),
    ("LLB", 2),
    ("ODD", 3),
    ("MI", 2),
    ("MI_SW", 2),
    ("Q2_SW", 2),
    ("Q2", 2),
    ("Q3", 2),
    ("Q3_321", 2),
    ("G3", 2),
    ("G3_321", 2),
    ("PHI", 2),
    ("GPT2", 1),
    ("MIX", 1),
    ("OSS", 1),
    ("DS", 1),
    ("LLW+qlora", 2),
    ("PHIW+qlora", 1),
]


def generate_on_rank(rank: int, model_dir: str, tp: int) -> Any:
    """Greedy tokens, and the width of the logits."""
    import torch

    from shardwise.config import Layout, Plan
    from shardwise.parallel.mesh import build_mesh
    from shardwise.server.engine import logits_by_step
    from shardwise.server.messages import END_OF_ANSWER
    from shardwise.weights.load import load_model

    plan = Plan(model=model_dir, task="serve", layout=Layout(tp=tp))
    mesh = build_mesh(plan.layout, "cpu")
    model = load_model(plan, mesh, torch.float32).model.eval()
    answers, widths = [], set()
    with torch.inference_mode():
        for prompt in PROMPTS:
            steps = logits_by_step(model, mesh, torch.tensor(prompt))
            tokens: list[int] = []
            logits = next(steps)
            while len(tokens) < NUM_NEW:
                widths.add(len(logits))
                tokens.append(int(logits.argmax()))
                try:  # only the first rank's token counts; a wrong one from another must not
                    logits = steps.send(tokens[-1] if rank == 0 else 1)
                except StopIteration:
                    break
            try:
                steps.send(END_OF_ANSWER)
            except StopIteration:
                answers.append(tokens)
    return answers, widths


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_greedy_tokens_equal_generate(tmp_path: Path, name: str, tp: int) -> None:
    """Also with a vocabulary that does not divide: no logit for padding (bug bank 5 and 23)."""
    import torch
    from transformers import AutoModelForCausalLM

    if name.endswith("+qlora"):
        base, folder = save_start(name, tmp_path)
    else:
        base = folder = save_model(name, tmp_path / name)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if base != folder:
        from peft import PeftModel

        round_matrices(plain)
        plain = PeftModel.from_pretrained(plain, folder).merge_and_unload()
    expected = []
    for prompt in PROMPTS:
        output = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(output[0, len(prompt) :].tolist())
    for answers, widths in run_ranks(tp, generate_on_rank, str(folder), tp):
        assert answers == expected
        assert widths == {plain.config.vocab_size}
