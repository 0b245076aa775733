"""The tiny models of the tests: random, fp32, about 0.2 M parameters, saved once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 260,
}
ODD: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MOE: dict[str, Any] = {
    "tie_word_embeddings": False,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
OSS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "intermediate_size": 48,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
DEEPSEEK: dict[str, Any] = {
    "tie_word_embeddings": False,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
LINEAR: dict[str, Any] = {
    "tie_word_embeddings": False,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
LINEAR_MOE: dict[str, Any] = {
    **LINEAR,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
GLM_MOE: dict[str, Any] = {
    "tie_word_embeddings": False,
    "head_dim": 24,
    "attention_bias": True,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
LLAMA_4: dict[str, Any] = {
    "tie_word_embeddings": False,
    "head_dim": 16,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
}

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
"""sizes whose every part for four ranks is made of whole blocks of four-bit numbers"""

PLANNED = ("SM3", "G2", "GLM4", "GLMM", "GLMA", "MM2", "L4", "Q3N", "Q35", "Q35M")
"""of families that are only planned"""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LL": ("LlamaConfig", {"tie_word_embeddings": False}),
    "LL1": ("LlamaConfig", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "LL321": ("LlamaConfig", {"tie_word_embeddings": False, "vocab_size": 321}),
    "LL321T": ("LlamaConfig", {"tie_word_embeddings": True, "vocab_size": 321}),
    "LLB": (
        "LlamaConfig",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "ODD": ("LlamaConfig", {**ODD, "tie_word_embeddings": True}),
    "MI": ("MistralConfig", {"tie_word_embeddings": False, "sliding_window": None}),
    "MI_SW": ("MistralConfig", {"tie_word_embeddings": False, "sliding_window": 8}),
    "Q2_SW": (
        "Qwen2Config",
        {
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "Q2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "Q3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "Q3_321": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True, "vocab_size": 321}),
    "MIX": (
        "MixtralConfig",
        {
            "tie_word_embeddings": False,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "MOE": ("Qwen3MoeConfig", {**MOE, "output_router_logits": True}),
    "MOE0": ("Qwen3MoeConfig", MOE),  # without the balance loss
    "MOE4": (  # layers for four stages, of which the first has no experts
        "Qwen3MoeConfig",
        {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [0], "output_router_logits": True},
    ),
    "MOED": (  # the first layer without experts
        "Qwen3MoeConfig",
        {**MOE, "num_hidden_layers": 3, "mlp_only_layers": [0], "output_router_logits": True},
    ),
    "OSS": ("GptOssConfig", OSS),
    "OSS64": ("GptOssConfig", {**OSS, "intermediate_size": 64}),
    "OSSB": ("GptOssConfig", {**OSS, "output_router_logits": True}),
    "DS": ("DeepseekV3Config", DEEPSEEK),
    "DSQ": ("DeepseekV3Config", {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True}),
    "PHI": ("Phi3Config", {"tie_word_embeddings": False, "sliding_window": 8}),
    "PHI_FULL": ("Phi3Config", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "GPT2": (
        "GPT2Config",
        {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": True},
    ),
    "G3": ("Gemma3TextConfig", {**GEMMA, "tie_word_embeddings": True}),
    "SM3": ("SmolLM3Config", {"tie_word_embeddings": True}),
    "G2": ("Gemma2Config", {**GEMMA, "tie_word_embeddings": True, "attn_logit_softcapping": None}),
    "GLM4": ("Glm4Config", {"tie_word_embeddings": False, "head_dim": 24}),
    "GLMM": ("Glm4MoeConfig", {**GLM_MOE, "use_qk_norm": True}),
    "GLMA": ("Glm4MoeConfig", GLM_MOE),  # as GLM-4.5-Air, without norms of queries and keys
    "MM2": (
        "MiniMaxM2Config",
        {
            "tie_word_embeddings": False,
            "head_dim": 24,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "L4": ("Llama4TextConfig", LLAMA_4),
    "Q3N": ("Qwen3NextConfig", LINEAR_MOE),
    "Q35": ("Qwen3_5TextConfig", LINEAR),
    "Q35M": ("Qwen3_5MoeTextConfig", LINEAR_MOE),
    "LLW": ("LlamaConfig", {**WIDE, "tie_word_embeddings": False, "num_hidden_layers": 4}),
    "LLBW": (
        "LlamaConfig",
        {**WIDE, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "MIW": ("MistralConfig", {**WIDE, "tie_word_embeddings": False, "sliding_window": 8}),
    "Q2W": ("Qwen2Config", {**WIDE, "tie_word_embeddings": True}),
    "Q3W": ("Qwen3Config", {**WIDE, "head_dim": 64, "tie_word_embeddings": True}),
    "G3W": ("Gemma3TextConfig", {**GEMMA, **WIDE, "num_hidden_layers": 4, "head_dim": 64}),
    "PHIW": ("Phi3Config", {**WIDE, "tie_word_embeddings": False, "sliding_window": 8}),
    "G3_321": ("Gemma3TextConfig", {**GEMMA, "tie_word_embeddings": True, "vocab_size": 321}),
}


def model_config(name: str) -> Any:
    """The transformers config of a tiny model."""
    import transformers

    class_name, changes = MODELS[name]
    return getattr(transformers, class_name)(**{**BASE, **changes})


def save_adapters(base: Path, folder: Path, **settings: Any) -> Path:
    """Let PEFT write random adapters (B too) of a saved model to `folder`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    options = {"target_modules": target_modules(model), **settings}
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **options)
    )
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn_like(param) * 0.05)
    adapted.save_pretrained(folder)
    return folder


def save_start(name: str, folder: Path) -> tuple[Path, Path]:
    """A tiny model and adapters of it; with +qlora behind its name they are for rounded ones."""
    base = save_model(name.removesuffix("+qlora"), folder / "base")
    adapters = save_adapters(base, folder / "start")
    return base, mark_rounded(adapters) if name.endswith("+qlora") else adapters


def mark_rounded(adapters: Path) -> Path:
    """Say of some adapters that the matrices below them are rounded to four bits each."""
    content = {"format": "nf4", "block_size": 64}
    (adapters / "base_quantization.json").write_text(json.dumps(content))
    return adapters


def target_modules(model: Any) -> list[str]:
    """The last names of all matrices in a model's layers, of a mixture of experts in attention."""
    from torch import nn

    layers = model.base_model.layers
    found = [n for n, module in layers.named_modules() if isinstance(module, nn.Linear)]
    if any(".experts" in name for name, _ in layers.named_modules()):
        found = [name for name in found if ".self_attn." in name]
    return sorted({name.rpartition(".")[2] for name in found})


def save_model(name: str, folder: Path, **save_options: Any) -> Path:
    """Write a tiny model to `folder`; its norms and biases are random too."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(name), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder, **save_options)
    return folder
