"""Ulysses sequence parallelism: ranks hold parts of each row, and exchange positions for heads around attention.

Everything but attention works on single positions, so each of `size` ranks computes T ÷ size of them and keeps only
their activations. Inside attention a rank sees all positions of heads ÷ size heads, so the mathematics, the kernels,
sliding windows and the isolation of packed documents are those of one process. After Jacobs et al., DeepSpeed Ulysses
(arXiv:2309.14509).

    check_sequence_parallel(model.config, size, row_length, attention)
    enable_ulysses(model, group)
    loss = language_model_loss(model, cut_batch(batch, rank, size), num_tokens)   # of this part: losses add up

The gradients of a rank are those of its part: they are summed over the group; if data parallelism averages over the
group, the loss is multiplied by its size, as for data-parallel ranks.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.parallel.sequence_checks import check_sequence_parallel

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "check_sequence_parallel",
    "check_ulysses",
    "cut_batch",
    "enable_ulysses",
    "pad_rows",
    "uncut_rows",
]

_IGNORED_LABEL = -100
_KNOWN_KEYS = {"input_ids", "labels", "position_ids", "attention_mask"}
_UNCUT: ContextVar[bool] = ContextVar("accel_scale_uncut_rows", default=False)


def cut_batch(batch: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return the part of each row that `rank` of `size` ranks holds.

    Labels are shifted before the cut: the last position of a part predicts the first token of the next one. They are
    then called ``shift_labels``, which the fast head and transformers' own loss use without shifting.

    Args:
        batch: ``input_ids`` and optionally ``labels`` (-100: no loss), ``position_ids`` that restart at 0 at each
            packed document, and an ``attention_mask`` with padding on the right. All (batch, T).

    Returns:
        ``input_ids``, ``position_ids`` and, if there are labels, ``shift_labels``. All (batch, T ÷ size).

    Raises:
        ConfigError: if T is not a multiple of `size`, or the batch holds inputs that cannot be cut.
    """
    import torch

    input_ids = batch["input_ids"]
    batch_size, length = input_ids.shape
    if length % size:
        raise ConfigError(
            f"rows of {length} tokens cannot be cut into {size} equal parts.",
            place="--sp_size",
            fix=f"use rows of a multiple of {size} tokens.",
        )
    unknown = sorted(name for name in set(batch) - _KNOWN_KEYS if isinstance(batch[name], torch.Tensor))
    if unknown:
        raise ConfigError(
            f"a batch with {', '.join(unknown)} cannot be cut along its sequences.",
            place="--sp_size",
            fix="leave it out, or use 1.",
        )
    _check_padding(batch.get("attention_mask"))
    position_ids = batch.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(length, device=input_ids.device)[None]
    whole = {"input_ids": input_ids, "position_ids": position_ids.expand(batch_size, length)}
    if batch.get("labels") is not None:
        whole["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=_IGNORED_LABEL)
    part = slice(rank * (length // size), (rank + 1) * (length // size))
    return {name: tensor[:, part].contiguous() for name, tensor in whole.items()}


def pad_rows(batch: Mapping[str, torch.Tensor], size: int, *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad rows to a multiple of `size` tokens, for `cut_batch`; the padding is seen by no token and has no label.

    Args:
        batch: As for `cut_batch`. With position ids, added tokens are documents of one token each.
        size: Ranks that share each row.
        pad_token_id: May be any token of the vocabulary.
    """
    import torch

    missing = -batch["input_ids"].shape[1] % size
    if not missing:
        return dict(batch)
    fillers = {"input_ids": pad_token_id, "labels": _IGNORED_LABEL, "position_ids": 0, "attention_mask": 0}
    return {
        name: torch.nn.functional.pad(tensor, (0, missing), value=fillers[name]) if name in fillers else tensor
        for name, tensor in batch.items()
    }


def _check_padding(attention_mask: torch.Tensor | None) -> None:
    """Check that padding is on the right, which needs no mask, since causal attention does not look there."""
    if attention_mask is None:
        return
    seen = attention_mask.bool()
    if attention_mask.ndim != 2 or not bool((seen[:, :-1] | ~seen[:, 1:]).all()):
        raise ConfigError(
            "rows with padding in front of or between their tokens cannot be cut.",
            place="--sp_size",
            fix="pad on the right, or pack the rows.",
        )


def enable_ulysses(model: Any, sp_group: Any) -> None:
    """Make `model` run on parts of rows from `cut_batch`; in place, before or after it is sharded.

    This changes the forward of the base model, and the entries of transformers' registries for the model's attention
    implementation; see `sequence_attention`. Calls with a cache (generation) and calls inside `uncut_rows` take whole
    rows as before.

    Args:
        model: A `PreTrainedModel` or `PeftModel`, or a pipeline stage of one: split first, then enable each part.
        sp_group: The ranks that share each row, in the order of the parts: a process group, or a device mesh of one
            dimension. Does nothing for one rank.
    """
    from accel_scale.parallel.sequence_attention import wrap_attention
    from accel_scale.parallel.sequence_rotary import use_longest_position

    group = sp_group.get_group() if hasattr(sp_group, "get_group") else sp_group
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if group.size() == 1 or "_ulysses_size" in vars(model):
        return
    for module in model.modules():
        _refuse_weights_of_heads(module)
    use_longest_position(model)
    config = model.config.get_text_config()
    name = wrap_attention(config._attn_implementation)
    if name != config._attn_implementation:
        config._attn_implementation = name
    _wrap_forward(model.base_model, group)
    model._ulysses_size = group.size()


def _refuse_weights_of_heads(module: nn.Module) -> None:
    """Refuse attention sinks and position biases, which have an entry per head; each rank would need its own."""
    for name in ("sinks", "relative_attention_bias"):
        if getattr(module, name, None) is not None:
            raise ConfigError(
                f"{type(module).__name__} has {name}, a weight for each head, which are not divided among ranks.",
                place="--sp_size",
                fix="use 1.",
            )


def _wrap_forward(base_model: Any, group: Any) -> None:
    import torch

    from accel_scale.parallel.sequence_attention import whole_rows_of

    # The function, not the bound method: pipeline stages share it but are different objects.
    previous, size = base_model.forward.__func__, group.size()

    @functools.wraps(type(base_model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _UNCUT.get() or kwargs.get("past_key_values") is not None:
            return previous(self, *args, **kwargs)
        position_ids = kwargs.get("position_ids")
        if position_ids is None or kwargs.get("attention_mask") is not None:
            raise ConfigError(
                "a model with sequence parallelism takes parts of rows with their position ids, and no mask.",
                place="model(…)",
                fix="cut the batch with cut_batch, or call the model inside of uncut_rows().",
            )
        # Given a mask, transformers does not look for packed documents, about which the part knows too little.
        kwargs["attention_mask"] = torch.ones_like(position_ids)
        with whole_rows_of(position_ids, group, size):
            return previous(self, *args, **kwargs)

    base_model.forward = types.MethodType(forward, base_model)


@contextlib.contextmanager
def uncut_rows() -> Iterator[None]:
    """Make models inside take whole rows: each rank computes all of them, without any exchange."""
    token = _UNCUT.set(True)
    try:
        yield
    finally:
        _UNCUT.reset(token)


def check_ulysses(model: Any, sp_group: Any, *, tolerance: float = 1e-3) -> float:
    """Run `model`, for which Ulysses is enabled, on one small packed row, cut and uncut, and compare.

    Catches architectures that mix positions outside of attention or number heads themselves. Costs two forward passes
    over 16 tokens per rank; call it before the model is sharded. Collective.

    Returns:
        The largest difference of hidden states in this rank's part, relative to the largest of them.

    Raises:
        ConfigError: if it is above `tolerance`.
    """
    import torch

    group = sp_group.get_group() if hasattr(sp_group, "get_group") else sp_group
    rank, size = group.rank(), group.size()
    length, device = 16 * size, next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, length), generator=generator)
    # The second document crosses the first cut.
    position_ids = torch.cat([torch.arange(8), torch.arange(length - 8)])[None]
    row = {"input_ids": ids.to(device), "position_ids": position_ids.to(device)}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        cut = model.base_model(**cut_batch(row, rank, size), use_cache=False).last_hidden_state
        with uncut_rows():
            whole = model.base_model(**row, use_cache=False).last_hidden_state
    model.train(was_training)
    part = whole.chunk(size, 1)[rank]
    worst = ((cut - part).abs().max() / part.abs().max().clamp(min=1e-6)).float()
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX, group=group)
    if not worst.item() <= tolerance:
        raise ConfigError(
            f"{type(model).__name__} does not compute the same on parts of a row: off by {worst.item():.1e}.",
            place="--sp_size",
            fix="use 1 for this model.",
        )
    return worst.item()
