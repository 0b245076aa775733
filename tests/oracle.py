"""What every layout is compared with: one process, plain transformers, AdamW written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

torch.set_num_threads(1)  # tiny products: threads would only wait for each other

LOSS_RTOL = 1e-5
NORM_RTOL = 1e-4
ATOL, RTOL = 1e-5, 1e-4

Row = tuple[list[int], list[int]]
"""token ids, and 1 for each token that is trained (as a target)"""


@dataclass
class OracleStep:
    loss: float
    norm: float
    num_tokens: int
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]


@dataclass
class AdamW:
    """The textbook update (Loshchilov and Hutter, 2019), decay only for matrices."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    t: int = 0
    m: dict[str, torch.Tensor] = field(default_factory=dict)
    v: dict[str, torch.Tensor] = field(default_factory=dict)

    def step(self, params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> None:
        self.t += 1
        for name, p in params.items():
            g = grads[name]
            m = self.m[name] = self.beta1 * self.m.get(name, 0.0) + (1 - self.beta1) * g
            v = self.v[name] = self.beta2 * self.v.get(name, 0.0) + (1 - self.beta2) * g * g
            if p.ndim > 1:
                p.mul_(1 - self.lr * self.weight_decay)
            m_hat, v_hat = m / (1 - self.beta1**self.t), v / (1 - self.beta2**self.t)
            p.sub_(self.lr * m_hat / (v_hat.sqrt() + self.eps))


def round_matrices(model: torch.nn.Module) -> None:
    """Round the matrices of a model's layers to NF4 and back, as bitsandbytes does it."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in model.base_model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            packed, state = quantize_4bit(module.weight.data, blocksize=64, quant_type="nf4")
            module.weight.data = dequantize_4bit(packed, state)


class Merged:
    """Adapters as they are defined: every matrix is W + (alpha / r) B A, made anew each time."""

    def __init__(self, model: torch.nn.Module, adapters: Path) -> None:
        if (adapters / "base_quantization.json").exists():
            round_matrices(model)
        config = json.loads((adapters / "adapter_config.json").read_text())
        self.scale = config["lora_alpha"] / config["r"]
        stored = load_file(adapters / "adapter_model.safetensors")
        self.params = {
            name.removeprefix("base_model.model.").removesuffix(".weight"): tensor.requires_grad_()
            for name, tensor in stored.items()
        }
        model.requires_grad_(False)
        names = [name.removesuffix(".lora_A") for name in self.params if name.endswith(".lora_A")]
        self.matrices = {name: model.get_submodule(name) for name in names}
        self.frozen = {
            name: module._parameters.pop("weight") for name, module in self.matrices.items()
        }

    def merge(self) -> None:
        for name, module in self.matrices.items():
            product = self.params[f"{name}.lora_B"] @ self.params[f"{name}.lora_A"]
            module.weight = self.frozen[name] + self.scale * product


def run_oracle(
    model_dir: Path,
    batches: Sequence[Sequence[Row]],
    optimizer: AdamW,
    clip_norm: float | None = None,
    adapters: Path | None = None,
) -> list[OracleStep]:
    """Train on one batch of rows after the other, a row at a time, and keep all there is.

    Args:
        adapters: a directory that PEFT wrote; only these are trained then.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).train()
    params = dict(model.named_parameters())
    merged = Merged(model, adapters) if adapters is not None else None
    if merged is not None:
        params = merged.params
    steps = []
    for rows in batches:
        num_tokens = sum(sum(trained[1:]) for _, trained in rows)
        total = 0.0
        for param in params.values():
            param.grad = None
        for ids, trained in rows:
            if not sum(trained[1:]):
                continue
            if merged is not None:
                merged.merge()
            output = model(input_ids=torch.tensor([ids]), use_cache=False)
            logits = output.logits[0, :-1].float()
            losses = -logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
            loss = (losses * torch.tensor(trained[1:])).sum() / num_tokens
            if getattr(model.config, "output_router_logits", False):
                share = sum(trained[1:]) / num_tokens
                loss = loss + model.config.router_aux_loss_coef * share * output.aux_loss
            loss.backward()
            total += loss.item()
        grads = {name: p.grad.clone() for name, p in params.items()}
        norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in grads.values()))
        scale = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm is not None else 1.0
        with torch.no_grad():
            optimizer.step(params, {name: g * scale for name, g in grads.items()})
        kept = {name: p.detach().clone() for name, p in params.items()}
        steps.append(OracleStep(total, norm, num_tokens, grads, kept))
    return steps


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """The contract's tolerance for gradients and parameters: 1e-5 absolute + 1e-4 relative."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    excess = ((got - want).abs() - ATOL - RTOL * want.abs().max()).max()
    assert excess <= 0, f"{name}: max |difference| {(got - want).abs().max():.3e}"
