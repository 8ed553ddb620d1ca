"""The modules that get adapters: those called as linear layers of the language model."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

# Names that models use for the part between their vision tower and their language model.
_PROJECTOR = re.compile(r"(?:^|\.)(?:\w*project(?:or|ion)|connector|merger\w*|\w*merger|aligner|resampler)\.")
_CLAMPED_WEIGHT = re.compile(r"self\.(\w+)\.weight\.(?:data\.)?clamp_?\(")
_READ_WEIGHT = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))")


def untrainable_linears(model: PreTrainedModel) -> list[str]:
    """Names of linear layers on which an adapter would fail, or would never be trained; sorted.

    These are the towers of other modalities; subclasses of `torch.nn.Linear` with another purpose (routers that return
    several tensors, grouped products); projections of state-space layers whose weights go into a fused kernel; the
    rankings of sparse attention (indexers); poolers; and layers that the class itself freezes (BLT's patcher).

    Args:
        model: On the meta device, unquantised: the classes of its modules are inspected.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    found = set[str]()
    language, towers = language_prefix(model), _towers_within(model)
    for name, module in model.named_modules():
        linears = {f"{name}.{leaf}".lstrip("."): m for leaf, m in module.named_children()}
        linears = {path: m for path, m in linears.items() if isinstance(m, (nn.Linear, Conv1D))}
        if not linears:
            continue
        read = _read_weights(type(module)) if hasattr(module, "A_log") else frozenset()
        for path, linear in linears.items():
            leaf = path.rpartition(".")[2]
            no_gradient = leaf in read or leaf == "pooler" or "Indexer" in type(module).__name__
            no_gradient |= not linear.weight.requires_grad
            if no_gradient or not path.startswith(language) or path.startswith(towers) or not _is_linear(linear):
                found.add(path)
    return sorted(found)


def language_prefix(model: PreTrainedModel) -> str:
    """Name prefix of the language model's modules in a multimodal model; empty for a text model."""
    if not is_multimodal(model.config):
        return ""
    decoder = model.get_decoder()
    return next((f"{name}." for name, module in model.named_modules() if module is decoder and name), "")


def freeze_other_parts(model: PreTrainedModel) -> None:
    """In a multimodal model, train only the parts used by text: the language model and its head (also of scores)."""
    prefix, towers = language_prefix(model), _towers_within(model)
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    kept = {id(parameter) for head in heads if head is not None for parameter in head.parameters()}
    for name, parameter in model.named_parameters():
        if name.startswith(towers) or (not name.startswith(prefix) and id(parameter) not in kept):
            parameter.requires_grad_(False)


def _towers_within(model: PreTrainedModel) -> tuple[str, ...]:
    """Name prefixes of the towers that a model keeps among its language model's modules, as Phi-4-multimodal does."""
    from transformers import PreTrainedModel

    if language_prefix(model):
        return ()
    kinds = tuple((getattr(model.config, "sub_configs", None) or {}).values())
    return tuple(
        f"{name}."
        for name, module in model.named_modules()
        if name
        and isinstance(module, PreTrainedModel)
        and isinstance(module.config, kinds)
        and "text" not in module.input_modalities
    )


def train_vision_parts(model: PreTrainedModel, which: str, *, place: str = "--train_vision") -> None:
    """Train the ``projector`` or ``all`` of the vision parts; ``none`` leaves them frozen.

    Raises:
        ConfigError: if the model has no part of that name.
    """
    if which == "none":
        return
    parts = parts_beside_language(model)
    seeing = {id(parameter) for parameters in parts.values() for parameter in parameters}
    chosen = [
        parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in seeing and (which == "all" or _PROJECTOR.search(name))
    ]
    if not chosen:
        raise ConfigError(
            f"{model.config.model_type} has no projector among {', '.join(parts)}.", place=place, fix="use all."
        )
    for parameter in chosen:
        parameter.requires_grad_(True)


def parts_beside_language(model: PreTrainedModel) -> dict[str, list[torch.nn.Parameter]]:
    """The parts for modalities other than text, by name, with their weights; the head is not included."""
    prefix, head = language_prefix(model), model.get_output_embeddings()
    heads = {id(parameter) for parameter in (head.parameters() if head is not None else ())}
    found: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if name.startswith(prefix) or id(parameter) in heads:
            continue
        words = name.split(".")
        ends = (".".join(words[:length]) for length in range(1, len(words) + 1))
        found.setdefault(next(end for end in ends if not prefix.startswith(f"{end}.")), []).append(parameter)
    return found


def unquantised_modules(model: PreTrainedModel) -> list[str]:
    """Modules that are not quantised when images are trained on a 4-bit base: all but the language model.

    Args:
        model: On the meta device.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    return sorted({*get_keys_to_not_convert(model), *parts_beside_language(model)})


def keep_clamped_weights(quantization: BitsAndBytesConfig, model: PreTrainedModel) -> None:
    """Exclude linear layers from `quantization` whose weights the model's code clamps, as Gemma 3n's does.

    Args:
        quantization: A `BitsAndBytesConfig`. If it names modules to leave out, it is not changed.
        model: On the meta device.
    """
    import torch
    from transformers.quantizers.base import get_keys_to_not_convert

    if getattr(quantization, "llm_int8_skip_modules", ()) is not None:
        return
    try:
        leaves = set(_CLAMPED_WEIGHT.findall(inspect.getsource(sys.modules[type(model).__module__])))
    except (OSError, TypeError):  # source not available
        return
    linears = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    if clamped := [name for name in linears if name.rpartition(".")[2] in leaves]:
        quantization.llm_int8_skip_modules = sorted({*get_keys_to_not_convert(model), *clamped})


def is_multimodal(config: PreTrainedConfig) -> bool:
    """True if a configuration has parts for modalities other than text."""
    return config.get_text_config(decoder=True) is not config and not getattr(config, "is_encoder_decoder", False)


def _is_linear(module: Any) -> bool:
    """True if a subclass of `torch.nn.Linear` still maps (n, in) to (n, out)."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if type(module).forward in (torch.nn.Linear.forward, Conv1D.forward) or not module.weight.is_meta:
        return True
    try:
        result = module(torch.empty(2, module.in_features, device="meta", dtype=module.weight.dtype))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(result, torch.Tensor) and result.shape == (2, module.out_features)


def _read_weights(layer: type) -> frozenset[str]:
    """Names of the projections whose weights the code of a state-space layer passes directly to a kernel."""
    try:
        source = inspect.getsource(sys.modules[layer.__module__])
    except (OSError, TypeError):  # source not available
        return frozenset({"out_proj", "dt_proj", "x_proj"})
    return frozenset(_READ_WEIGHT.findall(source))


def exclusion(names: Iterable[str]) -> str | None:
    """A regular expression for PEFT's ``exclude_modules`` that matches `names` in every layer; None for none."""
    patterns = {re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(name)) for name in names}
    return "|".join(sorted(patterns)) or None


