"""How much room a server has for keys and values, and what it says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Devices, Layout, Plan, Serve
from shardwise.errors import UserError
from shardwise.models.read import read_facts
from shardwise.planner.kv_room import describe_room, with_kv_room
from shardwise.planner.memory import kv_bytes_per_token, predict_memory
from tests.models import save_model

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("LL", tmp_path_factory.mktemp("m") / "LL")


def room(model: Path, gib: float | None = None, **serve: Any) -> tuple[int | None, int | None]:
    """Context and tokens."""
    plan = Plan(
        model=str(model),
        task="serve",
        layout=Layout(),
        devices=Devices(memory_gib=gib),
        serve=Serve(**serve),
    )
    settings = with_kv_room(plan, read_facts(model)).serve
    return settings.context, settings.kv_tokens


def test_as_many_tokens_as_can_be_asked_for(model: Path) -> None:
    """Each request in blocks of its own; so none is cut short by another's last block."""
    assert room(model, 8.0, context=100, max_running=4) == (100, 4 * 112)
    assert room(model, 8.0, context=96, max_running=1) == (96, 96)
    assert room(model, 8.0, max_running=2) == (256, 512)
    assert room(model, max_running=2) == (256, 512)


def test_what_memory_leaves(model: Path) -> None:
    """All that is left beside what the plan has for other things, and no more."""
    facts = read_facts(model)
    plan = Plan(model=str(model), task="serve", layout=Layout(), serve=Serve(context=128))
    memory = predict_memory(plan, facts)
    one = kv_bytes_per_token(plan, facts)
    gib = (memory.total - memory.kv_cache + 200 * one) / GIB
    assert room(model, gib + 1e-9, context=128) == (128, 192)


@pytest.mark.parametrize(("kv_tokens", "expected"), [(128, 128), (130, 128), (16, 16), (1000, 256)])
def test_a_context_that_nobody_set_is_what_has_room(
    model: Path, kv_tokens: int, expected: int
) -> None:
    context, tokens = room(model, kv_tokens=kv_tokens)
    assert (context, tokens) == (expected, kv_tokens // 16 * 16)


def test_a_context_that_has_no_room_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"kv_tokens=100 has no room .*context=100 .*=112 .*=96"):
        room(model, kv_tokens=100, context=100)
    with pytest.raises(UserError, match=r"context=128 needs .* GiB a process, of 0.01 GiB"):
        room(model, 0.01, context=128)


def test_what_is_said(model: Path) -> None:
    plan = Plan(
        model=str(model),
        task="serve",
        layout=Layout(),
        serve=Serve(context=128, kv_tokens=256, max_running=8),
    )
    text = describe_room(plan, read_facts(model))
    assert text.startswith("keys and values: room for 256 tokens")
    assert text.endswith("2 requests of 128 tokens at a time, or 8 of 32")
