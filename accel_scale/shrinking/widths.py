"""Heads, widths and experts of a shrunken configuration."""

from __future__ import annotations

from typing import Any

from accel_scale.shrinking.layers import Stored, first_of, set_all
from accel_scale.shrinking.rotation import LATENT_PARTS, is_sum_of_parts, shrink_rope
from accel_scale.shrinking.sizes import (
    AS_WIDE,
    EXPAND,
    EXPERTS_PER_TOKEN,
    FEED_FORWARD,
    HEAD_DIM,
    HIDDEN,
    LIMITS,
    NUM_EXPERTS,
    NUM_HEADS,
    NUM_KV_HEADS,
    STATE_HEADS,
)


def shrink_widths(old: Stored, new: dict[str, Any]) -> None:
    """Write heads and widths to `new`; see `shrink_config` for the ratios that stay."""
    hidden, heads = first_of(old, HIDDEN), first_of(old, NUM_HEADS, default=4)
    kv_heads = first_of(old, NUM_KV_HEADS, default=heads)
    group = min(8, heads // kv_heads)
    new_kv_heads = min(kv_heads, 4 if group == 1 else 2)
    new_heads = new_kv_heads * group
    set_all(new, NUM_HEADS, new_heads)
    set_all(new, NUM_KV_HEADS, new_kv_heads)
    attention_is_as_wide = not old.get("head_dim") or old["head_dim"] * heads == hidden
    new_hidden = new_heads * HEAD_DIM + (0 if attention_is_as_wide else 2 * HEAD_DIM)
    set_all(new, HIDDEN, new_hidden)
    if old.get("head_dim"):
        new["head_dim"] = HEAD_DIM
    _shrink_feed_forward(old, new, new_hidden / hidden)
    for key in ("d_head", "attention_head_dim"):
        if isinstance(old.get(key), int):
            new[key] = new.get("attention_hidden_size", new_hidden) // new_heads
    for key, limit in LIMITS.items():
        if isinstance(old.get(key), int):
            new[key] = min(old[key], limit)
    if isinstance(old.get("qk_head_dim"), int):
        new["qk_head_dim"] = new["qk_nope_head_dim"] + new["qk_rope_head_dim"]
    if is_sum_of_parts(old):
        new["head_dim"] = sum(new[key] for key in LATENT_PARTS)
    set_all(new, [key for key in AS_WIDE if old.get(key) == hidden or key == "word_embed_proj_dim"], new_hidden)
    if "rope_parameters" in old:
        new["rope_parameters"] = shrink_rope(old["rope_parameters"], old, hidden // heads)
    if "axial_pos_embds_dim" in old:  # Reformer's positions are two parts of the hidden size
        new["axial_pos_embds_dim"] = [new_hidden // 4, new_hidden - new_hidden // 4]
    for changes in (new.get("per_layer_config") or {}).values():
        _shrink_changes(changes, old, new)


def _shrink_changes(changes: dict[str, Any], old: Stored, new: Stored) -> None:
    """Shrink the sizes that one layer has instead of the model's own."""
    before = {**old, **changes}
    _shrink_heads(changes, new)
    changes |= {key: min(changes[key], limit) for key, limit in LIMITS.items() if isinstance(changes.get(key), int)}
    if "head_dim" in changes:
        changes["head_dim"] = 2 * HEAD_DIM
    if is_sum_of_parts(before):
        changes["head_dim"] = sum({**new, **changes}[key] for key in LATENT_PARTS)


def _shrink_feed_forward(old: Stored, new: dict[str, Any], ratio: float) -> None:
    for key in FEED_FORWARD:
        if isinstance(old.get(key), int):
            new[key] = _scaled(old[key], ratio)
        elif isinstance(old.get(key), list):
            new[key] = [_scaled(width, ratio) for width in new[key]]


def shrink_section(section: Stored, old: Stored, new: Stored) -> dict[str, Any]:
    """Shrink the sizes of attention, experts or an encoder in a separate dictionary, as in DBRX and GIT."""
    small, hidden = dict(section), first_of(new, HIDDEN)
    set_all(small, HIDDEN, hidden)
    _shrink_heads(small, new)
    _shrink_feed_forward(section, small, hidden / first_of(old, HIDDEN))
    shrink_experts(section, small)
    return small


def _shrink_heads(small: dict[str, Any], new: Stored) -> None:
    set_all(small, NUM_HEADS, first_of(new, NUM_HEADS, default=1))
    set_all(small, NUM_KV_HEADS, first_of(new, (*NUM_KV_HEADS, *NUM_HEADS), default=1))


def _scaled(width: int, ratio: float) -> int:
    return max(HEAD_DIM, round(width * ratio / HEAD_DIM) * HEAD_DIM)


def shrink_states(new: dict[str, Any]) -> None:
    """Set the heads of state-space layers to fill `expand` times the hidden size."""
    expand = first_of(new, EXPAND, default=0)
    for heads, head_dim in STATE_HEADS if expand else ():
        if new.get(heads) is not None and new.get(head_dim) is not None:
            new[head_dim] = HEAD_DIM
            new[heads] = expand * first_of(new, HIDDEN) // HEAD_DIM
            new |= {"mamba_d_ssm": new[heads] * HEAD_DIM} if new.get("mamba_d_ssm") is not None else {}


def shrink_experts(old: Stored, new: dict[str, Any]) -> None:
    """Write the numbers of experts, and of those of a token, to `new`."""
    for key in NUM_EXPERTS:
        if isinstance(old.get(key), int):
            new[key] = min(old[key], 4)
    for key in EXPERTS_PER_TOKEN:
        if isinstance(old.get(key), int):
            new[key] = min(old[key], 2)
