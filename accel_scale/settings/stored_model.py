"""Check a model's folder against the flags before libraries are imported: its kind, shapes, tokens and adapters."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import refuse_too_few_layers
from accel_scale.flags.paths import as_list
from accel_scale.modeling.files import refuse_missing_rows, refuse_shape
from accel_scale.modeling.model_class import has_scores, refuse_classes, refuse_scoring
from accel_scale.modeling.stored_weights import stored_shapes
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.styles import STYLES

if TYPE_CHECKING:
    from accel_scale.flags.parsing import ParsedFlags
    from accel_scale.planning.models.model_facts import ModelFacts

_LAYER_WEIGHT = re.compile(r"(?:model\.)?layers\.\d+\.(?:\w+\.)*(\w+)\.weight")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")


def refuse_stored_model(parsed: ParsedFlags, *, rewards: bool = False) -> None:
    """Refuse what the files of a local model show to be wrong; the rest shows when the libraries load it.

    Args:
        rewards: Whether the run trains a reward model.

    Raises:
        ConfigError: for a config.json that cannot be read or does not match the weights, a model of the wrong kind,
            missing tokens, adapters on missing modules, and a checkpointing policy of more layers than the model has.
    """
    given = parsed.explicit
    name, place = given.get("model_name_or_path"), parsed.place("model_name_or_path")
    folder = Path(str(name or default_model_path())).expanduser()
    if not (folder / "config.json").is_file():
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"the model {name!r} cannot be loaded: its config.json is not valid JSON ({error}).",
            place=place,
            fix="take the config.json that these weights were saved with.",
        ) from None
    except OSError:
        return
    if not isinstance(config, dict):
        return
    _refuse_kind(config, str(name), place, rewards=rewards)
    _refuse_tokens(folder, config, place)
    if (token := given.get("eos_token")) is not None:
        _refuse_unknown_token(folder, str(token), parsed.place("eos_token"))
    facts = _facts_of(config)
    if facts is None:
        return
    policy, architectures = given.get("checkpointing_policy"), as_list(config.get("architectures"))
    if isinstance(policy, str) and facts.model_type in STYLES:  # in others, a tower may have layers too
        model = str(architectures[0]) if architectures else facts.model_type
        refuse_too_few_layers(policy, facts.num_layers, model, place=parsed.place("checkpointing_policy"))
    shapes = stored_shapes(folder)
    if shapes and not config.get("quantization_config") and not config.get("auto_map"):
        _refuse_shapes(facts, shapes, folder)
    if not given.get("lora_target_parameters"):
        targets = [str(target) for target in as_list(given.get("lora_target_modules"))]
        _refuse_targets(facts, targets, shapes, parsed.place("lora_target_modules"))


def _facts_of(config: Mapping[str, object]) -> ModelFacts | None:
    """Shapes of a model that is modelled by hand; None for others."""
    try:
        return facts_from_config(config, name=str(config.get("model_type")))
    except ConfigError:
        return None


def _refuse_kind(config: Mapping[str, object], name: str, place: str, *, rewards: bool) -> None:
    architectures = [str(item) for item in as_list(config.get("architectures"))]
    if not rewards:
        refuse_scoring(architectures, name=name, place=place)
    elif has_scores(architectures):
        labels, number = config.get("id2label"), config.get("num_labels")
        number = len(labels) if isinstance(labels, Mapping) else number
        refuse_classes(number if isinstance(number, int) else 2, name=name, place=place)


def _refuse_shapes(facts: ModelFacts, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Compare matrices of dense models built like Llama, whose files name tensors as their classes do."""
    if facts.model_type not in STYLES or any(layer.mixture for layer in facts.layers):
        return
    linears = [linear for layer in facts.layers for linear in layer.linears]
    known = {linear.name: {(at.out_features, at.in_features) for at in linears if at.name == linear.name}
             for linear in linears}  # fmt: skip
    table = {(facts.vocab_size, facts.embedding_size or facts.hidden_size)}
    whole = dict.fromkeys(("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight"), table)
    for stored, shape in shapes.items():
        match = _LAYER_WEIGHT.fullmatch(stored)
        wanted = whole.get(stored) or (known.get(match[1]) if match else None)
        if wanted and shape not in wanted:
            refuse_shape(stored, shape, max(wanted), folder)


def _refuse_targets(
    facts: ModelFacts, targets: Sequence[str], shapes: Mapping[str, tuple[int, ...]], place: str
) -> None:
    """Refuse names of modules that are neither in the model's class nor in its files; patterns are left to PEFT."""
    linears = [linear for layer in facts.layers for linear in layer.linears] + list(facts.outside_linears)
    names = {name for linear in linears for name in (linear.name, *(linear.lora_names or ()))}
    stored = {part for name in shapes for part in name.split(".")}
    for target in targets:
        is_known = target in {*names, *stored, "all-linear", "lm_head", "score", facts.embedding_name}
        if is_known or not target.isidentifier():
            continue
        near = difflib.get_close_matches(target, sorted(names), n=1)
        fix = "name linear layers of the model, or leave the flag out: every one of them is adapted."
        raise ConfigError(
            f"{facts.model_type} has no module {target!r}.",
            place=place,
            fix=f"did you mean {near[0]}?" if near else fix,
        )


def _refuse_tokens(folder: Path, config: Mapping[str, object], place: str) -> None:
    """Refuse special tokens in use that have no row in the embedding."""
    text = config.get("text_config")
    rows = (text if isinstance(text, Mapping) else config).get("vocab_size")
    used = _special_tokens(folder)
    if not isinstance(rows, int) or not used:
        return
    found = [number for content, number in _added_tokens(folder) if content in used]
    if found and max(found) >= rows:
        refuse_missing_rows(max(found), rows, place=place)


def _special_tokens(folder: Path) -> Collection[str]:
    """The special tokens in use according to tokenizer_config.json."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokens = [config.get(name) for name in _SPECIAL_TOKENS]
    except (OSError, ValueError, AttributeError):
        return ()
    return {str(token.get("content")) if isinstance(token, dict) else str(token) for token in tokens if token}


def _added_tokens(folder: Path) -> list[tuple[str, int]]:
    """(text, number) of the tokens that tokenizer.json adds to its vocabulary; the rest of the file is not parsed."""
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        match = re.search(r'"added_tokens"\s*:\s*', text)
        entries = json.JSONDecoder().raw_decode(text, match.end())[0] if match else []
        return [(entry["content"], entry["id"]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _refuse_unknown_token(folder: Path, token: str, place: str) -> None:
    """Refuse a token that no file of the tokenizer mentions."""
    if not (folder / "tokenizer.json").is_file():
        return  # a vocabulary in another format
    names = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
    files = [folder / name for name in names if (folder / name).is_file()]
    written = [json.dumps(token), json.dumps(token, ensure_ascii=False)]
    if not any(form in file.read_text(encoding="utf-8") for file in files for form in written):
        raise unknown_token(token, place)


def unknown_token(token: str, place: str) -> ConfigError:
    """The error for a token that the vocabulary does not have."""
    return ConfigError(
        f"{token!r} is no token of the model's vocabulary.", place=place, fix="name one that is, or remove it."
    )
