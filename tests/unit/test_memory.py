"""The planner's bytes against formulas that are published and tensors that are really kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.config import GIB, Devices, Layout, Plan, Precision, Train
from shardwise.models.facts import facts_of_config
from shardwise.planner.memory import (
    RankSizes,
    activation_bytes_per_token,
    keeps_freed_blocks,
    masked_bytes_per_token,
    predict_memory,
    state_bytes,
)
from tests.models import model_config
from tests.unit.test_facts import LLAMA_3_1_8B, SMOLLM2


def kept_bytes(
    config: Any, num_layers: int, num_tokens: int, dtype: torch.dtype, layer_type: str
) -> int:
    """Bytes of the distinct tensors that autograd keeps during one forward pass."""
    from transformers import AutoModelForCausalLM

    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [layer_type] * num_layers
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    owned = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in owned:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        model.model(input_ids=ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "layer_type"),
    [
        ("LL", "full_attention"),
        ("ODD", "full_attention"),
        ("Q3", "full_attention"),
        ("G3", "full_attention"),
        ("G3", "sliding_attention"),
        ("MIX", "full_attention"),
        ("MOE", "full_attention"),
    ],
)
def test_activations_of_a_layer_are_what_autograd_keeps(
    name: str, layer_type: str, dtype: torch.dtype
) -> None:
    """Counted as the difference of two depths; within 2% for every family and dtype."""
    config = model_config(name)
    facts = facts_of_config(config.to_dict(), source=name)
    deep, shallow = (kept_bytes(config, n, 128, dtype, layer_type) for n in (4, 2))
    counted = (deep - shallow) / 2 / 128
    planned = activation_bytes_per_token(facts, tp=1, compute_bytes=dtype.itemsize)
    if layer_type == "sliding_attention":
        planned += masked_bytes_per_token(facts, tp=1, compute_bytes=dtype.itemsize, seq_len=128)
    assert planned == pytest.approx(counted, rel=0.02)


def plan(config: dict[str, Any], **changes: Any) -> Plan:
    base = {"model": "x", "task": "full", "layout": Layout()}
    return Plan(**{**base, **changes})


def test_states_are_sixteen_bytes_a_parameter_divided_by_fsdp() -> None:
    """ZeRO (arXiv 1910.02054) with fp32 weights and gradients: 4 + 4 + 8 bytes."""
    facts = facts_of_config(LLAMA_3_1_8B, source="8B")
    assert state_bytes(facts) == 16 * 8_030_261_248
    for ranks in (1, 8, 64):
        train = Train(seq_len=512, micro_batch=1, global_batch=64 * 2)
        memory = predict_memory(plan(LLAMA_3_1_8B, layout=Layout(fsdp=ranks), train=train), facts)
        states = memory.weights + memory.gradients + memory.optimizer
        assert states == pytest.approx(state_bytes(facts) / ranks, rel=1e-6)


def test_tensor_parallel_divides_matrices_and_not_norms() -> None:
    facts = facts_of_config(SMOLLM2, source="smol")
    one, three = RankSizes.of(facts, Layout()), RankSizes.of(facts, Layout(tp=3))
    norms = 2 * facts.hidden_size
    assert one.layer == facts.num_layer_parameters
    assert three.layer - norms == (one.layer - norms) // 3
    assert one.outer == facts.num_outer_parameters


def test_recomputation_and_smaller_passes_need_less() -> None:
    facts = facts_of_config(SMOLLM2, source="smol")
    big = predict_memory(plan(SMOLLM2, train=Train(micro_batch=4)), facts)
    small = predict_memory(plan(SMOLLM2, train=Train(micro_batch=1)), facts)
    again = predict_memory(plan(SMOLLM2, train=Train(micro_batch=4, checkpointing="full")), facts)
    half = predict_memory(plan(SMOLLM2, precision=Precision(compute="bf16")), facts)
    assert small.activations == pytest.approx(big.activations / 4)
    assert again.activations < big.activations / 5
    assert half.total < predict_memory(plan(SMOLLM2), facts).total
    for memory in (big, small, again, half):
        assert memory.total == sum(memory.model_dump().values())


def test_the_cache_of_a_served_context() -> None:
    """2 x layers x KV heads / tp x head_dim x bytes, for each token (bug bank 55)."""
    facts = facts_of_config(model_config("Q3").to_dict(), source="Q3")
    for tp in (1, 2):
        served = Plan(model="x", task="serve", layout=Layout(tp=tp), devices=Devices(count=tp))
        memory = predict_memory(served, facts)
        assert memory.kv_cache == 2 * 4 * (2 // tp) * 32 * 4 * 256
        assert memory.gradients == memory.optimizer == 0


def test_freed_blocks_are_kept_where_there_is_room_for_them() -> None:
    """The reserve is larger for it; on a device that only just holds the rest, nothing is kept."""
    facts = facts_of_config(SMOLLM2, source="smol")
    asked = plan(SMOLLM2)
    roomy = predict_memory(asked, facts)
    assert keeps_freed_blocks(asked, roomy)
    tight = asked.model_copy(update={"devices": Devices(memory_gib=(roomy.total - 1) / GIB)})
    lean = predict_memory(tight, facts)
    assert not keeps_freed_blocks(tight, lean)
    assert lean.reserve < roomy.reserve
    assert lean.total - lean.reserve == roomy.total - roomy.reserve
    assert lean.total <= roomy.total - 1
