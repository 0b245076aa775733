"""Low-rank adapters: which matrices get one, how ranks divide it, and how files describe it.

Files are PEFT's: `adapter_config.json` beside one or more safetensors files. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import Lora
from shardwise.errors import UserError
from shardwise.models.hub import read_config
from shardwise.models.layers import NF4_BLOCK, Cut, Param
from shardwise.parsing import parse

if TYPE_CHECKING:
    from shardwise.models.facts import ModelFacts

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
BASE_FILE = "base_quantization.json"
"""beside these, where adapters were trained on rounded matrices: PEFT's files cannot say it"""
LORA_A, LORA_B = "lora_A", "lora_B"
"""names of an adapter's two matrices, beside the `weight` that they belong to"""
_PEFT_PREFIX = "base_model.model."
_CUTS: dict[Cut, tuple[Cut, Cut]] = {
    "columns": ("shared", "columns"),
    "kv_heads": ("shared", "kv_heads"),
    "rows": ("rows", "shared"),
    "shared": ("shared", "shared"),
    "parts": ("shared", "parts"),
}
"""how a matrix is cut -> how A and B are: A cuts as its inputs, B as its outputs; what is whole is
used for a part of the other, so that its gradient is a part too"""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the model
    "layers_to_transform": (None,),
    "revision": (None, "main"),
}
"""settings of PEFT, and the values that mean plain adapters, the usual one first"""
_SAYS_NOTHING = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "layers_pattern"),
    *("eva_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
"""settings that are read elsewhere, or change nothing of what adapters compute"""


def adaptable(params: Mapping[str, Param], *, has_experts: bool) -> dict[str, Param]:
    """The matrices of a layer that can have an adapter, by the path of their module.

    Args:
        has_experts: whether any layer of the model has; only attention's matrices can have one
            then: PEFT takes the names of an MLP's matrices for those of its experts.
    """
    return {
        name.removesuffix(".weight"): param
        for name, param in params.items()
        if name.endswith(".weight") and len(param.shape) == 2 and param.cut in _CUTS
        if not (has_experts and name.startswith("mlp."))
    }


def with_adapters(
    params: dict[str, Param], lora: Lora | None, *, has_experts: bool
) -> dict[str, Param]:
    """A layer's parameters, frozen, and those of its adapters; unchanged without adapters."""
    if lora is None:
        return params
    found = {name: replace(param, trained=False) for name, param in params.items()}
    for module, param in adaptable(params, has_experts=has_experts).items():
        if lora.quantize is not None:
            found[f"{module}.weight"] = replace(param, trained=False, packed=True)
        if lora.targets is None or _leaf(module) in lora.targets:
            num_out, num_in = param.shape
            cut_a, cut_b = _CUTS[param.cut]
            parts = {
                name: Param(shape=(part.shape[0], lora.rank), cut=part.cut)
                for name, part in (param.parts or {}).items()
            }
            found[f"{module}.{LORA_A}"] = Param(shape=(lora.rank, num_in), cut=cut_a)
            found[f"{module}.{LORA_B}"] = Param(
                shape=(num_out, lora.rank), cut=cut_b, parts=parts or None
            )
    return found


def complete(lora: Lora, facts: ModelFacts) -> Lora:
    """The same adapters with their targets named.

    Raises:
        UserError: a target is no matrix of the model, nothing can have an adapter, or a matrix is
            not made of whole blocks.
    """
    model_type, known = facts.model_type, list(_widths(facts))
    if not known:
        raise UserError(f"{model_type} has no matrix that can have an adapter; use task=full.")
    targets = known if lora.targets is None else lora.targets
    unknown = [name for name in targets if name not in known]
    if unknown:
        raise UserError(
            f"lora.targets: {unknown[0]!r} is no matrix of {model_type} that can have an adapter; "
            f"there are: {', '.join(known)}."
        )
    reason = why_not_packed(facts)
    if lora.quantize is not None and reason is not None:
        raise UserError(f"lora.quantize={lora.quantize} {reason}; use task=lora.")
    return lora.model_copy(update={"targets": [name for name in known if name in targets]})


def _widths(facts: ModelFacts) -> dict[str, int]:
    """The matrices of a model that can have an adapter, and how many inputs each has."""
    return {
        _leaf(module): param.shape[1]
        for kind in dict.fromkeys(facts.layers)
        for module, param in adaptable(
            facts.params_of(kind), has_experts=facts.num_experts > 0
        ).items()
    }


def why_not_packed(facts: ModelFacts) -> str | None:
    """The reason why a model's matrices cannot rest in four bits; None if they can."""
    for name, width in _widths(facts).items():
        if width % NF4_BLOCK:
            return f"rounds blocks of {NF4_BLOCK} inputs, and {name} of this model has {width}"
    return None


def file_name(parameter: str) -> str:
    """What PEFT calls an adapter's matrix in its file."""
    return f"{_PEFT_PREFIX}{parameter}.weight"


def parameter_name(stored: str) -> str:
    """The model's own name of an adapter's matrix in a file of PEFT, or in a checkpoint."""
    return stored.removeprefix(_PEFT_PREFIX).removesuffix(".weight")


def read_adapters(directory: Path) -> Lora:
    """What `adapter_config.json` says of a directory's adapters.

    Raises:
        UserError: it cannot be read, or asks for more than plain adapters.
    """
    file = directory / ADAPTER_CONFIG
    config = read_config(file)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type {config.get('peft_type')!r} is not built; LORA is.")
    for key, value in config.items():
        plain = _PLAIN.get(key)
        is_plain = value in plain if plain else key in _SAYS_NOTHING or not value
        if not is_plain:
            usual = plain[0] if plain else None
            raise UserError(f"{file}: {key}={value!r} is not built; {key}={usual!r} is.")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        raise UserError(f"{file}: target_modules={targets!r}; a list of names is expected.")
    names = sorted({_leaf(str(name)) for name in targets})
    data = {
        "rank": config.get("r", 8),
        "alpha": config.get("lora_alpha", 8),
        "targets": names,
        "quantize": _read_base(directory / BASE_FILE),
    }
    try:
        return parse(Lora, data, source=str(file))
    except UserError as error:  # by the names that the file has
        text = str(error).replace(": rank =", ": r =").replace(": alpha =", ": lora_alpha =")
        raise UserError(text) from None


def _read_base(file: Path) -> Any:
    """How the matrices below some adapters were rounded; None: they were not."""
    if not file.exists():
        return None
    content = read_config(file)
    if content != {"format": "nf4", "block_size": NF4_BLOCK}:
        raise UserError(f"{file}: {content} is not built; nf4 in blocks of {NF4_BLOCK} is.")
    return content["format"]


def write_adapters(directory: Path, lora: Lora, base: Path) -> None:
    """Write `adapter_config.json`, as PEFT reads it, and what it cannot say."""
    if lora.quantize is not None:
        content = {"format": lora.quantize, "block_size": NF4_BLOCK}
        _write(directory / BASE_FILE, content)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.targets,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    _write(directory / ADAPTER_CONFIG, config)


def _write(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