def check_targets(
    config: LoraConfig, model: PreTrainedModel, *, dropout_is_set: bool, place: Callable[[str], str] = "--{}".format
) -> list[str]:
    """Try the adapters on a model without memory, and settle their options: `config` may lose its default dropout.

    Experts stored as one tensor have adapters that are added to the weight (PEFT's `ParamWrapper`): no input passes
    through them to which dropout could be applied, and they have no magnitudes of their own (DoRA).

    Args:
        config: Configuration of the adapters.
        model: On the meta device; it is modified and cannot be used afterwards.
        dropout_is_set: True if the user has chosen the dropout.

    Returns:
        Paths of linear layers that are targets and that PEFT passes over, see `passed_over`.

    Raises:
        ConfigError: if a target does not exist, or a requested option does not work on it.
    """
    import torch
    from peft import get_peft_model
    from peft.tuners.lora import LoraLayer, ParamWrapper

    kind, given = model.config.model_type, copy.deepcopy(config.target_modules)
    modules, parameters = ([name for name, _ in found] for found in (model.named_modules(), model.named_parameters()))
    _refuse_absent("lora_modules_to_save", config.modules_to_save, modules, kind, place)
    _refuse_absent("lora_target_parameters", config.target_parameters, parameters, kind, place)
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    trial = copy.deepcopy(config)
    trial.lora_dropout, trial.use_dora = 0.0, False
    try:
        with warnings.catch_warnings(action="ignore"):  # their causes are checked below
            adapted = get_peft_model(model, trial, low_cpu_mem_usage=True)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{kind}: {' '.join(str(error).split()).split('. ')[0].rstrip('.')}.",
            place=place("lora_target_modules"),
            fix="name linear layers of the model, or leave the flag out: every one of them is adapted.",
        ) from error
    layers = {name: module for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    _refuse_unmatched(given, trial, layers, kind, place)
    if not any(isinstance(module, ParamWrapper) for module in layers.values()):
        return []
    attention = "--lora_target_modules with the attention's layers leaves the experts as they are"
    if config.use_dora:
        raise ConfigError(
            f"{kind} keeps its experts as one tensor, whose adapters have no magnitudes.",
            place=place("use_dora"),
            fix=f"remove it; {attention}.",
        )
    if config.lora_dropout and dropout_is_set:
        raise ConfigError(
            f"{kind} keeps its experts as one tensor, to whose adapters dropout cannot be applied.",
            place=place("lora_dropout"),
            fix=f"use 0; {attention}.",
        )
    config.lora_dropout = 0.0
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    excluded = re.compile(config.exclude_modules) if isinstance(config.exclude_modules, str) else None
    return [
        name
        for name in passed_over(linears, adapted)
        if name != head
        and not (excluded and excluded.fullmatch(name))
        and (isinstance(given, str) or name.rpartition(".")[2] in (given or ()))
    ]


def passed_over(linears: Iterable[str], adapted: PeftModel) -> list[str]:
    """Those of `linears`, paths in the base model, that PEFT left as they are: no adapter, and not trained in full.

    PEFT (0.21) replaces the names of experts' linears by their stacked parameters, and with that passes over shared
    experts and dense layers of the same names.
    """
    import torch

    modules = dict(adapted.get_base_model().named_modules())
    return [path for path in linears if isinstance(modules.get(path), torch.nn.Linear)]


def _refuse_absent(
    flag: str, wanted: Iterable[str] | None, names: list[str], kind: str, place: Callable[[str], str]
) -> None:
    """Refuse words that match the end of none of `names`; PEFT ignores these and trains the rest."""
    for word in [wanted] if isinstance(wanted, str) else wanted or ():
        if not any(name == word or name.endswith(f".{word}") for name in names):
            parts = word.count(".") + 1
            ends = {".".join(name.split(".")[-parts:]) for name in names if name and not name[-1].isdigit()}
            close = difflib.get_close_matches(word, ends, 3) or sorted(ends)[:8]
            raise ConfigError(f"{kind} has no {word!r}.", place=place(flag), fix=f"choose from {', '.join(close)}.")


def _refuse_unmatched(
    given: str | Iterable[str] | None,
    trial: LoraConfig,
    layers: Mapping[str, LoraLayer],
    kind: str,
    place: Callable[[str], str],
) -> None:
    """Refuse a name given by the user that matched nothing; PEFT is satisfied if one of them matches."""
    if given is None or isinstance(given, str):
        return
    converted = {*(trial.target_modules or ()), *(trial.target_parameters or ())}
    # Stacked experts are one module with several adapted parameters.
    stacked = {getattr(module, "parameter_name", None) for module in layers.values()}
    for name in given:
        if name in converted - stacked and not any(layer.endswith(f".{name}") for layer in layers):
            raise ConfigError(
                f"{kind} has no linear layer {name!r} that an adapter could train.",
                place=place("lora_target_modules"),
                fix="name layers of the language model, or leave the flag out: every one of them is adapted.",
            )
