"""One rank of one engine: `python -m benchmarks.rank RUN_FILE`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

from benchmarks.cases import BY_NAME
from benchmarks.run import Run

COLLECTIVE_TIMEOUT_S = 120.0


def main(file: Path) -> None:
    """Join the group, train, and leave the result in the group's folder."""
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    run = Run(**json.loads(file.read_text()))
    rank = int(os.environ["RANK"])
    import torch
    import torch.distributed as dist

    from benchmarks.meter import Meter

    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = run.torch_device()
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)
    num_ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=dist.FileStore(f"{run.folder}/rendezvous", num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=None if device.type == "cpu" else device,
    )
    engine = BY_NAME[run.engine]
    meter = Meter(device, num_warmup=run.num_warmup, communication=engine.separates_communication)
    importlib.import_module(f"benchmarks.engines.{engine.module}").train(run, meter)
    Path(run.folder, f"{rank}.json").write_text(json.dumps(meter.result().to_dict()))
    dist.barrier()
    dist.destroy_process_group()


def _die_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    code = 1
    try:
        main(Path(sys.argv[1]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a failed process group must not hold up the exit
