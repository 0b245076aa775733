"""What one process has used: peak memory, by the device's own count."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process on a device, in bytes.

    On a CPU the largest resident set (what the kernel's out-of-memory killer counts), on an
    accelerator the largest amount that torch's allocator had reserved.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device.type).max_memory_reserved(device))
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
