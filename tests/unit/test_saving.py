"""What the plan says of checkpoints that are written while training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise
from shardwise.config import GIB
from shardwise.planner.answer import Answer
from shardwise.planner.memory import host_bytes_for_saves
from shardwise.planner.report import to_json
from tests.unit.test_facts import SMOLLM2

TABLE = 4 * SMOLLM2["vocab_size"] * SMOLLM2["hidden_size"]
"""bytes of the largest parameter, which is in one file"""
WITH_SAVES = "train.save_every=10"


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    return folder


def ask(model: Path, gpus: str, *overrides: str, memory_gib: float | None = None) -> Answer:
    settings = ["train.seq_len=160", *overrides]
    return shardwise.plan(model, gpus=gpus, memory_gib=memory_gib, overrides=settings)


def test_the_copy_is_a_part_of_host_memory(smol: Path) -> None:
    """Weights and two moments in fp32, and two more of the file that is being written."""
    without, alone = ask(smol, "cpu:1").single, ask(smol, "cpu:1", WITH_SAVES).single
    copy = 12 * without.facts.num_parameters
    assert without.memory.saving == 0
    assert alone.memory.saving == copy + 2 * TABLE
    more = alone.memory.total - without.memory.total
    assert more == pytest.approx(alone.memory.saving, rel=0.04)  # and the allocator's share
    waits = ask(smol, "cpu:1", WITH_SAVES, "train.async_save=false").single
    assert waits.memory == without.memory


def test_devices_with_a_memory_of_their_own_have_none_of_it(smol: Path) -> None:
    alone = ask(smol, "1xH100-80GB", WITH_SAVES).single
    assert alone.memory.saving == 0
    copy = 12 * alone.facts.num_parameters
    expected = copy + 2 * TABLE
    assert host_bytes_for_saves(alone.plan, alone.facts) == expected
    without = ask(smol, "1xH100-80GB").single
    assert host_bytes_for_saves(without.plan, without.facts) == 0


def test_training_waits_where_the_copy_has_no_room(smol: Path) -> None:
    """Without any other change; and not if the user has asked for it."""
    roomy = ask(smol, "cpu:1", WITH_SAVES).single
    short = roomy.memory.total / GIB - 0.1
    answer = ask(smol, "cpu:1", WITH_SAVES, memory_gib=short)
    assert answer.verdict == "fits_one_device"
    assert answer.chosen is not None
    assert answer.chosen.plan.train.async_save is False
    assert answer.chosen.name.endswith("training waits for saves")
    assert to_json(answer)["memory"]["worst_rank"]["saving"] == 0
    asked = ask(smol, "cpu:1", WITH_SAVES, "train.async_save=true", memory_gib=short)
    assert not asked.single.fits
    assert asked.single.plan.train.async_save is True
    none = ask(smol, "cpu:1", WITH_SAVES, memory_gib=0.5)
    assert "waits for saves" not in none.single.name
