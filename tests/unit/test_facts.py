"""Facts from config.json, exact to the last parameter against the model transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import UserError
from shardwise.models.planned import ALL_FAMILIES
from shardwise.models.read import facts_of_config, read_facts
from tests.models import MODELS, model_config

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LLAMA_3_1_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
PHI_3_MINI: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "sliding_window": 2047,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_the_name_and_shape_that_transformers_gives_it(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = model_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = {key: tuple(param.shape) for key, param in model.named_parameters()}
    facts = facts_of_config(config.to_dict(), source=name, planning=True)
    assert facts.parameter_shapes == built
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())


def test_every_family_of_the_table_is_among_the_models() -> None:
    assert {model_config(name).model_type for name in MODELS} == set(ALL_FAMILIES)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (SMOLLM2, 134_515_008),
        (LLAMA_3_1_8B, 8_030_261_248),
        (DEEPSEEK_V3, 671_026_404_352),  # without the extra layer that predicts a second token
        (GPT_OSS_120B, 116_829_156_672),
        (PHI_3_MINI, 3_821_079_552),
        (GPT2, 124_439_808),
    ],
    ids=["smollm2", "llama", "deepseek", "gpt-oss", "phi3", "gpt2"],
)
def test_published_parameter_counts(config: dict[str, Any], count: int) -> None:
    assert facts_of_config(config, source="test").num_parameters == count


@pytest.mark.parametrize(
    ("config", "count"),
    [(DEEPSEEK_V3, 37e9), (GPT_OSS_120B, 5.13e9)],
    ids=["deepseek", "gpt-oss"],
)
def test_published_counts_of_what_a_token_meets(config: dict[str, Any], count: float) -> None:
    """As their makers count: layers and head, without the embedding."""
    facts = facts_of_config(config, source="test")
    layers = sum(facts.num_active_parameters(kind) for kind in facts.layers)
    assert layers + facts.vocab_size * facts.hidden_size == pytest.approx(count, rel=0.015)


def test_head_dim_is_not_hidden_size_over_heads() -> None:
    """Qwen3 gives its own head_dim (bug bank 55)."""
    facts = facts_of_config(model_config("Q3").to_dict(), source="Q3")
    assert facts.head_dim == 32
    assert facts.k_size == facts.v_size == 2 * 32


_SLIDING: dict[str, Any] = {"model_type": "gemma3_text", "num_key_value_heads": 3}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, ["'bert'", "llama"]),
        ({"model_type": None}, ["model_type None"]),
        ({"model_type": ["llama"]}, ["model_type ['llama']"]),
        ({"hidden_size": None}, ["hidden_size is None"]),
        ({"num_hidden_layers": "30"}, ["num_hidden_layers is '30'"]),
        ({"num_hidden_layers": 2**32}, ["num_hidden_layers is 4294967296", "10000"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads is 0"]),
        ({"dtype": "float8"}, ["'float8'"]),
        ({"quantization_config": {"bits": 4}}, ["quantised"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"rope_scaling": {"type": "longrope"}}, ["'longrope'", "llama3"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, ["'dynamic'"]),
        ({"attention_dropout": "x"}, ["attention_dropout is 'x'"]),
        ({"add_cross_attention": True}, ["add_cross_attention"]),
        ({"model_type": "gpt2", "n_embd": 8}, ["n_head is None"]),
        ({**_SLIDING, "layer_types": 5}, ["layer_types is 5", "30 layers"]),
        ({**_SLIDING, "layer_types": ["full_attention"]}, ["30 layers"]),
        ({**_SLIDING, "layer_types": ["chunked_attention"] * 30}, ["'chunked_attention'"]),
        ({**_SLIDING, "sliding_window": None}, ["sliding_window is null"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings is 'false'"]),
        ({"num_key_value_heads": 4}, ["9 attention heads", "4 KV heads"]),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn"}}, ["'yarn'"]),
        ({**DEEPSEEK_V3, "v_head_dim": 256}, ["v_head_dim=256"]),
        ({**DEEPSEEK_V3, "n_group": 7}, ["256 experts in 7 groups"]),
        ({**DEEPSEEK_V3, "output_router_logits": True}, ["no balance loss"]),
        ({**DEEPSEEK_V3, "num_key_value_heads": 16}, ["num_key_value_heads=16"]),
        ({**GPT_OSS_120B, "num_local_experts": None}, ["num_local_experts is None"]),
        ({**GPT2, "n_head": 7}, ["7 heads", "768"]),
        (
            {**GPT_OSS_120B, "output_router_logits": True, "router_aux_loss_coef": None},
            ["router_aux_loss_coef is None"],
        ),
    ],
)
def test_configs_that_cannot_be_used(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        facts_of_config({**SMOLLM2, **changes}, source="config.json")
    assert all(word in str(caught.value) for word in words)


def test_sizes_that_are_left_out_are_those_of_transformers() -> None:
    """Head counts and windows of a config without them."""
    import transformers

    for name in ("MistralConfig", "Qwen2Config", "Qwen3Config", "Gemma3TextConfig"):
        config = getattr(transformers, name)()
        bare = {**SMOLLM2, "model_type": config.model_type, "num_attention_heads": 32}
        for key in ("num_key_value_heads", "tie_word_embeddings"):
            bare.pop(key)
        facts = facts_of_config(bare, source=name)
        assert facts.num_kv_heads == config.num_key_value_heads
        assert {kind.window for kind in facts.layers} <= {None, config.sliding_window}


@pytest.mark.parametrize("content", ["", "[1]", "{", "null"])
def test_a_broken_config_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        read_facts(tmp_path)
