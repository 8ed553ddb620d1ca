"""Random states of one rank: taken, restored, and derived for ranks that a checkpoint does not have."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def take_random_states(device: torch.device) -> dict[str, Any]:
    """Of python, numpy, torch and this rank's own accelerator, as `torch.load(weights_only=True)` reads them."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),  # type: ignore[union-attr, attr-defined]
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        # This rank's device only: how many others it sees may have changed when the run goes on.
        states[device.type] = torch.get_device_module(device).get_rng_state(device).cpu()
    return states


def put_random_states(states: dict[str, Any], device: torch.device) -> None:
    """The reverse of `take_random_states`; an accelerator that was not there keeps its state."""
    kind, keys, position, has_gauss, cached = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def derive_random_states(seed: int, step: int, rank: int) -> int:
    """Seed everything for a rank that no checkpoint knows: the same for the same seed, step and rank, else unrelated.

    Returns:
        What it was seeded with.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") % 2**63
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)  # every accelerator's as well
    return derived
