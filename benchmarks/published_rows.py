"""A row of published runs -> the plan, the model and the software that it describes.

What a row does not say, or the planner cannot express, is a reason (`Unplanned`), never a guess.
Facts of a model come from the row's columns; kinds of matrices and a tied head are those that come
nearest to the printed number of parameters.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.published_software import Software, Unplanned, software_of
from shardwise.catalog import Catalog, Device
from shardwise.config import Devices, Layout, Plan, Precision, Train
from shardwise.models.facts import ModelFacts
from shardwise.models.families import FAMILIES, Family
from shardwise.models.layers import Latent, LayerKind, Param, layer_params

Row = Mapping[str, str]
GPT = Family(model_type="gpt", norms=("ln_1", "ln_2"), norm_bias=True, qkv_bias=True, o_bias=True)
"""heads that are cut, layer norms with biases, and an MLP of two matrices (`PlainFacts`)"""
_CHIPS = re.compile(r"\b(GB300|GB200|B300|B200|H200|H100|A100|A10G|L40S|L4|V100|T4|MI300X)\b")
_ALIASES = {"NVIDIA Ampere": "A100 80GB"}
_MODELS = Path(__file__).with_name("published_models.csv")
"""dimensions of models that tables only name"""
_USABLE = 0.95
"""of the nominal memory of a device that the catalogue does not have"""
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_LATENTS = {
    "deepseek": Latent(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128),
    "kimi": Latent(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128),
}


@dataclass(frozen=True)
class PlainFacts(ModelFacts):
    """A GPT whose MLP has two matrices, both cut by tensor parallelism."""

    @cached_property
    def _params(self) -> dict[LayerKind, dict[str, Param]]:
        h, f = self.hidden_size, self.intermediate_size
        found = {}
        for kind in set(self.layers):
            params = layer_params(self, kind)
            for name in ("gate_proj", "up_proj", "down_proj"):
                params.pop(f"mlp.{name}.weight", None)
                params.pop(f"mlp.{name}.bias", None)
            params["mlp.up.weight"] = Param(shape=(f, h), cut="columns")
            params["mlp.down.weight"] = Param(shape=(h, f), cut="rows")
            found[kind] = params
        return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run as the planner sees it."""

    row: Row
    plans: tuple[Plan, ...]
    """one, or as many as there are micro-batches that the row leaves open"""
    facts: ModelFacts
    software: Software
    device: Device
    interleave: int


