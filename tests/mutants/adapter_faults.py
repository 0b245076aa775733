"""Faults of adapters: partial gradients, scale, first values, what is frozen."""

from __future__ import annotations

from tests.mutants.fault import Fault, parity

_TESTS = "tests/ranks/test_adapters.py::"
_FRESH = _TESTS + "test_fresh_adapters_are_the_same_on_every_layout[{'tp': 2}]"
_ONE = parity("LL+lora-fsdp=2")

ADAPTERS = (
    Fault(
        name="a-of-split-outputs-not-summed",
        history="modelscope/mcore-bridge#173",
        file="parallel/tensor.py",
        old="LORA_B: 0}, wrap=_column, partial=(LORA_A,))",
        new="LORA_B: 0}, wrap=_column, partial=())",
        proof=parity("Q3+lora-fsdp=2-tp=2"),
    ),
    Fault(
        name="b-of-split-inputs-not-summed",
        history="huggingface/peft#3079",
        file="parallel/tensor.py",
        old="wrap=_row, partial=(LORA_B,))",
        new="wrap=_row, partial=())",
        proof=parity("Q3+lora-fsdp=2-tp=2"),
    ),
    Fault(
        name="a-of-a-fused-matrix-not-summed",
        history="InfiniTensor/InfiniTrain#150",
        file="parallel/tensor.py",
        old="shards.partial_of(path, module, (LORA_A,))",
        new="shards.partial_of(path, module, ())",
        proof=parity("PHI+lora-tp=2"),
    ),
    Fault(
        name="adapters-scaled-by-alpha",
        history="Blaizzy/mlx-vlm#841",
        file="config.py",
        old="return self.alpha / self.rank",
        new="return self.alpha",
        proof=_ONE,
    ),
    Fault(
        name="alpha-of-the-file-ignored",
        history="ml-explore/mlx-examples#623",
        file="models/adapters.py",
        old='"alpha": config.get("lora_alpha", 8),',
        new='"alpha": float(config.get("r", 1)),',
        proof=_ONE,
    ),
    Fault(
        name="merged-without-their-scale",
        history="hao-ai-lab/FastVideo#870",
        file="weights/save.py",
        old="tensor.addmm_(_whole(index, b), _whole(index, a), alpha=lora.scale)",
        new="tensor.addmm_(_whole(index, b), _whole(index, a))",
        proof=_TESTS + "test_what_was_trained_is_what_peft_loads[LL-fsdp2]",
    ),
    Fault(
        name="the-model-is-trained-too",
        history="huggingface/diffusers#2245",
        file="parallel/adapters.py",
        old="model.requires_grad_(False)",
        new="model.requires_grad_(True)",
        proof=_ONE,
    ),
    Fault(
        name="first-values-made-for-each-shard",
        history="NVIDIA-NeMo/Megatron-Bridge#5840",
        file="weights/load.py",
        old="copy_(initial(name, param.shape, seed)[local_box(param)])",
        new="copy_(initial(name, local_part(param).shape, seed))",
        proof=_FRESH,
    ),
    Fault(
        name="first-values-of-each-rank-its-own",
        history="huggingface/transformers#48792",
        file="parallel/adapters.py",
        old='digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()',
        new="rank = torch.distributed.get_rank()\n"
        '    digest = hashlib.sha256(f"{seed + rank}/{name}".encode()).digest()',
        proof=_FRESH,
    ),
    Fault(
        name="every-rank-packs-the-first-inputs",
        history="huggingface/accelerate#3983",
        file="models/nf4.py",
        old="    return slice(start, stop)\n",
        new="    return slice(0, stop - start)\n",
        proof=parity("LLW+qlora-tp=2"),
    ),
    Fault(
        name="two-numbers-of-a-byte-swapped",
        history="amd/Quark#30",
        file="models/nf4.py",
        old="codes[..., 0::2] << 4 | codes[..., 1::2]",
        new="codes[..., 1::2] << 4 | codes[..., 0::2]",
        proof=parity("LLW+qlora-fsdp=2"),
    ),
    Fault(
        name="trained-on-unrounded-matrices",
        history="unslothai/unsloth-zoo#810",
        file="models/adapters.py",
        old='"quantize": _read_base(directory / BASE_FILE),',
        new='"quantize": None,',
        proof=parity("LLW+qlora-fsdp=2"),
    ),
    Fault(
        name="merged-into-unrounded-matrices",
        history="huggingface/transformers#31293",
        file="weights/save.py",
        old="tensor = rounded(tensor)",
        new="tensor = tensor.clone()",
        proof=_TESTS + "test_what_was_trained_is_what_peft_loads[LLW+qlora-tp2]",
    ),
    Fault(
        name="gathered-without-their-scales",
        history="axolotl-ai-cloud/axolotl#2992",
        file="models/nf4.py",
        old="target.copy_(numbers.flatten(-2).mul_(largest))",
        new="target.copy_(numbers.flatten(-2).mul_(largest.mean()))",
        proof=parity("LLW+qlora-tp=2"),
    ),
)
