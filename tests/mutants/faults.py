"""Faults that distributed training has had elsewhere, one small change of the source each.

To add one: a row in one of the tables below. A fault that changes no number belongs into none.
"""

from __future__ import annotations

from tests.mutants.adapter_faults import ADAPTERS
from tests.mutants.axis_faults import CONTEXT, KV_HEADS, PIPELINE, REPLICAS, SEQUENCE, SHARDS
from tests.mutants.expert_faults import EXPERTS, FAMILIES
from tests.mutants.fault import Fault
from tests.mutants.file_faults import FILES
from tests.mutants.model_faults import LOSS, TENSOR, VOCABULARY
from tests.mutants.packing_faults import PACKING
from tests.mutants.run_faults import CONTINUED, NORM, ROWS, STEP
from tests.mutants.serving_faults import SERVING

FAULTS: tuple[Fault, ...] = (
    *LOSS,
    *VOCABULARY,
    *TENSOR,
    *SEQUENCE,
    *KV_HEADS,
    *PIPELINE,
    *CONTEXT,
    *EXPERTS,
    *FAMILIES,
    *PACKING,
    *ADAPTERS,
    *NORM,
    *STEP,
    *ROWS,
    *CONTINUED,
    *REPLICAS,
    *SHARDS,
    *FILES,
    *SERVING,
)
