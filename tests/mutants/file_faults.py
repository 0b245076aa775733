"""Faults in what files hold: checkpoints written while training goes on, and coded weights."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SAVER = "tests/ranks/test_saver.py::"
_CODES = "tests/ranks/test_codes.py::"
_GGUF = "tests/unit/test_gguf_weights.py::"

FILES = (
    Fault(
        name="live-tensors-written-behind",
        history="pytorch/pytorch#144657",
        file="trainer/saver.py",
        old="self._writer(states.copied(), state, self._group)",
        new="self._writer(states, state, self._group)",
        proof=_SAVER + "test_what_is_written_behind_is_what_was_there[{'fsdp': 2}]",
    ),
    Fault(
        name="failed-background-save-not-told",
        history="Lightning-AI/pytorch-lightning#21079",
        file="trainer/saver.py",
        old="            raise running.error\n",
        new="            pass\n",
        proof=_SAVER + "test_a_save_that_fails_behind_ends_the_training",
    ),
    Fault(
        name="block-of-fp8-made-of-the-shapes",
        history="NVIDIA/TensorRT-Model-Connect#1115",
        file="weights/codes.py",
        old="block = (*((1,) * (len(shape) - 2)), *given)",
        new="block = tuple(-(-n // m) for n, m in zip(shape, scales, strict=True))",
        proof=_CODES + "test_fp8[uneven blocks]",
    ),
    Fault(
        name="fp8-scales-from-the-start-of-a-part",
        history="vllm-project/vllm#52997",
        file="weights/read.py",
        old="first = cut.start - block.start * width",
        new="first = 0",
        proof=_CODES + "test_fp8_in_layouts[{'tp': 2}]",
    ),
    Fault(
        name="fp8-scales-left-out",
        history="unslothai/unsloth#6200",
        file="weights/read.py",
        old="return numbers.mul_(scales)",
        new="return numbers",
        proof=_CODES + "test_fp8[blocks]",
    ),
    Fault(
        name="halves-of-gguf-heads-left-interleaved",
        history="huggingface/transformers#31766",
        file="weights/gguf.py",
        old='is_head = ".attn_q." in stored or ".attn_k." in stored',
        new='is_head = ".attn_q." in stored',
        proof=_GGUF + "test_there_and_back[LL]",
    ),
)
