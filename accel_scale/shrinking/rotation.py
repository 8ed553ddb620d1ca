"""What rotary positions depend on, in the size of a smaller head: frequencies, their sections, the rotated part."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from accel_scale.shrinking.layers import Stored
from accel_scale.shrinking.sizes import HEAD_DIM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Parts of a head with latent attention: without and with rotation.
LATENT_PARTS = ("qk_nope_head_dim", "qk_rope_head_dim")
# Frequencies of time, height and width in rotary positions of images.
_SECTIONS = "mrope_section"


def shrink_rope(rope: object, old: Stored, default_head_dim: int) -> object:
    """Cut per-frequency lists (longrope's factors) to the frequencies of the smaller head."""
    if not isinstance(rope, dict):
        return rope
    old_head_dim = old.get("head_dim") or default_head_dim

    def cut(value: object) -> object:
        if isinstance(value, dict):
            small = {key: cut(item) for key, item in value.items()}
            return small | ({_SECTIONS: _sections(value)} if value.get(_SECTIONS) else {})
        if isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
            return value[: max(1, len(value) * HEAD_DIM // old_head_dim)]
        return value

    return cut(rope)


def state_sections(small: PreTrainedConfig) -> None:
    """State the sections of a smaller head for classes that else assume those of a head of 128 values."""
    rope = getattr(small, "rope_parameters", None)
    if rope and isinstance(rope, dict) and _SECTIONS in getattr(small, "ignore_keys_at_rope_validation", ()):
        # Some classes have parameters for each type of layer, or fill them in later.
        for part in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
            part.setdefault(_SECTIONS, _sections(part))


def _sections(rope: Stored) -> list[int]:
    """The frequencies of a smaller head, divided as in `rope`, or as classes do without the key."""
    sections: list[int] = rope.get(_SECTIONS) or [16, 24, 24]
    total = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    ends = [round(total * sum(sections[: number + 1]) / sum(sections)) for number in range(len(sections))]
    shares = [max(1, end - begin) for begin, end in itertools.pairwise([0, *ends])]
    return [*shares[:-1], total - sum(shares[:-1])]


def is_sum_of_parts(stored: Stored) -> bool:
    """True if a head's size is that of its parts with and without rotation (DeepSeek's is that of the one with)."""
    parts = [part for key in LATENT_PARTS if isinstance(part := stored.get(key), int)]
    return len(parts) == len(LATENT_PARTS) and sum(parts) == stored.get("head_dim")
