"""The catalogue of models against what transformers builds and what their makers publish."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise import plan
from shardwise.catalog.models import find_model, load_models, nearest_name
from shardwise.models.planned import ALL_FAMILIES
from shardwise.models.read import facts_of_config, why_not_run
from shardwise.planner.capabilities import known_models

CATALOGUE = load_models()
PUBLISHED: dict[str, str] = {  # billions of parameters, as the hub or the model card counts them
    "llama-3-8b": "8.03",
    "llama-3-70b": "70.6",
    "llama-3.1-8b": "8.03",
    "llama-3.1-70b": "70.6",
    "llama-3.1-405b": "406",
    "llama-3.2-1b": "1.24",
    "llama-3.2-3b": "3.21",
    "llama-3.3-70b": "70.6",
    "qwen2.5-0.5b": "0.49",
    "qwen2.5-1.5b": "1.54",
    "qwen2.5-3b": "3.09",
    "qwen2.5-7b": "7.62",
    "qwen2.5-14b": "14.8",
    "qwen2.5-32b": "32.8",
    "qwen2.5-72b": "72.7",
    "qwen3-0.6b": "0.6",
    "qwen3-1.7b": "1.7",
    "qwen3-4b": "4.0",
    "qwen3-8b": "8.2",
    "qwen3-14b": "14.8",
    "qwen3-32b": "32.8",
    "qwen3-30b-a3b": "30.5",
    "qwen3-235b-a22b": "235",
    "qwen3-coder-480b-a35b": "480",
    "qwen3-next-80b-a3b": "80",
    "qwen3.5-27b": "27",
    "qwen3.5-35b-a3b": "35",
    "qwen3.5-122b-a10b": "122",
    "gemma-2-2b": "2.6",
    "gemma-2-9b": "9.24",
    "gemma-2-27b": "27.2",
    "gemma-3-1b": "1.00",
    "mistral-7b-v0.3": "7.25",
    "mistral-nemo-12b": "12.2",
    "mistral-large-123b": "123",
    "mixtral-8x7b": "46.7",
    "mixtral-8x22b": "141",
    "deepseek-v3": "671",
    "gpt-oss-20b": "20.9",
    "gpt-oss-120b": "116.8",
    "phi-3-mini-4k": "3.8",
    "phi-3.5-mini": "3.8",
    "phi-4": "14.7",
    "phi-4-mini": "3.8",
    "smollm2-135m": "0.135",
    "smollm2-360m": "0.362",
    "smollm2-1.7b": "1.7",
    "smollm3-3b": "3.08",
    "glm-4-9b": "9.4",
}
ROUNDED: dict[str, float] = {
    # with what sees images: 109 and 400; 0.86 billion of them
    "llama-4-scout": 109e9,
    "llama-4-maverick": 400e9,
    "kimi-k2": 1.0e12,
    "minimax-m2.5": 230e9,
    "qwen3.5-397b-a17b": 397e9,
    "glm-4.5": 355e9,  # with the layer that predicts a second token, without the embedding
    "glm-4.5-air": 106e9,
}
NOT_EMBEDDED: dict[str, float] = {
    # Gemma 2 (arXiv 2408.00118, table 2) and 3 (arXiv 2503.19786, table 1)
    "gemma-2-2b": 2024e6,
    "gemma-2-9b": 8324e6,
    "gemma-2-27b": 26047e6,
    "gemma-3-1b": 698e6,
    "gemma-3-4b": 3209e6,
    "gemma-3-12b": 10759e6,
    "gemma-3-27b": 25600e6,
}
MET: dict[str, tuple[str, int]] = {
    # billions that work on a token, and how many of embedding and head the makers count with them
    "mixtral-8x7b": ("12.9", 2),
    "mixtral-8x22b": ("39", 2),
    "qwen3-30b-a3b": ("3", 2),
    "qwen3-235b-a22b": ("22", 2),
    "qwen3-coder-480b-a35b": ("35", 2),
    "qwen3.5-35b-a3b": ("3", 2),
    "qwen3.5-122b-a10b": ("10", 2),
    "qwen3.5-397b-a17b": ("17", 2),
    "qwen3-next-80b-a3b": ("3", 0),
    "llama-4-scout": ("17", 2),
    "llama-4-maverick": ("17", 2),
    "deepseek-v3": ("37", 1),
    "kimi-k2": ("32", 1),
    "gpt-oss-20b": ("3.6", 1),
    "gpt-oss-120b": ("5.1", 1),
    "minimax-m2.5": ("10", 1),
    "glm-4.5": ("32", 0),
    "glm-4.5-air": ("12", 0),
}


def facts(name: str) -> Any:
    return facts_of_config(CATALOGUE[name].config, source=name, planning=True)


def _fast_first() -> list[Any]:
    """Each model; all but one of each family are slow."""
    seen: set[str] = set()
    found = []
    for name, model in CATALOGUE.items():
        family = model.config["model_type"]
        found.append(pytest.param(name, marks=[pytest.mark.slow] if family in seen else []))
        seen.add(family)
    return found


@pytest.mark.parametrize("name", _fast_first())
def test_a_model_has_the_parameters_that_transformers_gives_it(name: str) -> None:
    """Every name and shape, so every parameter to the last one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**CATALOGUE[name].config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = {key: tuple(param.shape) for key, param in model.named_parameters()}
    assert facts(name).parameter_shapes == built
    assert facts(name).num_parameters == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    digits = len(PUBLISHED[name].partition(".")[2])
    assert f"{facts(name).num_parameters / 1e9:.{digits}f}" == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_published_counts_that_count_something_else(name: str) -> None:
    assert facts(name).num_parameters == pytest.approx(ROUNDED[name], rel=0.03)


