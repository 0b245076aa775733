"""Check everything, prepare everything, and only then start ranks."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from shardwise import console
from shardwise.config import (
    GIB,
    PLAN_FILE,
    Devices,
    Layout,
    Plan,
    Precision,
    Prediction,
    Task,
    Train,
)
from shardwise.errors import UserError, missing_extra
from shardwise.launch.job import WORK_DIR, Job
from shardwise.launch.local import run_local
from shardwise.launch.rundir import (
    as_resumed,
    check_resume,
    check_same_rows,
    check_same_task,
    claimed,
    tidy,
)
from shardwise.models.hub import TOKENIZER_FILE
from shardwise.models.lookup import local_model
from shardwise.models.read import base_of, directory_with, facts_of_plan, read_facts
from shardwise.planner.answer import MEMORY_EVIDENCE
from shardwise.planner.devices import host_gib
from shardwise.planner.kv_room import with_kv_room
from shardwise.planner.layout import check_plan
from shardwise.planner.machine import Machine, load_machine
from shardwise.planner.memory import host_bytes_for_saves, predict_memory, stage_bytes
from shardwise.trainer.copies import Copies, prepare_new, prepare_resumed
from shardwise.weights.index import verify
from shardwise.weights.names import open_model_index

if TYPE_CHECKING:
    from shardwise.models.facts import ModelFacts
    from shardwise.trainer.data.chat import Example

_PREFIX = "shardwise-"
_SHORT_JOB_TIMEOUT_S = 300.0


def check_model(plan: Plan) -> Plan:
    """Check a plan against its model's config, files and devices, without torch.

    Returns:
        The plan as `check_plan` completes it.

    Raises:
        UserError: the plan is not legal for the model, the files are not whole, or the planned
            memory is more than a device has.
    """
    stored, facts = read_facts(plan.model), facts_of_plan(plan)
    plan = check_plan(plan, facts)
    index = open_model_index(plan.model, stored)
    for warning in verify(index, stored):
        console.out.print(f"note: {warning}")
    memory, capacity = predict_memory(plan, facts), plan.devices.memory_gib
    if capacity is None and plan.devices.kind == "cpu":
        capacity = host_gib() / plan.layout.world_size
    need = memory.total / GIB
    if capacity is not None and need > capacity:
        saves = f", train.async_save=false ({memory.saving / GIB:.2f} GiB less)"
        raise UserError(
            f"layout {plan.layout} needs {need:.2f} GiB a device, a device of the plan has "
            f"{capacity:.2f} GiB; run `shardwise plan` for a layout that fits, or set "
            f"devices.memory_gib{saves if memory.saving else ''}."
        )
    plan = _with_host_memory(plan, facts)
    if plan.trains and facts.adapters is not None:
        plan = plan.model_copy(update={"lora": facts.adapters})
    if plan.predicted is None:
        evidence = Prediction(
            memory=memory,
            memory_evidence=MEMORY_EVIDENCE,
            stage_bytes=stage_bytes(plan, facts),
        )
        plan = plan.model_copy(update={"predicted": evidence})
    return plan


def _with_host_memory(plan: Plan, facts: ModelFacts) -> Plan:
    """A plan that waits for its saves if this machine has no room for copies of them."""
    each, has = host_bytes_for_saves(plan, facts) / GIB, host_gib()
    need = each * int(os.environ.get("LOCAL_WORLD_SIZE", plan.layout.world_size))
    if need <= has:
        return plan
    console.out.print(
        f"note: training waits for its saves: copies of them would take {need:.2f} GiB of host "
        f"memory, this machine has {has:.2f} GiB"
    )
    return plan.model_copy(update={"train": plan.train.model_copy(update={"async_save": False})})


def start_train(
    plan: Plan, *, data: Path, eval_data: Path | None, run_dir: Path, resume: bool = False
) -> None:
    """Fine-tune by a plan; returns when the last checkpoint is complete.

    Started by `torchrun`, each process is a rank; otherwise the ranks are started here.

    Raises:
        UserError: anything about the input, before any process is started.
        RunFailed: a rank failed while running.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    _require_task(plan, "full", "lora")
    plan = plan.model_copy(update={"model": local_model(plan.model)})
    device = device_type(plan)
    with ExitStack() as held:

        def prepare() -> Job:
            copies = None if plan.train.copy_to is None else Copies(plan.train.copy_to)
            if copies is not None and not resume:
                prepare_new(copies)
            if copies is not None and resume:
                held.enter_context(claimed(run_dir))
                done = prepare_resumed(copies, run_dir)
                console.out.print(done or f"{copies.url} holds nothing newer than {run_dir}")
            checked = check_model(as_resumed(run_dir, plan) if resume else plan)
            if copies is None or not resume:
                held.enter_context(claimed(run_dir))
            check_resume(run_dir, resume=resume)
            check_same_task(run_dir, plan)
            tidy(run_dir, facts_of_plan(plan), resume=resume)
            _prepare_inputs(checked, data, eval_data, run_dir)
            return _job("train", checked, run_dir, device, plan.train.timeout_s)

        if "TORCHELASTIC_RUN_ID" in os.environ:
            from shardwise.launch.worker import run_as_rank

            run_as_rank(prepare, device, plan.train.timeout_s)
        else:
            job = prepare()
            _announce(plan, "train")
            run_local(job)


