"""The planner's ledger of collectives against the collectives that a real step runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Layout
from tests.e2e.bench import fast_first
from tests.models import save_model
from tests.ranks.steps import _micro_batches, random_rows
from tests.run_ranks import run_ranks

ROWS = random_rows([31] * 8)  # eight rows of 32 tokens
HALVES = random_rows([15] * 16)  # two of them fill a sequence


def count_on_rank(
    rank: int, model_dir: str, layout: dict[str, int], settings: dict[str, Any]
) -> Any:
    """(op, bytes) -> count, planned and as dispatched in the second step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from shardwise.config import Lora, Plan, Precision, Train
    from shardwise.models.read import facts_of_plan
    from shardwise.parallel.mesh import build_mesh
    from shardwise.planner.traffic import traffic
    from shardwise.trainer.optim import make_optimizer
    from shardwise.trainer.step import train_step
    from shardwise.weights.load import load_model

    names = {
        "allreduce_": "all_reduce",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "send": "send",
        "alltoall_base_": "all_to_all",
    }
    seen: Counter[tuple[str, int]] = Counter()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.overloadpacket.__name__
            if name in names:
                tensors = [t for a in args[:2] for t in (a if isinstance(a, list) else [a])]
                sizes = [t.nbytes for t in tensors if isinstance(t, torch.Tensor)]
                seen[names[name], max(sizes)] += 1
            return func(*args, **(kwargs or {}))

    precision = Precision(compute=settings.pop("compute", "fp32"))
    lora = Lora(**settings.pop("lora")) if "lora" in settings else None
    train = Train(seq_len=32, micro_batch=2, **settings)
    plan = Plan(
        model=model_dir,
        task="lora" if lora else "full",
        layout=Layout(**layout),
        precision=precision,
        train=train,
        lora=lora,
    )
    mesh = build_mesh(plan.layout, "cpu")
    sharded = load_model(plan, mesh, torch.float32)
    optimizer = make_optimizer(sharded, train)
    rows = HALVES if train.packing else ROWS[: train.global_batch]
    micro = _micro_batches(rows, plan, mesh)
    train_step(sharded, optimizer, micro, mesh, train, 1e-3)
    with Recorder():
        train_step(sharded, optimizer, micro, mesh, train, 1e-3)
    planned: Counter[tuple[str, int]] = Counter()
    for line in traffic(plan, facts_of_plan(plan), mesh.rank("pp")):
        planned[line.op, line.num_bytes] += line.count
    if layout.get("cp", 1) > 1 and mesh.rank("cp") == 0 and layout.get("tp", 1) > 1:
        # this rank has the last token of each of the two rows, after which nothing comes
        planned["all_gather", 2 * 2 * 30 * 4] = planned.pop(("all_gather", 2 * 2 * 32 * 4))
    if train.packing and layout.get("tp", 1) > 1:
        # the first token of the second row in a sequence is not trained
        planned["all_gather", 2 * 2 * 60 * 4] = planned.pop(("all_gather", 2 * 2 * 62 * 4))
    return planned, seen


