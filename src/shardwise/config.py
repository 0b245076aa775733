"""The Plan: one strict, readable file that planning writes and training and serving obey.

Every number that can be derived from others is a property, not a field. All classes are frozen
and keyword-only; an unknown key is an error that suggests the nearest known one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from shardwise.errors import UserError
from shardwise.parsing import parse, read_yaml

PLAN_FILE = "plan.yaml"
GIB = 2**30
Task = Literal["full", "lora", "qlora", "serve"]


class Config(BaseModel):
    """Base of every configuration class: frozen, finite, no unknown keys, no type changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Layout(Config):
    """How many ranks each mesh axis has. The product is the number of processes.

    `dp` replicas, `fsdp` ZeRO shards, `tp` tensor, `pp` pipeline, `cp` context, `ep` expert
    parallel; `zero` is the ZeRO stage of the `fsdp` axis.
    """

    dp: int = Field(default=1, ge=1, description="replicas of the whole model")
    fsdp: int = Field(default=1, ge=1, description="ranks that shard parameters and states")
    tp: int = Field(default=1, ge=1, description="ranks that split each layer's matrices")
    pp: int = Field(default=1, ge=1, description="pipeline stages")
    cp: int = Field(default=1, ge=1, description="ranks that split the sequence")
    ep: int = Field(default=1, ge=1, description="ranks that split the experts")
    zero: Literal[1, 2, 3] = Field(
        default=3,
        description="what the fsdp axis gathers: 3 each layer when it is needed; 2 once a "
        "micro-batch; 1 once a step, with one reduction of the gradients",
    )

    sequence_parallel: bool = Field(
        default=False,
        description="the tp ranks split the sequence where they do not split matrices",
    )

    @property
    def sequence_multiple(self) -> int:
        """What the length of a padded micro-batch is a multiple of, in tokens."""
        return self.sequence_parts * (2 * self.cp if self.cp > 1 else 1)

    @property
    def sequence_parts(self) -> int:
        """Ranks that split the sequence between the split regions of tensor parallelism."""
        return self.tp if self.sequence_parallel else 1

    @property
    def num_expert_shards(self) -> int:
        """Ranks that share the states of the experts that each has (`efsdp`)."""
        return self.fsdp * self.cp * self.tp // self.ep if self.ep > 1 else self.num_shards

    @property
    def num_shards(self) -> int:
        """Ranks that share the states between them."""
        return self.fsdp * self.cp

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.dp * self.fsdp * self.cp * self.tp * self.pp

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different rows."""
        return self.dp * self.fsdp

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered parameters stay from a forward pass to its backward pass.

        A pipeline has many passes under way at once, so it cannot do without them.
        """
        return self.pp > 1 or (self.num_shards > 1 and self.zero < 3)

    @property
    def reduces_once(self) -> bool:
        """Whether gradients cross ranks once a step and not once a micro-batch.

        Without sharding a rank holds whole gradients anyway, so waiting costs nothing.
        """
        return self.zero == 1 or self.num_shards == 1 or self.pp > 1

    @property
    def sums_by_itself(self) -> bool:
        """Whether gradients of replicas are summed after the last backward pass, where they are,
        and not by FSDP, which shards nothing here. torch's pipelines call FSDP's own sum."""
        return self.num_shards == self.num_expert_shards == self.pp == 1

    def __str__(self) -> str:
        axes = {a: getattr(self, a) for a in ("pp", "dp", "fsdp", "cp", "tp", "ep")}
        text = " x ".join(f"{a}={n}" for a, n in axes.items() if n > 1) or "one process"
        text += " + sequence parallel" if self.sequence_parallel else ""
        return f"{text} (ZeRO-{self.zero})" if self.num_shards > 1 else text


class Devices(Config):
    """The devices a plan was made for."""

    kind: str = Field(default="cpu", description="'cpu' or a name of the device catalogue")
    count: int | None = Field(
        default=None, ge=1, description="None: as many as the layout has ranks"
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="memory of one device in GiB; None: on cpu an equal part of this machine's",
    )
    per_node: int | None = Field(
        default=None, ge=1, description="devices of a node; None: as the catalogue says"
    )
    network_gbit: float | None = Field(
        default=None,
        gt=0,
        description="network of a whole node in Gb/s, one direction; None: as the catalogue says",
    )

    def node(self, usual: int) -> int:
        """Devices of a node that are used, where a node has so many usually.

        Equally many of each node: of 256 devices in racks of 72, 64.
        """
        most, count = self.per_node or usual, self.count or self.per_node or usual
        return max(n for n in range(1, min(most, count) + 1) if count % n == 0)


class Precision(Config):
    """Number formats. Master weights and moments are always fp32."""

    compute: Literal["fp32", "bf16"] = Field(
        default="fp32", description="dtype of the forward and backward pass"
    )

    reduce: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="dtype in which gradients are added up over micro-batches and ranks; bf16 "
        "halves their traffic and loses digits",
    )

    @property
    def compute_bytes(self) -> int:
        """Bytes of one value in the compute dtype."""
        return {"fp32": 4, "bf16": 2}[self.compute]

    @property
    def reduce_bytes(self) -> int:
        """Bytes of one value of a gradient on its way between ranks."""
        return {"fp32": 4, "bf16": 2}[self.reduce]


