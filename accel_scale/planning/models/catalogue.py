"""Finds a model's facts by name: the built-in catalogue, a local config.json, or the hub."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError, first_line
from accel_scale.facts.special_floats import read_config_json
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import facts_of_any, shipped_facts

_DATA = Path(__file__).parent / "data" / "models.json"


@functools.cache
def _catalogue() -> dict[str, Any]:
    return json.loads(_DATA.read_text(encoding="utf-8"))


@functools.cache
def _names() -> dict[str, str]:
    """The catalogue's entry for every lower-case name: full names, and names without the owner."""
    owners = {name.lower(): entry for entry, item in _catalogue().items() for name in (entry, *item["variants"])}
    short: dict[str, str] = {}
    for name, entry in owners.items():
        short.setdefault(name.rpartition("/")[2], entry)
    return {**short, **owners}


def catalogue_names() -> tuple[str, ...]:
    """Names of the catalogue's entries: the models known without a network."""
    return tuple(_catalogue())


def catalogue_config(model: str) -> dict[str, Any] | None:
    """The config.json of a model in the catalogue, by any of its names; None for other models."""
    entry = _names().get(model.lower())
    return dict(_catalogue()[entry]["config"]) if entry is not None else None


def load_model_facts(model: str, *, allow_download: bool = True) -> ModelFacts:
    """Facts of a model, from the folder or config.json at that path, the catalogue's entry, or the hub's config.

    Only ``config.json`` is read, as JSON: no code from the hub runs and no weights are fetched.

    Args:
        model: A path, a catalogue name with or without its owner (in any case), or a hub name ``owner/name``.
        allow_download: Whether a config that is not in the local cache may be fetched. ``HF_HUB_OFFLINE`` is obeyed.

    Raises:
        ConfigError: if there is no such model, its config cannot be read, or its architecture is not modelled.
    """
    if not isinstance(model, str) or not model.strip():
        raise ConfigError("no model is named.", place="model", fix="give a name, a folder or a config.json.")
    path = Path(model).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return _facts_from_file(path if path.is_file() else path / "config.json", name=model)
    entry = _names().get(model.lower())
    if entry is not None:
        item = _catalogue()[entry]
        if "facts" in item:
            return shipped_facts(item["facts"], item["config"], name=model)
        return facts_of_any(item["config"], name=model, place=f"catalogue entry {entry}")
    if path.is_dir():
        raise ConfigError("the folder holds no config.json.", place=model, fix="give the folder of a saved model.")
    return _facts_from_file(_hub_config(model, allow_download), name=model)


def is_on_hub(model: str) -> bool:
    """True if `model` can only be found on the hub: ``owner/name`` that is neither a path nor in the catalogue."""
    if Path(model).expanduser().exists() or model.lower() in _names():
        return False
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not model.endswith("/")


def _facts_from_file(path: Path, *, name: str) -> ModelFacts:
    try:
        config = read_config_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ConfigError(f"cannot read it: {reason}.", place=str(path), fix="give a config.json.") from None
    if not isinstance(config, Mapping):
        raise ConfigError("it is not a JSON object.", place=str(path), fix="give a model's config.json.")
    return facts_of_any(config, name=name, place=str(path))


def full_names() -> tuple[str, ...]:
    """``owner/name`` of every model in the catalogue, variants included."""
    names = (name for entry, item in _catalogue().items() for name in (entry, *item["variants"]))
    return tuple(name for name in names if "/" in name)


def _hub_config(model: str, allow_download: bool) -> Path:
    """The path of the hub's config.json. Only ``owner/name`` is looked up: a bare name is a typo or a local folder."""
    if not is_on_hub(model):
        raise _not_found(model, "no catalogue name and no folder")
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except ValueError as error:
        raise _not_found(model, first_line(error)) from None
    if isinstance(cached, str):
        return Path(cached)
    if not allow_download or constants.HF_HUB_OFFLINE:
        raise _not_found(model, "not in the catalogue or the local cache, and the hub is out of reach or switched off")
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"))  # asks once; the download would retry for half a minute
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as error:
        raise _not_found(model, f"not in the catalogue, and the hub answers {type(error).__name__}") from None
    except Exception as error:
        # Connection errors come from the hub client's HTTP library, whose name changes (httpx, httpx2).
        if not type(error).__module__.startswith("httpx"):
            raise
        raise _not_found(model, f"not in the catalogue, and the hub cannot be reached ({error})") from None


def _not_found(model: str, reason: str) -> ConfigError:
    wanted = model.lower()
    known = {name.rpartition("/")[2]: entry for name, entry in reversed(_names().items())}
    near = difflib.get_close_matches(wanted.rpartition("/")[2], known, n=4, cutoff=0.5)
    entries = ", ".join(dict.fromkeys(known[name] for name in near)) or "gpt2, meta-llama/Llama-3.1-8B, Qwen/Qwen3-8B"
    return ConfigError(
        f"no model {model!r}: {reason}.",
        place="model",
        fix=f"use one of {entries}, owner/name from the hub, or a folder with a config.json.",
    )
