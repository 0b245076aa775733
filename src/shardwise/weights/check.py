"""Are an exported directory and the sharded model it came from the same model?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, logging

from shardwise.config import Config, Lora, Plan
from shardwise.errors import UserError
from shardwise.models.adapters import ADAPTER_FILE, LORA_A, LORA_B, parameter_name, read_adapters
from shardwise.models.nf4 import rounded
from shardwise.models.read import base_of, facts_of_plan, read_facts
from shardwise.parallel.collectives import gather_last_dim
from shardwise.parallel.grads import local_part
from shardwise.parallel.mesh import Mesh
from shardwise.parsing import parse, read_yaml
from shardwise.weights.load import load_model, local_box
from shardwise.weights.save import DTYPES

CHECK_FILE, LOGITS_FILE = "check.yaml", "logits.safetensors"
TOLERANCE = 1e-4
"""allowed |difference| of fp32 logits, relative to the largest"""


class Check(Config):
    """What both models compute."""

    ids: list[list[int]] = Field(description="rows of equal length")
    dtype: str = Field(description="of the exported weights: fp32, bf16 or fp16")
    adapters: Literal["merged", "alone"] | None = Field(
        default=None, description="how those of the source were exported; None: it has none"
    )


def run_logits(plan: Plan, folder: Path, mesh: Mesh) -> None:
    """Every rank: the sharded model's logits, in fp32 on weights rounded to the exported dtype."""
    check = parse(Check, read_yaml((folder / CHECK_FILE).read_text()), source=CHECK_FILE)
    is_merged = check.adapters == "merged"
    model = load_model(plan, mesh, torch.float32, unpacked=is_merged).model.eval()
    with torch.no_grad():
        if is_merged:
            _merge(model, facts_of_plan(plan).adapters)
        for name, param in model.named_parameters():
            if check.adapters != "alone" or name.endswith((LORA_A, LORA_B)):
                local = local_part(param)
                local.copy_(local.to(DTYPES[check.dtype]))
        ids = torch.tensor(check.ids, device=mesh.device)
        logits = model(input_ids=ids, use_cache=False).logits
    if mesh.size("tp") > 1:
        logits = gather_last_dim(logits, model.config.vocab_size, mesh.group("tp"))
    if dist.get_rank() == 0:
        save_file({"logits": logits.contiguous().cpu()}, folder / LOGITS_FILE)


def _as_numbers(base: Path | None) -> dict[str, Any]:
    """What makes transformers read a model's codes as numbers, on a GPU too.

    Raises:
        UserError: it cannot.
    """
    stored_as = None if base is None else read_facts(base).stored_as
    if stored_as is None:
        return {}
    if stored_as.method == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    if stored_as.method == "fp8":
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    raise UserError(
        f"{base}: plain transformers does not make numbers of {stored_as.method} files, so there "
        "is nothing to compare with; use --merge, or leave out --check."
    )


def _merge(model: nn.Module, lora: Lora | None) -> None:
    """Merge the adapters of a sharded model into its matrices, in place."""
    if lora is None:
        return
    for _, module in model.named_modules():
        parts = [part for part in (module, *module.children()) if hasattr(part, LORA_B)]
        for part in parts if hasattr(module, LORA_A) else ():  # of a fused matrix, several
            product = _full(part.lora_B) @ _full(module.lora_A)
            whole = _full(part.weight) + lora.scale * product
            local_part(part.weight).copy_(whole[local_box(part.weight)])
            local_part(part.lora_B).zero_()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare_with_plain(folder: Path, exported: Path) -> tuple[float, float]:
    """Largest |difference| between the sharded logits and plain transformers', and the largest
    logit. Loads the whole exported model into this process."""
    check = parse(Check, read_yaml((folder / CHECK_FILE).read_text()), source=CHECK_FILE)
    sharded = load_file(folder / LOGITS_FILE)["logits"]
    logging.disable_progress_bar()
    base = base_of(exported)
    plain = AutoModelForCausalLM.from_pretrained(
        base or exported, dtype=torch.float32, local_files_only=True, **_as_numbers(base)
    ).eval()
    with torch.no_grad():
        if base is not None:
            for name in read_facts(exported).packed_parameters():
                module = plain.get_submodule(name.removesuffix(".weight"))
                module.weight.copy_(rounded(module.weight))
            scale, stored = read_adapters(exported).scale, load_file(exported / ADAPTER_FILE)
            tensors = {parameter_name(name): tensor.float() for name, tensor in stored.items()}
            for name in tensors:
                if name.endswith(LORA_B):
                    module = name.removesuffix(f".{LORA_B}")
                    product = tensors[name] @ tensors[f"{module}.{LORA_A}"]
                    plain.get_submodule(module).weight += scale * product
        logits = plain(input_ids=torch.tensor(check.ids), use_cache=False).logits
    return float((sharded - logits).abs().max()), float(logits.abs().max())