def read_rows(path: Path) -> list[Row]:
    """Rows of a CSV file; missing columns and cells are empty."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return [
            {str(k): (v or "").strip() for k, v in row.items() if isinstance(v, str | None)}
            for row in csv.DictReader(file)
        ]


def run_of(row: Row, catalog: Catalog) -> Run:
    """What a row describes.

    Raises:
        Unplanned: it does not say enough, or the planner has no model of it.
    """
    method = row.get("method", "").lower()
    if method in ("infer", "inference", "serve"):
        raise Unplanned("serving, which has a referee of its own")
    if method not in ("", "full", "pretrain", "sft", "finetune", "lora", "qlora"):
        raise Unplanned(f"method {method} is not known")
    software = software_of(row)
    facts = facts_of(row)
    device = device_of(row, catalog)
    given_axes = [number(row, axis) or 1 for axis in ("tp", "pp", "dp", "cp")]
    num_devices = number(row, "n_gpus") or math.prod(given_axes)
    layout = layout_of(row, facts, num_devices)
    seq_len = number(row, "seq_len")
    if seq_len is None and software.measures == "states":
        seq_len = 2048  # of which states do not depend
    if seq_len is None:
        raise Unplanned("sequence length not given")
    rows_per_rank = layout.num_data_ranks
    given = number(row, "micro_batch")
    batch = number(row, "global_batch") or (given or 1) * rows_per_rank
    sizes = [given] if given else [n for n in _MICRO_BATCHES if batch % (n * rows_per_rank) == 0]
    interleave = number(row, "interleave") or 1
    plans = [
        Plan(
            model=row.get("model", "") or "unnamed",
            task="full",
            layout=layout,
            devices=Devices(
                kind=device.name,
                count=layout.world_size,
                memory_gib=device.usable_gib,
                network_gbit=device.network_gbit,
            ),
            precision=Precision(compute=software.compute, reduce=software.reduce),
            train=Train(
                seq_len=seq_len,
                global_batch=max(batch, rows_per_rank),
                micro_batch=size,
                checkpointing=software.checkpointing,
                compile=software.fused,
                pipeline_schedule="interleaved" if interleave > 1 and layout.pp > 1 else "1f1b",
            ),
        )
        for size in sizes or [1]
    ]
    return Run(
        row=row,
        plans=tuple(plans),
        facts=facts,
        software=software,
        device=device,
        interleave=interleave,
    )


def number(row: Row, key: str) -> int | None:
    """A whole number of a cell; None if it holds none."""
    value = real(row, key)
    return None if value is None or value < 1 or value != int(value) else int(value)


def real(row: Row, key: str) -> float | None:
    """A number of a cell; None if it holds none."""
    try:
        value = float(row.get(key, "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def device_of(row: Row, catalog: Catalog) -> Device:
    """The catalogue's device of a row: of the chip that it names, the one nearest in memory."""
    name = _ALIASES.get(row.get("gpu", ""), row.get("gpu", ""))
    if not name and "model states" in row.get("note", "").lower():
        name = "A100 80GB"  # states are the same on any
    chip = _CHIPS.search(name.upper().replace("-", " ").replace("_", " "))
    told = re.search(r"(\d+)\s*GB", name, flags=re.IGNORECASE)
    memory = real(row, "gpu_mem_GB") or (float(told[1]) if told else None)
    kinds = [d for d in catalog.devices.values() if chip and re.match(rf"{chip[1]}(-|$)", d.name)]
    if not kinds or re.search("pcie|nvl\\b", name, flags=re.IGNORECASE):  # another machine
        if memory is None:
            raise Unplanned(f"device {name or '(none)'} is not in the catalogue")
        source = {"source": "the row", "date": "unknown"}
        return Device(name=name or "unnamed", usable_gib=_USABLE * memory, **source)
    device = max(kinds, key=lambda d: d.usable_gib)
    if memory is not None:
        device = min(kinds, key=lambda d: abs(d.usable_gib * 1.074 - memory))
    if "HBM2e" in name:  # the same chip with 2.4 TB/s and 500 of 700 W (torchtitan's tables);
        # dynamic power grows with the cube of the clock
        clock = (500 / 700) ** (1 / 3)
        update = {
            "hbm_gb_per_s": 2400.0,
            "usable_gib": 94.5,
            "sustained_tflops": clock * (device.sustained_tflops or 0),
            "attention": clock * (device.attention or 0),
        }
        device = device.model_copy(update=update)
    return device


def layout_of(row: Row, facts: ModelFacts, num_devices: int) -> Layout:
    """Sizes of the axes; data parallel ranks are what is left of the devices."""
    tp, pp, cp, ep = (number(row, axis) or 1 for axis in ("tp", "pp", "cp", "ep"))
    if num_devices % (tp * pp * cp):
        raise Unplanned(f"{num_devices} devices are no multiple of tp x pp x cp = {tp * pp * cp}")
    if pp > facts.num_layers:
        raise Unplanned(f"pp={pp} has more stages than {facts.num_layers} layers")
    dp = num_devices // (tp * pp * cp)
    zero, shards = _sharding(row, dp)
    if "megatron-lm readme" in row.get("source", "").lower() and shards == 1:
        zero, shards = 1, dp  # it gathers parameters while it computes: a distributed optimizer
    if shards == 1:
        zero = 3
    if ep > 1 and (not facts.num_experts or (shards * cp * tp) % ep or facts.num_experts % ep):
        raise Unplanned(f"ep={ep} does not divide the experts or the ranks")
    recompute = row.get("recompute", "").lower()
    old = "sc21" in row.get("source", "").lower()
    split = (
        tp > 1
        and not old
        and not ("korthikanti" in row.get("source", "").lower() and "sp" not in recompute)
    )
    return Layout(
        dp=dp // shards,
        fsdp=shards,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=zero,  # type: ignore[arg-type]
        sequence_parallel=split,
    )


def _sharding(row: Row, dp: int) -> tuple[int, int]:
    """ZeRO stage, and ranks that share the states."""
    text = row.get("zero_stage_or_fsdp", "").lower()
    if text in ("", "0", "none", "ddp"):
        return 3, 1
    if "not stated" in text:
        if dp > 1 and "lora" not in row.get("method", ""):  # adapters have next to no states
            raise Unplanned("how states are sharded is not stated")
        return 3, 1
    if match := re.search(r"megatron-fsdp\D*(\d+)", text):
        shards = math.gcd(int(match[1]), dp)
        return 3, shards
    if text == "1" or "zero-1" in text or "zero1" in text:
        return 1, dp
    if text == "2" or "zero-2" in text or "grad_op" in text or "zero2" in text:
        return 2, dp
    if text == "3" or "zero-3" in text or "zero3" in text or "fsdp" in text or "full" in text:
        return 3, dp
    raise Unplanned(f"sharding {text!r} is not known")


