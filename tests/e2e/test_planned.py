"""Planned against measured, on real processes of a model large enough to be measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest

import shardwise
from shardwise.trainer.report import compare
from tests.e2e.bench import long_last
from tests.e2e.test_kill import SLOW_SAVES
from tests.tokenizer import save_tokenizer

SHAPE = {  # of SmolLM2-135M, less deep, with random weights
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("planned") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).save_pretrained(
        folder
    )
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that are all longer than any sequence length used here."""
    file = tmp_path_factory.mktemp("planned") / "rows.jsonl"
    turn = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "on and " * 200}]
    file.write_text("".join(json.dumps({"messages": turn}) + "\n" for _ in range(16)))
    return file


@pytest.fixture(scope="module")
def short_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 45 to 130 tokens."""
    file = tmp_path_factory.mktemp("planned") / "short.jsonl"
    lines = [
        [{"role": "user", "content": "go"}, {"role": "assistant", "content": "on and " * num}]
        for num in (1, 3, 6, 9, 13) * 12
    ]
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in lines))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("layout", long_last([{"cp": 2}, {"fsdp": 2}, {"pp": 2}], 1), ids=str)
def test_peak_memory_of_packed_rows_is_as_planned(
    model: Path, short_rows: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """The plan is one for rows that fill a sequence, which several do about as well."""
    check_peaks(model, short_rows, tmp_path, layout, ["train.packing=true", "train.global_batch=8"])


@pytest.mark.slow
def test_peak_memory_while_a_checkpoint_is_written_is_as_planned(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy that is written is there during the next steps' peaks, on a disk that is slow."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_SAVES.replace("0.03", "0.2"))
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    check_peaks(model, rows, tmp_path, {"fsdp": 2}, ["train.save_every=1", "train.max_steps=3"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    long_last(
        [
            ({"fsdp": 2}, ["precision.compute=bf16"]),
            ({"tp": 3, "sequence_parallel": True}, []),
            ({"pp": 2, "fsdp": 2, "zero": 1}, ["train.global_batch=16"]),
            ({"fsdp": 1}, []),
            ({"fsdp": 2}, []),
            ({"fsdp": 2}, ["train.checkpointing=full", "train.global_batch=8"]),
            ({"fsdp": 2, "zero": 1}, ["train.global_batch=8"]),
            ({"dp": 2}, ["train.global_batch=8"]),
            ({"pp": 2}, ["train.global_batch=8"]),
            ({"pp": 2}, ["train.global_batch=8", "train.pipeline_schedule=zbv"]),
            ({"cp": 2}, []),
        ],
        3,
    ),
    ids=[
        "fsdp2 bf16",
        "tp3 sequence parallel",
        "pp2 x fsdp2",
        "one",
        "fsdp2",
        "fsdp2 recompute",
        "zero1",
        "dp2",
        "pp2",
        "pp2 zbv",
        "cp2",
    ],
)
def test_peak_memory_is_as_planned(
    model: Path, rows: Path, tmp_path: Path, layout: dict[str, int], settings: list[str]
) -> None:
    """The worst rank's peak is within 8% of the plan (no time is asserted: machines are shared)."""
    check_peaks(model, rows, tmp_path, layout, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    long_last(
        [
            ({"tp": 3}, ["lora.quantize=nf4", "precision.compute=bf16"]),
            ({"fsdp": 2}, ["precision.compute=bf16"]),
            ({"fsdp": 2}, ["lora.quantize=nf4"]),
            ({"fsdp": 2}, ["train.checkpointing=full", "lora.targets=[q_proj,v_proj]"]),
            ({"tp": 3, "sequence_parallel": True}, []),
            ({"pp": 2}, ["train.global_batch=8"]),
        ],
        2,
    ),
    ids=[
        "tp3 nf4 bf16",
        "fsdp2 bf16",
        "nf4",
        "fsdp2 recompute q v",
        "tp3 sequence parallel",
        "pp2",
    ],
)
def test_peak_memory_of_adapters_is_as_planned(
    model: Path, rows: Path, tmp_path: Path, layout: dict[str, int], settings: list[str]
) -> None:
    check_peaks(model, rows, tmp_path, layout, settings, task="lora")


def check_peaks(
    model: Path,
    rows: Path,
    tmp_path: Path,
    layout: dict[str, int],
    settings: list[str],
    task: Literal["full", "lora"] = "full",
) -> None:
    pytest.importorskip("resource")
    shape = shardwise.Layout(**layout)
    answer = shardwise.plan(
        model,
        task=task,
        gpus=f"cpu:{shape.world_size}",
        memory_gib=20.0,
        layout=shape,
        overrides=[
            "train.seq_len=256",
            "train.micro_batch=2",
            "train.global_batch=4",
            "train.max_steps=2",
            "train.epochs=3",
            *settings,
        ],
    )
    assert answer.chosen is not None
    shardwise.train(answer.chosen.plan, data=rows, out=tmp_path / "run")
    *peaks, step = compare(tmp_path / "run")
    assert len(peaks) == shape.world_size
    planned = [row.planned for row in peaks if row.planned is not None]
    measured = [row.measured for row in peaks if row.measured is not None]
    assert max(planned) == pytest.approx(max(measured), rel=0.08)
    # of the others less is asked: their peak may lie at another moment than the plan looks at
    assert planned == pytest.approx(measured, rel=0.15)
    assert step.measured is not None


MIXTURE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


LATENT = {
    **MIXTURE,
    "intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
SINKS = {
    **MIXTURE,
    "intermediate_size": 768,
    "head_dim": 64,
    "num_local_experts": 8,
    "sliding_window": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FUSED = {
    **{key: value for key, value in SHAPE.items() if key != "tie_word_embeddings"},
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("planned") / "mixture"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MIXTURE), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"fsdp": 2, "ep": 2}], ids=str)
def test_peak_memory_of_experts_is_as_planned(
    mixture: Path, rows: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Random experts are used about evenly, as the plan takes them to be."""
    check_peaks(mixture, rows, tmp_path, layout, ["train.micro_batch=4", "train.global_batch=8"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "shape", "layout"),
    long_last(
        [
            ("DeepseekV3Config", LATENT, {"fsdp": 2, "ep": 2}),
            ("GptOssConfig", SINKS, {"fsdp": 2}),
            ("DeepseekV3Config", LATENT, {"fsdp": 2}),
            ("DeepseekV3Config", LATENT, {"tp": 2, "sequence_parallel": True}),
            ("GptOssConfig", SINKS, {"fsdp": 2, "ep": 2}),
            ("Phi3Config", FUSED, {"tp": 2}),
        ],
        2,
    ),
    ids=lambda value: str(value) if isinstance(value, dict) and len(value) < 3 else None,
)
def test_peak_memory_of_other_families_is_as_planned(
    rows: Path, tmp_path: Path, config: str, shape: dict[str, Any], layout: dict[str, int]
) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**shape), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    settings = ["train.micro_batch=4", "train.global_batch=8"]
    check_peaks(tmp_path / "model", rows, tmp_path, layout, settings)