def start_serve(plan: Plan) -> None:
    """Serve a plan's model until interrupted (errors as `start_train`)."""
    _require_task(plan, "serve")
    if plan.serve.weights not in (None, plan.precision.compute):
        raise UserError(
            f"serve.weights={plan.serve.weights} is planned only: weights are served in the "
            f"compute dtype so far; leave it out, or set it to {plan.precision.compute}."
        )
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "serve", "serving") from None
    plan = check_model(plan.model_copy(update={"model": local_model(plan.model)}))
    load_tokenizer(plan.model)
    _check_port(plan.serve.host, plan.serve.port)
    plan = with_kv_room(plan, read_facts(plan.model))
    _announce(plan, "serve")
    with TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        run_local(_job("serve", plan, folder, device_type(plan), plan.serve.timeout_s))


def start_probe(num_processes: int, kind: str) -> Machine:
    """Measure this machine with so many processes at once."""
    layout = Layout(fsdp=num_processes)
    devices = Devices(kind=kind, count=num_processes)
    plan = Plan(model="", task="full", layout=layout, devices=devices)
    from shardwise.probe.machine import MACHINE_FILE

    with TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        run_local(_job("probe", plan, folder, device_type(plan), _SHORT_JOB_TIMEOUT_S))
        return load_machine(folder / MACHINE_FILE)


