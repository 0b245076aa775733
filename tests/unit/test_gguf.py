"""GGUF headers, written by the gguf package, read back as the facts of the same model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shardwise import plan
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.gguf import config_of_gguf, read_header
from shardwise.models.lookup import look_up
from shardwise.models.read import facts_of_config
from tests.models import model_config

ARCHITECTURES = {  # tiny model -> architecture in llama.cpp
    "LL": "llama",
    "LLB": "llama",
    "ODD": "llama",
    "MIX": "llama",
    "Q2": "qwen2",
    "Q3": "qwen3",
    "MOE": "qwen3moe",
    "G2": "gemma2",
    "G3": "gemma3",
    "PHI": "phi3",
    "OSS": "gpt-oss",
    "SM3": "smollm3",
    "GLM4": "glm4",
    "GLMM": "glm4moe",
    "GLMA": "glm4moe",
    "DS": "deepseek2",
    "DSQ": "deepseek2",
}
_EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


def facts_of(name: str, **changes: Any) -> ModelFacts:
    config = {**model_config(name).to_dict(), **changes}
    return facts_of_config(config, source=name, planning=True)


def tensors_of(facts: ModelFacts, architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a model under the names that llama.cpp's converter gives them."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, facts.num_layers)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in facts.parameter_shapes.items():
        parts = name.split(".")
        if "experts" in parts:  # stacked by transformers, one tensor a matrix here
            base, _, bias = parts[-1].partition("_proj")
            targets = _EXPERTS[f"{base}_proj"]
            suffix = "bias" if bias else "weight"
            inner = list(shape[1:])
            if len(targets) == 2:
                wide = 0 if not facts.family.experts.transposed or bias else 1  # type: ignore[union-attr]
                inner[wide] //= 2
            for target in targets:
                found[f"blk.{parts[2]}.{target}.{suffix}"] = (shape[0], *inner)
        elif parts[-1] == "sinks":
            found[f"blk.{parts[2]}.attn_sinks.weight"] = shape
        else:
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            found[target] = shape
    return found


def write(
    path: Path,
    facts: ModelFacts,
    architecture: str,
    extra: dict[str, tuple[int, ...]] | None = None,
    **changes: Any,
) -> Path:
    """A GGUF file of a model's shapes, as the gguf package writes it; every value is zero."""
    writer = gguf.GGUFWriter(str(path), architecture)
    experts = facts.num_experts
    plain = facts.expert_width if architecture in ("llama", "gpt-oss") and experts else None
    sizes = {
        "block_count": facts.num_layers,
        "embedding_length": facts.hidden_size,
        "feed_forward_length": plain or facts.intermediate_size,
        "attention.head_count": facts.num_heads,
        "attention.head_count_kv": facts.num_kv_heads,
        "attention.key_length": facts.head_dim,
        "context_length": facts.max_positions,
    }
    window = next((kind.window for kind in facts.layers if kind.window), None)
    if window:
        sizes["attention.sliding_window"] = window
    if experts:
        sizes |= {"expert_count": experts, "expert_used_count": facts.experts_per_token}
    if experts and architecture != "llama":
        sizes["expert_feed_forward_length"] = facts.expert_width
    if facts.shared_width:
        sizes["expert_shared_count"] = facts.shared_width // facts.expert_width
        sizes["leading_dense_block_count"] = sum(not kind.has_experts for kind in facts.layers)
    if facts.latent:  # as for an attention on the latent, whose one key all heads share
        latent = facts.latent
        sizes["attention.head_count_kv"] = 1
        sizes["attention.key_length"] = latent.kv_rank + latent.rope_dim
        sizes["attention.key_length_mla"] = facts.head_dim
        sizes["attention.value_length"] = sizes["attention.kv_lora_rank"] = latent.kv_rank
        sizes["attention.value_length_mla"] = latent.v_dim
        sizes["rope.dimension_count"] = latent.rope_dim
        if latent.q_rank:
            sizes["attention.q_lora_rank"] = latent.q_rank
    for key, value in (sizes | changes).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_token_list([f"token {n}" for n in range(facts.vocab_size)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * facts.vocab_size)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for name, shape in tensors_of(facts, architecture).items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float16))
    for name in ("rope_freqs.weight", "blk.1.exp_probs_b.bias"):
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    for name, shape in (extra or {}).items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_header_says_what_the_config_says(name: str, tmp_path: Path) -> None:
    """Every size that decides parameters, layers and cache; and that the tensors are as many."""
    facts = facts_of(name)
    path = write(tmp_path / "model.gguf", facts, ARCHITECTURES[name])
    found = look_up(path)
    assert found.facts.parameter_shapes == facts.parameter_shapes
    assert found.facts.num_experts == facts.num_experts
    assert found.facts.experts_per_token == facts.experts_per_token
    assert found.facts.max_positions == facts.max_positions
    assert found.facts.cache_size == facts.cache_size
    if name not in ("G2", "G3"):  # whose tiny configs have other layers with a window than most
        assert found.facts.layers == facts.layers
    assert found.directory is None and "GGUF" in found.notes[0]


