"""From a sharded checkpoint to plain transformers: shapes, one tensor for a tie, equal logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.errors import UserError
from shardwise.models.read import read_facts
from shardwise.weights.index import INDEX_FILE, verify
from shardwise.weights.names import open_model_index
from shardwise.weights.save import DTYPES, export_model
from tests.models import save_model
from tests.oracle import AdamW, assert_close, run_oracle
from tests.ranks.test_checkpoint import BATCHES, run

EPS = 1e-3


def export(
    source: Path, target: Path, dtype: str = "fp32", **options: int
) -> dict[str, torch.Tensor]:
    """Export, and give back what the files hold."""
    facts = read_facts(source)
    index = open_model_index(source, facts)
    assert verify(index, facts) == ()
    num_bytes = export_model(index, facts, target, DTYPES[dtype], **options)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(target.glob("*.safetensors")):
        tensors.update(load_file(file))
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


@pytest.mark.parametrize(
    ("name", "layout", "rows"),
    [
        ("LL321", "tp2", 321),
        ("LL321T", "both", 321),
        ("Q3", "tp2", 320),
        ("Q3_321", "both", 321),
        ("G3_321", "tp2", 321),
        ("ODD", "fsdp2", 320),
        ("PHI", "tp2", 320),
        ("GPT2", "fsdp2", 320),
        ("OSS", "ep2", 320),
        ("DS", "ep2", 320),
        ("DS", "pp2", 320),
    ],
)
def test_trained_under_a_layout_and_loaded_by_plain_transformers(
    tmp_path: Path, name: str, layout: str, rows: int
) -> None:
    """The export has the vocabulary's rows and one tensor for a tie (bug bank 5 and 23)."""
    model = save_model(name, tmp_path / "model")
    run(model, layout, range(2), save=tmp_path / "step-000002")
    tensors = export(tmp_path / "step-000002" / "model", tmp_path / "out")
    facts = read_facts(model)
    assert tensors[facts.family.names.embedding].shape[0] == rows
    assert ("lm_head.weight" in tensors) != facts.tied
    want = run_oracle(model, BATCHES[:2], AdamW(lr=1e-3, eps=EPS), clip_norm=1.0)[-1].params
    untrained = load_file(model / "model.safetensors")
    assert set(tensors) == set(untrained)
    for key in facts.buffer_shapes:
        assert torch.equal(tensors[key], untrained[key])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    logits = plain(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits
    assert logits.shape[-1] == rows
    loaded = dict(plain.named_parameters())
    assert set(loaded) == set(want)
    for key, param in loaded.items():
        assert_close(key, param, want[key])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_dtype_files_and_index(tmp_path: Path, dtype: str) -> None:
    """Split into files with an index; every value is the stored one, rounded once."""
    import json

    model = save_model("LL", tmp_path / "LL")
    tensors = export(model, tmp_path / "out", dtype, max_file_bytes=150_000)
    stored = load_file(model / "model.safetensors")
    assert {k: t.to(DTYPES[dtype]).tolist() for k, t in stored.items()} == {
        k: t.tolist() for k, t in tensors.items()
    }
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(stored)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert all((tmp_path / "out" / file).stat().st_size < 250_000 for file in files)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == DTYPES[dtype]


def test_an_export_never_overwrites_and_is_whole_or_absent(tmp_path: Path) -> None:
    model = save_model("LL", tmp_path / "LL")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export(model, tmp_path / "taken")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        export(model, tmp_path / "file" / "out")
    assert not list(tmp_path.glob(".*.partial"))