@pytest.mark.parametrize("name", NOT_EMBEDDED)
def test_published_counts_without_the_embedding(name: str) -> None:
    found = facts(name)
    count = found.num_parameters - found.vocab_size * found.hidden_size
    assert count == pytest.approx(NOT_EMBEDDED[name], abs=0.6e6)


@pytest.mark.parametrize("name", MET)
def test_published_counts_of_what_works_on_a_token(name: str) -> None:
    published, num_tables = MET[name]
    found = facts(name)
    count = found.num_parameters_met + (num_tables - 1) * found.vocab_size * found.hidden_size
    digits = len(published.partition(".")[2])
    assert f"{count / 1e9:.{digits}f}" == published


def test_every_model_is_compared_with_a_published_count() -> None:
    """Of those with the same sizes, one is."""
    compared = {*PUBLISHED, *ROUNDED, *NOT_EMBEDDED}
    sizes = {name: (facts(name).hidden_size, facts(name).layers) for name in CATALOGUE}
    assert {sizes[name] for name in compared} == set(sizes.values())


def test_the_models_that_people_ask_for() -> None:
    assert len(CATALOGUE) >= 50
    for start in (
        *("llama-3", "llama-4", "qwen2.5", "qwen3-", "qwen3.5", "gemma-2", "gemma-3", "mistral"),
        *("mixtral", "deepseek-v3", "deepseek-r1", "gpt-oss", "phi-3", "phi-4", "smollm2"),
        *("smollm3", "glm-4-", "glm-4.5", "kimi", "llama-sea-lion", "gemma-sea-lion"),
    ):
        assert any(name.startswith(start) for name in CATALOGUE), start
    assert sum("sahabat" in name for name in CATALOGUE) >= 2


def test_names_are_unique_and_each_model_says_where_its_sizes_are_from() -> None:
    hub_ids = [hub_id for model in CATALOGUE.values() for hub_id in model.hub]
    assert len(hub_ids) == len(set(hub_ids))
    for name, model in CATALOGUE.items():
        assert name == name.lower() and "/" not in name
        assert model.sources and all(source.what and source.date for source in model.sources)


@pytest.mark.parametrize(
    ("text", "name", "hub_id"),
    [
        ("llama-3.1-8b", "llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("LLAMA-3.1-8B", "llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/llama-3.1-8b-INSTRUCT", "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("DeepSeek-R1", "deepseek-r1", "deepseek-ai/DeepSeek-R1"),
    ],
)
def test_a_model_is_found_by_any_of_its_names(text: str, name: str, hub_id: str) -> None:
    found = find_model(text)
    assert found is not None
    assert (found[0].name, found[1]) == (name, hub_id)


def test_a_name_that_is_nearly_one() -> None:
    assert find_model("llama-3.1-9b") is None
    assert nearest_name("llama-3.1-9b") == "llama-3.1-8b"
    assert nearest_name("meta-llama/Llama-3.1-8b-Instrct") == "meta-llama/Llama-3.1-8B-Instruct"
    assert nearest_name("???") is None


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_plan_of_each_model(name: str) -> None:
    """It keeps the hub's id, and says so if the model cannot be run."""
    answer = plan(name, gpus="8xB200-180GB")
    assert answer.single.plan.model == CATALOGUE[name].hub[0]
    row = next(row for row in known_models() if row["name"] == name)
    planned_only = [note for note in answer.notes if note.startswith("planned only")]
    assert row["runs"] == (not planned_only)
    if row["runs"]:
        assert facts_of_config(CATALOGUE[name].config, source=name)


def test_the_list_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    """One line a model, or one object."""
    from shardwise.cli_catalog import models

    models(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(CATALOGUE)
    (line,) = (line for line in lines if line.startswith("mixtral-8x7b "))
    assert line.split() == [
        *("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", "mixtral"),
        *("46.7", "B", "12.7", "B", "32768", "runs"),
    ]
    models(as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(CATALOGUE)
    assert rows[0]["parameters"] == 8_030_261_248


def test_families_that_cannot_be_run_say_so() -> None:
    for family in ALL_FAMILIES.values():
        assert bool(family.proved) != bool(family.planned)
    assert why_not_run({"model_type": "gemma2"}) == "Shardwise does not run gemma2 yet"
    assert why_not_run({"model_type": "llama"}) is None
