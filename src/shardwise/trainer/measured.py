"""What a run really took, written beside its plan. No torch."""

from __future__ import annotations

from shardwise.config import Config

MEASURED_FILE = "measured.json"
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
"""a line a checkpoint that was evaluated: step and eval_loss"""


class Measured(Config):
    """Written by the first rank when a run has finished."""

    peak_bytes: list[int]
    """of each rank"""
    step_s: float | None
    """median seconds of the steps after the first; None: there was only one"""
    tokens_per_s: float
    steps: int
    train_loss: float
    eval_loss_before: float | None
    eval_loss_after: float | None
