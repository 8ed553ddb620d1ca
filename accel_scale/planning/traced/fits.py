"""Fits of traced models, which give bytes of a step as polynomials: from files, or by new traces."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from accel_scale.errors import NotRunError
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import Document, helper, read_trace, shipped_fits, tracer, write_trace
from accel_scale.planning.models.training_setup import TrainingSetup

if TYPE_CHECKING:
    from tqdm import tqdm

# transformers masks rows of a window's length, too (`_ignore_causal_mask_sdpa`); an indexer chooses among more than
# it takes.
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
_CHOSEN = ("index_topk", "indexer_budget")
# Key in a model's fits: some setting has no fit for all lengths, so that each length has its own.
_EXACT = "exact"


class _Progress:
    """A bar that counts traced settings, on a terminal."""

    bar: tqdm[None] | None = None

    def begin(self, total: int) -> None:
        if total and self.bar is None and sys.stderr.isatty():
            from tqdm import tqdm

            shape = "tracing the model's layers, kept for the next time: |{bar}| {n_fmt}/{total_fmt} settings"
            self.bar = tqdm(total=total, bar_format=shape, leave=False, dynamic_ncols=True)

    def step(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def end(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


_progress = _Progress()
# Removes the bar before something else is shown.
end_progress = _progress.end


def fit_of(model: ModelFacts, setup: TrainingSetup, is_cuda: bool, is_tracked: bool) -> Document:
    """The fit from the files, or by a new trace. If no fit holds for every length, each length has its own.

    Raises:
        NotRunError: if the model's class cannot take the step.
    """
    text, key = model.traced_config, _key(model, setup, is_cuda, is_tracked)
    known = _known(text)
    exact = f"{key} x{setup.sequence_length}"
    # If one setting's tensors follow no polynomial, looking for one in the others costs more than it may save.
    is_exact = _EXACT in known and key not in known
    fit = known.get(exact if is_exact else key)
    if fit is None:
        fit = _shared_fit(text, key, setup.sequence_length)
        if fit is None:
            fit = tracer().traced_fit(model, setup, is_cuda=is_cuda, is_tracked=is_tracked, is_exact=is_exact)
        new = {_EXACT: {}, exact: fit} if fit["exact"] else {key: fit}
        _progress.step()
        known |= new
        write_trace(text, {"fits": {**read_trace(text).get("fits", {}), **new}})
    if "refused" in fit:
        fix = "leave it to the start check, or plan with another precision or with a model of similar shape."
        raise NotRunError(fit["refused"], place=model.name, fix=fit.get("fix", fix))
    return fit


# By a model's config and a fit's key: the number of the call that makes it, and the length.
_shared: dict[tuple[str, str], tuple[int, int]] = {}


def share_traces(model: ModelFacts, setups: Iterable[TrainingSetup], *, is_cuda: bool) -> None:
    """Announce the traces that these setups need: a second process, if one is allowed, makes some of them."""
    text = model.traced_config
    known = _known(text)
    missing: dict[str, TrainingSetup] = {}
    for setup in setups:
        if (key := _key(model, setup, is_cuda, False)) not in known:
            missing.setdefault(key, setup)
    second = helper()
    _progress.begin(len(missing))
    if len(missing) < 2 or _EXACT in known or _shared or second is None:
        return
    options = {"is_cuda": is_cuda, "is_tracked": False, "is_exact": False}
    # The last traces are made first. Without recomputation a trace takes least: made last, neither process waits long.
    ordered = sorted(missing.items(), key=lambda item: item[1].checkpointing != "none")
    second.share([functools.partial(tracer().traced_fit, model, setup, **options) for _, setup in ordered])
    for index, (key, setup) in enumerate(ordered):
        _shared[text, key] = index, setup.sequence_length


def _shared_fit(text: str, key: str, length: int) -> Document | None:
    """A fit that the second process has made or makes; None if it is to be made here."""
    index, its_length = _shared.pop((text, key), (-1, 0))
    second = helper() if index >= 0 else None
    fit = cast("Document | None", second.result_of(index) if second is not None else None)
    return fit if fit is not None and (not fit["exact"] or its_length == length) else None


@functools.lru_cache(maxsize=16)
def _known(text: str) -> Document:
    """Fits of a model that ship with the package or are cached, read once."""
    return {**shipped_fits(text), **read_trace(text).get("fits", {})}


def _key(model: ModelFacts, setup: TrainingSetup, is_cuda: bool, is_tracked: bool) -> str:
    """A key of everything that a trace depends on."""
    parts: list[object] = [setup.checkpointing if setup.checkpointing != "offload" else "full", is_tracked]
    parts += [setup.trained_bytes, setup.frozen_bytes if setup.trains_adapters else 0]
    parts += [setup.compute_bytes if setup.autocast else 0, is_cuda]
    parts += [setup.attention == "eager", setup.is_padded, model.num_scores > 0]
    parts += [sum(setup.sequence_length > window for window in windows_of(model.traced_config))]
    if setup.trains_adapters:
        lora = setup.lora
        parts += [setup.quantises_base, lora.rank, lora.targets, lora.dora, lora.full_modules, lora.dropout > 0]
    return json.dumps(parts)


@functools.lru_cache(maxsize=16)
def windows_of(text: str) -> tuple[int, ...]:
    """Lengths beyond which a config's model attends differently."""
    config = json.loads(text)
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    found = {part[name] - 1 for part in parts for name in _WINDOWS if isinstance(part.get(name), int)}
    found |= {part[name] for part in parts for name in _CHOSEN if isinstance(part.get(name), int)}
    return tuple(sorted(found))
