"""What a model may be called, and what is said where there is none of that name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise import plan
from shardwise.catalog.models import load_models
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.hub import is_hub_id
from shardwise.models.lookup import local_model, look_up
from tests.unit.test_facts import SMOLLM2

GEMMA_3_4B = {  # as published: the rest is left to transformers
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    return folder


def run(*args: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line, without a network."""
    command = [sys.executable, "-m", "shardwise.cli", *map(str, args)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr, exit code 2."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("shardwise: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def cached(cache: Path, hub_id: str, config: dict[str, Any]) -> Path:
    """Put a config.json where the hub's client keeps it."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


def count(facts: ModelFacts) -> int:
    return facts.num_parameters


def test_a_directory_and_the_config_in_it_are_the_same_model(model: Path) -> None:
    """A plan keeps the directory, where the weights are looked for."""
    for given in (model, model / "config.json"):
        found = look_up(given)
        assert count(found.facts) == 134_515_008
        assert found.model == str(model) and found.directory == model


def test_a_config_of_another_name(model: Path) -> None:
    file = model / "smol.json"
    (model / "config.json").rename(file)
    found = look_up(file)
    assert count(found.facts) == 134_515_008
    assert found.model == str(file) and found.directory is None


def test_a_name_of_the_catalogue_is_not_a_directory_of_that_name(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert look_up("llama-3.2-1b").model == "meta-llama/Llama-3.2-1B"
    model.rename(model.parent / "llama-3.2-1b")
    assert look_up("llama-3.2-1b").model == str(model.parent / "llama-3.2-1b")


def test_the_language_part_of_a_larger_model(model: Path) -> None:
    """Its config leaves much to transformers' class; the catalogue has all of it."""
    (model / "config.json").write_text(json.dumps(GEMMA_3_4B))
    found = look_up(model)
    assert found.facts.parameter_shapes == look_up("gemma-3-4b").facts.parameter_shapes
    assert found.directory is None and "language part" in found.notes[0]


def test_quantised_files_are_planned_as_if_they_were_not(model: Path) -> None:
    quantised = {**SMOLLM2, "quantization_config": {"quant_method": "awq"}}
    (model / "config.json").write_text(json.dumps(quantised))
    (note,) = plan(model, gpus="cpu:2").notes
    assert note.startswith("planned only: the model is quantised (awq), which this version does")
    quantised["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(quantised))
    notes = plan(model, gpus="cpu:2").notes
    assert notes[0].startswith("its files are in fp8, blocks of 128 x 128;")


def test_a_hub_id_in_the_local_cache(tmp_path: Path, model: Path) -> None:
    cached(tmp_path / "hub", "some-one/Smol_1.5", SMOLLM2)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    done = run("plan", "some-one/Smol_1.5", "--gpus", "cpu:2", "--json", **env)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["parameters"] == 134_515_008
    assert answer["plan"]["model"] == "some-one/Smol_1.5"
    assert_refused(run("plan", "some-one/other", **env), "some-one/other", "HF_HUB_OFFLINE")


def test_a_plan_of_a_hub_id_is_run_from_the_cache(tmp_path: Path) -> None:
    """Here as far as its weights, which are not there; without a cache it says what to do."""
    out, cache = tmp_path / "plan.yaml", tmp_path / "hub"
    done = run("plan", "smollm2-135m", "--gpus", "cpu:2", "--seq-len", "128", "--out", out)
    assert done.returncode == 0, done.stderr
    hub_id = "HuggingFaceTB/SmolLM2-135M"
    assert yaml.safe_load(out.read_text())["model"] == hub_id
    (tmp_path / "rows.jsonl").write_text("{}\n")
    train = ("train", out, "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "run")
    empty = {"HF_HUB_CACHE": str(cache)}
    assert_refused(run(*train, **empty), hub_id, f"hf download {hub_id}")
    snapshot = cached(cache, hub_id, SMOLLM2)
    assert_refused(run(*train, **empty), str(snapshot), "safetensors")
    assert_refused(run("serve", "smollm2-135m", **empty), str(snapshot), "safetensors")
    assert not (tmp_path / "run").exists()


def test_what_is_planned_only_is_not_run(tmp_path: Path, model: Path) -> None:
    """By name, by a plan's id, and from a directory."""
    with pytest.raises(UserError, match=r"'gemma-2-2b' and does not run it.*gemma2 yet"):
        local_model("gemma-2-2b")
    with pytest.raises(UserError, match="does not run it: published as kimi_k2 with code"):
        local_model("moonshotai/Kimi-K2-Instruct")
    for hub_id in ("deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b"):  # fp8 and MXFP4 are read
        with pytest.raises(UserError, match=f"hf download {hub_id}"):
            local_model(hub_id)
    (model / "config.json").write_text(json.dumps(load_models()["gemma-2-2b"].config))
    assert look_up(model).notes == ("planned only: Shardwise does not run gemma2 yet",)
    assert_refused(run("serve", model), "does not run gemma2 yet; it runs", "llama")
    assert_refused(run("export", model, "--out", tmp_path / "out"), "does not run gemma2 yet")


def test_a_gguf_file_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert_refused(run("serve", tmp_path / "model.gguf"), "model.gguf is a GGUF file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llama-3.1-9b", ["'llama-3.1-9b'", "did you mean 'llama-3.1-8b'?"]),
        ("no-such-model-at-all-99", ["catalog models"]),
        ("./nowhere", ["'./nowhere'", "config.json"]),
        ("nowhere/deep/model", ["'nowhere/deep/model'"]),
        ("a b/c", ["'a b/c'"]),
        ("owner/na..me", ["'owner/na..me'"]),
        ("-owner/name", []),
        ("owner/", ["'owner/'"]),
        ("owner/name?x=1", ["'owner/name?x=1'"]),
        ("meta-llama/Llama-3.1-8b-instruc", ["did you mean 'meta-llama/Llama-3.1-8B-Instruct'?"]),
        ("missing.gguf", ["'missing.gguf'"]),
    ],
)
def test_names_of_nothing(text: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        look_up(text)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message


@pytest.mark.parametrize(
    ("text", "word"),
    [("llama-3.1-9b", "did you mean"), ("a b/c", "'a b/c'"), ("x" * 300, "name too long")],
)
def test_names_of_nothing_on_the_command_line(text: str, word: str) -> None:
    assert_refused(run("plan", text), word)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"model_type": []}'])
@pytest.mark.parametrize("name", ["config.json", "other.json"])
def test_files_that_are_no_config(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as caught:
        look_up(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_directories_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json; give another directory"):
        look_up(tmp_path)
    (tmp_path / "q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"give the GGUF file in it: .*q4\.gguf"):
        look_up(tmp_path)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("a/b", True),
        ("GoToCompany/gemma2_9b", True),
        ("name", False),
        ("a/b/c", False),
        ("a/", False),
        ("/a", False),
        ("a/-b", False),
        ("a/b-", False),
        ("a--b/c", False),
        ("a/b..c", False),
        ("a/b c", False),
        ("../a", False),
        ("a/b\n", False),
    ],
)
def test_ids_as_the_hub_allows_them(text: str, valid: bool) -> None:
    assert is_hub_id(text) is valid


class _Hub(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    def do_GET(self) -> None:
        owner = self.path.split("/")[1]
        assert self.path.endswith("/resolve/main/config.json")
        answers = {
            "good": (200, json.dumps(SMOLLM2)),
            "broken": (200, "<html>"),
            "list": (200, "[]"),
        }
        code, body = answers.get(owner, (403 if owner == "gated" else 401, ""))
        self.send_response(code)
        if owner == "gated":
            self.send_header("X-Error-Code", "GatedRepo")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
        "no_proxy": "127.0.0.1",
    }
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_config_from_the_hub(hub: dict[str, str]) -> None:
    done = run("plan", "good/model", "--gpus", "cpu:2", "--json", **hub)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["parameters"] == 134_515_008 and answer["plan"]["model"] == "good/model"


@pytest.mark.parametrize(
    ("hub_id", "words"),
    [
        ("gated/model", ["accepted its terms", "hf auth login"]),
        ("nobody/model", ["no config.json of 'nobody/model' for you (HTTP 401)"]),
        ("broken/model", ["no JSON"]),
        ("list/model", ["no JSON object"]),
    ],
)
def test_what_the_hub_does_not_give(hub: dict[str, str], hub_id: str, words: list[str]) -> None:
    assert_refused(run("plan", hub_id, **hub), *words)


def test_a_hub_that_does_not_answer(hub: dict[str, str]) -> None:
    nobody = {**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert_refused(run("plan", "good/model", **nobody), "cannot be reached", "config.json")
