"""The planner's bytes against formulas that are published and tensors that are really kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from shardwise.config import Devices, Layout, Plan, Precision, Train
from shardwise.models.attention import attention_of
from shardwise.models.planned import ALL_FAMILIES
from shardwise.models.read import facts_of_config
from shardwise.parallel.context import apply_context
from shardwise.planner.activations import (
    activation_bytes_per_token,
    context_bytes_per_token,
    masked_bytes_per_token,
)
from shardwise.planner.memory import (
    RankSizes,
    predict_memory,
    state_bytes,
)
from tests.models import model_config
from tests.unit.test_facts import LLAMA_3_1_8B, SMOLLM2


def kept_bytes(
    config: Any,
    num_layers: int,
    num_tokens: int,
    dtype: torch.dtype,
    layer_type: str,
    positions: torch.Tensor | None = None,
) -> int:
    """Bytes of the distinct tensors that autograd keeps during one forward pass.

    Args:
        positions: of tokens in their own rows, where these are packed.
    """
    from transformers import AutoModelForCausalLM

    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [layer_type] * num_layers
    attention = attention_of(ALL_FAMILIES[config.model_type])
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention
    ).train()
    if positions is not None:
        apply_context(model, SimpleNamespace(layout=Layout()), packed=True)  # type: ignore[arg-type]
    owned = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in owned:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class _Convolution(torch.autograd.Function):
    """Keeps what Dao-AILab/causal-conv1d keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.clone()


