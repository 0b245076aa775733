"""The public functions: plan, load, train and serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.catalog import Catalog, Price, find_price, load_catalog
from shardwise.config import Devices, Layout, Plan, Precision, Task, with_overrides
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.lookup import local_model, look_up
from shardwise.models.read import with_adapters_of
from shardwise.parsing import parse
from shardwise.planner.accelerator import SET_NETWORK, Accelerator, accelerator
from shardwise.planner.answer import Answer
from shardwise.planner.cost import Cost, Job, Rate, cost_of, cost_of_serving
from shardwise.planner.devices import parse_devices
from shardwise.planner.kernels import engine
from shardwise.planner.machine import Machine
from shardwise.planner.rent import Limits, Rentals, find_rentals
from shardwise.planner.search import search
from shardwise.planner.serving_report import serving_notes
from shardwise.planner.serving_search import LOAD_KEYS, search_serving
from shardwise.planner.speeds import Speeds
from shardwise.weights.index import verify
from shardwise.weights.names import open_model_index

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from shardwise.parallel.mesh import Mesh


def plan(
    model: str | Path,
    *,
    task: Task = "full",
    gpus: str | None = None,
    instance: str | None = None,
    num_instances: int = 1,
    memory_gib: float | None = None,
    layout: Layout | None = None,
    machine: Machine | None = None,
    overrides: Sequence[str] = (),
    job: Job | None = None,
    catalog_file: Path | None = None,
) -> Answer:
    """Find out whether a model needs sharding for a task, and how to shard it. Uses no torch.

    Args:
        model: directory with config.json (or of adapters), that file, a GGUF file, a hub id, or a
            name of the catalogue (weights are not needed for planning).
        task: "full" fine-tuning, adapters alone ("lora"; "qlora": on matrices of four bits), or
            "serve": on accelerators planned for an engine with continuous batching, under the
            load that keys of `serve` say.
        gpus: devices, like "cpu:2", "8xH100-80GB" or, nodes x devices, "2x8xH100-80GB". None:
            those of `instance`, or "cpu:1".
        instance: what is rented, like "aws:p5.48xlarge@us-east-1": devices, network and price.
        num_instances: how many of them.
        memory_gib: memory of one device in GiB; None: the catalogue's, or an equal part of this
            machine's.
        layout: judge this layout (or that of `overrides`) instead of searching for one.
        machine: measured speeds, for step times; None: the catalogue's, for an accelerator.
        overrides: plan values as "train.seq_len=256".
        job: how much is to be trained (or answered), and at which price.
        catalog_file: YAML that replaces facts of the catalogue.

    Returns:
        The verdict and, if there is a way, `chosen.plan`. Memory is in bytes, times in seconds.

    Raises:
        UserError: the model, the devices or a value cannot be used, or weights are there but not
            whole.
    """
    catalog, job = load_catalog(catalog_file), job or Job()
    price = None
    if instance is not None:
        price = _price(catalog, instance, num_instances, gpus)
        devices = _rented(catalog, price, num_instances, memory_gib)
        job = replace(job, rate=job.rate or Rate.of(price))
    else:
        devices = parse_devices("cpu:1" if gpus is None else gpus, memory_gib, catalog)
    found = look_up(model)
    asked = base_plan(found.model, task, layout or Layout(), devices)
    asked = with_overrides(asked, overrides)
    facts = with_adapters_of(asked, found.facts)
    if asked.trains and facts.adapters is not None:
        asked = asked.model_copy(update={"lora": facts.adapters})
    fixed = layout is not None or asked.layout != Layout()  # `overrides` may set it too
    speeds = machine or _catalog_speeds(asked, catalog)
    unknown = price is not None and num_instances > 1 and asked.devices.network_gbit is None
    if machine is None and unknown:  # what the catalogue has is of another machine
        speeds = f"the network of {instance} is not known: {SET_NETWORK}"
    if task == "serve" and asked.devices.kind != "cpu":
        answer, cost = _served(asked, facts, speeds, catalog, job, fixed=fixed)
        notes = found.notes + serving_notes(answer)
        if facts.adapters is not None and facts.adapters.quantize is not None:
            notes += (
                "the adapters were trained on matrices rounded to nf4, and this is planned for an "
                "engine that has them whole: give it what `shardwise export --merge` writes",
            )
    else:
        _check_no_load(asked)
        known = catalog.devices.get(asked.devices.kind)
        node = None if known is None else asked.devices.node(known.per_node)
        if isinstance(speeds, str) and SET_NETWORK not in speeds:
            probe = f"`shardwise probe --kind {asked.devices.kind}`"
            speeds = f"{speeds}; {probe} on such a machine measures it, for --cluster"
        has_adapters = found.facts.adapters is not None
        answer = search(asked, facts, speeds, fixed=fixed, node=node, adapters_stay=has_adapters)
        chosen = answer.chosen
        cost = None if chosen is None else cost_of(chosen.plan, chosen.step_s, job)
        notes = found.notes
    if found.directory is not None:
        notes += _weight_notes(found.directory, found.facts)
    if cost is None and job != Job():
        notes += ("hours and money are not told: they need a step time",)
    return replace(answer, notes=notes, cost=cost)


def find_gpus(
    model: str | Path,
    *,
    job: Job,
    limits: Limits | None = None,
    task: Task = "full",
    overrides: Sequence[str] = (),
    catalog_file: Path | None = None,
) -> Rentals:
    """Which rented machines of the catalogue do a training job, cheapest first. Uses no torch.

    Args:
        job: how much is to be trained; prices are the catalogue's.
        limits: hours, USD and region; None: any.

    Raises:
        UserError: as `plan`; the job does not say how much, or no price is of the region.
    """
    if task == "serve" or (job.tokens is None and job.rows is None):
        raise UserError("--find-gpus needs to know how much is trained: --tokens or --rows.")
    answers: dict[tuple[object, ...], Answer] = {}

    def answer_of(price: Price, count: int) -> Answer:
        name = f"{price.provider}:{price.instance}@{price.region}"
        known = count == 1 or price.network_gbit is not None
        key = (price.device, price.count, price.network_gbit, count, None if known else name)
        name += "/spot" if price.kind == "spot" else ""
        if key not in answers:
            answers[key] = plan(
                model,
                task=task,
                instance=name,
                num_instances=count,
                overrides=overrides,
                job=job,
                catalog_file=catalog_file,
            )
        answer = answers[key]
        chosen, priced = answer.chosen, replace(job, rate=job.rate or Rate.of(price))
        cost = None if chosen is None else cost_of(chosen.plan, chosen.step_s, priced)
        return replace(answer, cost=cost)

    return find_rentals(load_catalog(catalog_file).prices, answer_of, limits or Limits())


def _served(
    plan: Plan,
    facts: ModelFacts,
    speeds: Speeds | str | None,
    catalog: Catalog,
    job: Job,
    *,
    fixed: bool,
) -> tuple[Answer, Cost | None]:
    """A server on accelerators, and what its output costs."""
    known = engine(speeds, catalog) if isinstance(speeds, Accelerator) else _why_unknown(speeds)
    answer = search_serving(plan, facts, known, fixed=fixed)
    chosen = answer.chosen
    if chosen is None:
        return answer, None
    return answer, cost_of_serving(chosen.served, chosen.num_devices, job)


def _why_unknown(speeds: Speeds | str | None) -> str:
    if isinstance(speeds, str):
        return speeds
    return "a probe measures no kernels of inference engines; leave --cluster out"


def _check_no_load(plan: Plan) -> None:
    """On a CPU, or in training, nothing is known of many requests."""
    given = [name for name in LOAD_KEYS if name in plan.serve.model_fields_set]
    if given and (plan.task != "serve" or plan.devices.kind == "cpu"):
        where = f"--task {plan.task}" if plan.task != "serve" else "cpu devices"
        raise UserError(
            f"serve.{given[0]} is of --task serve on accelerators of the catalogue, this is of "
            f"{where}; leave it out, or give --task serve --gpus 1xH100-80GB."
        )


def _price(catalog: Catalog, instance: str, count: int, gpus: str | None) -> Price:
    if gpus is not None:
        raise UserError(f"--gpus {gpus} and --instance {instance} both name devices; give one.")
    if count < 1:
        raise UserError(f"--count {count}: give at least 1 instance.")
    return find_price(catalog, instance)


def _rented(catalog: Catalog, price: Price, count: int, memory_gib: float | None) -> Devices:
    """The devices of some instances."""
    devices = parse_devices(f"{count}x{price.count}x{price.device}", memory_gib, catalog)
    return devices.model_copy(update={"network_gbit": price.network_gbit})


def _catalog_speeds(plan: Plan, catalog: Catalog) -> Speeds | str | None:
    """What the catalogue knows of a plan's devices; None: there is only the probe."""
    return None if plan.devices.kind == "cpu" else accelerator(plan.devices, catalog)