LAYOUTS = [
    {"fsdp": 2},
    {"fsdp": 2, "zero": 2},
    {"fsdp": 2, "zero": 1},
    {"dp": 2},
    {"dp": 2, "fsdp": 2},
    {"dp": 2, "fsdp": 2, "zero": 1},
    {"tp": 2},
    {"fsdp": 2, "tp": 2},
    {"tp": 4},
    {"tp": 2, "sequence_parallel": True},
    {"fsdp": 2, "tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"pp": 2, "fsdp": 2, "zero": 1},
    {"pp": 2, "tp": 2},
    {"pp": 2, "tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"dp": 2, "cp": 2},
    {"cp": 2, "tp": 2, "sequence_parallel": True},
    {"pp": 2, "cp": 2, "zero": 1},
]


def check_ledger(model: Path, layout: dict[str, int], **settings: Any) -> None:
    num_ranks = Layout(**layout).world_size
    for planned, seen in run_ranks(num_ranks, count_on_rank, str(model), layout, settings):
        exchanges = "ep" in layout
        assert _merged(seen, exchanges) == _merged(planned, exchanges)


def _merged(found: Counter[tuple[str, int]], exchanges: bool) -> Counter[tuple[str, int]]:
    """Without scalars; where tokens are exchanged, which are of any size, that is under one key."""
    result: Counter[tuple[str, int]] = Counter()
    for (op, size), count in found.items():
        is_counts = size == 4 * 8  # of four experts
        if op == "all_to_all" and exchanges and not is_counts:
            result[op, 0] += count
        elif size > 8:
            result[op, size] += count
    return result


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_ledger_where_a_norm_follows_the_mlp(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Made again, the sum that the norm needs crosses ranks again."""
    check_ledger(save_model("G3", tmp_path / "G3"), layout, checkpointing="full")


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("Q3", "none"), ("LL", "full")], ids=["Q3", "LL-full"]
)
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: "x".join(f"{axis}{size}" for axis, size in layout.items())
)
def test_ledger_equals_what_a_step_runs(
    tmp_path: Path, name: str, layout: dict[str, int], checkpointing: str
) -> None:
    """Count and size of every collective; scalars (loss, norm) are left out."""
    check_ledger(save_model(name, tmp_path / name), layout, checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("layout", "global_batch"),
    [
        ({"fsdp": 2}, 4),
        ({"fsdp": 2}, 8),
        ({"fsdp": 2, "zero": 1}, 4),
        ({"fsdp": 2, "zero": 1}, 8),
        ({"dp": 2}, 8),
        ({"pp": 2, "fsdp": 2, "zero": 1}, 8),
    ],
    ids=["zero3", "zero3 twice", "zero1", "zero1 twice", "dp twice", "pp twice"],
)
def test_ledger_in_bf16(tmp_path: Path, layout: dict[str, int], global_batch: int) -> None:
    """Gradients of one pass cross as they are; those that were added up in fp32, in fp32."""
    model = save_model("Q3", tmp_path / "Q3")
    check_ledger(model, layout, compute="bf16", global_batch=global_batch)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    "layout",
    [
        {"fsdp": 2},
        {"fsdp": 2, "ep": 2},
        {"fsdp": 4, "ep": 2},
        {"dp": 2, "fsdp": 2, "ep": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, "ep": 2},
        {"pp": 2, "fsdp": 2, "zero": 1, "ep": 2},
    ],
    ids=str,
)
def test_ledger_of_experts(tmp_path: Path, layout: dict[str, int], checkpointing: str) -> None:
    """How many tokens go where is the router's choice: of their exchanges only the number is
    compared."""
    model = save_model("MIX", tmp_path / "MIX")
    check_ledger(model, layout, checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "checkpointing"),
    [
        ("DS", {"fsdp": 2, "ep": 2}, "none"),
        ("DS", {"tp": 2, "sequence_parallel": True, "ep": 2}, "full"),
        ("DS", {"cp": 2}, "none"),
        ("OSS", {"tp": 2, "sequence_parallel": True}, "full"),
        ("PHI", {"tp": 4}, "none"),
        ("PHI", {"fsdp": 2, "tp": 2, "sequence_parallel": True}, "full"),
        ("GPT2", {"dp": 2, "fsdp": 2}, "full"),
        ("MOE", {"pp": 2}, "none"),
        ("MOE", {"cp": 2}, "none"),
        ("MOE", {"pp": 2, "tp": 2, "sequence_parallel": True}, "full"),
    ],
    ids=str,
)
def test_ledger_of_other_families(
    tmp_path: Path, name: str, layout: dict[str, Any], checkpointing: str
) -> None:
    """Layers of two kinds, shared experts, a latent, fused matrices, a balance loss in a
    pipeline."""
    check_ledger(save_model(name, tmp_path / name), layout, checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    fast_first(
        [
            ("LL", {"fsdp": 2}, {"checkpointing": "full"}),
            ("Q3", {"dp": 2}, {}),
            ("LL", {"fsdp": 2}, {"lora": {"rank": 1}}),
            ("PHI", {"tp": 2}, {}),
            ("LLW", {"fsdp": 2}, {"lora": {"rank": 4, "quantize": "nf4"}, "compute": "bf16"}),
            ("Q3", {"pp": 2, "fsdp": 2, "zero": 1}, {}),
            ("PHIW", {"fsdp": 2, "tp": 2}, {"lora": {"rank": 4, "quantize": "nf4"}}),
            ("LL", {"fsdp": 2, "zero": 1}, {"compute": "bf16"}),
            ("Q3", {"dp": 2, "fsdp": 2}, {}),
            ("LL", {"tp": 2}, {}),
            ("LL", {"tp": 4, "sequence_parallel": True}, {"checkpointing": "full"}),
            ("Q3", {"fsdp": 2, "tp": 2, "sequence_parallel": True}, {}),
            ("Q3", {"pp": 2, "tp": 2}, {}),
            ("Q3", {"cp": 2}, {}),
            ("DS", {"tp": 2, "sequence_parallel": True, "ep": 2}, {}),
        ],
        5,
    ),
    ids=str,
)
def test_ledger_of_adapters(
    tmp_path: Path, name: str, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Frozen weights are gathered; only the adapters' gradients cross ranks."""
    model = save_model(name, tmp_path / name)
    check_ledger(model, layout, **{"lora": {"rank": 4}, **settings})


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zbv", "dualpipev"])
def test_ledger_of_every_schedule(tmp_path: Path, schedule: str) -> None:
    """A V-shaped schedule has both ends of the model on one rank."""
    model = save_model("Q3", tmp_path / "Q3")
    check_ledger(model, {"pp": 2}, pipeline_schedule=schedule)


@pytest.mark.parametrize(
    "layout", [{"fsdp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"cp": 2}], ids=str
)
def test_ledger_of_packed_rows(tmp_path: Path, layout: dict[str, int]) -> None:
    """Positions cross no ranks: each knows those of its own tokens."""
    check_ledger(save_model("Q3", tmp_path / "Q3"), layout, packing=True)
