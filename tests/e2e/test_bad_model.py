"""A bad model ends with exit code 2 and one line that names the file and what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import Bench, fast_first
from tests.e2e.shell import listed_checkpoints, metrics
from tests.models import model_config, save_model
from tests.tokenizer import save_tokenizer


@pytest.fixture
def own(bench: Bench, ll: Path) -> Bench:
    """The bench with its own copy of the model."""
    bench.model = bench.folder / "own"
    shutil.copytree(ll, bench.model)
    bench.plan["model"] = str(bench.model)
    return bench


@pytest.fixture
def sharded(bench: Bench) -> Bench:
    """The bench with a model of several weight files."""
    bench.model = bench.folder / "sharded"
    save_model("LL", bench.model, max_shard_size="200KB")
    save_tokenizer(bench.model)
    bench.plan["model"] = str(bench.model)
    return bench


def _first_shard(model: Path) -> Path:
    return min(model.glob("model-*.safetensors"))


def _rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.slow
def test_a_model_that_is_not_there(bench: Bench) -> None:
    """The missing directory is named by train, serve, plan and export."""
    bench.plan["model"] = "/nowhere/model"
    bench.assert_refused(bench.train(), "/nowhere/model")
    for command in (["serve"], ["plan"], ["export", "--out", "x"]):
        bench.assert_refused(bench.run(*command, "/nowhere/model"), "/nowhere/model")


@pytest.mark.slow
@pytest.mark.parametrize("content", fast_first(["{", "[]", "", '{"model_type": 5}', "{}"]))
def test_a_config_that_is_broken(own: Bench, content: str) -> None:
    """The file is named."""
    (own.model / "config.json").write_text(content)
    own.assert_refused(own.train(), "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, "many", 0, -4, 4.5], ids=repr)
def test_a_config_number_that_is_wrong(own: Bench, value: Any) -> None:
    """The key is named."""
    config = json.loads((own.model / "config.json").read_text())
    (own.model / "config.json").write_text(json.dumps({**config, "num_attention_heads": value}))
    own.assert_refused(own.train(), "num_attention_heads")


@pytest.mark.slow
def test_a_family_that_is_not_supported(own: Bench) -> None:
    """bloom is named, and a family that is supported."""
    config = json.loads((own.model / "config.json").read_text())
    (own.model / "config.json").write_text(json.dumps({**config, "model_type": "bloom"}))
    own.assert_refused(own.train(), "bloom", "llama")


@pytest.mark.slow
def test_weights_in_pickle_files_only(own: Bench) -> None:
    """A pickle file is not read; the file is named, and how to convert it."""
    (own.model / "model.safetensors").rename(own.model / "pytorch_model.bin")
    own.assert_refused(own.train(), "pytorch_model.bin", "save_pretrained")


def test_a_shard_that_is_deleted(sharded: Bench) -> None:
    """The missing file is named."""
    shard = _first_shard(sharded.model)
    shard.unlink()
    sharded.assert_refused(sharded.train(), shard.name)


@pytest.mark.parametrize("verb", fast_first(["serve", "train", "export"]))
def test_a_shard_that_is_cut(sharded: Bench, verb: str) -> None:
    """The file that lacks its last kilobyte is named, whatever reads it."""
    shard = _first_shard(sharded.model)
    os.truncate(shard, shard.stat().st_size - 1024)
    if verb == "train":
        done = sharded.train()
    elif verb == "serve":
        done = sharded.run("serve", sharded.model)
    else:
        done = sharded.run("export", sharded.model, "--out", "hf")
        assert not (sharded.folder / "hf").exists()
    sharded.assert_refused(done, shard.name)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 4, 100])
def test_a_shard_without_its_header(sharded: Bench, size: int) -> None:
    """A file that ends within its header is named."""
    shard = _first_shard(sharded.model)
    os.truncate(shard, size)
    sharded.assert_refused(sharded.train(), shard.name)


@pytest.mark.slow
def test_a_tensor_that_is_missing(sharded: Bench) -> None:
    """The tensor that the index lists but its file lacks is named."""
    shard = _first_shard(sharded.model)
    names: list[str] = []
    _rewrite(shard, lambda tensors: names.append(tensors.popitem()[0]))
    sharded.assert_refused(sharded.train(), names[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_tensor_that_no_file_has(own: Bench, name: str) -> None:
    """The tensor is named."""
    _rewrite(own.model / "model.safetensors", lambda tensors: tensors.pop(name))
    own.assert_refused(own.train(), name)


def test_a_tensor_that_is_transposed(own: Bench) -> None:
    """The tensor and both shapes are named."""
    name = "model.layers.1.mlp.down_proj.weight"
    _rewrite(
        own.model / "model.safetensors",
        lambda tensors: tensors.update({name: tensors[name].T.contiguous()}),
    )
    own.assert_refused(own.train(), name, "128", "64")


@pytest.mark.slow
def test_tensors_with_another_prefix(own: Bench) -> None:
    """A tensor that is missed is named."""

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if name.startswith("model."):
                tensors["transformer." + name.removeprefix("model.")] = tensors.pop(name)

    _rewrite(own.model / "model.safetensors", rename)
    own.assert_refused(own.train(), "model.")


@pytest.mark.slow
def test_a_tensor_of_whole_numbers(own: Bench) -> None:
    """Quantized or damaged weights are not taken for weights: the tensor and its type are named."""
    name = "model.layers.1.mlp.down_proj.weight"

    def to_int8(tensors: dict[str, Any]) -> None:
        import torch

        tensors[name] = tensors[name].to(torch.int8)

    _rewrite(own.model / "model.safetensors", to_int8)
    own.assert_refused(own.train(), name)


@pytest.mark.parametrize("verb", fast_first(["serve", "train"]))
def test_no_tokenizer(own: Bench, verb: str) -> None:
    """The missing file is named."""
    for file in own.model.glob("tokenizer*"):
        file.unlink()
    done = own.train() if verb == "train" else own.run("serve", own.model)
    own.assert_refused(done, "tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "serve"])
def test_a_tokenizer_that_is_broken(own: Bench, verb: str) -> None:
    """The broken file is named."""
    (own.model / "tokenizer.json").write_text('{"version": ')
    done = own.train() if verb == "train" else own.run("serve", own.model)
    own.assert_refused(done, "tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize("verb", fast_first(["serve", "train"]))
def test_no_chat_template(bench: Bench, verb: str) -> None:
    """The missing template is named."""
    bench.model = bench.folder / "plain"
    save_model("LL", bench.model)
    save_tokenizer(bench.model, chat_template=None)
    bench.plan["model"] = str(bench.model)
    done = bench.train() if verb == "train" else bench.run("serve", bench.model)
    bench.assert_refused(done, "chat template", "plain")


@pytest.mark.slow
def test_a_tokenizer_with_more_ids_than_the_model(bench: Bench) -> None:
    """Ids past the model's vocabulary are noticed before a rank looks them up."""
    bench.model = bench.folder / "small"
    config = model_config("LL")
    config.vocab_size, config.eos_token_id = 200, 1
    config.pad_token_id, config.bos_token_id = 0, 1
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(bench.model)
    save_tokenizer(bench.model)
    bench.plan["model"] = str(bench.model)
    bench.assert_refused(bench.train(), "200")


@pytest.mark.slow
def test_tensors_that_nobody_asked_for_are_a_note(own: Bench) -> None:
    """A further tensor is named in a note, and training works."""

    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.extra"] = tensors["model.norm.weight"].clone()

    _rewrite(own.model / "model.safetensors", add)
    own.plan["layout"] = {}
    done = own.train()
    assert (done.code, done.err) == (0, ""), done.text
    (note,) = [line for line in done.out.splitlines() if line.startswith("note: ")]
    assert "model.layers.0.self_attn.rotary_emb.extra" in note
    assert [record["step"] for record in metrics(own.out)] == [1]
    assert listed_checkpoints(own.out) == [1]
