"""How many of the head's logits the chunked loss holds at once, for both training and the planner."""

from __future__ import annotations

# Small enough for a CPU's caches.
CPU_LOGITS = 2**22
# Enough to keep a large card's matrix units busy.
CARD_LOGITS = 2**28
# For a model whose layers run in tiles: as much memory as one tile takes.
LONG_ROWS_LOGITS = 2**26
# Above this size the head's gradient is computed in the backward pass, where the activations are already being
# freed, at the price of computing the logits a second time.
HEAD_GRAD_IN_FORWARD_BYTES = 256 * 2**20
# A logit takes 16 bytes at the peak: the product, its fp32 copy, its probability and its gradient. Together they may
# take a thirteenth of a card, which puts cards of 12, 16, 24, 40 and 48 GB well between two powers of two, so that
# memory reserved by the driver does not change the result.
_LOGIT_BYTES, _SHARE = 16, 13


def card_logits(card_bytes: float) -> int:
    """Logits per chunk for a frozen head on a card of this memory: 2²⁸ from 52 GiB up, a lower power of two below.

    A trained head uses `CARD_LOGITS` on every card: its gradient is summed over the chunks in fp32, which takes more
    memory than smaller chunks would save.
    """
    return min(CARD_LOGITS, 1 << max(0, int(card_bytes / _SHARE / _LOGIT_BYTES).bit_length() - 1))


def chunk_tokens(logits: int, vocab_size: int, *, long_rows: bool = False) -> int:
    """Tokens in a chunk of `logits` logits, or of fewer for `long_rows`; at least 64."""
    return max(64, (min(logits, LONG_ROWS_LOGITS) if long_rows else logits) // vocab_size)
