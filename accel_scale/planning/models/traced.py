"""Models that are not modelled by hand: their facts come from the real class, and are cached in files.

`accel_scale.tracing`, which inspects real classes, trains with the packages above this one. It is looked up by name
when a model is not in the cache, and torch is imported only then.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_config import MODEL_TYPES, facts_from_config
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, MixtureFacts, ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup

_TRACER = "accel_scale.tracing.service"
_HELPER = "accel_scale.tracing.helper"
_VERSIONED = ("torch", "transformers", "peft", "accel-scale")
# Incremented when what is cached or shipped changes.
FORMAT = 11

Document = dict[str, Any]


class Helper(Protocol):
    """The interface of `accel_scale.tracing.helper.SecondProcess`."""

    def share(self, calls: Sequence[Callable[[], object]]) -> None:
        """Share calls whose results are asked for in this order."""

    def result_of(self, index: int) -> object:
        """The result of a shared call; None if it is to be made here."""


class Tracer(Protocol):
    """The interface of `accel_scale.tracing.service`."""

    def facts_of(self, values: Mapping[str, object], *, name: str, place: str) -> ModelFacts:
        """Shapes and parameters of the real class."""

    def traced_fit(
        self, facts: ModelFacts, setup: TrainingSetup, *, is_cuda: bool, is_tracked: bool, is_exact: bool
    ) -> Document:
        """Bytes of a step by segment, as polynomials of rows and length."""

    def kept_layers(self, facts: ModelFacts, setup: TrainingSetup) -> list[Document]:
        """What layers keep of earlier tokens: number of layers, window, bytes per row and per token."""


def tracer() -> Tracer:
    """The module that traces real classes; imports torch and transformers.

    Raises:
        ConfigError: if they are not installed.
    """
    helper()
    try:
        return cast(Tracer, importlib.import_module(_TRACER))
    except ImportError as error:
        raise ConfigError(
            f"the model is not modelled by hand, and tracing it needs torch and transformers ({error}).",
            place="model",
            fix=f"install them, or use one of {', '.join(MODEL_TYPES)}.",
        ) from None


def helper() -> Helper | None:
    """A second process for traces, where one is allowed; it is started by the first call."""
    return cast("Helper | None", importlib.import_module(_HELPER).started(_TRACER))


def facts_of_any(config: Mapping[str, object], *, name: str, place: str | None = None) -> ModelFacts:
    """`facts_from_config` for layers that are modelled by hand, facts of the real class for everything else.

    Raises:
        ConfigError: if neither can read the config.
    """
    model_type = config.get("model_type") if isinstance(config, Mapping) else None
    if model_type in MODEL_TYPES or model_type == "gemma3" or not isinstance(model_type, str):
        facts = facts_from_config(config, name=name, place=place)
        if facts.layers_are_modelled:
            return facts
    text = _text_of(config)
    document = read_trace(text)
    if "facts" in document:
        return _facts_from(document["facts"], name=name, text=text)
    if sys.stderr.isatty():
        print("reading the model's class …", file=sys.stderr, flush=True)
    facts = tracer().facts_of(json.loads(text), name=name, place=place or name)
    write_trace(text, {"facts": as_stored(facts)})
    return facts


def shipped_facts(stored: Document, config: Mapping[str, object], *, name: str) -> ModelFacts:
    """Facts of a model in the catalogue, read from its class when the entry was made."""
    return _facts_from(stored, name=name, text=_text_of(config))


def as_stored(facts: ModelFacts) -> Document:
    """The facts as they are stored: all but the model's name and its config."""
    stored = asdict(facts)
    del stored["traced_config"], stored["name"]
    return stored


def _text_of(config: Mapping[str, object]) -> str:
    values = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    return json.dumps(values, sort_keys=True, default=str)


def _facts_from(stored: Document, *, name: str, text: str) -> ModelFacts:
    def linears(items: list[Document]) -> tuple[LinearFacts, ...]:
        named = [
            item | {"lora_names": None if item["lora_names"] is None else tuple(item["lora_names"])} for item in items
        ]
        return tuple(LinearFacts(**item) for item in named)

    layers = tuple(
        LayerFacts(
            **{
                **layer,
                "attention": linears(layer["attention"]),
                "mlp": linears(layer["mlp"]),
                "mixture": MixtureFacts(**layer["mixture"]) if layer["mixture"] else None,
            }
        )
        for layer in stored["layers"]
    )
    outside = linears(stored["outside_linears"])
    return ModelFacts(**{**stored, "layers": layers, "outside_linears": outside, "name": name, "traced_config": text})


@functools.cache
def _versions() -> tuple[str, ...]:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in _VERSIONED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} none")
    return tuple(found)


def _path(text: str) -> Path:
    import hashlib

    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accel-scale" / "traces"
    key = hashlib.sha256("\n".join((str(FORMAT), *_versions(), text)).encode()).hexdigest()
    return root / f"{key[:24]}.json"


def read_trace(text: str) -> Document:
    """What is cached about a config's model under the installed versions; empty if there is nothing."""
    try:
        document = json.loads(_path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def shipped_fits(text: str) -> Document:
    """Fits of a model in the catalogue for the usual settings, which then need no torch; empty for other models."""
    import gzip

    path = shipped_path(text)
    if not path.is_file():
        return {}
    document = json.loads(gzip.decompress(path.read_bytes()))
    return dict(document["fits"]) if document["format"] == FORMAT else {}


def shipped_path(text: str) -> Path:
    """Where the package keeps the fits of a config."""
    import hashlib

    return Path(__file__).parent / "data" / "traces" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json.gz"


def write_trace(text: str, added: Document) -> None:
    """Add to the cache. A folder that cannot be written only costs time on the next run."""
    path, document = _path(text), {**read_trace(text), **added}
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(document), encoding="utf-8")
        new.replace(path)
    except OSError:
        return
