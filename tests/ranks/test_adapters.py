"""Adapters: fresh ones, the frozen model beside them, checkpoints, and PEFT's files out and in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from shardwise.models.adapters import ADAPTER_FILE, file_name
from shardwise.models.read import read_facts
from shardwise.weights.index import verify
from shardwise.weights.names import open_model_index
from shardwise.weights.save import export_adapters, export_model
from tests.e2e.bench import fast_first
from tests.models import save_model, save_start
from tests.oracle import LOSS_RTOL, AdamW, assert_close, round_matrices, run_oracle
from tests.ranks.steps import RAGGED, _micro_batches, random_rows, run_steps
from tests.ranks.test_checkpoint import check_resume, run
from tests.run_ranks import run_ranks

ROWS = [random_rows(RAGGED, seed=seed) for seed in range(3)]
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
LORA = {"rank": 4, "targets": ["q_proj", "o_proj", "up_proj", "down_proj"]}


@pytest.mark.parametrize(
    "layout",
    fast_first([{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"fsdp": 2}, {"pp": 2}], 2),
    ids=str,
)
def test_fresh_adapters_are_the_same_on_every_layout(tmp_path: Path, layout: Any) -> None:
    """They change nothing at first, and then as on one rank (bug bank 32)."""
    model = save_model("LL", tmp_path / "LL")
    settings: dict[str, Any] = {"lora": LORA, "learning_rate": 1e-2, "eps": 1e-3, "micro_batch": 2}
    untouched = run_oracle(model, ROWS[:1], AdamW(lr=0.0))[0].loss
    (alone,) = run_steps(model, {"fsdp": 1}, ROWS, **settings)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in alone[0].params} == {
        *LORA["targets"]  # type: ignore[misc]
    }
    for steps in run_steps(model, layout, ROWS, **settings):
        assert steps[0].loss == pytest.approx(untouched, rel=LOSS_RTOL)
        for got, want in zip(steps, alone, strict=True):
            assert got.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
            for name, _, param in got.named:
                assert_close(name, param, want.params[name])
    for name, param in alone[-1].params.items():
        assert param.any(), name
        if name.endswith("lora_A"):
            assert param.std() == pytest.approx((3 * param.shape[1]) ** -0.5, rel=0.2)


def hold_on_rank(rank: int, model_dir: str, layout: dict[str, Any], task: Any) -> Any:
    """The dtypes that rest on a rank, and what a step has changed."""
    from shardwise.config import Layout, Plan, Precision, Train
    from shardwise.parallel.grads import local_part
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer.optim import make_optimizer
    from shardwise.trainer.step import train_step
    from shardwise.weights.load import load_model

    train = Train(micro_batch=2, check_replicas=True)
    plan = Plan(
        model=model_dir,
        task=task,
        layout=Layout(**layout),
        precision=Precision(compute="bf16"),
        train=train,
    )
    mesh = build_mesh(plan.layout, "cpu")
    sharded = load_model(plan, mesh, torch.float32)
    optimizer = make_optimizer(sharded, train)
    before = {n: local_part(p).detach().clone() for n, p in sharded.named_parameters()}
    micro = _micro_batches(ROWS[0], plan, mesh)
    train_step(sharded, optimizer, micro, mesh, train, 1e-2)
    changed = {
        name
        for name, param in sharded.named_parameters()
        if not torch.equal(before[name], local_part(param).detach())
    }
    held = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    return {name: str(tensor.dtype) for name, tensor in before.items()}, changed, held


@pytest.mark.parametrize(
    "layout", fast_first([{"pp": 2}, {"dp": 2}, {"fsdp": 2, "tp": 2}], 2), ids=str
)
def test_the_model_rests_in_the_compute_dtype_and_stays_as_it_is(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    """bf16 weights without gradients or moments, fp32 adapters (bug bank 34); every B has moved,
    as have none of the A, whose gradient is zero at first."""
    model = save_model("LL", tmp_path / "LL")
    num_ranks = 4 if "fsdp" in layout else 2
    for dtypes, changed, held in run_ranks(num_ranks, hold_on_rank, str(model), layout, "lora"):
        for name, dtype in dtypes.items():
            assert dtype == ("torch.float32" if "lora" in name else "torch.bfloat16"), name
        assert changed == {name for name in dtypes if name.endswith("lora_B")}
        assert 0 < held < 70_000


@pytest.mark.parametrize(
    ("name", "written", "read"),
    fast_first(
        [
            ("LL", "tp2", "tp2"),
            ("PHIW+qlora", "tp2", "fsdp2"),
            ("LL", "both", "pp2"),
            ("LL", "pp2", "tp4"),
            ("LLW+qlora", "pp2", "both"),
        ],
        2,
    ),
)
def test_resume_on_the_same_or_another_layout(
    tmp_path: Path, name: str, written: str, read: str
) -> None:
    """A checkpoint has the adapters alone, and the model stays where it is."""
    _, adapters = save_start(name, tmp_path)
    check_resume(adapters, tmp_path, written, read)
    stored = open_model_index(tmp_path / "step-000002" / "model", read_facts(adapters)).pieces
    own = {name for name, pieces in stored.items() if "step-000002" in str(pieces[0].file)}
    assert own == {name for name in stored if "lora" in name}


@pytest.mark.parametrize(
    ("name", "layout"),
    fast_first(
        [
            ("LL", "fsdp2"),
            ("PHI", "tp2"),
            ("LLW+qlora", "tp2"),
            ("PHIW+qlora", "fsdp2"),
            ("LL", "tp2"),
            ("Q3", "pp2"),
            ("OSS", "ep2"),
            ("DS", "ep2"),
        ],
        3,
    ),
)
def test_what_was_trained_is_what_peft_loads(tmp_path: Path, name: str, layout: str) -> None:
    """Whole, with the same logits, without the model's own weights (bug bank 31); and the merged
    model has them too, in plain transformers. What was trained on matrices of four bits has the
    logits that it has on those of bitsandbytes."""
    base, start = save_start(name, tmp_path)
    step, out, merged = tmp_path / "step-000002", tmp_path / "out", tmp_path / "merged"
    ranks = run(start, layout, range(2), save=step)
    facts = read_facts(step / "model")
    index = open_model_index(step / "model", facts)
    assert verify(index, facts) == ()
    num_bytes = export_adapters(index, facts, out, torch.float32)
    stored, began = load_file(out / ADAPTER_FILE), load_file(start / ADAPTER_FILE)
    assert {k: t.shape for k, t in stored.items()} == {k: t.shape for k, t in began.items()}
    assert num_bytes == sum(tensor.nbytes for tensor in stored.values())
    for key, tensor in stored.items():
        assert not torch.equal(tensor, began[key]), key
    if layout != "tp2":  # there, parts of fused matrices have other names
        for rank in ranks:
            for key, param in rank[-1].params.items():
                assert torch.equal(stored[file_name(key)], param), key
    export_model(index, facts, merged, torch.float32)
    ids = torch.tensor([random_rows((40,))[0][0]])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        if facts.adapters is not None and facts.adapters.quantize is not None:
            quantized = AutoModelForCausalLM.from_pretrained(
                base, dtype=torch.float32, quantization_config=NF4
            )
            # as in training: for evaluation, bitsandbytes rounds the scales to bf16 on CPU
            theirs = PeftModel.from_pretrained(quantized.train(), out).train()(ids).logits
            round_matrices(plain)
        before = plain(ids).logits
        beside = PeftModel.from_pretrained(plain, out).eval()(ids).logits
        inside = AutoModelForCausalLM.from_pretrained(merged).eval()(ids).logits
    assert (beside - before).abs().max() > 1e-2
    assert (beside - inside).abs().max() < 1e-5 * beside.abs().max()
    if facts.adapters is not None and facts.adapters.quantize is not None:
        assert (beside - theirs).abs().max() < 1e-5 * beside.abs().max()


def test_a_rounded_model_rests_in_four_bits_and_stays_as_it_is(tmp_path: Path) -> None:
    """Bytes of matrices, bf16 of the rest, fp32 adapters; replicas are compared byte by byte."""
    model = save_model("LLW", tmp_path / "LLW")
    for dtypes, changed, _ in run_ranks(2, hold_on_rank, str(model), {"dp": 2}, "qlora"):
        for name, dtype in dtypes.items():
            is_matrix = name.endswith("proj.weight")
            expected = "float32" if "lora" in name else "uint8" if is_matrix else "bfloat16"
            assert dtype == f"torch.{expected}", name
        assert changed == {name for name in dtypes if name.endswith("lora_B")}
