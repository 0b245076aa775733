"""Loading: each rank reads only its own slices, and gets the right ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import fast_first
from tests.models import save_model
from tests.run_ranks import run_ranks


def load_on_rank(rank: int, model_dir: str, layout: dict[str, int]) -> Any:
    """Bytes that the rank read, values it holds, and the full parameters."""
    import torch
    from torch.distributed.tensor import DTensor

    from shardwise.config import Layout, Plan
    from shardwise.models.build import build_on_meta, materialise
    from shardwise.models.read import read_facts
    from shardwise.parallel.apply import parallelize
    from shardwise.parallel.grads import local_part
    from shardwise.parallel.mesh import build_mesh
    from shardwise.planner.memory import RankSizes
    from shardwise.weights.index import open_index
    from shardwise.weights.load import load_weights

    plan = Plan(model=model_dir, task="full", layout=Layout(**layout))
    mesh = build_mesh(plan.layout, "cpu")
    facts = read_facts(model_dir)
    sharded = parallelize(lambda: build_on_meta(model_dir, torch.float32), plan, facts, mesh)
    model = sharded.model
    materialise(model, mesh.device)
    num_bytes = load_weights(sharded, open_index(model_dir))
    held = sum(local_part(p).numel() for p in model.parameters())
    full = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
    sizes = RankSizes.of(facts, plan.layout)
    planned = facts.num_layers * sizes.layer_bytes(1) + sizes.outer
    on_meta = [n for n, t in [*model.named_buffers(), *full.items()] if t.is_meta]
    return num_bytes, held, full, planned, on_meta


@pytest.mark.parametrize(
    "layout", [{"fsdp": 2}, {"tp": 2}, {"fsdp": 2, "tp": 2}], ids=["fsdp2", "tp2", "fsdp2xtp2"]
)
@pytest.mark.parametrize("name", ["LL321", "LLB", "Q3", "G3"])
def test_each_rank_reads_its_own_slices_only(
    tmp_path: Path, name: str, layout: dict[str, int]
) -> None:
    from safetensors.torch import load_file

    save_model(name, tmp_path / name, max_shard_size="200KB")
    stored = {}
    for file in (tmp_path / name).glob("*.safetensors"):
        stored.update(load_file(file))
    num_ranks = math.prod(layout.values())
    ranks = run_ranks(num_ranks, load_on_rank, str(tmp_path / name), layout)
    for num_bytes, held, full, planned, on_meta in ranks:
        assert num_bytes == 4 * held  # fp32: every byte read is a value held
        assert not on_meta
        assert set(full) == set(stored)
        for key, tensor in stored.items():
            assert bool((full[key] == tensor).all()), key
        fsdp = layout.get("fsdp", 1)  # rows are cut whole, so a rank may hold a few more
        assert held <= planned / fsdp + sum(math.prod(t.shape[1:]) for t in stored.values())
    everything = sum(tensor.numel() for tensor in stored.values())
    total = sum(held for _, held, *_ in ranks)
    assert total >= everything
    if "tp" not in layout:
        assert total == everything  # nothing is held twice


def read_on_rank(rank: int, model_dir: str, layout: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank read and holds."""
    import torch

    from shardwise.config import Layout, Plan
    from shardwise.parallel.grads import local_part
    from shardwise.parallel.mesh import build_mesh
    from shardwise.weights.load import load_model
    from shardwise.weights.progress import Loading

    plan = Plan(model=model_dir, task="full", layout=Layout(**layout))
    mesh = build_mesh(plan.layout, "cpu")
    with Loading(mesh) as loading:
        sharded = load_model(plan, mesh, torch.float32, loading=loading)
    return loading.num_bytes, sum(local_part(p).nbytes for _, p in sharded.stored_names())


@pytest.mark.parametrize(
    ("name", "layout"),
    fast_first(
        [
            ("LL", {"pp": 2, "tp": 2}),
            ("LL", {"tp": 4}),  # of two KV heads
            ("LL321T", {"pp": 2}),
            ("LL", {"dp": 2, "fsdp": 2}),
            ("MOE", {"fsdp": 2, "ep": 2}),
            ("MOE", {"tp": 2, "ep": 2, "sequence_parallel": True}),
            ("DS", {"pp": 2}),
            ("PHI", {"tp": 2}),
        ],
        1,
    ),
    ids=str,
)
def test_each_rank_reads_what_it_holds(tmp_path: Path, name: str, layout: dict[str, Any]) -> None:
    """Not a byte more, of stages, experts, copies of KV heads and parts of fused matrices too."""
    model = save_model(name, tmp_path / name)
    sizes = [size for axis, size in layout.items() if axis not in ("ep", "sequence_parallel")]
    for read, held in run_ranks(math.prod(sizes), read_on_rank, str(model), layout):
        assert 0 < read == held


