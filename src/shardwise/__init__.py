"""Shardwise: plan, prove, fine-tune and serve large language models over many devices.

    import shardwise
    answer = shardwise.plan("path/to/model", gpus="cpu:2", memory_gib=2.0)
    shardwise.train(answer.chosen.plan, data="rows.jsonl", out="runs/first")

Names are imported when first used, so that planning needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api import load, plan, serve, train
    from shardwise.config import Devices, Layout, Plan, Precision, Serve, Train
    from shardwise.errors import RunFailed, ShardwiseError, UserError

__version__ = "0.6.0"

_HOME = {
    **dict.fromkeys(("load", "plan", "serve", "train"), "shardwise.api"),
    **dict.fromkeys(
        ("Devices", "Layout", "Plan", "Precision", "Serve", "Train"), "shardwise.config"
    ),
    **dict.fromkeys(("RunFailed", "ShardwiseError", "UserError"), "shardwise.errors"),
}

__all__ = [
    "Devices",
    "Layout",
    "Plan",
    "Precision",
    "RunFailed",
    "Serve",
    "ShardwiseError",
    "Train",
    "UserError",
    "__version__",
    "load",
    "plan",
    "serve",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
