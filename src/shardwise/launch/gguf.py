"""A GGUF file as a source to export from: config and tokenizer by transformers, weights by us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.models.facts import ModelFacts
from shardwise.models.gguf import check_count, config_of_gguf, read_header
from shardwise.models.hub import CONFIG_FILE
from shardwise.models.read import facts_of_config, read_facts
from shardwise.weights.gguf import open_gguf, why_not_read
from shardwise.weights.index import WeightIndex


def open_source(path: Path, folder: Path) -> tuple[WeightIndex, ModelFacts]:
    """The weights of a GGUF file, and what makes them a model.

    Args:
        folder: gets config.json and the tokenizer.

    Raises:
        UserError: the file is not whole, is not read, or the package `gguf` is missing.
    """
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    header = read_header(path)
    reason = why_not_read(header)
    if reason is not None:
        raise UserError(f"{path} is not read: {reason}; give the model that it was made of.")
    facts = facts_of_config(config_of_gguf(header), source=str(path), planning=True)
    check_count(header, facts)
    index = open_gguf(header, facts, folder)
    config, tokenizer = _parts(path)
    tokenizer.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    # transformers knows of rotation and special tokens, and not of every size
    theirs = {key: value for key, value in config.to_diff_dict().items() if key[0] != "_"}
    whole = {**theirs, **config_of_gguf(header)}
    whole["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[whole["model_type"]]]
    (folder / CONFIG_FILE).write_text(json.dumps(whole, indent=2), encoding="utf-8")
    return index, read_facts(folder)


def _parts(path: Path) -> list[Any]:
    """Config and tokenizer as transformers makes them of the header."""
    import transformers

    transformers.logging.set_verbosity_error()
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        return [
            kind.from_pretrained(str(path.parent), **where)
            for kind in (transformers.AutoConfig, transformers.AutoTokenizer)
        ]
    except Exception as error:  # the library has no error of its own for this
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: transformers cannot read its tokenizer: {reason}") from None
