"""Every layout equals one process: loss, norm, every gradient, parameters after 1 and 5 steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from shardwise.models.families import FAMILIES
from shardwise.models.read import read_facts
from shardwise.weights.names import fused_parts
from tests.models import mark_rounded, model_config, save_adapters, save_model
from tests.oracle import (
    LOSS_RTOL,
    NORM_RTOL,
    AdamW,
    OracleStep,
    Row,
    assert_close,
    run_oracle,
)
from tests.ranks.layouts import (
    ADAPTED_FAST,
    ADAPTED_SLOW,
    FAST,
    LORA,
    QLORA,
    ROUNDED_FAST,
    ROUNDED_SLOW,
    SLOW,
    Case,
)
from tests.ranks.steps import RAGGED, RankStep, _micro_batches, random_rows, run_steps
from tests.run_ranks import run_ranks

NUM_STEPS = 5
COMPARED = (0, NUM_STEPS - 1)
"""steps of which every gradient and parameter is compared; of the others loss and norm are"""
EPS = 1e-3  # with 1e-8, a gradient of rounding noise would decide the first update
CASES = FAST + SLOW + ADAPTED_FAST + ADAPTED_SLOW + ROUNDED_FAST + ROUNDED_SLOW
BATCHES = [random_rows(RAGGED, seed=seed) for seed in range(NUM_STEPS)]
FSDP2, TP2 = {"fsdp": 2}, {"tp": 2}


@cache
def saved(name: str) -> Path:
    if name.endswith(QLORA):
        return mark_rounded(save_adapters(saved(name.removesuffix(QLORA)), Path(mkdtemp()) / name))
    if name.endswith(LORA):
        return save_adapters(saved(name.removesuffix(LORA)), Path(mkdtemp()) / name)
    return save_model(name, Path(mkdtemp()) / name)


def plain(name: str) -> str:
    """Of a model with adapters the model."""
    return name.removesuffix(LORA).removesuffix(QLORA)


@cache
def oracle(name: str) -> tuple[OracleStep, ...]:
    optimizer = AdamW(lr=1e-3, eps=EPS, weight_decay=0.1)
    adapters = saved(name) if name.endswith((LORA, QLORA)) else None
    model = saved(plain(name))
    return tuple(run_oracle(model, BATCHES, optimizer, clip_norm=0.5, adapters=adapters))


@pytest.mark.parametrize("case", FAST + ADAPTED_FAST + ROUNDED_FAST, ids=str)
def test_layout_equals_one_process(case: Case) -> None:
    check_parity(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW + ADAPTED_SLOW + ROUNDED_SLOW, ids=str)
def test_layout_equals_one_process_slow(case: Case) -> None:
    check_parity(case)


def check_parity(case: Case, batches: Sequence[Sequence[Row]] = BATCHES) -> None:
    """Train on the rows of `BATCHES`, marked as they may be, and compare all there is."""
    ranks = run_steps(
        saved(case.model),
        case.layout,
        batches,
        eps=EPS,
        weight_decay=0.1,
        clip_norm=0.5,
        kept=COMPARED,
        **{"micro_batch": 2, **case.train},  # type: ignore[arg-type]
    )
    parts = fused_parts(read_facts(saved(case.model)))
    for number, want in enumerate(oracle(case.model)):
        got = [steps[number] for steps in ranks]
        for one in got:  # every rank reports the same, right numbers
            assert one.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
            assert one.norm == pytest.approx(want.norm, rel=NORM_RTOL)
            assert one.num_tokens == want.num_tokens == sum(RAGGED)
        if number not in COMPARED:
            continue
        scale = min(1.0, 0.5 / (want.norm + 1e-6))  # the gradients have been clipped in place
        found = {name for one in got for name in one.grads}
        assert {parts.get(name, (name, 0))[0] for name in found} == set(want.grads)
        for key, grad, param in (entry for one in got for entry in one.named):
            name, first = parts.get(key, (key, 0))
            rows = slice(first, first + len(grad))
            assert_close(f"gradient of {key}, step {number}", grad, want.grads[name][rows] * scale)
            assert_close(f"{key} after step {number}", param, want.params[name][rows])
        if case.layout.get("tp", 1) > 1:  # the parts that a fused matrix was taken into
            trained = {name for name, (whole, _) in parts.items() if whole in want.grads}
            assert trained <= found
        check_replicas(got)


def check_replicas(got: list[RankStep]) -> None:
    """Whatever several ranks hold is bitwise equal on all of them."""
    seen: dict[tuple[str, str], str] = {}
    for step in got:
        for box, digest in step.held:
            assert seen.setdefault(box, digest) == digest, box


def test_every_claimed_family_and_kind_is_in_the_matrix() -> None:
    """docs/capabilities.md says "proved" only of what runs here."""
    proved = {
        (model_config(plain(case.model)).model_type, kind) for case in CASES for kind in case.kinds
    }
    for family in FAMILIES.values():
        for kind in set(family.proved) - {"serve tp"}:
            assert (family.model_type, kind) in proved


def save_idle(folder: Path) -> Path:
    """A mixture of experts whose router only ever chooses the first or the second."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_model("MIX", folder / "MIX"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1] = -layer.mlp.gate.weight[0]
            layer.mlp.gate.weight[2:] = 0.0
    model.config.num_experts_per_tok = 1
    model.save_pretrained(folder / "idle")
    return folder / "idle"


