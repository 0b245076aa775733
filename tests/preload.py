"""Imported once by the fork server, so that every rank starts in a moment."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt2.modeling_gpt2
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral
import transformers.models.mixtral.modeling_mixtral
import transformers.models.phi3.modeling_phi3
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import shardwise.parallel.apply  # noqa: F401

torch.set_num_threads(1)