def test_layers_that_predict_a_second_token_are_left_out(tmp_path: Path) -> None:
    facts = facts_of("GLMM")
    more = {"block_count": facts.num_layers + 1, "nextn_predict_layers": 1}
    extra = {f"blk.{facts.num_layers}.nextn.eh_proj.weight": (64, 128)}
    path = write(tmp_path / "model.gguf", facts, "glm4moe", extra, **more)
    assert look_up(path).facts.parameter_shapes == facts.parameter_shapes


def test_a_plan_of_a_gguf_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.GGUF", facts_of("LL"), "llama")
    answer = plan(path, gpus="cpu:1", memory_gib=8)
    assert answer.single.plan.model == str(path)
    assert answer.facts.num_parameters == facts_of("LL").num_parameters


def test_a_file_in_several_parts(tmp_path: Path) -> None:
    """The tensors of all parts are counted; a missing one is named."""
    facts = facts_of("LL")
    whole = write(tmp_path / "whole.gguf", facts, "llama")
    names = tensors_of(facts, "llama")
    for number in (1, 2):
        writer = gguf.GGUFWriter(str(tmp_path / f"part-0000{number}-of-00002.gguf"), "llama")
        if number == 1:
            for key, value in config_values(whole).items():
                writer.add_uint32(key, value)
        writer.add_uint16("split.count", 2)
        for name, shape in list(names.items())[number - 1 :: 2]:
            writer.add_tensor(name, np.zeros(shape, dtype=np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = tmp_path / "part-00001-of-00002.gguf"
    assert look_up(first).facts.parameter_shapes == facts.parameter_shapes
    (tmp_path / "part-00002-of-00002.gguf").unlink()
    with pytest.raises(UserError, match=r"part-00002-of-00002\.gguf is not there"):
        look_up(first)


def config_values(path: Path) -> dict[str, int]:
    return {
        key: value for key, value in read_header(path).values.items() if key.startswith("llama.")
    }


@pytest.mark.parametrize("length", [0, 3, 4, 8, 20, 24, 40, 200, 1000])
def test_a_file_that_ends_within_its_header(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.gguf", facts_of("LL"), "llama")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=r"model\.gguf.*(ends within it|no GGUF file)"):
        look_up(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "ends within it"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1), "values of the type 9"),
        (b"GGUF" + struct.pack("<IQQQ2s", 3, 0, 1, 2, b"\xff\xfe"), "broken"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture None"),
        (b"not one", "no GGUF file"),
    ],
)
def test_a_file_that_is_broken(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        look_up(path)
    assert "\n" not in str(caught.value)


def test_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", facts_of("LL"), "llama")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(UserError, match=r"'mamba' cannot be planned; those that can: .*llama"):
        config_of_gguf(read_header(path))


def test_tensors_that_are_not_those_of_the_sizes(tmp_path: Path) -> None:
    """Both numbers are named."""
    facts = facts_of("LL")
    path = write(tmp_path / "model.gguf", facts, "llama", feed_forward_length=64)
    with pytest.raises(UserError, match=f"{facts.num_parameters:,} values"):
        look_up(path)
    smaller = facts_of("LL", intermediate_size=64).num_parameters
    with pytest.raises(UserError, match=f"{smaller:,} parameters"):
        look_up(path)


@pytest.mark.parametrize("key", ["llama.block_count", "split.count", "llama.context_length"])
def test_a_size_that_is_no_number(tmp_path: Path, key: str) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_string(key, "four")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=f"{key} is 'four'; expected a whole number"):
        look_up(path)


def test_a_size_that_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", facts_of("LL"), "llama")
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_COUNT"))
    with pytest.raises(UserError, match="num_hidden_layers is None"):
        look_up(path)


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A file cut right after it, as a download that has begun, is planned."""
    facts = facts_of("LL")
    path = write(tmp_path / "model.gguf", facts, "llama")
    path.write_bytes(path.read_bytes()[: -2 * facts.num_parameters])
    assert look_up(path).facts.num_parameters == facts.num_parameters
