"""The HTML page: what it shows, how it draws a pipeline and seats the ranks; in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.config import Devices, Layout, Plan, Train
from shardwise.models.lookup import look_up
from shardwise.planner.answer import Answer
from shardwise.planner.drawing import Action, actions_of_rank, draw_pipeline
from shardwise.planner.page import memory_bars, page
from shardwise.planner.placement import nodes_of

ONE_F_ONE_B, LOOPED = "1f1b", "interleaved"


def ask(model: str = "llama-3.1-70b", gpus: str = "4x8xH100-80GB", **options: Any) -> Answer:
    settings = ["train.seq_len=8192", "train.global_batch=64"]
    return shardwise.plan(model, gpus=gpus, overrides=settings, **options)


def pipeline() -> Answer:
    return ask(layout=Layout(pp=4, tp=8, sequence_parallel=True))


@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, "gpipe", LOOPED])
@pytest.mark.parametrize(("pp", "num_micro"), [(2, 2), (2, 6), (4, 8), (4, 4)])
def test_the_order_is_the_one_that_torch_runs(schedule: str, pp: int, num_micro: int) -> None:
    """torch makes it for schedules of several stages a rank; of one the published order is known:
    all forward (GPipe), or pp - rank passes ahead (arXiv 2104.04473, figure 4)."""
    for rank in range(pp):
        order = actions_of_rank(schedule, pp, rank, num_micro)
        if schedule == LOOPED:
            want = torch_order(pp, rank, num_micro)
        else:
            ahead = num_micro if schedule == "gpipe" else min(num_micro, pp - rank)
            forward = [Action(True, rank, m) for m in range(num_micro)]
            backward = [Action(False, rank, m) for m in range(num_micro)]
            want = forward[:ahead]
            for number in range(num_micro):
                want += [backward[number], *forward[ahead + number : ahead + number + 1]]
        assert order == want


def torch_order(pp: int, rank: int, num_micro: int) -> list[Action]:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    class Stage:
        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages, self.group_size = index, 2 * pp, pp
            self.group_rank, self.is_last = rank, index == 2 * pp - 1
            self.has_backward, self.group = True, None

    stages: Any = [Stage(rank), Stage(rank + pp)]
    runner = ScheduleInterleaved1F1B(stages, num_micro, loss_fn=lambda *_: None)
    found = []
    for action in runner.pipeline_order[rank]:
        if action is not None:
            forward, micro = action.computation_type.name == "FORWARD", action.microbatch_index
            found.append(Action(forward, action.stage_index, int(micro or 0)))
    return found


@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, "gpipe", LOOPED])
def test_a_drawn_pipeline_idles_as_the_formula_says(schedule: Any) -> None:
    """(pp - 1) / micro-batches of the work, half of it interleaved, where all stages are alike."""
    found = look_up("llama-3.1-8b").facts
    train = Train(global_batch=8, seq_len=4096, pipeline_schedule=schedule)
    plan = Plan(model="x", task="full", layout=Layout(pp=4), train=train)
    drawing = draw_pipeline(plan, found)
    assert drawing is not None
    assert len(drawing.rows) == 4
    for row in drawing.rows:
        assert len({block.action for block in row}) == len(row)
        for before, after in pairwise(row):
            assert after.begin >= before.end
    work = max(sum(block.end - block.begin for block in row) for row in drawing.rows)
    share = 3 / 8 / (2 if schedule == LOOPED else 1)
    assert drawing.end / work - 1 == pytest.approx(share, abs=0.12)  # the head makes it uneven


def test_schedules_that_torch_makes_up_are_not_drawn() -> None:
    found = look_up("llama-3.1-8b").facts
    train = Train(global_batch=16, pipeline_schedule="zbv")
    plan = Plan(model="x", task="full", layout=Layout(pp=2), train=train)
    assert draw_pipeline(plan, found) is None
    assert draw_pipeline(Plan(model="x", task="full", layout=Layout()), found) is None


def test_ranks_sit_in_the_order_of_the_mesh() -> None:
    """As torch numbers a mesh of pp x dp x fsdp x cp x tp."""
    import torch

    layout = Layout(pp=2, dp=2, fsdp=2, cp=2, tp=2, zero=1)
    plan = Plan(model="x", task="full", layout=layout, devices=Devices(count=34))
    mesh = torch.arange(32).view(2, 2, 2, 2, 2)
    seats = [seat for node in nodes_of(plan, 8).nodes for seat in node.seats]
    assert len(seats) == 32
    for seat in seats:
        assert mesh[tuple(seat.at.values())] == seat.rank
        assert list(seat.at) == ["pp", "dp", "fsdp", "cp", "tp"]
    nodes = nodes_of(plan, 8)
    assert [len(node.seats) for node in nodes.nodes] == [8, 8, 8, 8, 0]
    assert [node.num_idle for node in nodes.nodes] == [0, 0, 0, 0, 2]
    many = nodes_of(Plan(model="x", task="full", layout=Layout(dp=4096)), 8)
    assert len(many.nodes) + many.num_hidden == 512


def test_bars_show_every_part_and_where_a_device_ends() -> None:
    answer = pipeline()
    bars = memory_bars(answer)
    assert answer.given is not None
    shown = next(bar for bar in bars if bar.label == answer.given.name)
    assert not shown.is_cut
    assert shown.mark == pytest.approx(40)  # of two and a half devices
    share = answer.given.memory.total / answer.given.capacity
    assert sum(part.percent for part in shown.parts) == pytest.approx(40 * share, abs=0.1)
    assert bars[0].is_cut
    assert sum(part.percent for part in bars[0].parts) == pytest.approx(100)


def test_the_page_holds_the_answer_and_fetches_nothing() -> None:
    answer = ask()
    html = page(answer)
    assert "<h1>Shard it</h1>" in html
    assert "Sharded over 32 devices" in html
    assert "Which rank sits where" in html
    assert answer.chosen is not None
    assert answer.chosen.name in html
    assert all(name in html for name, _ in answer.rejected[:20])
    assert not re.findall(r"(?:src|href)=\"(?!data:)", html)
    assert "<script" not in html
    assert "@import" not in html
    assert page(ask()) == html


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<b>model"
    folder.mkdir()
    import json

    from tests.unit.test_facts import SMOLLM2

    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    html = page(shardwise.plan(folder, gpus="cpu:2", memory_gib=2.5))
    assert "<b>model" not in html
    assert "&lt;b&gt;model" in html


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["pipeline", "search", "impossible", "serve"])
def test_in_a_browser_it_is_as_wide_as_the_window(tmp_path: Path, kind: str, width: int) -> None:
    """No message on the console, and nothing to scroll sideways but what is meant to be."""
    answers = {
        "pipeline": pipeline,
        "search": ask,
        "impossible": lambda: ask(gpus="1xA10G"),
        "serve": lambda: ask("qwen3-8b", "1xL40S", task="serve"),
    }
    (tmp_path / "page.html").write_text(page(answers[kind]()))
    (tmp_path / "frame.html").write_text(
        f"<iframe id=f src=page.html width={width} height=900></iframe><script>"
        "f.onload = () => { const d = f.contentDocument.documentElement;"
        "document.title = `${d.scrollWidth} of ${d.clientWidth}` }</script>"
    )
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/frame.html"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    match = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout)
    assert match is not None, done.stdout[:500]
    assert int(match[1]) <= int(match[2])
