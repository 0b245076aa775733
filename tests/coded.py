"""Models in the number formats that large ones are published in, made from plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST = 448.0
"""of an 8-bit number with four bits of exponent"""


def save_fp8(
    model: Path,
    coded: Path,
    plain: Path,
    *,
    quantization: dict[str, Any],
    block: tuple[int, int] | None,
    scale: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a model with its layers' matrices in fp8, and the same numbers as a plain model.

    Args:
        block: numbers that share a scale; None: all of a matrix.
        scale: what the scale of `X.weight` is called instead.
    """
    tensors, coded_tensors = _tensors(model), {}
    for name, tensor in list(tensors.items()):
        is_matrix = ".layers." in name and tensor.ndim == 2 and name.endswith("proj.weight")
        if not is_matrix:
            coded_tensors[name] = tensor
            continue
        rows, columns = block or tensor.shape
        height, width = -(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)
        padded = torch.zeros(height * rows, width * columns)
        padded[: tensor.shape[0], : tensor.shape[1]] = tensor
        largest = padded.view(height, rows, width, columns).abs().amax(dim=(1, 3))
        scales = (largest / _LARGEST).clamp(min=1e-12)
        if dtype == torch.float8_e8m0fnu:
            scales = scales.log2().ceil().exp2()
        stored = scales.to(dtype)
        wide = stored.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        wide = wide[: tensor.shape[0], : tensor.shape[1]]
        codes = (tensor / wide).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        coded_tensors[name] = codes
        coded_tensors[name.replace("weight", scale)] = stored if block else stored.view(1)
        tensors[name] = codes.float() * wide
    _write(model, plain, tensors)
    _write(model, coded, coded_tensors, quantization)


def save_mxfp4(model: Path, coded: Path, plain: Path) -> None:
    """Write a GPT-OSS model with its experts in MXFP4, and the same numbers as a plain model."""
    tensors, coded_tensors = _tensors(model), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            coded_tensors[name] = tensor
            continue
        groups = tensor.transpose(1, 2).unflatten(-1, (-1, 32))
        powers = (groups.abs().amax(-1).clamp(min=1e-30) / 6.0).log2().ceil()
        scaled = groups / powers.exp2().unsqueeze(-1)
        codes = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
        signs = (scaled < 0).long()
        nibbles = codes + 8 * signs
        coded_tensors[f"{name}_blocks"] = (nibbles[..., ::2] + 16 * nibbles[..., 1::2]).byte()
        coded_tensors[f"{name}_scales"] = (powers + 127).byte()
        numbers = FP4[codes] * (1 - 2 * signs) * powers.exp2().unsqueeze(-1)
        tensors[name] = numbers.flatten(-2).transpose(1, 2).contiguous()
    _write(model, plain, tensors)
    _write(model, coded, coded_tensors, {"quant_method": "mxfp4"})


def _tensors(model: Path) -> dict[str, torch.Tensor]:
    return {k: t for file in model.glob("*.safetensors") for k, t in load_file(file).items()}


def _write(
    model: Path,
    target: Path,
    tensors: dict[str, torch.Tensor],
    quantization: dict[str, Any] | None = None,
) -> None:
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        file = target / "config.json"
        config = json.loads(file.read_text()) | {"quantization_config": quantization}
        file.write_text(json.dumps(config))
