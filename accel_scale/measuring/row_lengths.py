"""Measures the row lengths of a data file for a plan, with the model's tokenizer if it is on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from accel_scale.errors import ConfigError
from accel_scale.planning.search.requests import model_for_recipe, with_lengths
from accel_scale.planning.search.search import Request

_SAMPLED_ROWS = 1000


def measured(request: Request, model: str, dataset: str, columns: Sequence[str]) -> tuple[Request, str]:
    """The request with the row lengths of `dataset`, and a sentence on what was measured or why nothing was.

    Raises:
        ConfigError: if the data file cannot be read.
    """
    import os

    from accel_scale.quiet import quiet_imports

    quiet_imports()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # download nothing for an estimate

    from accel_scale.data.lengths import length_distribution
    from accel_scale.data.loading import load_training_data
    from accel_scale.modeling.loading import load_tokenizer

    rows = load_training_data(dataset, columns=columns)
    try:
        tokenizer = load_tokenizer(model_for_recipe(model))
    except ConfigError:
        return request, f"Rows are taken to be full: the tokenizer of {model} is not on this machine."
    if rows.conversational and tokenizer.chat_template is None:
        return request, f"Rows are taken to be full: {model} has no chat template to write these conversations with."
    limit = request.sequence_length
    found = length_distribution(rows.train, tokenizer, max_length=limit, batch_size=8, num_sampled=_SAMPLED_ROWS)
    mean = found.mean_tokens * (1 - found.lost_token_share)
    longest = min(limit, found.max_tokens)
    note = (
        f"{dataset}: {mean:.0f} tokens a row on average, {longest} at most ({found.num_sampled} rows measured); "
        f"packing fills {found.packed_fill:.0%}."
    )
    return with_lengths(request, mean_tokens=mean, longest_tokens=longest, packed_fill=found.packed_fill), note
