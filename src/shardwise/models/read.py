"""config.json -> ModelFacts; what is not proved, or read otherwise, is refused. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.config import Lora, Plan
from shardwise.errors import UserError
from shardwise.models.adapters import (
    ADAPTER_CONFIG,
    complete,
    read_adapters,
)
from shardwise.models.facts import ModelFacts
from shardwise.models.families import FAMILIES, Family
from shardwise.models.hub import CONFIG_FILE, cached_directory, is_hub_id, read_config
from shardwise.models.layers import Latent, LayerKind, Linear
from shardwise.models.planned import ALL_FAMILIES
from shardwise.models.sizes import Sizes
from shardwise.models.stored import StoredFormat, stored_format

_MOST_LAYERS = 10_000
"""of a model: each is listed, and no model has as many"""
_DEFAULT_Q_RANK = 1536  # of transformers' config class
_NOT_PROVED_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "router_jitter_noise": (0.0, 0),
    "use_sliding_window": (False,),
}
"""settings of a mixture of experts, and the values that are proved"""
_DTYPES = ("float32", "bfloat16", "float16")


def base_of(directory: Path) -> Path | None:
    """The model that a directory of adapters belongs to; None if it holds no adapters.

    Raises:
        UserError: the model is not there.
    """
    if not (directory / ADAPTER_CONFIG).exists():
        return None
    given = str(read_config(directory / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    base = directory / given  # an absolute path stays as it is
    if given and not base.is_dir() and Path(given).is_dir():  # as PEFT, from where it is run
        base = Path(given)
    if given and not base.is_dir() and is_hub_id(given):
        base = cached_directory(given) or base
    if not given or not base.is_dir():
        raise UserError(
            f"{directory} holds adapters of the model {given!r}, which is not there; put its "
            f"directory into base_model_name_or_path of {directory / ADAPTER_CONFIG}."
        )
    return base


def directory_with(file: str, model: str | Path) -> Path:
    """Where a small file of a model is: beside its adapters, or with the model that they are of."""
    directory = Path(model)
    if (directory / file).exists():
        return directory
    return base_of(directory) or directory


def facts_of_plan(plan: Plan) -> ModelFacts:
    """The facts of a plan's model, with the adapters that the plan adds (errors as `read_facts` and
    `with_adapters_of`)."""
    return with_adapters_of(plan, read_facts(plan.model))


def with_adapters_of(plan: Plan, facts: ModelFacts) -> ModelFacts:
    """The facts of a plan's model as found, and the adapters that the plan adds.

    Raises:
        UserError: the plan asks for adapters that the model cannot have, does not train, or that
            are not those of the directory.
    """
    if plan.lora is not None and plan.task == "full":
        raise UserError("the plan has a section lora, and task=full trains no adapters: task=lora.")
    if facts.adapters is not None and plan.task == "full":
        raise UserError(
            f"{plan.model} holds adapters: train on with task=lora, or merge them first with "
            "`shardwise export --merge`."
        )
    if facts.adapters is None and plan.task != "lora":
        if plan.lora is not None:
            raise UserError(f"the plan has a section lora, and {plan.model} holds no adapters.")
        return facts
    if facts.adapters is not None and plan.lora is None:
        return facts
    lora = complete(plan.lora or Lora(), facts)
    if facts.adapters is None:
        return replace(facts, adapters=lora)
    for key in plan.lora.model_fields_set if plan.lora else ():
        if getattr(facts.adapters, key) != getattr(lora, key):
            raise UserError(
                f"lora.{key}={getattr(lora, key)}, but the adapters in {plan.model} have "
                f"{getattr(facts.adapters, key)}; leave lora out to train them on."
            )
    return facts


def read_facts(model: str | Path) -> ModelFacts:
    """Read the facts of a model directory (or of a config.json) that Shardwise can run, or of
    adapters and their model.

    Raises:
        UserError: no readable config.json, a key is missing, or the model cannot be run.
    """
    path = Path(model)
    base = base_of(path)
    if base is not None:
        if (base / ADAPTER_CONFIG).exists():
            raise UserError(f"{path} holds adapters of {base}, which holds adapters itself.")
        facts, lora = read_facts(base), read_adapters(path)
        return replace(facts, adapters=complete(lora, facts))
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.exists():
        raise UserError(
            f"no model at {str(model)!r}: expected a directory with {CONFIG_FILE}, or that file "
            "(models are not downloaded; fetch one first and give its directory)."
        )
    return facts_of_config(read_config(file), source=str(file))


def facts_of_config(
    config: Mapping[str, Any], *, source: str, planning: bool = False
) -> ModelFacts:
    """The facts in the content of a config.json.

    Args:
        source: names it in errors.
        planning: read what can only be planned too; `why_not_run` says what that is.

    Raises:
        UserError: a key is missing or wrong, or the model cannot be planned (or run).
    """
    family = _family(config, source, planning=planning)
    config = {**family.defaults, **config}
    _refuse_what_is_not_causal(config, source)
    reason = None if planning else why_not_run(config)
    if reason is not None:
        others = "" if family.proved else f"; it runs {_running()}"
        raise UserError(f"{source}: {reason}{others}.")
    size = Sizes(config, source, family.keys)
    num_heads = size.required("num_attention_heads")
    hidden_size = size.required("hidden_size")
    latent = _latent(config, family, size)
    attention_bias = size.flag("attention_bias", family.default_attention_bias)
    mlp_bias = size.flag("mlp_bias", False)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise UserError(f"{source}: dtype {dtype!r} is not one of {', '.join(_DTYPES)}.")
    width = 4 * hidden_size if family.mlp == "conv1d" else None
    num_kv_heads = size.optional("num_key_value_heads", family.default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise UserError(
            f"{source}: {num_heads} attention heads are no multiple of {num_kv_heads} KV heads."
        )
    if hidden_size % num_heads and family.attention == "conv1d":
        raise UserError(f"{source}: {num_heads} heads do not divide the width {hidden_size}.")
    stored_as, layers = stored_format(config), _layer_kinds(config, family, size)
    if all(kind.has_experts for kind in layers):
        width = 0  # no layer has a plain MLP
    return ModelFacts(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=size.optional("intermediate_size", width),
        layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=latent.nope_dim + latent.rope_dim
        if latent
        else size.optional("head_dim", family.default_head_dim or hidden_size // num_heads),
        vocab_size=size.required("vocab_size"),
        tied=size.flag("tie_word_embeddings", family.tied_by_default),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=size.flag("use_qk_norm", False) if family.qk_norm is None else family.qk_norm,
        unit_heads=family.unit_heads and size.flag("use_qk_norm", True),
        max_positions=size.required("max_position_embeddings"),
        dropout=_dropout(config, family, source),
        dtype=dtype,
        latent=latent,
        linear=_linear(size) if family.linear else None,
        stored_as=stored_as if isinstance(stored_as, StoredFormat) else None,
        **_experts(config, family, size),
    )


def why_not_run(config: Mapping[str, Any]) -> str | None:
    """The reason why a model that can be planned cannot be run; None if it can.

    Some kinds of rotary embedding change with the padded length of a row.
    """
    family = ALL_FAMILIES[str(config["model_type"])]
    if not family.proved:
        return f"Shardwise does not run {family.model_type} yet"
    stored_as = stored_format(config)
    if isinstance(stored_as, str):
        return stored_as
    if stored_as is not None and stored_as.method == "mxfp4" and family.model_type != "gpt_oss":
        return f"{stored_as} is read for gpt_oss, not for {family.model_type}"
    for kind in sorted(_rope_types(config)):
        if kind not in family.rope_types:
            return (
                f"rope type {kind!r} is not proved equal to one process; those that "
                f"are: {', '.join(family.rope_types)}"
            )
    return None


def _running() -> str:
    return ", ".join(sorted(FAMILIES))


def _linear(size: Sizes) -> Linear:
    """Sizes of a linear attention, with the defaults of transformers' config classes."""
    linear = Linear(
        num_key_heads=size.optional("linear_num_key_heads", 16),
        num_value_heads=size.optional("linear_num_value_heads", 32),
        key_dim=size.optional("linear_key_head_dim", 128),
        value_dim=size.optional("linear_value_head_dim", 128),
        kernel=size.optional("linear_conv_kernel_dim", 4),
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise UserError(
            f"{size.source}: {linear.num_value_heads} linear value heads are no multiple of "
            f"{linear.num_key_heads} linear key heads."
        )
    return linear


def _latent(config: Mapping[str, Any], family: Family, size: Sizes) -> Latent | None:
    """Sizes of a latent attention, which has its own idea of a head."""
    if family.attention != "latent":
        return None
    heads = size.required("num_attention_heads")
    if size.optional("num_key_value_heads", heads) != heads:
        raise UserError(
            f"{size.source}: num_key_value_heads={config['num_key_value_heads']} with latent "
            f"attention is not proved; num_key_value_heads={heads} (as many as heads) is."
        )
    no_latent = "q_lora_rank" in config and config["q_lora_rank"] is None
    latent = Latent(
        q_rank=None if no_latent else size.optional("q_lora_rank", _DEFAULT_Q_RANK),
        kv_rank=size.required("kv_lora_rank"),
        rope_dim=size.required("qk_rope_head_dim"),
        nope_dim=size.required("qk_nope_head_dim"),
        v_dim=size.required("v_head_dim"),
    )
    if latent.rope_dim % 2 or latent.v_dim > latent.nope_dim + latent.rope_dim:
        raise UserError(
            f"{size.source}: qk_rope_head_dim={latent.rope_dim} must be even, and v_head_dim="
            f"{latent.v_dim} at most qk_nope_head_dim + qk_rope_head_dim="
            f"{latent.nope_dim + latent.rope_dim}."
        )
    return latent


def _experts(config: Mapping[str, Any], family: Family, size: Sizes) -> dict[str, Any]:
    """What a config says of experts, refusing what is not proved."""
    row = family.experts
    if row is None:
        return {}
    for key, value in _NOT_PROVED_OF_EXPERTS.items():
        if config.get(key) not in (None, *value):
            raise UserError(
                f"{size.source}: {key}={config[key]!r} is not proved; {key}={value[0]!r} is."
            )
    balance = size.flag("output_router_logits", False)
    if balance and not row.balance_loss:
        raise UserError(
            f"{size.source}: transformers has no balance loss for {family.model_type}; set "
            "output_router_logits to false."
        )
    key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    num_experts, chosen = size.required(key), size.required("num_experts_per_tok")
    groups = size.optional("n_group", 8 if family.attention == "latent" else 1)
    groups = groups if row.corrected else 1
    if chosen > num_experts or num_experts % groups:
        raise UserError(
            f"{size.source}: {chosen} of {num_experts} experts in {groups} groups; "
            "num_experts_per_tok can be at most their number, and n_group must divide it."
        )
    width = size.required(row.width)
    shared = size.required(row.shared) * width if row.shared else 0
    if row.shared_width:
        shared = size.required(row.shared_width)
    return {
        "num_experts": num_experts,
        "experts_per_token": chosen,
        "expert_width": width,
        "shared_width": shared,
        "balance_weight": size.number("router_aux_loss_coef", 0.001) if balance else None,
    }


def _layer_kinds(config: Mapping[str, Any], family: Family, size: Sizes) -> tuple[LayerKind, ...]:
    num_layers = size.required("num_hidden_layers")
    if num_layers > _MOST_LAYERS:
        raise UserError(
            f"{size.source}: num_hidden_layers is {num_layers}; expected at most {_MOST_LAYERS}."
        )
    types = _layer_types(config, family, num_layers, size)
    sliding = [kind == family.windowed for kind in types or ()] or _sliding_layers(
        config, family, num_layers, size
    )
    linear = _linear_layers(types, family, num_layers, size)
    window, key = None, family.keys.get("sliding_window", "sliding_window")
    if any(sliding):
        if key in config and config[key] is None:
            raise UserError(
                f"{size.source}: {key} is null, and {sum(sliding)} layers have a sliding "
                f"window; set it to a number of tokens, such as {family.default_window}."
            )
        window = size.optional("sliding_window", family.default_window)
    dense = _dense_layers(config, family, num_layers, size)
    return tuple(
        LayerKind(
            has_experts=family.experts is not None and not is_dense,
            window=window if is_sliding else None,
            is_linear=is_linear,
        )
        for is_sliding, is_dense, is_linear in zip(sliding, dense, linear, strict=True)
    )


def _layer_types(
    config: Mapping[str, Any], family: Family, num_layers: int, size: Sizes
) -> list[str] | None:
    """What the config says each layer is; None: it says nothing."""
    reads = family.sliding in ("upper", "pattern") or family.linear
    types = config.get("layer_types") if reads else None
    if not types:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise UserError(
            f"{size.source}: layer_types is {types!r}; expected one entry for each of the "
            f"{num_layers} layers."
        )
    known = ("full_attention", "linear_attention" if family.linear else family.windowed)
    strange = sorted({str(kind) for kind in types} - set(known))
    if strange:
        raise UserError(
            f"{size.source}: layers of the type {strange[0]!r} are not proved; those that are: "
            f"{', '.join(known)}."
        )
    return types


def _linear_layers(
    types: list[str] | None, family: Family, num_layers: int, size: Sizes
) -> list[bool]:
    """For each layer whether its attention is linear."""
    if not family.linear:
        return [False] * num_layers
    if types:
        return [kind == "linear_attention" for kind in types]
    every = size.optional("full_attention_interval", 4)
    return [(number + 1) % every != 0 for number in range(num_layers)]


def _dense_layers(
    config: Mapping[str, Any], family: Family, num_layers: int, size: Sizes
) -> list[bool]:
    """For each layer of a mixture of experts, whether it has a plain MLP instead."""
    if family.dense_layers == "first":
        first = size.optional("first_k_dense_replace", 3, least=0)
        return [number < first for number in range(num_layers)]
    if family.dense_layers == "listed":
        listed = config.get("mlp_only_layers") or []
        if not isinstance(listed, list):
            raise UserError(f"{size.source}: mlp_only_layers is {listed!r}; expected a list.")
        step = size.optional("decoder_sparse_step", 1)
        return [number in listed or (number + 1) % step != 0 for number in range(num_layers)]
    return [False] * num_layers


def _family(config: Mapping[str, Any], source: str, *, planning: bool) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ALL_FAMILIES:
        if planning:
            raise UserError(
                f"{source}: model_type {model_type!r} cannot be planned; the families that can: "
                f"{', '.join(sorted(ALL_FAMILIES))}."
            )
        raise UserError(
            f"{source}: model_type {model_type!r} is not proved equal to one process yet; "
            f"the families that are: {_running()}."
        )
    return ALL_FAMILIES[model_type]


def _refuse_what_is_not_causal(config: Mapping[str, Any], source: str) -> None:
    """Rows are padded on the right without a mask, which only a causal model may not see."""
    if config.get("use_bidirectional_attention"):
        raise UserError(
            f"{source}: use_bidirectional_attention lets tokens attend to later ones; only causal "
            "models are supported."
        )
    if config.get("add_cross_attention"):
        raise UserError(
            f"{source}: add_cross_attention makes a decoder of an encoder's output; only models of "
            "their own are supported."
        )


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Every kind of rotary embedding that a config names, at whatever depth."""
    found = set()
    for section in (config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(section, Mapping):
            for part in (section, *section.values()):  # some families have a section a layer type
                if isinstance(part, Mapping):
                    found |= {str(part[key]) for key in ("rope_type", "type") if part.get(key)}
    return found


def _dropout(config: Mapping[str, Any], family: Family, source: str) -> tuple[str, float] | None:
    """The first dropout that is not zero."""
    for key, default in family.dropouts.items():
        value = config.get(key, default)
        value = 0.0 if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{source}: {key} is {value!r}; expected a number.")
        if value > 0:
            return key, float(value)
    return None


def _sliding_layers(
    config: Mapping[str, Any], family: Family, num_layers: int, size: Sizes
) -> list[bool]:
    """For each layer whether it has a sliding window, as transformers' config classes decide."""
    if family.sliding == "all":
        return [bool(config.get("sliding_window", family.default_window))] * num_layers
    if family.sliding == "given":
        return [bool(config.get("sliding_window"))] * num_layers
    if family.sliding == "upper":
        first = size.optional("max_window_layers", 28, least=0)
        windowed = bool(config.get("use_sliding_window"))
        return [windowed and number >= first for number in range(num_layers)]
    if family.sliding == "pattern":
        pattern = size.optional("sliding_window_pattern", family.default_pattern)
        return [(number + 1) % pattern != 0 for number in range(num_layers)]
    return [False] * num_layers
