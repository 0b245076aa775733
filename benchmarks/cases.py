"""What is compared: engines, cases, and the order in which they run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Stage = Literal[0, 1, 2, 3]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to train on a group of ranks."""

    name: str
    module: str
    """in `benchmarks.engines`, with a function `train(run, meter)`"""
    stage: Stage
    """of ZeRO: what is sharded; 0 is replicas. Engines of one stage are compared"""
    peer: str
    """what `--peers` calls it; "" for Shardwise itself"""
    packages: tuple[str, ...] = ()
    """what it imports beyond Shardwise's own requirements"""
    separates_communication: bool = True
    """Whether its collectives are called from Python, where waiting for them can be timed. DDP
    reduces inside C++, during the backward pass."""


ENGINES = (
    Engine(name="shardwise-dp", module="shardwise_engine", stage=0, peer=""),
    Engine(name="shardwise-zero1", module="shardwise_engine", stage=1, peer=""),
    Engine(name="shardwise-zero2", module="shardwise_engine", stage=2, peer=""),
    Engine(name="shardwise-zero3", module="shardwise_engine", stage=3, peer=""),
    Engine(name="fsdp2-zero2", module="fsdp2_engine", stage=2, peer="fsdp2"),
    Engine(name="fsdp2-zero3", module="fsdp2_engine", stage=3, peer="fsdp2"),
    Engine(name="ddp", module="ddp_engine", stage=0, peer="ddp", separates_communication=False),
    Engine(
        name="ddp-zero1", module="ddp_engine", stage=1, peer="ddp", separates_communication=False
    ),
    Engine(
        name="hf-ddp",
        module="hf_engine",
        stage=0,
        peer="hf",
        packages=("accelerate",),
        separates_communication=False,
    ),
    Engine(
        name="ds-zero1",
        module="deepspeed_engine",
        stage=1,
        peer="ds1",
        packages=("deepspeed",),
    ),
    Engine(
        name="ds-zero2",
        module="deepspeed_engine",
        stage=2,
        peer="ds2",
        packages=("deepspeed",),
    ),
    Engine(
        name="ds-zero3",
        module="deepspeed_engine",
        stage=3,
        peer="ds3",
        packages=("deepspeed",),
    ),
)
PEERS = tuple(dict.fromkeys(engine.peer for engine in ENGINES if engine.peer))
BY_NAME = {engine.name: engine for engine in ENGINES}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of work that every engine does."""

    size: str
    """a key of `workload.SIZES`"""
    dtype: str
    """of compute: "fp32", or "bf16" with fp32 master weights"""
    seq_len: int
    """tokens of a row; each rank has one row a step"""
    allocator: str
    """a key of `group.ALLOCATORS`"""

    def __str__(self) -> str:
        return f"{self.size} {self.dtype} {self.seq_len} tokens, {self.allocator} allocator"


def engines_of(peers: Sequence[str]) -> tuple[Engine, ...]:
    """The chosen peers' engines, and Shardwise's at every stage that one of them has."""
    chosen = [engine for engine in ENGINES if engine.peer in peers]
    stages = {engine.stage for engine in chosen}
    ours = [engine for engine in ENGINES if not engine.peer and engine.stage in stages]
    return (*ours, *chosen)


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def refusal(
    engines: Sequence[Engine], has_package: Callable[[str], bool] = is_installed
) -> str | None:
    """One line that names the packages that are missing; None if nothing is."""
    needed = dict.fromkeys(package for engine in engines for package in engine.packages)
    missing = [package for package in needed if not has_package(package)]
    if not missing:
        return None
    peers = dict.fromkeys(e.peer for e in engines if set(e.packages) & set(missing))
    return (
        f"{', '.join(missing)} is not installed, which {', '.join(peers)} needs: install the "
        "versions of benchmarks/requirements.txt as benchmarks/README.md says, or leave it out of "
        "--peers."
    )


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items from another one on in every turn, so that none always runs first or last."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]