class _DeltaRule(torch.autograd.Function):
    """Keeps what fla-org/flash-linear-attention's chunk_gated_delta_rule keeps (at bc3b101)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        normed = [(x.clone(), x.new_zeros(x.shape[:-1], dtype=torch.float32)) for x in (q, k)]
        summed = torch.cumsum(g.float(), 1)
        inverted = v.new_zeros(*v.shape[:-1], 64)
        ctx.save_for_backward(*normed[0], *normed[1], v.contiguous(), summed, beta, inverted)
        return v.clone(memory_format=torch.contiguous_format)


def keep_like_the_kernels(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Put kernels that compute nothing and keep what the real ones keep into transformers'."""
    from importlib import import_module

    name = model_type.removesuffix("_text")
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    monkeypatch.setattr(
        module, "causal_conv1d_fn", lambda x, weight, *_, **__: _Convolution.apply(x, weight)
    )
    monkeypatch.setattr(
        module,
        "torch_chunk_gated_delta_rule",
        lambda q, k, v, g, beta, **_: (_DeltaRule.apply(q, k, v, g, beta), None),
    )


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
        ("PHI", "sliding_attention"),
        ("PHI_FULL", "full_attention"),
        ("GPT2", "full_attention"),
        ("OSS", "full_attention"),
        ("OSS", "sliding_attention"),
        ("DS", "full_attention"),
        ("DSQ", "full_attention"),
        ("SM3", "full_attention"),
        ("G2", "full_attention"),
        ("G2", "sliding_attention"),
        ("GLM4", "full_attention"),
        ("GLMM", "full_attention"),
        ("GLMA", "full_attention"),
        ("MM2", "full_attention"),
        ("Q3N", "full_attention"),
        ("Q3N", "linear_attention"),
        ("Q35", "full_attention"),
        ("Q35", "linear_attention"),
        ("Q35M", "full_attention"),
        ("Q35M", "linear_attention"),
        ("L4", "full_attention"),
        ("L4", "chunked_attention"),
    ],
)
def test_activations_of_a_layer_are_what_autograd_keeps(
    name: str, layer_type: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted as the difference of two depths; within 2% for every family and dtype."""
    config = model_config(name)
    facts = facts_of_config(config.to_dict(), source=name, planning=True)
    if name == "G2":  # its capped scores are a part of FlashAttention's kernel, not of torch's
        monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    if layer_type == "linear_attention":
        keep_like_the_kernels(monkeypatch, config.model_type)
    if name == "L4":  # its layers without experts: transformers gives every expert every token
        config.moe_layers = []
        config.no_rope_layers = [int(layer_type != "full_attention")] * 4
    deep, shallow = (kept_bytes(config, n, 128, dtype, layer_type) for n in (4, 2))
    counted = (deep - shallow) / 2 / 128
    kinds = [k for k in facts.layers if k.is_linear == (layer_type == "linear_attention")]
    has_window = layer_type in ("sliding_attention", "chunked_attention")
    kinds = [k for k in kinds if bool(k.window) == has_window]
    kind, c = kinds[-1], dtype.itemsize
    kind = kind._replace(has_experts=False) if name == "L4" else kind
    planned = activation_bytes_per_token(facts, kind, Layout(), compute_bytes=c)
    planned += masked_bytes_per_token(facts, kind, Layout(), c, seq_len=128)
    assert planned == pytest.approx(counted, rel=0.02)


def test_masked_attention_repeats_the_keys_and_values() -> None:
    """Of three query heads a KV head; of a single KV head it makes no copy."""
    for num_heads, num_kv_heads in ((9, 3), (4, 1)):
        config = model_config("G3")
        config.num_attention_heads, config.num_key_value_heads = num_heads, num_kv_heads
        facts = facts_of_config(config.to_dict(), source="G3")
        deep, shallow = (
            kept_bytes(config, n, 128, torch.float32, "sliding_attention") for n in (4, 2)
        )
        kind = facts.layers[0]
        planned = activation_bytes_per_token(facts, kind, Layout(), compute_bytes=4)
        planned += masked_bytes_per_token(facts, kind, Layout(), 4, seq_len=128)
        assert planned == pytest.approx((deep - shallow) / 2 / 128, rel=0.005)


@pytest.mark.parametrize("length", [128, 32, 8])
@pytest.mark.parametrize(
    ("name", "layer_type"),
    [("LL", "full_attention"), ("ODD", "full_attention"), ("G3", "sliding_attention")],
)
def test_activations_of_packed_rows_are_what_autograd_keeps(
    name: str, layer_type: str, length: int
) -> None:
    """The chunks of the output; masks, of rows longer than a window, once for all layers."""
    config = model_config(name)
    facts = facts_of_config(config.to_dict(), source=name)
    positions = torch.arange(128)[None] % length
    deep, shallow = (
        kept_bytes(config, n, 128, torch.float32, layer_type, positions) for n in (4, 2)
    )
    kind = facts.layers[0]
    planned = activation_bytes_per_token(facts, kind, Layout(), compute_bytes=4)
    planned += context_bytes_per_token(facts, Layout(), 4, packed=True)
    planned += masked_bytes_per_token(facts, kind, Layout(), 4, seq_len=length, packed=True)
    assert planned == pytest.approx((deep - shallow) / 2 / 128, rel=0.02)


def plan(config: dict[str, Any], **changes: Any) -> Plan:
    base = {"model": "x", "task": "full", "layout": Layout()}
    return Plan(**{**base, **changes})


def test_states_are_sixteen_bytes_a_parameter_divided_by_fsdp() -> None:
    """ZeRO (arXiv 1910.02054) with fp32 weights and gradients: 4 + 4 + 8 bytes."""
    facts = facts_of_config(LLAMA_3_1_8B, source="8B")
    assert state_bytes(plan(LLAMA_3_1_8B), facts) == 16 * 8_030_261_248
    for ranks in (1, 8, 64):
        train = Train(seq_len=512, micro_batch=1, global_batch=64 * 2)
        memory = predict_memory(plan(LLAMA_3_1_8B, layout=Layout(fsdp=ranks), train=train), facts)
        states = memory.weights + memory.gradients + memory.optimizer
        assert states == pytest.approx(state_bytes(plan(LLAMA_3_1_8B), facts) / ranks, rel=1e-6)


def test_tensor_parallel_divides_matrices_and_not_norms() -> None:
    facts = facts_of_config(SMOLLM2, source="smol")
    one, three = RankSizes.of(facts, Layout()), RankSizes.of(facts, Layout(tp=3))
    norms = 2 * facts.hidden_size
    assert one.layer_bytes(1) == facts.num_layer_parameters(facts.layers[0])
    assert three.layer_bytes(1) - norms == (one.layer_bytes(1) - norms) // 3
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
