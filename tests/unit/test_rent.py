"""Which rented machines do a job: the fewest of each kind, the cheapest first, and why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.api import find_gpus
from shardwise.api import plan as make_plan
from shardwise.cli import app
from shardwise.errors import UserError
from shardwise.planner.cost import Job
from shardwise.planner.rent import Limits

JOB = Job(tokens=1e9)
SETTINGS = ["train.seq_len=4096", "train.global_batch=64"]


def test_the_cheapest_comes_first_and_costs_what_its_plan_says() -> None:
    rentals = find_gpus("llama-3.1-8b", job=JOB, overrides=SETTINGS)
    prices = [rental.usd for rental in rentals.found]
    assert len(prices) >= 10
    assert prices == sorted(prices)
    for rental in rentals.found[:3]:
        price = rental.price
        alone = make_plan(
            "llama-3.1-8b",
            instance=f"{price.provider}:{price.instance}@{price.region}",
            num_instances=rental.num_instances,
            overrides=SETTINGS,
            job=JOB,
        )
        assert alone.cost is not None
        assert alone.cost.usd == pytest.approx(rental.usd)
        assert rental.hours * price.usd_per_hour * rental.num_instances == pytest.approx(rental.usd)


@pytest.mark.slow
def test_limits_are_kept() -> None:
    """More instances where one is too slow; none where they cost too much."""
    free = find_gpus("llama-3.1-8b", job=JOB, overrides=SETTINGS)
    region = "ap-southeast"
    near = find_gpus(
        "llama-3.1-8b", job=JOB, overrides=SETTINGS, limits=Limits(region=region, hours=3.0)
    )
    assert near.found
    assert all(region in rental.price.region for rental in near.found)
    assert all(rental.hours <= 3 for rental in near.found)
    assert any(rental.num_instances > 1 for rental in near.found)
    assert all("the network of" in reason for _, reason in near.rejected)
    slow = find_gpus("llama-3.1-8b", job=JOB, overrides=SETTINGS, limits=Limits(hours=0.01))
    assert any("hours, not 0.01" in reason for _, reason in slow.rejected)
    cheap = Limits(usd=free.found[2].usd)
    few = find_gpus("llama-3.1-8b", job=JOB, overrides=SETTINGS, limits=cheap)
    assert [r.usd for r in few.found] == [r.usd for r in free.found if r.usd <= free.found[2].usd]


def test_the_task_is_the_one_that_was_asked_for() -> None:
    """Adapters are no way out here: who wants them says so."""
    for rental in find_gpus("llama-3.1-8b", job=JOB, overrides=SETTINGS).found:
        assert rental.answer.chosen is not None
        assert rental.answer.chosen.plan.task == "full"
    lora = find_gpus("llama-3.1-8b", job=JOB, task="lora", overrides=SETTINGS)
    chosen = [rental.answer.chosen for rental in lora.found]
    assert {option and option.plan.method for option in chosen} == {"lora"}
    assert lora.found[0].usd < find_gpus("llama-3.1-8b", job=JOB, overrides=SETTINGS).found[0].usd


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--find-gpus"], "--tokens or --rows"),
        (["--find-gpus", "--tokens", "1B", "--task", "serve"], "--tokens or --rows"),
        (["--find-gpus", "--tokens", "1B", "--gpus", "8xH100-80GB"], "leave out --gpus"),
        (["--find-gpus", "--tokens", "1B", "--price", "2"], "leave out --price"),
        (["--find-gpus", "--tokens", "1B", "--region", "moon"], "aws:ap-southeast-1"),
        (["--find-gpus", "--tokens", "1T", "--budget", "1"], "no instance of the catalogue"),
        (["--within", "5"], "--find-gpus"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(options: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["plan", "llama-3.1-8b", *options], catch_exceptions=False)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_and_plan_are_of_the_cheapest(tmp_path: Path) -> None:
    options = ["--find-gpus", "--tokens", "1B", "--seq-len", "4096", "--json"]
    out = tmp_path / "plan.yaml"
    done = CliRunner().invoke(app, ["plan", "llama-3.1-8b", *options, "--out", str(out)])
    data = json.loads(done.stdout)
    best = data["rentals"]["found"][0]
    assert data["cost"]["usd"] == pytest.approx(best["usd"])
    assert data["layout"] == best["layout"]
    assert f"kind: {best['device']}" in out.read_text()
    assert {"option", "reason"} == set(data["rentals"]["rejected"][0])