def test_fp16_and_bf16_files_are_widened(tmp_path: Path) -> None:
    """Master weights are fp32 whatever the files hold."""
    import torch
    from transformers import AutoModelForCausalLM

    save_model("LL", tmp_path / "LL")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "LL", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    _, held, full, *_ = run_ranks(1, load_on_rank, str(tmp_path / "bf16"), {"fsdp": 1})[0]
    assert held == sum(p.numel() for p in model.parameters())
    for name, param in model.named_parameters():
        assert full[name].dtype == torch.float32
        assert bool((full[name] == param.float()).all())


def status(key: str) -> int:
    """Bytes that the system notes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def peak_on_rank(
    rank: int, model_dir: str, warm_up: str, layout: dict[str, int]
) -> tuple[int, int]:
    """Bytes that this rank holds of a model, and by how many its memory grew at most meanwhile."""
    import torch

    from shardwise.config import Layout, Plan
    from shardwise.parallel.grads import local_part
    from shardwise.parallel.mesh import build_mesh
    from shardwise.weights.load import load_model

    plan = Plan(model=model_dir, task="full", layout=Layout(**layout))
    mesh = build_mesh(plan.layout, "cpu")
    load_model(plan.model_copy(update={"model": warm_up}), mesh, torch.float32)  # first calls
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    sharded = load_model(plan, mesh, torch.float32)
    held = sum(local_part(param).nbytes for _, param in sharded.stored_names())
    return held, status("VmHWM") - before


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Models of 0.3 GB in fp32, as bf16 and fp8 files, and each with a tiny one."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    from tests.coded import save_fp8

    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 32000}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    dense = LlamaConfig(**sizes, intermediate_size=3072)
    experts = MixtralConfig(**{**sizes, "num_local_experts": 4}, intermediate_size=1024)
    for name, config in (("dense", dense), ("experts", experts)):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / name, max_shard_size="60MB")
    for name in ("dense", "experts"):
        save_model("LL" if name == "dense" else "MIX", folder / f"small {name}")
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    save_fp8(folder / "dense", folder / "fp8", folder / "p", quantization=how, block=(128, 128))
    small = {"dense": "small dense", "fp8": "small dense", "experts": "small experts"}
    return {name: (folder / name, folder / small[name]) for name in small}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
@pytest.mark.parametrize(
    ("name", "layout"),
    fast_first(
        [
            ("fp8", {"tp": 2}),
            ("dense", {"fsdp": 1}),
            ("dense", {"fsdp": 2}),
            ("dense", {"tp": 2}),
            ("dense", {"pp": 2}),
            ("experts", {"fsdp": 2, "ep": 2}),
        ]
    ),
    ids=str,
)
def test_a_process_holds_its_shard_and_a_tenth_more(
    large: dict[str, tuple[Path, Path]], name: str, layout: dict[str, int]
) -> None:
    num_ranks = math.prod(size for axis, size in layout.items() if axis != "ep")
    for held, grown in run_ranks(num_ranks, peak_on_rank, *map(str, large[name]), layout):
        assert held > 100e6
        assert grown < 1.10 * held


def peak_of_export(rank: int, warm_up: str, model_dir: str, target: str) -> int:
    """By how much memory grew at most while a model was exported."""
    import torch

    from shardwise.models.read import read_facts
    from shardwise.weights.names import open_model_index
    from shardwise.weights.save import export_model

    for model in (warm_up, model_dir):
        facts = read_facts(model)
        index = open_model_index(model, facts)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        export_model(index, facts, Path(target) / Path(model).name, torch.float32)
    return status("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
def test_an_export_holds_a_tensor_and_not_the_model(
    large: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model, small = large["dense"]
    (tmp_path / "out").mkdir()
    (grown,) = run_ranks(1, peak_of_export, str(small), str(model), str(tmp_path / "out"))
    embedding = 4 * 32000 * 1024
    size = (tmp_path / "out" / "dense" / "model.safetensors").stat().st_size
    assert grown < 1.25 * embedding < 0.5 * size
