"""transformers' attention and mask functions on whole rows whose positions are on several ranks.

A model's own forward asks transformers for its masks, once per kind of layer, and passes them to its layers, which
pass them to the attention function. Both functions are looked up by name in transformers' registries. Here they are
wrapped: inside `whole_rows_of` the mask is built for whole rows and wrapped in `WholeRowMask`; attention that gets
such a mask exchanges heads before and back afterwards; all other calls pass through. So everything that attention
needs travels with the mask, also through activation checkpointing, and a model without sequence parallelism in the
same process is not affected. Checked on transformers 5.23.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accel_scale.parallel.sequence_exchange import gather_positions, to_parts, to_whole_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# `eager` is not in transformers' registry, but a function of each model's module, found by this name.
EAGER = "eager"
EAGER_ULYSSES = "eager_ulysses"
_EAGER_FUNCTION = "eager_attention_forward"


@dataclass(frozen=True)
class WholeRowMask:
    """The facts about whole rows that the attention of one kind of layer needs.

    Args:
        mask: The mask that the attention function would get in one process, in its own shape.
        group: Process group of the ranks that share the rows.
        size: Number of these ranks.
        keywords: Further arguments of the attention function, replacing those for this rank's positions.
    """

    mask: Any
    group: ProcessGroup | None
    size: int
    keywords: dict[str, Any]


@dataclass
class _Rows:
    """The whole rows of the current forward pass."""

    position_ids: torch.Tensor
    group: ProcessGroup | None
    size: int
    document_ids: torch.Tensor | None = None
    num_masks: int = 0
    lengths: dict[str, Any] | None = field(default=None)


_ROWS: ContextVar[_Rows | None] = ContextVar("accel_scale_whole_rows", default=None)


@contextlib.contextmanager
def whole_rows_of(position_ids: torch.Tensor, group: Any, size: int) -> Iterator[None]:
    """Build masks inside for the whole rows; this rank holds their `position_ids`, (batch, T ÷ size).

    Collective over `group`: position ids are gathered once.

    Raises:
        RuntimeError: if no mask was requested inside, so that attention cannot have seen the whole rows.
    """
    from transformers.masking_utils import find_packed_sequence_indices

    whole = gather_positions(position_ids, group, size)
    rows = _Rows(whole, group, size, find_packed_sequence_indices(whole))
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)
    if rows.num_masks == 0:
        raise RuntimeError("The model asked transformers for no attention mask: its attention saw this part only.")


def current_positions() -> torch.Tensor | None:
    """Position ids of the whole rows, (batch, T), in a forward pass over parts of them; otherwise None."""
    rows = _ROWS.get()
    return None if rows is None else rows.position_ids


def wrap_attention(name: str) -> str:
    """Wrap the attention and mask functions that transformers registers as `name`; repeating it is harmless.

    Returns:
        The name that the model must use: `name`, or another one for ``eager``.

    Raises:
        KeyError: if transformers builds no masks for `name`.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    mask_function = ALL_MASK_ATTENTION_FUNCTIONS[name]
    attend = _attend_eagerly if name == EAGER else ALL_ATTENTION_FUNCTIONS[name]
    target = EAGER_ULYSSES if name == EAGER else name
    if not hasattr(mask_function, "wrapped_for_whole_rows"):
        AttentionMaskInterface.register(target, _wrapped_mask(mask_function, is_flash="flash" in name))
    if not hasattr(attend, "wrapped_for_whole_rows"):
        AttentionInterface.register(target, _wrapped_attention(attend))
    return target


def _wrapped_mask(original: Callable[..., Any], *, is_flash: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Any:
        rows = _ROWS.get()
        if rows is None:
            return original(*args, **kwargs)
        rows.num_masks += 1
        if is_flash:  # takes no mask: it has its own windows, and documents are given as lengths
            return WholeRowMask(None, rows.group, rows.size, _flash_keywords(rows))
        found = original(*args, **{**kwargs, **_whole_row_arguments(rows, kwargs["mask_function"])})
        return WholeRowMask(found, rows.group, rows.size, {"position_ids": rows.position_ids})

    mask.wrapped_for_whole_rows = True  # type: ignore[attr-defined]
    return mask


def _whole_row_arguments(rows: _Rows, mask_function: Callable[..., Any]) -> dict[str, Any]:
    """Mask arguments for whole rows, replacing those for this rank's part, which the model takes for whole rows.

    `mask_function` is the layer's pattern, a function of indices. It does not include packed documents yet: the model
    was given an attention mask, with which transformers does not look for them.
    """
    from transformers.masking_utils import packed_sequence_compatibility_function

    length = rows.position_ids.shape[1]
    arguments: dict[str, Any] = {
        "q_length": length,
        "kv_length": length,
        "q_offset": 0,
        "kv_offset": 0,
        "attention_mask": None,
    }
    if rows.document_ids is not None:
        arguments["mask_function"] = packed_sequence_compatibility_function(
            mask_function, rows.position_ids, rows.document_ids
        )
        arguments["allow_is_causal_skip"] = False
    return arguments


def _flash_keywords(rows: _Rows) -> dict[str, Any]:
    """Arguments for FlashAttention's variable lengths, if rows are packed."""
    if rows.document_ids is None:
        return {"position_ids": None}
    if rows.lengths is None:
        rows.lengths = document_lengths(rows.document_ids)
    return {"position_ids": None, **rows.lengths}


def document_lengths(document_ids: torch.Tensor) -> dict[str, Any]:
    """transformers' arguments for FlashAttention's variable lengths, for packed rows laid end to end.

    Args:
        document_ids: (batch, T), rising within each row.
    """
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = is_start.flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(starts, (0, 1), value=document_ids.numel()).to(torch.int32)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _wrapped_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        *args: object,
        **kwargs: object,
    ) -> Any:
        if not isinstance(attention_mask, WholeRowMask):
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        rows = attention_mask
        q, k, v = to_whole_rows(query, key, value, rows.group, rows.size)
        with _key_groups(module, q.shape[1] // k.shape[1]):
            output = original(module, q, k, v, rows.mask, *args, **{**kwargs, **rows.keywords})[0]
        return to_parts(output, rows.group, rows.size), None

    attend.wrapped_for_whole_rows = True  # type: ignore[attr-defined]
    return attend


def _attend_eagerly(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
    """Call the eager attention of the module that defines the model's attention."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), _EAGER_FUNCTION, None)
        if function is not None:
            return function(module, *args, **kwargs)
    raise RuntimeError(f"{type(module).__name__} has no {_EAGER_FUNCTION}.")


@contextlib.contextmanager
def _key_groups(module: torch.nn.Module, number: int) -> Iterator[None]:
    """Set `module`'s queries per key head to `number`, which differs if key heads were sent to several ranks."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == number:
        yield
        return
    module.num_key_value_groups = number  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before
