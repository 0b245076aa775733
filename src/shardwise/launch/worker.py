"""One rank of a job: `python -m shardwise.launch.worker JOB_FILE`."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from shardwise.config import Plan, load_plan
from shardwise.errors import ShardwiseError, UserError
from shardwise.launch.job import Job, read_job
from shardwise.launch.local import GROUP_FOLDER, done_file, error_file


def main(job_file: str) -> int:
    """Run a job as the rank that the launcher has started; returns the exit code."""
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    folder = Path(os.environ[GROUP_FOLDER])
    try:
        job = read_job(Path(job_file))
        _quiet_libraries()
        _join(job.device_type, job.timeout_s, folder / "rendezvous")
        _run(job)
        done_file(folder, int(os.environ["RANK"])).touch()
    except BaseException as error:
        _report(error_file(folder, int(os.environ["RANK"])), error)
        return 2 if isinstance(error, UserError) else 1
    return 0


def run_as_rank(prepare: Callable[[], Job], device_type: str, timeout_s: float) -> None:
    """Be one rank of a job that torchrun has started; the first rank prepares it for all."""
    import torch.distributed as dist

    _quiet_libraries()
    _join(device_type, timeout_s, None)
    outcome: list[Job | ShardwiseError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [prepare()]
        except ShardwiseError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    (result,) = outcome
    if isinstance(result, ShardwiseError):
        dist.destroy_process_group()
        raise result
    if result is not None:
        _run(result)


def _join(device_type: str, timeout_s: float, rendezvous: Path | None) -> None:
    """Join the process group of the job, on this rank's own device.

    Args:
        rendezvous: file through which the ranks meet; None: as torchrun's environment says.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = None
    if device_type != "cpu":
        device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(device_type).set_device(device)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = None if rendezvous is None else dist.FileStore(str(rendezvous), world_size)
    dist.init_process_group(
        dist.get_default_backend_for_device(device_type),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )


def _run(job: Job) -> None:
    import torch.distributed as dist

    from shardwise.parallel.mesh import build_mesh

    plan: Plan = load_plan(job.path)
    if dist.get_world_size() != plan.layout.world_size:
        raise UserError(
            f"layout {plan.layout} needs {plan.layout.world_size} processes, "
            f"{dist.get_world_size()} were started."
        )
    mesh = build_mesh(plan.layout, job.device_type)
    if job.kind == "train":
        from shardwise.trainer.loop import run_train

        run_train(plan, job.path, job.work, mesh)
    elif job.kind == "serve":
        from shardwise.server.run import run_serve

        run_serve(plan, mesh)
    elif job.kind == "logits":
        from shardwise.weights.check import run_logits

        run_logits(plan, job.path, mesh)
    else:
        from shardwise.probe.machine import run_probe

        run_probe(job.path, mesh)
    dist.barrier()
    dist.destroy_process_group()


def _quiet_libraries() -> None:
    """Ranks print what Shardwise says, not what its libraries do on the way."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _report(file: Path, error: BaseException) -> None:
    """Leave the error where the launcher finds it, whole or not at all."""
    lines = traceback.format_exc().splitlines()
    report = {
        "time": time.time(),
        "user_error": str(error) if isinstance(error, UserError) else None,
        "summary": f"{type(error).__name__}: {error}".splitlines()[0],
        "traceback": "\n".join(f"[rank {os.environ['RANK']}] {line}" for line in lines),
    }
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(report), encoding="utf-8")
        partial.rename(file)
    except OSError:  # then at least on this rank's own output
        traceback.print_exc()


def _die_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # a failed process group must not hold up the exit
