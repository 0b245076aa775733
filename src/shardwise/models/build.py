"""Build an untouched transformers model on the meta device and materialise it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.models.attention import attention_of
from shardwise.models.families import FAMILIES


def build_on_meta(model_dir: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a directory's config.json with parameters of `dtype` and no storage."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    if hasattr(config, "quantization_config"):  # of its files: loading makes numbers of them
        del config.quantization_config
    attention = attention_of(FAMILIES[config.model_type])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.train()


def materialise(model: PreTrainedModel, device: torch.device) -> None:
    """Give every parameter its (uninitialised) local storage and every buffer its value."""
    names_of: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            names_of.setdefault(param, []).append((module, name))
    model.to_empty(device=device)
    for (first_module, first_name), *others in names_of.values():
        for module, name in others:  # to_empty makes tied weights two; make them one again
            module.register_parameter(name, first_module.get_parameter(first_name))
    restore_buffers(model)


def restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds (rotary frequencies, embedding scales).

    transformers' own initialiser of a module sets them; parameters are marked as done before, so
    that it leaves them alone.
    """
    for module in model.modules():
        if not module._non_persistent_buffers_set:
            continue
        for param in module.parameters(recurse=False):
            param._is_hf_initialized = True
        with torch.no_grad():
            model._init_weights(module)


class Absent(nn.Module):
    """Stands for a module that another pipeline stage has; gives back what it gets first."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The hidden states, unchanged."""
        return hidden


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model of transformers."""
    (layers,) = (part for part in model.base_model.children() if isinstance(part, nn.ModuleList))
    return layers