def base_plan(model: str, task: str, layout: Layout, devices: Devices | str | None = None) -> Plan:
    """A plan with the defaults of a kind of device: fp32 compute on cpu, bf16 elsewhere."""
    if isinstance(devices, str):
        devices = parse_devices(devices)
    devices = devices or Devices()
    precision = Precision(compute="fp32" if devices.kind == "cpu" else "bf16")
    data = {"model": model, "task": task, "layout": layout}
    return parse(Plan, {**data, "devices": devices, "precision": precision}, source="plan")


def _weight_notes(model: Path, facts: ModelFacts) -> tuple[str, ...]:
    """Verify the weights of a model directory; planning needs none, but broken ones are told."""
    if not any(next(model.glob(pattern), None) for pattern in ("*.safetensors*", "*.bin")):
        return ("no weights here: planned from config.json alone",)
    return verify(open_model_index(model, facts), facts)


def load(plan: Plan, mesh: Mesh | None = None, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build, shard and load a plan's model on this rank.

    Args:
        plan: its `task` decides whether logits are whole ("serve") or chunks.
        mesh: from `shardwise.parallel.mesh.build_mesh`; None: built on the initialised process
            group, or on a group of this one process.
        dtype: of the parameters at rest; None: fp32 for training, the compute dtype for serving.

    Returns:
        A transformers model whose parameters are this rank's shards. For a plan of one process
        and `task="serve"` it is the plain model.

    Raises:
        UserError: the plan is not legal for the model, its files are not whole, or the process
            group has another size.
    """
    for axis in ("pp", "cp"):
        if getattr(plan.layout, axis) > 1:
            raise UserError(
                f"{axis}={getattr(plan.layout, axis)}: a model that is called as one takes whole "
                f"rows through all layers; use shardwise.train, or {axis}=1."
            )
    import torch.distributed as dist

    from shardwise.launch.start import device_type
    from shardwise.parallel.data import DTYPES
    from shardwise.parallel.mesh import build_mesh
    from shardwise.weights.load import load_model

    if mesh is None:
        kind = device_type(plan)
        if not dist.is_initialized():
            backend = dist.get_default_backend_for_device(kind)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        if dist.get_world_size() != plan.layout.world_size:
            raise UserError(
                f"layout {plan.layout} needs {plan.layout.world_size} processes, the process group "
                f"has {dist.get_world_size()}; start them with torchrun, or use a smaller layout."
            )
        mesh = build_mesh(plan.layout, kind)
    plan = plan.model_copy(update={"model": local_model(plan.model)})
    at_rest = DTYPES["fp32" if plan.trains else plan.precision.compute]
    return load_model(plan, mesh, dtype or at_rest).model


def train(
    plan: Plan,
    *,
    data: str | Path,
    out: str | Path,
    eval_data: str | Path | None = None,
    resume: bool = False,
) -> Path:
    """Fine-tune by a plan on this machine (or as one rank of `torchrun`).

    Args:
        data: JSON lines of `{"messages": [{"role": ..., "content": ...}, ...]}`.
        out: directory of the run: checkpoints, metrics.jsonl and measured.json are written there.
        eval_data: rows for the loss before and after.
        resume: continue from the newest complete checkpoint in `out`.

    Returns:
        The directory of the last checkpoint.

    Raises:
        UserError: anything about the input, before a process is started.
        RunFailed: a rank failed; the last complete checkpoint is intact.
        Interrupted: by Ctrl-C or SIGTERM; likewise.
    """
    from shardwise.launch.start import start_train
    from shardwise.trainer.state import complete_checkpoints

    run_dir = Path(out)
    evaluation = None if eval_data is None else Path(eval_data)
    start_train(plan, data=Path(data), eval_data=evaluation, run_dir=run_dir, resume=resume)
    return complete_checkpoints(run_dir)[-1]


def serve(plan: Plan) -> None:
    """Serve a plan's model over the OpenAI API until interrupted.

    Args:
        plan: `layout.tp`, `precision` and `serve` are used.

    Raises:
        UserError: the plan is not legal, its files are not whole, or the port is taken.
        RunFailed: a rank failed while serving.
    """
    from shardwise.launch.start import start_serve

    start_serve(plan)
