"""The work that every engine does: model, tokens and settings of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

NUM_RANKS = 2
VOCAB_SIZE = 49152
SIZES = {
    "135m": {  # the shape of SmolLM2-135M
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
    "30m": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
    },
}
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
"""of matrices; vectors (norms) do not decay in any engine"""
CLIP_NORM = 1.0


def model_config(size: str) -> Any:
    """The transformers configuration of a size."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        use_cache=False,
        **SIZES[size],
    )


def save_model(size: str, folder: Path) -> None:
    """Write a random model, fp32: what every engine starts from."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(model_config(size)).save_pretrained(folder)


def whole_model(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """The saved model, whole, fp32, in memory of its own (not in pages of the file)."""
    import torch
    from safetensors.torch import load_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    load_model(model, folder / "model.safetensors")
    return model.to(device).train()


def row(step: int, rank: int, seq_len: int) -> torch.Tensor:
    """The token ids of a rank's one row of a step, int64 [1, seq_len].

    Small ids are more frequent, so that the loss falls within a few steps: equal losses then show
    that the engines' updates are equal too, and not only their forward passes.
    """
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.rand(1, seq_len, generator=generator) ** 4 * VOCAB_SIZE).long()


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, as in Shardwise's own optimizer."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
