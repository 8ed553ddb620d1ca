"""The small micro-batch for the twin, with the inputs that a recipe's own collator creates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from accel_scale.modeling.attention import with_document_lengths
from accel_scale.start_check.twin import FIRST_PLAIN_TOKEN, VOCAB_SIZE

# Kinds of rows: flattened packed rows and padded rows of TRL's collator, or rows of a plain loop with (lanes) and
# without (stream) the positions that separate documents.
RowKind = Literal["packed", "padded", "lanes", "stream"]
# Document lengths in the two rows; the second document of the first row is changed to see what it affects.
_DOCUMENTS = ((9, 8, 7), (13, 11))
_SEED = 20


@dataclass(frozen=True)
class TinyBatch:
    """A micro-batch, and the logits that must not change when the end of one document does.

    Attributes:
        inputs: Inputs of the model, including labels.
        changed: The same inputs with other tokens in the second half of one document.
        before: (batch, length) true in that document's unchanged half, where only a non-causal model changes.
        others: (batch, length) true in other documents and other rows.
    """

    inputs: dict[str, torch.Tensor | int]
    changed: dict[str, torch.Tensor | int]
    before: torch.Tensor
    others: torch.Tensor


def tiny_batch(kind: RowKind, attention: str) -> TinyBatch:
    """Two rows of a few documents each, as a run of this `kind` would pass them to a model with that attention."""
    generator = torch.Generator().manual_seed(_SEED)
    packs = kind in ("packed", "lanes")
    lengths: list[tuple[int, ...]] = [row if packs else (sum(row),) for row in _DOCUMENTS]
    if kind == "padded":
        lengths[1] = (lengths[1][0] - 5,)
    rows = [torch.randint(FIRST_PLAIN_TOKEN, VOCAB_SIZE, (sum(row),), generator=generator) for row in lengths]
    begin = lengths[0][0] if packs else 0
    size = lengths[0][1] if packs else lengths[0][0]
    middle, end = begin + size // 2, begin + size
    other = rows[0].clone()
    span = VOCAB_SIZE - FIRST_PLAIN_TOKEN
    other[middle:end] = (other[middle:end] - FIRST_PLAIN_TOKEN + span // 2) % span + FIRST_PLAIN_TOKEN
    inputs, changed = (
        with_document_lengths(_collate(kind, [first, *rows[1:]], lengths), attention) for first in (rows[0], other)
    )
    shape = inputs["input_ids"].shape
    place = torch.arange(shape.numel()).view(shape)  # row 0 comes first, flattened or not
    before = (place >= begin) & (place < middle)
    others = ((place < begin) | (place >= end)) if packs else (place >= shape[1])
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        others = others & mask.bool()
    return TinyBatch(inputs, changed, before, others)


def _collate(kind: RowKind, rows: list[torch.Tensor], lengths: list[tuple[int, ...]]) -> dict[str, torch.Tensor | int]:
    if kind in ("packed", "padded"):
        return _trl_batch(rows, lengths, padding_free=kind == "packed")
    ids = torch.stack(rows)
    labels = ids.clone()
    inputs: dict[str, torch.Tensor | int] = {"input_ids": ids, "labels": labels}
    if kind == "lanes":
        positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
        labels[positions == 0] = -100
        inputs["position_ids"] = positions
    return inputs


def _trl_batch(
    rows: list[torch.Tensor], lengths: list[tuple[int, ...]], *, padding_free: bool
) -> dict[str, torch.Tensor | int]:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=padding_free)
    examples = []
    for row, parts in zip(rows, lengths, strict=True):
        ids = row.tolist()
        # A prompt without loss, as in most data sets, of a third of the row.
        example = {"input_ids": ids, "labels": [-100] * 8 + ids[8:]}
        if padding_free:
            example["seq_lengths"] = list(parts)
        examples.append(example)
    batch: dict[str, torch.Tensor | int] = collator(examples)
    return batch
