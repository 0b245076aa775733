"""How many tokens' keys and values a server keeps, of the memory that is really there. No torch."""

from __future__ import annotations

from shardwise.config import GIB, Plan
from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.planner.devices import free_gib
from shardwise.planner.memory import kv_bytes_per_token, predict_memory

KV_BLOCK_TOKENS = 16
"""tokens of a block of the cache"""


def with_kv_room(plan: Plan, facts: ModelFacts) -> Plan:
    """A plan to serve whose `serve.context` and `serve.kv_tokens` are numbers.

    What is left of a device's memory beside all else holds keys and values, up to as many tokens as
    can be asked for at a time. On CPU without a limit in the plan, ranks share what is free now.

    Raises:
        UserError: there is no room for one request of the context that the plan asks for.
    """
    serve = plan.serve
    asked = serve.context or facts.max_positions
    whole = -(-asked // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
    room = serve.kv_tokens
    if room is None:
        gib = plan.devices.memory_gib
        if gib is None:
            gib = free_gib() / plan.layout.world_size
        planned = predict_memory(plan, facts)
        left = gib * GIB - (planned.total - planned.kv_cache)
        room = max(0, min(serve.max_running * whole, int(left / kv_bytes_per_token(plan, facts))))
        if room < (whole if serve.context is not None else KV_BLOCK_TOKENS):
            raise UserError(
                f"serve.context={asked} needs {planned.total / GIB:.2f} GiB a process, of "
                f"{gib:.2f} GiB; " + _what_works(room)
            )
    elif serve.context is not None and room < whole:
        raise UserError(
            f"serve.kv_tokens={room} has no room for one request of serve.context={asked} tokens; "
            f"set serve.kv_tokens={whole} or more, or serve.context={_blocks(room)}."
        )
    room = _blocks(room)
    settings = serve.model_copy(update={"context": min(asked, room), "kv_tokens": room})
    return plan.model_copy(update={"serve": settings})


def _blocks(tokens: int) -> int:
    """As many tokens as fill whole blocks."""
    return tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS


def describe_room(plan: Plan, facts: ModelFacts) -> str:
    """What the keys and values of such a plan have room for, in a line."""
    serve = plan.serve
    tokens, context = serve.kv_tokens or 0, serve.context or facts.max_positions
    gib = tokens * kv_bytes_per_token(plan, facts) / GIB
    whole = min(serve.max_running, tokens // context)
    shorter = max(1, context // 4)
    usual = min(serve.max_running, tokens // shorter)
    more = f", or {usual} of {shorter:,}" if usual > whole else ""
    return (
        f"keys and values: room for {tokens:,} tokens ({gib:.2f} GiB a process): "
        f"{whole} request{'' if whole == 1 else 's'} of {context:,} tokens at a time{more}"
    )


def _what_works(room: int) -> str:
    if room >= KV_BLOCK_TOKENS:
        return f"set serve.context={_blocks(room)} or less."
    return "use more tp ranks, serve.context=512 and fewer serve.max_batch_tokens, or bf16."
