"""Every layout equals one process: loss, norm, every gradient, parameters after 1 and 5 steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from shardwise.models.families import ALL_KINDS, FAMILIES
from tests.models import MODELS, model_config, save_model
from tests.oracle import LOSS_RTOL, NORM_RTOL, AdamW, OracleStep, assert_close, run_oracle
from tests.ranks.steps import RAGGED, RankStep, random_rows, run_steps

NUM_STEPS = 5
EPS = 1e-3  # with 1e-8, a gradient of rounding noise would decide the first update
BATCHES = [random_rows(RAGGED, seed=seed) for seed in range(NUM_STEPS)]
ONE, FSDP2, FSDP4, TP2, TP3 = {"fsdp": 1}, {"fsdp": 2}, {"fsdp": 4}, {"tp": 2}, {"tp": 3}
FSDP5 = {"fsdp": 5}  # leaves ranks without a part of the smallest parameters
BOTH = {"fsdp": 2, "tp": 2}
DP2, DP2TP2, HYBRID = {"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "fsdp": 2}
ZERO1, ZERO2 = {"fsdp": 2, "zero": 1}, {"fsdp": 2, "zero": 2}
DATA = (DP2, DP2TP2, HYBRID, ZERO1, ZERO2, {**HYBRID, "zero": 1}, {**BOTH, "zero": 1})

FAST = [
    ("LL", TP2),
    ("LL", BOTH),
    ("LL321", TP2),
    ("LL321T", BOTH),
    ("ODD", TP3),
    ("ODD", FSDP2),
    ("Q3", BOTH),
    ("G3", TP2),
    ("LL", DP2),
    ("LL321T", HYBRID),
    ("ODD", ZERO1),
    ("Q3", ZERO2),
    ("MI_SW", BOTH),
]
SLOW = [
    (name, layout)
    for name in MODELS
    for layout in (ONE, FSDP2, FSDP4, FSDP5, TP2, TP3, BOTH, *DATA)
    if layout.get("tp", 1) in ((1, 3) if name == "ODD" else (1, 2)) and (name, layout) not in FAST
]


@cache
def saved(name: str) -> Path:
    return save_model(name, Path(mkdtemp()) / name)


@cache
def oracle(name: str) -> tuple[OracleStep, ...]:
    optimizer = AdamW(lr=1e-3, eps=EPS, weight_decay=0.1)
    return tuple(run_oracle(saved(name), BATCHES, optimizer, clip_norm=0.5))


def layout_id(value: object) -> str:
    return "x".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "layout"), FAST, ids=layout_id)
def test_layout_equals_one_process(name: str, layout: dict[str, int]) -> None:
    check_parity(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), SLOW, ids=layout_id)
def test_layout_equals_one_process_slow(name: str, layout: dict[str, int]) -> None:
    check_parity(name, layout)


def check_parity(name: str, layout: dict[str, int]) -> None:
    ranks = run_steps(
        saved(name),
        layout,
        BATCHES,
        micro_batch=2,
        eps=EPS,
        weight_decay=0.1,
        clip_norm=0.5,
    )
    for number, want in enumerate(oracle(name)):
        got = [steps[number] for steps in ranks]
        for one in got:  # every rank reports the same, right numbers
            assert one.loss == pytest.approx(want.loss, rel=LOSS_RTOL)
            assert one.norm == pytest.approx(want.norm, rel=NORM_RTOL)
            assert one.num_tokens == want.num_tokens == sum(RAGGED)
        scale = min(1.0, 0.5 / (want.norm + 1e-6))  # the gradients have been clipped in place
        assert set(got[0].grads) == set(want.grads)
        for key, grad in want.grads.items():
            assert_close(f"gradient of {key}, step {number}", got[0].grads[key], grad * scale)
        if number in (0, NUM_STEPS - 1):
            for key, param in want.params.items():
                assert_close(f"{key} after step {number}", got[0].params[key], param)
        check_replicas(got, layout.get("tp", 1))


def check_replicas(got: list[RankStep], tp: int) -> None:
    """Parameters that tp does not split are bitwise equal on its ranks."""
    for first in range(0, len(got), tp):
        for other in got[first + 1 : first + tp]:
            assert other.replicas == got[first].replicas


def test_every_claimed_family_and_kind_is_in_the_matrix() -> None:
    """docs/capabilities.md says "proved" only of what runs here."""
    proved = {(model_config(name).model_type, layout_id(layout)) for name, layout in FAST + SLOW}
    for family in FAMILIES.values():
        kinds = {
            "fsdp": "fsdp2",
            "ZeRO-1": "fsdp2xzero1",
            "ZeRO-2": "fsdp2xzero2",
            "dp": "dp2",
            "dp x fsdp": "dp2xfsdp2",
            "tp": "tp2",
            "fsdp x tp": "fsdp2xtp2",
            "dp x tp": "dp2xtp2",
        }
        assert set(kinds) == set(ALL_KINDS) - {"serve tp"}
        for kind in set(kinds) & set(family.proved):
            assert (family.model_type, kinds[kind]) in proved


@pytest.mark.parametrize("layout", [FSDP2, BOTH], ids=layout_id)
def test_recomputed_activations_change_nothing(layout: dict[str, int]) -> None:
    """checkpointing=full gives the same gradients."""
    batch = random_rows(RAGGED)
    plain = run_steps(saved("Q3"), layout, [batch], micro_batch=4)[0][0]
    recomputed = run_steps(saved("Q3"), layout, [batch], micro_batch=4, checkpointing="full")[0][0]
    assert recomputed.loss == pytest.approx(plain.loss, rel=LOSS_RTOL)
    for key, grad in plain.grads.items():
        assert_close(key, recomputed.grads[key], grad)


@pytest.mark.parametrize("layout", [FSDP2, TP2], ids=layout_id)
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


@pytest.mark.parametrize("layout", [FSDP2, DP2], ids=layout_id)
def test_bf16_gradients_are_reduced_in_fp32(layout: dict[str, int]) -> None:
    """The sum of two ranks' bf16 gradients is the fp32 sum of those of each rank's rows alone.

    Equal numbers of targets, so that dividing by half as many is exact in bf16 too.
    """
    batch = random_rows([31] * 8)
    bf16 = {"micro_batch": 4, "compute": "bf16"}
    got = run_steps(saved("LL"), layout, [batch], **bf16)[0][0].grads
    halves = [run_steps(saved("LL"), ONE, [batch[r::2]], **bf16)[0][0].grads for r in (0, 1)]
    for key, grad in got.items():
        want = (halves[0][key] + halves[1][key]) / 2
        excess = ((grad - want).abs() - 1e-6 * want.abs()).max()
        assert excess <= 0, f"{key}: max |difference| {(grad - want).abs().max():.3e}"
