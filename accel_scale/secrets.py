"""Credentials: which settings hold them, and texts with them removed."""

from __future__ import annotations

import os
import re
from typing import Any

_NAME = re.compile(r"^(token|.*(hub|access|auth|api|bearer)_?(token|key))$|password|secret", re.IGNORECASE)
_MASK = "***"
# Tokens of the hub and of others that begin in a way of their own.
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
    """Whether a setting of this name holds a credential."""
    return bool(_NAME.search(name))


def mask(text: str) -> str:
    """`text` with credentials in URLs, tokens, and the values of flags that hold them replaced."""
    text = _IN_URL.sub(lambda found: f"{found[1] or ''}{_MASK}", text)
    text = _IN_QUERY.sub(rf"\1{_MASK}", text)
    text = _TOKEN.sub(rf"\1{_MASK}", text)
    return _AFTER_FLAG.sub(rf"\1{_MASK}", text)


def move_token_to_environment(arguments: Any) -> None:
    """``hub_token`` of transformers' arguments goes where the hub's client looks for it: they are saved as they are.

    The Trainer writes ``training_args.bin`` into every checkpoint and prints its arguments (transformers 5.23).
    """
    if getattr(arguments, "hub_token", None):
        os.environ["HF_TOKEN"] = arguments.hub_token
        arguments.hub_token = None


def without_secrets(value: object) -> Any:
    """`value` with every mapping entry that names a credential removed, and credentials within texts masked."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items() if not (isinstance(k, str) and is_secret(k))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    return mask(value) if isinstance(value, str) else value