def start_check(plan: Plan, source: Path, exported: Path, dtype: str) -> tuple[float, float]:
    """Run the sharded model of `source` on the plan's ranks and compare its logits with plain
    transformers on `exported`. Returns the largest |difference| and the largest |logit|."""
    import yaml

    from shardwise.weights.check import CHECK_FILE, Check, compare_with_plain

    facts = read_facts(source)
    vocab = facts.vocab_size
    ids = [[(37 * row + 11 * i * i + i) % vocab for i in range(24)] for row in range(2)]
    precision = Precision(compute="fp32")
    # whole rows on every rank, over as many of them: what splits rows or layers splits states here
    tp = 1 if facts.num_experts else plan.layout.tp
    layout = Layout(fsdp=plan.layout.world_size // tp, tp=tp)
    changes = {"model": str(source), "precision": precision, "layout": layout, "predicted": None}
    changes["train"] = Train(global_batch=layout.fsdp)
    sharded = check_plan(plan.model_copy(update=changes), facts)
    console.out.print(f"comparing plain transformers with the sharded model ({layout}) ...")
    with TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        how: Literal["merged", "alone"] | None = None
        if facts.adapters is not None:
            how = "merged" if base_of(exported) is None else "alone"
        check = Check(ids=ids, dtype=dtype, adapters=how)
        (folder / CHECK_FILE).write_text(yaml.safe_dump(check.model_dump()), encoding="utf-8")
        run_local(_job("logits", sharded, folder, device_type(plan), _SHORT_JOB_TIMEOUT_S))
        return compare_with_plain(folder, exported)


def device_type(plan: Plan) -> str:
    """torch's name of the kind of device that the plan runs on.

    Raises:
        UserError: this machine has fewer accelerators than the plan has ranks.
    """
    if plan.devices.kind == "cpu":
        return "cpu"
    import torch

    accelerator = torch.accelerator.current_accelerator()
    here = torch.accelerator.device_count() if accelerator is not None else 0
    if accelerator is None or ("RANK" not in os.environ and here < plan.layout.world_size):
        raise UserError(
            f"the plan needs {plan.layout.world_size} {plan.devices.kind} devices, this machine "
            f"has {here}; start it there, or use --set devices.kind=cpu."
        )
    return accelerator.type


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model directory (or of the model of adapters), which must have a chat
    template."""
    model = str(directory_with(TOKENIZER_FILE, model))
    if not (Path(model) / TOKENIZER_FILE).exists():
        raise UserError(f"{model} has no {TOKENIZER_FILE}; copy the tokenizer's files there.")
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # the library has no error of its own for a broken file
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot read the tokenizer {model}/{TOKENIZER_FILE}: {reason}") from None
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer of {model} has no chat template; put one into "
            f"{Path(model) / 'chat_template.jinja'}."
        )
    return tokenizer


def _announce(plan: Plan, verb: str) -> None:
    count = plan.layout.world_size
    processes = "1 process" if count == 1 else f"{count} processes"
    console.out.print(f"starting {processes} to {verb} ({plan.layout}) ...")


def _require_task(plan: Plan, *tasks: Task) -> None:
    if plan.task not in tasks:
        names = " or ".join(f"--set task={task}" for task in tasks)
        raise UserError(f"the plan's task is {plan.task!r}; this needs {names}.")


def _job(
    kind: Literal["train", "serve", "logits", "probe"],
    plan: Plan,
    folder: Path,
    device: str,
    timeout_s: float,
) -> Job:
    """Write the plan where the ranks look for it, and the message that they get."""
    plan.save(folder / PLAN_FILE)
    return Job(
        kind=kind,
        folder=str(folder),
        device_type=device,
        num_processes=plan.layout.world_size,
        timeout_s=timeout_s,
    )


def _prepare_inputs(plan: Plan, data: Path, eval_data: Path | None, run_dir: Path) -> None:
    """Encode the rows and copy the model's small files; the old ones stay until all is well."""
    from shardwise.trainer.data.order import Order
    from shardwise.trainer.data.store import open_rows
    from shardwise.trainer.loop import EVAL_ROWS, MODEL_FILES, TRAIN_ROWS
    from shardwise.weights.save import copy_model_files

    tokenizer = load_tokenizer(plan.model)
    with TemporaryDirectory(dir=run_dir / WORK_DIR) as name:
        fresh = Path(name)
        _prepare_rows(plan, tokenizer, data, fresh / TRAIN_ROWS)
        order = Order(lengths=open_rows(fresh / TRAIN_ROWS).lengths, train=plan.train)
        if plan.train.packing:
            console.out.print(f"packing: {order.fill()}")
        if eval_data is not None:
            _prepare_rows(plan, tokenizer, eval_data, fresh / EVAL_ROWS)
        (fresh / MODEL_FILES).mkdir()
        copy_model_files(base_of(Path(plan.model)) or Path(plan.model), fresh / MODEL_FILES)
        copy_model_files(directory_with(TOKENIZER_FILE, plan.model), fresh / MODEL_FILES)
        check_same_rows(run_dir, plan, fresh / TRAIN_ROWS, order.num_steps)
        for folder in (Path(TRAIN_ROWS).parts[0], MODEL_FILES):
            shutil.rmtree(run_dir / WORK_DIR / folder, ignore_errors=True)
            (fresh / folder).rename(run_dir / WORK_DIR / folder)


def _prepare_rows(plan: Plan, tokenizer: Any, data: Path, folder: Path) -> None:
    """Read, encode and store the rows of a data file, and say what became of them."""
    from shardwise.trainer.data.chat import encode
    from shardwise.trainer.data.read import read_conversations
    from shardwise.trainer.data.store import write_rows

    def examples() -> Iterator[Example]:
        for number, conversation in enumerate(conversations, start=1):
            try:
                yield encode(conversation, tokenizer)
            except UserError as error:
                raise UserError(f"{data}, conversation {number}: {error}") from None

    conversations = read_conversations(data)
    vocab_size = read_facts(plan.model).vocab_size
    summary = write_rows(folder, examples(), seq_len=plan.train.seq_len, vocab_size=vocab_size)
    console.out.print(f"{data.name}: {summary}")


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family, reuse_port=False):
            return
    except OSError as error:
        raise UserError(
            f"serve.port={port} on {host} cannot be used: {error.strerror or error}; give another "
            "with --set serve.port=N."
        ) from None
