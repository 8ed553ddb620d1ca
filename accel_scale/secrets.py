"""Credentials: recognise settings that hold them, and mask them in texts."""

from __future__ import annotations

import os
import re
from typing import Any

_NAME = re.compile(r"^(token|.*(hub|access|auth|api|bearer)_?(token|key))$|password|secret", re.IGNORECASE)
_MASK = "***"
# Tokens of the hub and other services, recognised by their prefixes.
_TOKEN = re.compile(r"\b(hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}")
_IN_URL = re.compile(r"(?<=://)(?:([^/\s@:]*:)[^/\s@]*|[^/\s@]+)(?=@)")
_IN_QUERY = re.compile(
    r"(?i)(?<=[?&;])([\w.-]*(?:token|key|password|secret|signature|sig|credential)=)[^&\s'\"]*[^&\s'\".,:]"
)
_AFTER_FLAG = re.compile(
    r"(?i)(--(?:token|[\w-]*(?:(?:hub|access|auth|api|bearer)[_-]?(?:token|key)|password|secret))"
    r"(?:=|\s+(?=\S{16})))[^\s'\",\]]+"
)


def is_secret(name: str) -> bool:
    """True if a setting of this name holds a credential."""
    return bool(_NAME.search(name))


def mask(text: str) -> str:
    """Mask credentials in URLs, tokens, and the values of credential flags in `text`."""
    text = _IN_URL.sub(lambda found: f"{found[1] or ''}{_MASK}", text)
    text = _IN_QUERY.sub(rf"\1{_MASK}", text)
    text = _TOKEN.sub(rf"\1{_MASK}", text)
    return _AFTER_FLAG.sub(rf"\1{_MASK}", text)


def move_token_to_environment(arguments: Any) -> None:
    """Move ``hub_token`` out of transformers' arguments, which get saved, to where the hub's client looks for it.

    The Trainer writes ``training_args.bin`` into every checkpoint and prints its arguments (transformers 5.23).
    """
    if getattr(arguments, "hub_token", None):
        os.environ["HF_TOKEN"] = arguments.hub_token
        arguments.hub_token = None


def without_secrets(value: object) -> Any:
    """`value` without mapping entries that name a credential, and with credentials in texts masked."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items() if not (isinstance(k, str) and is_secret(k))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    return mask(value) if isinstance(value, str) else value
