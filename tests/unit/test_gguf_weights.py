"""Weights of GGUF files, as the gguf package writes them and as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from shardwise.errors import UserError
from shardwise.launch.export import start_export
from tests.models import model_config, save_model
from tests.unit.test_gguf import ARCHITECTURES, facts_of, tensors_of

KINDS = gguf.GGMLQuantizationType


def write_model(
    path: Path, name: str, kind: KINDS, tensors: dict[str, Any] | None = None, **extra: Any
) -> Path:
    """A GGUF file of a tiny model, its matrices in a number format; None: of random numbers."""
    architecture, config = ARCHITECTURES.get(name, "llama"), model_config(name)
    facts = facts_of(name)
    writer = gguf.GGUFWriter(str(path), architecture)
    sizes: dict[str, Any] = {
        "block_count": facts.num_layers,
        "embedding_length": facts.hidden_size,
        "feed_forward_length": facts.intermediate_size or facts.expert_width,
        "attention.head_count": facts.num_heads,
        "attention.head_count_kv": facts.num_kv_heads,
        "attention.key_length": facts.head_dim,
        "attention.value_length": facts.head_dim,
        "context_length": facts.max_positions,
        "vocab_size": facts.vocab_size,
        "rope.dimension_count": facts.head_dim,
    }
    window = next((layer.window for layer in facts.layers if layer.window), None)
    if window:
        sizes["attention.sliding_window"] = window
    if facts.num_experts:
        sizes |= {"expert_count": facts.num_experts, "expert_used_count": 2}
        sizes["expert_feed_forward_length"] = facts.expert_width
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in extra.items():
        writer.add_string(f"{architecture}.{key.replace('_', '.')}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    _add_tokenizer(writer, facts.vocab_size)
    random = np.random.default_rng(0)
    for tensor, shape in tensors_of(facts, architecture).items():
        values = random.standard_normal(shape).astype(np.float32)
        values = values if tensors is None else tensors[tensor]
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if len(shape) == 1 or shape[-1] % block:
            writer.add_tensor(tensor, values)
        elif kind in (
            KINDS.Q4_K,
            KINDS.Q6_K,
            KINDS.Q8_1,
        ):  # which the package reads and does not write
            writer.add_tensor(tensor, _random_blocks(random, shape, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(random: np.random.Generator, shape: tuple[int, ...], kind: KINDS) -> Any:
    """Random codes whose scales are numbers."""
    values, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // values, width), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    places = (0, 2) if kind == KINDS.Q4_K else (width - 2,)
    for place in places:
        blocks[..., place : place + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    characters = [chr(ord("!") + number) for number in range(90)]
    tokens = [
        "<|endoftext|>",
        "ab",
        "cd",
        *characters,
        *(f"a{number}" for number in range(vocab_size)),
    ]
    writer.add_token_list(tokens[:vocab_size])
    writer.add_token_types([3, *([1] * (vocab_size - 1))])
    writer.add_token_merges(["a b", "c d"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def as_converted(model: Path, name: str) -> dict[str, Any]:
    """A model's tensors as llama.cpp's converter stores them."""
    from transformers import AutoModelForCausalLM

    facts, architecture = facts_of(name), ARCHITECTURES[name]
    kind = next(k for k, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(kind, facts.num_layers)
    found = {}
    state = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for key in facts.stored_shapes:
        values = state[key].float().numpy()
        layer = key.split(".")[2] if ".layers." in key else ""
        if key.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = np.ascontiguousarray(half)
        elif key.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = values
        else:
            target = names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert target is not None
            if architecture == "llama" and (".attn_q." in target or ".attn_k." in target):
                heads = values.reshape(-1, 2, facts.head_dim // 2, *values.shape[1:])
                values = heads.swapaxes(1, 2).reshape(values.shape)
            if architecture == "gemma3" and "norm" in target:
                values = values + 1
            found[target] = values
    return found


@pytest.mark.parametrize("name", ["LL", "LLB", "ODD", "MIX", "Q2", "Q3", "MOE", "G3", "PHI"])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """The same model, from its own numbers as llama.cpp's converter stores them."""
    from transformers import AutoModelForCausalLM

    model = save_model(name, tmp_path / "model")
    tensors = as_converted(model, name)
    file = write_model(tmp_path / "model.gguf", name, KINDS.F32, tensors)
    start_export(file, tmp_path / "out", "fp32", check=False)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        # Gemma's one is added and taken off again
        assert torch.allclose(ours[key], tensor, rtol=0, atol=1e-6 if name == "G3" else 0), key


@pytest.mark.parametrize("name", ["LL", "Q2", "G3", "PHI"])
@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.Q8_0], ids=lambda kind: kind.name)
def test_numbers_are_those_that_transformers_reads(tmp_path: Path, name: str, kind: KINDS) -> None:
    check(write_model(tmp_path / "model.gguf", name, kind), tmp_path / "out")


@pytest.mark.parametrize(
    "kind",
    [KINDS.F16, KINDS.BF16, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1],
    ids=lambda kind: kind.name,
)
def test_number_formats(tmp_path: Path, kind: KINDS) -> None:
    check(write_model(tmp_path / "model.gguf", "LL", kind), tmp_path / "out")


@pytest.mark.parametrize("kind", [KINDS.Q4_K, KINDS.Q6_K], ids=lambda kind: kind.name)
def test_formats_with_long_blocks(tmp_path: Path, kind: KINDS) -> None:
    check(write_model(tmp_path / "model.gguf", "LLW", kind), tmp_path / "out")


def check(file: Path, out: Path) -> None:
    """Export, and compare with what transformers makes of the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start_export(file, out, "fp32", check=False)
    ours = AutoModelForCausalLM.from_pretrained(out)
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key
    ids = torch.arange(6).view(1, -1)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert (out / "generation_config.json").exists()
    (architecture,) = ours.config.architectures  # which other engines ask for
    assert architecture == type(ours).__name__


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling_type": "yarn"}, "rope.scaling.type='yarn'"),
        ({}, "would end at"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    path = write_model(tmp_path / "model.gguf", "LL", KINDS.Q8_0, **change)
    if not change:
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError) as error:
        start_export(path, tmp_path / "out", None, check=False)
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_number_format_that_is_not_read(tmp_path: Path) -> None:
    """Of which the package knows the size only; nothing is left behind."""
    path = write_model(tmp_path / "model.gguf", "LL", KINDS.Q8_1)
    with pytest.raises(UserError, match="is stored as Q8_1, which is not read"):
        start_export(path, tmp_path / "out", None, check=False)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("name", ["OSS", "DS", "GLM4"])
def test_architectures_that_are_only_planned(tmp_path: Path, name: str) -> None:
    from tests.unit.test_gguf import write

    path = write(tmp_path / "model.gguf", facts_of(name), ARCHITECTURES[name])
    with pytest.raises(UserError, match="are read, not"):
        start_export(path, tmp_path / "out", None, check=False)


def test_options_that_are_not_for_it(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "LL", KINDS.Q8_0)
    with pytest.raises(UserError, match="--check is not for GGUF"):
        start_export(path, tmp_path / "out", None, check=True)
    with pytest.raises(UserError, match="--dtype 'int8'"):
        start_export(path, tmp_path / "out", "int8", check=False)
    config = tmp_path / "out" / "config.json"
    start_export(path, tmp_path / "out", "fp16", check=False)
    assert json.loads(config.read_text())["dtype"] == "float16"
