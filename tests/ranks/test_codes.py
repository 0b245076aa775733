"""Files in fp8 and MXFP4: every rank gets the numbers that they stand for, in every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import UserError
from shardwise.models.read import read_facts
from shardwise.weights.index import verify
from shardwise.weights.names import open_model_index
from tests.coded import save_fp8, save_mxfp4
from tests.e2e.bench import fast_first
from tests.models import save_model
from tests.run_ranks import run_ranks

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
FORMATS: dict[str, dict[str, Any]] = {
    "uneven blocks": {"quantization": {**FP8, "weight_block_size": [28, 20]}, "block": (28, 20)},
    "blocks": {"quantization": FP8, "block": (16, 16)},
    "powers of two": {"quantization": FP8, "block": (16, 16), "dtype": torch.float8_e8m0fnu},
    "bf16 scales": {"quantization": FP8, "block": (16, 16), "dtype": torch.bfloat16},
    "whole matrices": {
        "quantization": {"quant_method": "fp8", "weight_block_size": None},
        "block": None,
    },
    "rows": {
        "quantization": {"quant_method": "fbgemm_fp8"},
        "block": (1, 256),
        "scale": "weight_scale",
    },
    "compressed-tensors": {
        "quantization": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        },
        "block": (1, 256),
        "scale": "weight_scale",
    },
}


def load_on_rank(rank: int, model: str, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What this rank holds of every parameter."""
    from shardwise.config import Layout, Plan
    from shardwise.parallel.grads import local_part
    from shardwise.parallel.mesh import build_mesh
    from shardwise.weights.load import load_model

    plan = Plan(model=model, task="full", layout=Layout(**layout))
    sharded = load_model(plan, build_mesh(plan.layout, "cpu"), torch.float32)
    return {name: local_part(param).detach() for name, param in sharded.stored_names()}


def assert_loads_the_same(coded: Path, plain: Path, layout: dict[str, Any]) -> None:
    num_ranks = math.prod(n for axis, n in layout.items() if axis in ("pp", "dp", "fsdp", "tp"))
    ours = run_ranks(num_ranks, load_on_rank, str(coded), layout)
    theirs = run_ranks(num_ranks, load_on_rank, str(plain), layout)
    for mine, want in zip(ours, theirs, strict=True):
        assert mine.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("kind", fast_first(list(FORMATS), 2))
def test_fp8(tmp_path: Path, kind: str) -> None:
    """The numbers, bit for bit, of a directory that holds them as they are."""
    save_fp8(save_model("Q3", tmp_path / "m"), tmp_path / "c", tmp_path / "p", **FORMATS[kind])
    assert_loads_the_same(tmp_path / "c", tmp_path / "p", {"fsdp": 1})


@pytest.mark.parametrize(
    "layout", fast_first([{"tp": 2}, {"fsdp": 2}, {"pp": 2}, {"tp": 4}], 1), ids=str
)
def test_fp8_in_layouts(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Parts that begin within a block."""
    kind = FORMATS["uneven blocks"]
    save_fp8(save_model("Q3", tmp_path / "m"), tmp_path / "c", tmp_path / "p", **kind)
    assert_loads_the_same(tmp_path / "c", tmp_path / "p", layout)


@pytest.mark.parametrize(
    "layout",
    fast_first([{"fsdp": 2, "ep": 2}, {"tp": 2, "sequence_parallel": True}, {"fsdp": 2}], 1),
    ids=str,
)
def test_fp8_of_experts(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Which files have one by one, and models stacked."""
    kind = FORMATS["uneven blocks"]
    save_fp8(save_model("DS", tmp_path / "m"), tmp_path / "c", tmp_path / "p", **kind)
    assert_loads_the_same(tmp_path / "c", tmp_path / "p", layout)


@pytest.mark.parametrize(
    "layout",
    fast_first(
        [{"fsdp": 2, "ep": 2}, {"fsdp": 1}, {"fsdp": 3}, {"tp": 2, "sequence_parallel": True}], 1
    ),
    ids=str,
)
def test_mxfp4(tmp_path: Path, layout: dict[str, Any]) -> None:
    save_mxfp4(save_model("OSS64", tmp_path / "m"), tmp_path / "c", tmp_path / "p")
    assert_loads_the_same(tmp_path / "c", tmp_path / "p", layout)


@pytest.mark.parametrize("name", fast_first(["OSS64", "Q3", "DS"], 2))
def test_the_numbers_are_transformers_own(tmp_path: Path, name: str) -> None:
    """What `from_pretrained` makes of the same files."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    how: Any = Mxfp4Config(dequantize=True)
    if name == "OSS64":
        save_mxfp4(save_model(name, tmp_path / "m"), tmp_path / "c", tmp_path / "p")
    else:
        save_fp8(save_model(name, tmp_path / "m"), tmp_path / "c", tmp_path / "p", **_EVEN)
        how = FineGrainedFP8Config(weight_block_size=(8, 8), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "c", dtype=torch.float32, quantization_config=how
    ).state_dict()
    (ours,) = run_ranks(1, load_on_rank, str(tmp_path / "c"), {"fsdp": 1})
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


_EVEN: dict[str, Any] = {"quantization": {**FP8, "weight_block_size": [8, 8]}, "block": (8, 8)}


def test_an_export_is_a_plain_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from shardwise.launch.export import start_export

    save_mxfp4(save_model("OSS64", tmp_path / "m"), tmp_path / "c", tmp_path / "p")
    start_export(tmp_path / "c", tmp_path / "out", "fp32", check=False)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "p").state_dict()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


def refusal(folder: Path, change: Any) -> str:
    """What is said of a coded model whose tensors have been changed."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    facts = read_facts(folder)
    with pytest.raises(UserError) as error:
        verify(open_model_index(folder, facts), facts)
    return str(error.value)


def test_scales_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    save_fp8(save_model("Q3", tmp_path / "m"), tmp_path / "c", tmp_path / "p", **FORMATS["blocks"])
    name = "model.layers.0.mlp.down_proj.weight"

    def transposed(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].t().contiguous()

    text = refusal(tmp_path / "c", transposed)
    assert name in text
    assert "[16, 16]" in text or "(16, 16)" in text
    text = refusal(tmp_path / "c", lambda tensors: tensors.pop(f"{name}_scale_inv"))
    assert f"{name}_scale_inv is missing" in text


@pytest.mark.parametrize("shape", [(128, 1), (2,), (2, 2), (0, 1)])
def test_scales_that_say_nothing_of_blocks(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Where the config has none, only a scale a matrix, a row or a column is clear."""
    kind = FORMATS["whole matrices"]
    save_fp8(save_model("Q3", tmp_path / "m"), tmp_path / "c", tmp_path / "p", **kind)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    text = refusal(tmp_path / "c", lambda tensors: tensors.update({name: torch.ones(shape)}))
    assert f"{name} {list(shape)}" in text


def test_codes_without_scales(tmp_path: Path) -> None:
    save_mxfp4(save_model("OSS64", tmp_path / "m"), tmp_path / "c", tmp_path / "p")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    assert f"{name} is missing" in refusal(tmp_path / "c", lambda tensors: tensors.pop(name))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "mxfp4"}, "gpt_oss"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [0, 16]}, "blocks of [0, 16]"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"num_bits": 8, "type": "float", "symmetric": False}}
                },
            },
            "compressed-tensors of other",
        ),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp4"),
    ],
)
def test_what_is_not_read_is_said_before_anything(
    tmp_path: Path, quantization: dict[str, Any], words: str
) -> None:
    folder = save_model("Q3", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(UserError) as error:
        read_facts(folder)
    assert words in str(error.value)
