"""Check once whether the hub can be reached: its client would retry for half a minute or more per file."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path

from accel_scale.errors import ConfigError

_SECONDS = 2.0
_TRUE = ("1", "on", "yes", "true")
# Read by the libraries at import (huggingface_hub 1.x, transformers 5.23, datasets 5.2).
_OFFLINE = {
    "model": ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    "dataset": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}


def require_on_hub(name: str, *, kind: str, place: str) -> None:
    """Refuse a name on the hub that is neither in the local cache nor within reach.

    If it is in the cache and the hub is out of reach, the libraries are told so (``HF_HUB_OFFLINE``): call this before
    they are imported.

    Args:
        name: ``owner/name``.
        kind: ``model`` or ``dataset``.
        place: The setting that names it.

    Raises:
        ConfigError: if the name is not available.
    """
    variable = next((v for v in _OFFLINE[kind] if os.environ.get(v, "").lower() in _TRUE), None)
    if variable is None:
        unreachable = unreachable_hub()
        if unreachable is None:
            return
    if is_cached(name, kind):
        if variable is None:
            print(f"warning: {unreachable} cannot be reached: {name} comes from the local cache.", file=sys.stderr)
            os.environ["HF_HUB_OFFLINE"] = "1"
        return
    why = f"{variable} is set" if variable is not None else f"{unreachable} cannot be reached"
    raise ConfigError(
        f"there is no folder or file {name!r}, {why}, and the local cache of the hub does not have it.",
        place=place,
        fix=f"give the path of the {kind}, or download it where there is a network: hf download {name}"
        + " --repo-type dataset" * (kind == "dataset"),
    )


def give_up_if_unreachable() -> None:
    """If the hub is out of reach, make its client read only the cache from here on: it would wait for seconds."""
    if not os.environ.get("HF_HUB_OFFLINE") and unreachable_hub() is not None:
        os.environ["HF_HUB_OFFLINE"] = "1"


@functools.lru_cache(maxsize=1)
def unreachable_hub() -> str | None:
    """The hub's host if it does not answer within two seconds, else None. Behind a proxy, its client finds out."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    address = urllib.parse.urlsplit(endpoint)
    if address.hostname is None or urllib.request.getproxies().get(address.scheme):
        return None
    host, port = address.hostname, address.port or (80 if address.scheme == "http" else 443)
    answered: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_SECONDS):
            answered.append(True)

    # Name resolution has no timeout of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return None if answered else host


def is_cached(name: str, kind: str) -> bool:
    """True if the local cache has any version of `name`."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()
    if any((hub / f"{kind}s--{name.replace('/', '--')}" / "snapshots").glob("*/*")):
        return True
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    return kind == "dataset" and (prepared / name.replace("/", "___")).is_dir()