class Lora(Config):
    """Low-rank adapters beside frozen matrices: y = W x + (alpha / rank) B A x, with A [rank, in]
    and B [out, rank] (Hu et al., arXiv 2106.09685, section 4.1)."""

    rank: int = Field(default=16, ge=1, description="inner width of an adapter")
    alpha: float = Field(default=32.0, gt=0, description="an adapter counts alpha / rank times")
    targets: list[str] | None = Field(
        default=None,
        min_length=1,
        description="names of the matrices that get one, like [q_proj, v_proj]; None: all of "
        "attention and MLP, of a mixture of experts all of attention",
    )
    quantize: Literal["nf4"] | None = Field(
        default=None, description="round the layers' frozen matrices (QLoRA); None: they stay so"
    )

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / self.rank


class Train(Config):
    """Settings of a fine-tuning run. Rows are conversations, lengths are tokens."""

    seq_len: int = Field(
        default=512, ge=2, description="longest row in tokens; longer ones are cut"
    )
    packing: bool = Field(
        default=False,
        description="several whole rows in each sequence of seq_len tokens, none seeing another; "
        "global_batch and micro_batch count sequences then",
    )
    global_batch: int = Field(default=8, ge=1, description="rows of one optimizer step, all ranks")
    micro_batch: int = Field(default=1, ge=1, description="rows of one forward pass on one rank")
    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1, description="stop after so many steps")
    learning_rate: float = Field(default=2e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0, description="not applied to 1-D parameters")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    clip_norm: float | None = Field(default=1.0, gt=0, description="None: no clipping")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"] = Field(
        default="1f1b", description="order of the micro-batches in a pipeline (pp > 1)"
    )
    checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="what a layer computes again in the backward pass: nothing; all but matrix "
        "products and attention; everything",
    )
    checkpoint_every: int = Field(
        default=1, ge=1, description="of so many layers, one recomputes and the others keep"
    )
    compile: bool = Field(default=False, description="torch.compile each layer")
    seed: int = Field(
        default=0, ge=0, description="order of the rows, and first values of adapters"
    )
    save_every: int | None = Field(
        default=None, ge=1, description="steps between checkpoints; None: only at the end"
    )
    async_save: bool = Field(
        default=True,
        description="copy what those checkpoints hold, and write it while training goes on; on CPU "
        "the copy is part of the planned memory",
    )
    keep: int | None = Field(
        default=None,
        ge=1,
        description="newest checkpoints that stay, besides the one of the lowest evaluation loss; "
        "None: all",
    )
    copy_to: str | None = Field(
        default=None,
        description="where complete checkpoints are copied to, as fsspec names it (such as "
        "s3://bucket/runs/a), and fetched from if a resumed run has none as new",
    )
    check_replicas: bool = Field(
        default=False,
        description="stop if replicas or tied copies are not bitwise equal after a step",
    )
    timeout_s: float = Field(
        default=600.0, gt=0, description="a collective that waits longer fails"
    )

    def num_micro_batches(self, layout: Layout) -> int:
        """Forward passes of one rank in one optimizer step."""
        rows_per_rank = -(-self.global_batch // layout.num_data_ranks)
        return -(-rows_per_rank // self.micro_batch)


class Serve(Config):
    """Settings of the OpenAI-compatible server."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    context: int | None = Field(
        default=None, ge=2, description="prompt + answer in tokens; None: the model's own limit"
    )
    max_queue: int = Field(default=32, ge=1, description="waiting requests before HTTP 429")
    max_running: int = Field(
        default=32, ge=1, description="requests that are answered at a time, if the cache has room"
    )
    max_batch_tokens: int = Field(
        default=512,
        ge=1,
        description="tokens of a pass, of all requests together; of longer prompts a part a pass",
    )
    kv_tokens: int | None = Field(
        default=None,
        ge=16,
        description="tokens whose keys and values are kept, of all requests together; None: as "
        "memory allows, at most max_running x context",
    )
    prefix_cache: bool = Field(
        default=True, description="keep them for prompts that begin alike, while there is room"
    )
    max_body_mib: float = Field(
        default=4.0, gt=0, description="largest body of a call in MiB; HTTP 413 beyond"
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="seconds for a whole answer; None: as long as it takes"
    )
    weights: Literal["bf16", "fp8", "int8", "int4", "fp4", "mxfp4"] | None = Field(
        default=None,
        description="format of the weights; None: the compute dtype, the only one that is run",
    )
    concurrency: int = Field(
        default=1, ge=1, description="requests that are there at a time; planning only, so is:"
    )
    prompt_len: int | None = Field(
        default=None, ge=1, description="mean tokens of a prompt; None: 1024, or half the context"
    )
    output_len: int | None = Field(
        default=None, ge=1, description="mean tokens of an answer; None: as the prompt"
    )
    ttft_ms: float | None = Field(
        default=None, gt=0, description="most milliseconds to a first token"
    )
    tpot_ms: float | None = Field(default=None, gt=0, description="and between two tokens")
    timeout_s: float = Field(
        default=600.0, gt=0, description="a collective that waits longer fails"
    )


class Memory(Config):
    """Predicted peak bytes of the worst rank, by part. `total` is their sum."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    kv_cache: int
    saving: int = 0
    reserve: int

    @property
    def total(self) -> int:
        """Bytes of one process at its peak."""
        return sum(getattr(self, part) for part in type(self).model_fields)


class Prediction(Config):
    """What the planner expects, with the evidence that each number rests on."""

    memory: Memory
    memory_evidence: str
    stage_bytes: list[int] | None = Field(
        default=None, description="peak of each position on the pp axis; None: all as `memory`"
    )
    step_s: float | None = Field(default=None, description="seconds; None: not measured here")
    step_evidence: str = "no measurement of this machine: run `shardwise probe`"


class Plan(Config):
    """Everything that a run needs, in one file. Only `model`, `task` and `layout` are required."""

    version: Literal[1] = 1
    model: str = Field(
        description="directory with config.json and safetensors files (or of adapters), or a hub "
        "id whose files are in the local hub cache"
    )
    task: Task = Field(
        description="full fine-tuning, adapters alone (lora), or serving; qlora is short for lora "
        "with lora.quantize=nf4"
    )
    layout: Layout
    devices: Devices = Devices()
    precision: Precision = Precision()
    train: Train = Train()
    lora: Lora | None = Field(default=None, description="adapters of task=lora; None: the defaults")
    serve: Serve = Serve()
    predicted: Prediction | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_lora(cls, data: Any) -> Any:
        """Write the short name out, so that all else knows of one way to say it."""
        if not isinstance(data, Mapping) or data.get("task") != "qlora":
            return data
        lora = data.get("lora") or {}
        given = lora.model_dump(exclude_unset=True) if isinstance(lora, Lora) else lora
        if isinstance(given, Mapping):
            lora = {"quantize": "nf4", **given}
            if lora["quantize"] is None:
                raise PydanticCustomError(
                    "conflict", "lora.quantize is null, and task=qlora says nf4; set task=lora"
                )
        return {**data, "task": "lora", "lora": lora}

    @property
    def method(self) -> Task:
        """The task by the name that people know it by."""
        return "qlora" if self.lora is not None and self.lora.quantize is not None else self.task

    @property
    def trains(self) -> bool:
        """Whether it is a plan of a training run."""
        return self.task != "serve"

    @property
    def saves_behind(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.trains and self.train.async_save and self.train.save_every is not None

    def to_yaml(self) -> str:
        """The plan as YAML text; `parse(Plan, read_yaml(text), source=...)` gives it back."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)

    def save(self, path: Path) -> None:
        """Write the plan to `path`."""
        path.write_text(self.to_yaml(), encoding="utf-8")


def load_plan(path: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Read a plan file and apply `key.path=value` overrides to it.

    A relative `model` is looked for beside the plan file first, then in the working directory.

    Raises:
        UserError: the file is missing, not YAML, or a key or value in it is not allowed.
    """
    file = Path(path)
    if file.is_dir():
        file = file / PLAN_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the plan {str(file)!r}: {error}.") from None
    try:
        data = read_yaml(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file} is not YAML: {reason}.") from None
    if isinstance(data, Mapping):
        data = apply_overrides(data, overrides)
        if overrides:
            data.pop("predicted", None)  # it was of another plan
    plan = parse(Plan, data, source=str(file))
    beside = file.parent / plan.model
    return plan.model_copy(update={"model": str(beside)}) if beside.exists() else plan


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` with each `a.b=value` set; values are read as YAML.

    Raises:
        UserError: an override is not of the form key=value.
    """
    result = _deep_copy(data)
    for item in overrides:
        key, sep, raw = item.partition("=")
        names = key.split(".")
        if not sep or not all(names):
            raise UserError(f"--set {item!r} is not of the form key=value, like layout.tp=3.")
        try:
            value = read_yaml(raw)
        except yaml.YAMLError:
            raise UserError(f"--set {item!r}: {raw!r} is not a YAML value.") from None
        node = result
        for name in names[:-1]:
            child = node.setdefault(name, {})
            if not isinstance(child, dict):
                raise UserError(f"--set {item!r}: {name!r} holds a value, not a section.")
            node = child
        node[names[-1]] = value
    return result


def with_overrides(plan: Plan, overrides: Sequence[str]) -> Plan:
    """A plan with `key.path=value` overrides applied (errors as `load_plan`)."""
    data = apply_overrides(plan.model_dump(exclude_unset=True), overrides)
    return parse(Plan, data, source="--set")


def plan_schema() -> dict[str, Any]:
    """The JSON schema of `plan.yaml`."""
    schema = Plan.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _deep_copy(node: Any) -> Any:
    return {k: _deep_copy(v) for k, v in node.items()} if isinstance(node, Mapping) else node
