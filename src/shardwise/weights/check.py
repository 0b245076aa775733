"""Are an exported directory and the sharded model it came from the same model?"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import Field
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, logging

from shardwise.config import Config, Plan, parse, read_yaml
from shardwise.parallel.collectives import gather_last_dim
from shardwise.parallel.grads import local_part
from shardwise.parallel.mesh import Mesh
from shardwise.weights.load import load_model
from shardwise.weights.save import DTYPES

CHECK_FILE, LOGITS_FILE = "check.yaml", "logits.safetensors"
TOLERANCE = 1e-4
"""allowed |difference| of fp32 logits, relative to the largest"""


class Check(Config):
    """What both models compute."""

    ids: list[list[int]] = Field(description="rows of equal length")
    dtype: str = Field(description="of the exported weights: fp32, bf16 or fp16")


def run_logits(plan: Plan, folder: Path, mesh: Mesh) -> None:
    """Every rank: the sharded model's logits, in fp32 on weights rounded to the exported dtype."""
    check = parse(Check, read_yaml((folder / CHECK_FILE).read_text()), source=CHECK_FILE)
    model = load_model(plan, mesh, torch.float32).model.eval()
    with torch.no_grad():
        for param in model.parameters():
            local = local_part(param)
            local.copy_(local.to(DTYPES[check.dtype]))
        ids = torch.tensor(check.ids, device=mesh.device)
        logits = model(input_ids=ids, use_cache=False).logits
    if mesh.size("tp") > 1:
        logits = gather_last_dim(logits, model.config.vocab_size, mesh.group("tp"))
    if dist.get_rank() == 0:
        save_file({"logits": logits.contiguous().cpu()}, folder / LOGITS_FILE)


def compare_with_plain(folder: Path, exported: Path) -> tuple[float, float]:
    """Largest |difference| between the sharded logits and plain transformers', and the largest
    logit. Loads the whole exported model into this process."""
    check = parse(Check, read_yaml((folder / CHECK_FILE).read_text()), source=CHECK_FILE)
    sharded = load_file(folder / LOGITS_FILE)["logits"]
    logging.disable_progress_bar()
    plain = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor(check.ids), use_cache=False).logits
    return float((sharded - logits).abs().max()), float(logits.abs().max())
