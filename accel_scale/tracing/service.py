"""The planner's interface to real model classes: facts, and memory of a step as polynomials of rows and length."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from accel_scale.errors import ConfigError, NotRunError
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import Document
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.quiet import quiet_imports
from accel_scale.tracing.cache import read_cache
from accel_scale.tracing.facts import read_facts
from accel_scale.tracing.fits import fit_segments
from accel_scale.tracing.skeletons import not_built
from accel_scale.tracing.step import FakeStep, Layers

__all__ = ["facts_of", "get_ready", "kept_layers", "traced_fit"]

# Errors that do not come from missing layers.
_MIXED_DTYPES = re.compile("expected (m1 and m2 to have the same dtype|scalar type)")
_LAYERS: tuple[Layers, ...] = ("few", "few, counted as all", "all")


def get_ready() -> None:
    """Import what every trace needs, before it is known what is traced."""
    quiet_imports()
    import transformers.modeling_utils  # noqa: F401


def facts_of(values: Mapping[str, object], *, name: str, place: str) -> ModelFacts:
    """Read shapes and parameters of the model that transformers builds from a ``config.json``.

    Raises:
        ConfigError: if transformers cannot build the model.
    """
    try:
        with _quiet():
            return read_facts(values, name=name, place=place)
    except ConfigError:
        raise
    except Exception as error:  # raised by the model's own code
        raise not_built(str(values.get("model_type")), place, error) from None


def traced_fit(
    facts: ModelFacts, setup: TrainingSetup, *, is_cuda: bool, is_tracked: bool, is_exact: bool = False
) -> Document:
    """Memory of a step of a few layers by segment, as polynomials of the number of rows and the length.

    For each segment, ``net`` is what it leaves allocated, and ``peaks`` are the sums that are highest at some size.
    ``one_row`` has the segments of a single row, if they differ. ``exact`` means that the sizes follow no polynomial
    of the length, and the fit is for this length only. If the model cannot take the step, ``refused`` says why, and
    there is nothing else.

    Args:
        facts: Facts of the model.
        setup: Training setup.
        is_cuda: Whether CUDA's kernels run.
        is_tracked: Whether a memory tracker is active.
        is_exact: Whether the sizes are already known to follow no polynomial.

    Raises:
        ConfigError: if the model cannot be built.
    """
    for layers in _LAYERS:  # some layers do not run without the others
        try:
            with _quiet():
                step = FakeStep(facts, setup, is_cuda=is_cuda, is_tracked=is_tracked, layers=layers)
                segments, one_row, exact = fit_segments(step, facts, setup, is_exact)
            break
        except NotRunError as error:  # the class is not recomputed
            return {"refused": error.problem, "fix": "use --checkpointing_policy none.", "exact": False}
        except ConfigError:
            raise
        except Exception as error:  # raised by the model's own code
            mixes = _MIXED_DTYPES.search(str(error))
            if mixes or layers == _LAYERS[-1]:
                bits = 8 * (setup.trained_bytes if setup.trains_all else setup.frozen_bytes)
                what = f"mixes dtypes with {bits}-bit weights" if mixes else "takes no step without weights"
                return {"refused": _not_run(facts, what, error).problem, "exact": False}
    return {
        "segments": segments,
        "one_row": one_row,
        "stands_for": step.stands_for,
        "kinds": step.kinds,
        "hidden_bytes": step.hidden_bytes,
        "given_bytes": step.given_bytes,
        "hidden_size": facts.hidden_size,
        "takes_logits": step.takes_logits,
        "exact": exact,
    }


def kept_layers(facts: ModelFacts, setup: TrainingSetup) -> list[Document]:
    """What the model's layers cache for earlier tokens.

    Raises:
        ConfigError: if the model cannot run without weights, or does not use a standard cache.
    """
    try:
        with _quiet():
            return [asdict(layer) for layer in read_cache(facts, setup)]
    except ConfigError:
        raise
    except Exception as error:  # raised by the model's own code
        raise _not_run(facts, "answers nothing without weights", error) from None


def _not_run(facts: ModelFacts, what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ConfigError(
        f"{facts.model_type!r} {what} ({type(error).__name__}: {reason}).",
        place=facts.name,
        fix="leave it to the start check, or plan with a model of similar shape.",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' messages about kernels and patterns."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
