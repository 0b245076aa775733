"""Faults of mixtures of experts (where tokens go, what comes back, the balance loss), and of what
single families have: sinks, a latent, fused matrices."""

from __future__ import annotations

from tests.mutants.fault import Fault, parity

_EXPERTS = parity("MIX-fsdp=2-ep=2")
_BALANCE = parity("MOE-cp=2")
_SPLIT = parity("MOE-fsdp=2-tp=2-ep=4-sequence_parallel=True")

EXPERTS = (
    Fault(
        name="gradient-of-experts-averaged",
        history="NVIDIA/Megatron-LM#7452",
        file="parallel/data.py",
        old="module.set_gradient_divide_factor(1.0)",
        new='split = "efsdp" in axes.mesh_dim_names\n'
        "            module.set_gradient_divide_factor(2.0 if split else 1.0)",
        proof=parity("MIX-fsdp=4-ep=2", slow=True),
    ),
    Fault(
        name="gradient-of-experts-summed-again",
        history="NVIDIA/Megatron-LM#7452",
        file="parallel/tensor.py",
        old="if not isinstance(param, DTensor):",
        new='if not isinstance(param, DTensor) or "experts" in param_name:',
        proof=_SPLIT,
    ),
    Fault(
        name="norm-without-the-experts",
        history="NVIDIA/Megatron-LM#5916",
        file="parallel/grads.py",
        old="*EXPERT_AXES[2:]",
        new="*EXPERT_AXES[2:3]",
        proof=_EXPERTS,
    ),
    Fault(
        name="tokens-not-put-back-in-order",
        history="huggingface/transformers#48205",
        file="parallel/expert.py",
        old="torch.zeros_like(returned).index_copy(0, order, returned)",
        new="returned",
        proof=_EXPERTS,
    ),
    Fault(
        name="gradients-of-travelling-tokens-lost",
        history="huggingface/transformers#48205",
        file="parallel/collectives.py",
        old="return _all_to_all(grad, received, sent, group), None, None, None",
        new="return _all_to_all(grad, received, sent, group) * 0, None, None, None",
        proof=_EXPERTS,
    ),
    Fault(
        name="router-detached-from-the-loss",
        history="NVIDIA-NeMo/Automodel#2995",
        file="parallel/expert.py",
        old="* top_k_weights.unsqueeze(-1)",
        new="* top_k_weights.detach().unsqueeze(-1)",
        proof=_EXPERTS,
    ),
    Fault(
        name="halves-of-an-expert-swapped",
        history="NVIDIA-NeMo/Automodel#1814",
        file="weights/names.py",
        old="parts = (names.gate, names.up) if",
        new="parts = (names.up, names.gate) if",
        proof=_EXPERTS,
    ),
    Fault(
        name="balance-loss-detached",
        history="huggingface/transformers#48687",
        file="trainer/step.py",
        old="return loss + routing.weight * balance",
        new="return loss + routing.weight * balance.detach()",
        proof=_BALANCE,
    ),
    Fault(
        name="balance-of-the-own-part-of-a-row",
        history="NVIDIA/Megatron-LM#7452",
        file="trainer/balance.py",
        old='dist.all_reduce(counts, group=mesh.group("cp"))',
        new="pass",
        proof=_BALANCE,
    ),
    Fault(
        name="balance-of-the-own-tokens",
        history="NVIDIA/Megatron-LM#7452",
        file="trainer/balance.py",
        old='dist.all_reduce(chosen, group=mesh.group("tp"))',
        new="pass",
        proof=_SPLIT,
    ),
    Fault(
        name="balance-loss-of-the-last-stage",
        history="databricks/megablocks#85",
        file="parallel/pipeline.py",
        old="own if tally is None else tally + own",
        new="own",
        proof=parity("MOE-pp=2-tp=2-sequence_parallel=True"),
    ),
    Fault(
        name="balance-loss-of-other-stages-detached",
        history="pytorch/torchtitan#2061",
        file="parallel/pipeline.py",
        old="own if tally is None else tally + own",
        new="own if tally is None else tally.detach() + own",
        proof=parity("MOE-pp=2-tp=2-sequence_parallel=True"),
    ),
    Fault(
        name="padding-is-balanced",
        history="huggingface/transformers#48687",
        file="trainer/data/batches.py",
        old="real[i, span] = True",
        new="real[i] = True",
        proof=_BALANCE,
    ),
)

FAMILIES = (
    Fault(
        name="no-token-sees-the-sink-through-a-mask",
        history="sgl-project/sglang#11634",
        file="models/attention.py",
        old="visible = True if attention_mask.dtype == torch.bool else 0.0",
        new='visible = False if attention_mask.dtype == torch.bool else float("-inf")',
        proof=parity("OSS-cp=2"),
    ),
    Fault(
        name="sink-scaled-like-a-product",
        history="ROCm/aiter#1633",
        file="models/attention.py",
        old='(s_aux / options["scaling"])',
        new="s_aux",
        proof=parity("OSS-fsdp=2-ep=2"),
    ),
    Fault(
        name="router-correction-not-loaded",
        history="PrimeIntellect-ai/prime-rl#2681",
        file="weights/load.py",
        old="num_bytes += read_into(buffer, local_box(buffer), index.pieces_of(name), name)",
        new="buffer.zero_()",
        proof=parity("DS-pp=2"),
    ),
    Fault(
        name="values-as-wide-as-keys",
        history="vllm-project/vllm#50060",
        file="models/attention.py",
        old="return output[:, added:, :, :v_dim], None",
        new="return output[:, added:, :, -v_dim:], None",
        proof=parity("DS-cp=2"),
    ),
    Fault(
        name="every-part-of-a-fused-matrix-from-its-top",
        history="NVIDIA/TensorRT-LLM#15475",
        file="weights/names.py",
        old="first += matrix.shape[0]",
        new="first += 0",
        proof=parity("PHI-tp=2"),
    ),
)