@pytest.mark.parametrize(
    "layout", [{"fsdp": 2}, {"fsdp": 2, "ep": 2}, {"fsdp": 4, "ep": 4}], ids=str
)
def test_experts_that_get_no_token(tmp_path: Path, layout: dict[str, int]) -> None:
    """No hang; their gradient is zero, not missing, and they decay as the oracle's do (bug bank
    10). One rank's rows are a single token each."""
    import torch

    model = save_idle(tmp_path)
    rows = random_rows((1, 60, 1, 33, 1, 17, 1, 5))
    want = run_oracle(model, [rows], AdamW(lr=1e-3, eps=EPS, weight_decay=0.1))[0]
    idle = "model.layers.0.mlp.experts.gate_up_proj"
    assert not want.grads[idle][2:].any()
    assert want.grads[idle][:2].any()
    for (got,) in run_steps(model, layout, [rows], micro_batch=1, eps=EPS, weight_decay=0.1):
        assert got.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
        assert not got.grads[idle][2:].any()
        for name, grad, param in got.named:
            assert_close(f"gradient of {name}", grad, want.grads[name])
            assert_close(name, param, want.params[name])
        assert torch.isfinite(got.grads[idle]).all()


RECOMPUTED = [
    Case(model="Q3", layout={"fsdp": 2}, train={"checkpointing": "full"}),
    Case(model="Q3", layout={"fsdp": 2, "tp": 2}, train={"checkpointing": "full"}),
    Case(model="Q3", layout={"fsdp": 2}, train={"checkpointing": "selective"}),
    Case(
        model="G3",
        layout={"tp": 2, "sequence_parallel": True},
        train={"checkpointing": "selective", "checkpoint_every": 2},
    ),
    Case(model="Q3", layout={"pp": 2}, train={"checkpointing": "full"}),
    Case(model="MI_SW", layout={"cp": 2}, train={"checkpointing": "selective"}),
    Case(model="MOE", layout={"fsdp": 2, "ep": 2}, train={"checkpointing": "full"}),
    Case(model="MIX", layout={"fsdp": 2, "ep": 2}, train={"checkpointing": "selective"}),
    Case(model="MOE", layout={"pp": 2}, train={"checkpointing": "full"}),
    Case(model="OSS", layout={"fsdp": 2}, train={"checkpointing": "selective"}),
    Case(model="DS", layout={"cp": 2}, train={"checkpointing": "full"}),
    Case(model="DS", layout={"fsdp": 2, "ep": 2}, train={"checkpointing": "selective"}),
    Case(model="PHI", layout={"tp": 2}, train={"checkpointing": "selective"}),
    Case(model="GPT2", layout={"fsdp": 2}, train={"checkpointing": "full"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", RECOMPUTED, ids=str)
def test_recomputed_activations_change_nothing(case: Case) -> None:
    check_parity(case)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_compiled_layers_train_the_same() -> None:
    """One process, so that no rank waits while another one compiles."""
    batch = random_rows((31,) * 4)
    want = run_oracle(saved("LL"), [batch], AdamW(lr=1e-3))[0]
    ((got,),) = run_steps(
        saved("LL"), {"fsdp": 1}, [batch], micro_batch=4, compile=True, timeout_s=450
    )
    assert got.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
    for name, grad, _ in got.named:
        assert_close(name, grad, want.grads[name])


@pytest.mark.parametrize("layout", [FSDP2, TP2], ids=["fsdp2", "tp2"])
def test_bf16_compute_keeps_fp32_master_weights(layout: dict[str, int]) -> None:
    """bf16 passes, fp32 weights and gradients: near the fp32 run, and smaller steps add up."""
    import torch

    batch = random_rows(RAGGED)
    step = run_steps(saved("LL"), layout, [batch], micro_batch=4, compute="bf16")[0][0]
    exact = run_steps(saved("LL"), layout, [batch], micro_batch=4)[0][0]
    assert step.loss == pytest.approx(exact.loss, rel=5e-3)
    assert step.norm == pytest.approx(exact.norm, rel=3e-2)
    assert all(p.dtype == torch.float32 for p in step.params.values())
    assert all(g.dtype == torch.float32 for g in step.grads.values())
    error = (step.grads["model.norm.weight"] - exact.grads["model.norm.weight"]).norm()
    assert error < 0.05 * exact.grads["model.norm.weight"].norm()


@pytest.mark.parametrize("layout", [FSDP2, {"dp": 2}], ids=["fsdp2", "dp2"])
def test_bf16_gradients_are_reduced_in_fp32(layout: dict[str, int]) -> None:
    """The sum of two ranks' bf16 gradients is the fp32 sum of those of each rank's rows alone.

    Equal numbers of targets, so that dividing by half as many is exact in bf16 too.
    """
    batch = random_rows([31] * 8)
    bf16: dict[str, Any] = {"micro_batch": 4, "compute": "bf16"}
    got = run_steps(saved("LL"), layout, [batch], **bf16)[0][0].grads
    halves = [
        run_steps(saved("LL"), {"fsdp": 1}, [batch[r::2]], **bf16)[0][0].grads for r in (0, 1)
    ]
    for key, grad in got.items():
        want = (halves[0][key] + halves[1][key]) / 2
        excess = ((grad - want).abs() - 1e-6 * want.abs()).max()
        assert excess <= 0, f"{key}: max |difference| {(grad - want).abs().max():.3e}"


@pytest.mark.parametrize("layout", [FSDP2, {"dp": 2}], ids=["fsdp2", "dp2"])
def test_gradients_reduced_in_bf16_are_near_the_exact_ones(layout: dict[str, int]) -> None:
    """Within the digits of bf16, and not more exact than that: the setting is obeyed."""
    batch = random_rows(RAGGED)
    step = run_steps(saved("LL"), layout, [batch], micro_batch=4, reduce="bf16")[0][0]
    exact = run_steps(saved("LL"), layout, [batch], micro_batch=4)[0][0]
    assert step.loss == pytest.approx(exact.loss, rel=LOSS_RTOL)
    for name, grad in exact.grads.items():
        error = (step.grads[name] - grad).norm() / grad.norm()
        assert error < 2**-7, name
    weight = "model.layers.0.mlp.up_proj.weight"
    assert (step.grads[weight] - exact.grads[weight]).norm() > 1e-5 * exact.grads[weight].norm()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"])
def test_the_last_step_of_an_epoch_may_have_fewer_rows(schedule: str) -> None:
    """A schedule is made for the micro-batches of a whole step; the missing ones are empty."""
    batches = [BATCHES[0], BATCHES[1][:1], BATCHES[2][:5]]
    want = run_oracle(saved("Q3"), batches, AdamW(lr=1e-3, eps=EPS))
    train = {"micro_batch": 1, "eps": EPS, "pipeline_schedule": schedule}
    for steps in run_steps(saved("Q3"), {"pp": 2}, batches, **train):
        for got, expected in zip(steps, want, strict=True):
            assert got.loss == pytest.approx(expected.loss, rel=LOSS_RTOL)
            assert got.norm == pytest.approx(expected.norm, rel=NORM_RTOL)
            for name, _, param in got.named:
                assert_close(name, param, expected.params[name])


EVALUATED = [
    {"fsdp": 1},
    {"fsdp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"pp": 2},
    {"pp": 3, "pipeline_schedule": "gpipe"},
    {"pp": 2, "pipeline_schedule": "interleaved"},
    {"pp": 2, "pipeline_schedule": "zbv"},
]


def evaluate_on_rank(
    rank: int, model_dir: str, layout: dict[str, Any], settings: dict[str, Any], rows: Any
) -> list[float]:
    """Loss of some rows, twice, a row at a time, then after a step: a pipeline goes from one to
    the other."""
    import torch

    from shardwise.config import Layout, Plan, Train
    from shardwise.parallel.mesh import build_mesh
    from shardwise.trainer.optim import make_optimizer
    from shardwise.trainer.step import evaluate, train_step
    from shardwise.weights.load import load_model

    schedule = layout.pop("pipeline_schedule", "1f1b")
    settings = {"pipeline_schedule": schedule, "eps": EPS, **settings}
    train = Train(micro_batch=2, global_batch=8, **settings)
    plan = Plan(model=model_dir, task="full", layout=Layout(**layout), train=train)
    mesh = build_mesh(plan.layout, "cpu")
    sharded = load_model(plan, mesh, torch.float32)
    optimizer = make_optimizer(sharded, train)
    losses = [evaluate(sharded, _micro_batches(rows, plan, mesh), mesh) for _ in range(2)]
    single = plan.model_copy(update={"train": train.model_copy(update={"micro_batch": 1})})
    losses.append(evaluate(sharded, _micro_batches(rows, single, mesh), mesh))
    train_step(sharded, optimizer, _micro_batches(rows, plan, mesh), mesh, train, 1e-3)
    return [*losses, evaluate(sharded, _micro_batches(rows, plan, mesh), mesh)]


@pytest.mark.parametrize("layout", EVALUATED, ids=str)
def test_evaluation_is_the_same_by_every_layout(layout: dict[str, Any]) -> None:
    """Seven rows, each counted once (bug bank 19), however they are cut: one at a time they go
    through a pipeline in several rounds. Training goes on unharmed afterwards."""
    check_evaluation(layout)


def check_evaluation(layout: dict[str, Any], **settings: Any) -> None:
    rows = random_rows(RAGGED[:7], seed=9)
    want = run_oracle(saved("Q3"), [rows], AdamW(lr=1e-3))[0].loss
    num_ranks = math.prod(n for n in layout.values() if isinstance(n, int))
    after = set()
    for before, again, singly, trained in run_ranks(
        num_ranks, evaluate_on_rank, str(saved("Q3")), layout, settings, rows
    ):
        assert before == again == pytest.approx(want, rel=LOSS_RTOL)
        assert singly == pytest.approx(want, rel=LOSS_RTOL)
        after.add(trained)
    assert len(after) == 1
    assert after.pop() < want