def facts_of(row: Row) -> ModelFacts:
    """The model of a row, from its columns and, for what is empty there, the table of models."""
    known = _named(row.get("model", ""))
    cells = {key: row.get(key) or known.get(key, "") for key in (*_DIMS, "n_params_B")}
    if not row.get("layers") and known:  # the table's number is exact, the row's is in the name
        cells["n_params_B"] = known["n_params_B"]
    sizes = {key: number(cells, key) for key in _DIMS}
    needed = ("layers", "hidden", "heads", "vocab")
    missing = [key for key in needed if not sizes[key]]
    if missing:
        raise Unplanned(f"dimensions of the model are not given: {', '.join(missing)}")
    hidden, heads = sizes["hidden"] or 0, sizes["heads"] or 0
    name = row.get("model", "").lower()
    latent = next((value for key, value in _LATENTS.items() if key in name), None)
    if not latent and hidden % heads and not known.get("head_dim"):
        raise Unplanned(f"{heads} heads do not divide the width {hidden}")
    params = real(cells, "n_params_B")
    options = list(_options(cells, sizes, latent, known))
    if params is None:
        return options[0]
    best = min(options, key=lambda facts: abs(facts.num_parameters / 1e9 - params))
    if abs(best.num_parameters / 1e9 / params - 1) > 0.25:
        raise Unplanned(
            f"{params:g} B parameters are printed, the dimensions make "
            f"{best.num_parameters / 1e9:.3g} B"
        )
    return best


_DIMS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "experts",
    "top_k",
    "head_dim",
    "expert_ffn",
    "shared_experts",
    "dense_layers",
)


def _options(
    cells: Row, sizes: Mapping[str, int | None], latent: Latent | None, known: Row
) -> Iterable[ModelFacts]:
    """Models of those dimensions: with and without a gate, with and without a tied head."""
    hidden, heads = sizes["hidden"] or 0, sizes["heads"] or 0
    ffn = sizes["ffn"] or 4 * hidden
    experts = sizes["experts"] or 0
    width = sizes["expert_ffn"] or ffn
    dense = sizes["dense_layers"] or 0
    kinds = (LayerKind(),) * dense + (LayerKind(has_experts=experts > 0),) * (
        (sizes["layers"] or 0) - dense
    )
    kv_heads = sizes["kv_heads"] or heads
    if latent is not None or heads % kv_heads:
        kv_heads = heads
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "layers": kinds,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": latent.nope_dim + latent.rope_dim
        if latent
        else sizes["head_dim"] or hidden // heads,
        "vocab_size": sizes["vocab"] or 0,
        "max_positions": 2**20,
        "dropout": None,
        "dtype": "bfloat16",
        "mlp_bias": False,
        "unit_heads": False,
    }
    if experts:
        family = FAMILIES["deepseek_v3" if latent else "qwen3_moe"]
        for tied in (False, True):
            yield ModelFacts(
                family=family,
                tied=tied,
                qk_norm=bool(family.qk_norm),
                qkv_bias=False,
                o_bias=False,
                latent=latent,
                num_experts=experts,
                experts_per_token=sizes["top_k"] or 1,
                expert_width=width,
                shared_width=(sizes["shared_experts"] or 0) * width,
                **common,
            )
        return
    plain_first = re.search(r"gpt|mpt|opt|bloom|falcon|neox|pythia", cells.get("model", "").lower())
    for tied, cls in product(
        (True, False) if plain_first else (False, True), (PlainFacts, ModelFacts)
    ):
        plain = cls is PlainFacts
        family = GPT if plain else FAMILIES["llama"]
        yield cls(family=family, tied=tied, qk_norm=False, qkv_bias=plain, o_bias=plain, **common)


@cache
def _models() -> list[Row]:
    return read_rows(_MODELS)


def _named(name: str) -> Row:
    """The row of the table of models whose name a model's has in it; the longest such name."""
    plain = re.sub(r"[^a-z0-9.]", "", name.lower())
    rows = [row for row in _models() if row["model"] and row["model"] in plain]
    return max(rows, key=lambda row: len(row["model"]), default={})
