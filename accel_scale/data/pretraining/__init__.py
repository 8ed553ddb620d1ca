"""Pretraining data: text of any size, tokenised while training or before, in an order that resumes at once.

    tokenizer = load_pretraining_tokenizer("gpt2")             # or "byte", or "char" with texts=sample_texts(data)
    data = open_pretraining_data("corpus.jsonl", tokenizer=tokenizer, row_length=1024, validation_share=0.01)
    loader = data.train_loader(global_batch_size=64, micro_batch_size=8, rank=0, world_size=4, num_workers=2)
    for step in loader:                                        # one optimizer step
        for micro_batch in step.micro_batches:                 # 64 / (8 * 4) = 2 of them
            ...                                                # input_ids, labels [, position_ids]: (8, 1024) int64
        state = loader.state_dict()                            # of this rank, after this step

Signatures (all raise `ConfigError` for what cannot be honoured):

* `open_pretraining_data(data, *, tokenizer, row_length, seed=42, text_column="text", text_documents="file",
  isolate_documents=False, validation_share=0.0, validation_data=None) -> PretrainingData`
* `PretrainingData.train_loader(*, global_batch_size, micro_batch_size, rank=0, world_size=1, num_workers=0,
  state=None, pin_memory=False) -> TrainLoader`: an endless iterator of `TrainStep`; `TrainStep.micro_batches` is a
  list of dicts of tensors for ``model(**micro_batch)``, `.row_ids` the lists of their rows' ids, `.num_predicted` the
  number of labels of the step on this rank that are predicted. `TrainLoader.state_dict()`, `.wait_seconds` (total),
  `.last_wait_seconds`, `.close()`; it is also a context manager.
* `PretrainingData.validation_loader(*, micro_batch_size, rank=0, world_size=1, max_rows=None) -> ValidationLoader`:
  can be iterated repeatedly and yields dicts of tensors, equally many on every rank; raises if there is no validation
  data, which `PretrainingData.has_validation` tells.
* `PretrainingData.row_text(row_id) -> str`, `.sources` (tuple of `SourceFacts`), `.notes` (lines for the user),
  `.estimate_tokens() -> TokenEstimate(tokens, exact)` of one epoch of training data.
* `merge_states(states) -> dict`: all ranks' states into one JSON-able dict, from which any number of ranks resumes.
* `load_pretraining_tokenizer(name, *, texts=None) -> PreTrainedTokenizerFast`
* `train_tokenizer(texts, vocab_size) -> PreTrainedTokenizerFast`
* `sample_texts(data, *, text_column="text", text_documents="file", validation_share=0.0, max_bytes=64 MiB)
  -> Iterator[str]`
* `prepare_data(data, *, tokenizer, output_dir, text_column="text", text_documents="file", num_workers=None)
  -> PreparedSummary`

The global batch of step k depends on the data, the seed, `global_batch_size` and `row_length`, and on nothing else, in
particular not on the number of ranks or workers or on the micro-batch.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS: dict[str, str] = {
    "open_pretraining_data": "opening",
    "PretrainingData": "opened",
    "TrainLoader": "loader",
    "TrainStep": "loader",
    "merge_states": "states",
    "ValidationLoader": "validation",
    "load_pretraining_tokenizer": "tokenizers",
    "train_tokenizer": "tokenizers",
    "sample_texts": "sampling",
    "prepare_data": "prepare",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
