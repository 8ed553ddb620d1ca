"""Random states of one rank: captured, restored, and derived for ranks that a checkpoint lacks."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def take_random_states(device: torch.device) -> dict[str, Any]:
    """States of python, numpy, torch and this rank's accelerator, in a form for `torch.load(weights_only=True)`."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),  # type: ignore[union-attr, attr-defined]
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        # Only this rank's device: the number of visible devices may differ when the run resumes.
        states[device.type] = torch.get_device_module(device).get_rng_state(device).cpu()
    return states


def put_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the states of `take_random_states`; an accelerator without a saved state keeps its own."""
    kind, keys, position, has_gauss, cached = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def derive_random_states(seed: int, step: int, rank: int) -> int:
    """Seed everything for a rank that the checkpoint lacks: deterministic in seed, step and rank, unrelated otherwise.

    Returns:
        The derived seed.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") % 2**63
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)  # seeds every accelerator as well
    return derived
