"""Where a config.json comes from: a file, the hub's local cache, or the hub itself. No torch."""

from __future__ import annotations

import json
import re
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from shardwise.errors import UserError

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
_HALF = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[-.](?![-.]))*(?<![-.])"
_HUB_ID = re.compile(f"{_HALF}/{_HALF}")
_TIMEOUT_S = 10.0


def is_hub_id(text: str) -> bool:
    """Whether a text is of the form OWNER/NAME, as the hub allows it."""
    return _HUB_ID.fullmatch(text) is not None


def read_config(file: Path) -> dict[str, Any]:
    """The content of a model's or adapters' config file.

    Raises:
        UserError: the file is not readable, or holds no JSON object.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file} as JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} holds no JSON object.")
    return config


def cached_directory(hub_id: str) -> Path | None:
    """Where the local hub cache has the files of a model; None: it has no config.json of it."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, CONFIG_FILE)
    return Path(found).parent if isinstance(found, str) else None


def name_of(directory: str | Path) -> str:
    """What people call the model in a directory, which in the hub cache is named by a revision."""
    path = Path(directory)
    if path.parent.name == "snapshots":
        return path.parent.parent.name.split("--")[-1]
    return path.name


def fetch_config(hub_id: str, hint: str) -> dict[str, Any]:
    """A model's config.json from the hub, which nothing else is fetched from.

    Args:
        hint: the end of what is said where that fails.

    Raises:
        UserError: the hub cannot be reached, has no such model, or wants a login.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    request = Request(hf_hub_url(hub_id, CONFIG_FILE))
    for key, value in build_hf_headers().items():  # a login is not for where a redirect leads
        request.add_unredirected_header(key, value)
    try:
        if constants.HF_HUB_OFFLINE:
            raise URLError("HF_HUB_OFFLINE is set")
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            config = json.loads(response.read())
    except HTTPError as error:
        raise UserError(_refused(hub_id, error, hint)) from None
    except (OSError, HTTPException) as error:  # no network, no answer, half an answer
        reason = getattr(error, "reason", error)
        raise UserError(
            f"{hub_id!r} is not in the local hub cache, and the hub cannot be reached ({reason}): "
            f"give a directory with {CONFIG_FILE}, or that file{hint}"
        ) from None
    except ValueError as error:
        raise UserError(f"the hub's {CONFIG_FILE} of {hub_id!r} is no JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"the hub's {CONFIG_FILE} of {hub_id!r} holds no JSON object.")
    return config


def _refused(hub_id: str, error: HTTPError, hint: str) -> str:
    if error.headers.get("X-Error-Code") == "GatedRepo":
        return (
            f"the hub gives {hub_id!r} only to those who have accepted its terms: do that there, "
            f"then `hf auth login`{hint}"
        )
    return (
        f"the hub has no {CONFIG_FILE} of {hub_id!r} for you (HTTP {error.code}); for a private "
        f"model `hf auth login` first{hint}"
    )
