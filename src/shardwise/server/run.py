"""The serving run of one rank: load, then answer (the first) or follow (the others)."""

from __future__ import annotations

import signal
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, GenerationConfig

from shardwise import console
from shardwise.config import Plan
from shardwise.models.hub import TOKENIZER_FILE, name_of
from shardwise.models.read import directory_with, read_facts
from shardwise.parallel.data import DTYPES
from shardwise.parallel.mesh import Mesh
from shardwise.planner.kv_room import describe_room
from shardwise.server.api import api_of
from shardwise.server.blocks import BLOCK_TOKENS
from shardwise.server.engine import Engine
from shardwise.server.kvcache import KVCache
from shardwise.server.runner import Runner
from shardwise.weights.load import load_model
from shardwise.weights.progress import Loading

GENERATION_FILE = "generation_config.json"


def run_serve(plan: Plan, mesh: Mesh) -> None:
    """Load this rank's part of the model and serve until told to stop."""
    with Loading(mesh) as loading:
        at_rest = DTYPES[plan.precision.compute]
        model = load_model(plan, mesh, at_rest, loading=loading).model.eval()
    summary = loading.summary()
    facts = read_facts(plan.model)
    num_blocks = (plan.serve.kv_tokens or 0) // BLOCK_TOKENS
    cache = KVCache(facts, plan.layout, num_blocks=num_blocks, dtype=at_rest, device=mesh.device)
    runner = Runner(model, mesh, cache)
    if dist.get_rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank says when it is over
        with torch.inference_mode():
            runner.follow()
        return
    console.out.print(f"each rank has loaded its shards ({summary})")
    console.out.print(describe_room(plan, facts))
    files = directory_with(TOKENIZER_FILE, plan.model)
    tokenizer = AutoTokenizer.from_pretrained(files, local_files_only=True)
    engine = Engine(
        runner,
        tokenizer,
        plan.serve,
        end_ids=end_ids(plan.model, tokenizer),
        num_blocks=num_blocks,
    )
    context = plan.serve.context or facts.max_positions
    console.out.print(
        f"serving {name_of(plan.model)} on http://{plan.serve.host}:{plan.serve.port}/v1 "
        f"({plan.layout}), context {context:,} tokens"
    )
    with api_of(engine, plan, context):
        engine.run()


def end_ids(model_dir: str, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the generation config's and the tokenizer's."""
    given = None
    files = directory_with(GENERATION_FILE, model_dir)
    if (files / GENERATION_FILE).exists():
        given = GenerationConfig.from_pretrained(files, local_files_only=True).eos_token_id
    ids = given if isinstance(given, list) else [given]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)
