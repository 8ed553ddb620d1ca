"""LoRA, rsLoRA and DoRA adapters, and 4- and 8-bit bases for them, from TRL's `ModelConfig` flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.strategies import strategy_named
from accel_scale.modeling.model_class import scores_rows

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedModel

    from accel_scale.modeling.precision import Precision

_ALL_LINEAR = "all-linear"
_HEAD = "lm_head"
# PEFT's names for the task of a model.
_LANGUAGE, _SCORES = "CAUSAL_LM", "SEQ_CLS"


def lora_config(
    model_args: Any,
    model: PreTrainedModel,
    *,
    dropout_is_set: bool = True,
    place: Callable[[str], str] = "--{}".format,
    note: Callable[[str], None] = lambda text: None,
) -> LoraConfig:
    """PEFT's configuration of the adapters described by `model_args`, tried on a model without memory.

    Without ``--lora_target_modules`` every linear layer of the language model except the output head gets an adapter,
    for LoRA and QLoRA alike: adapters on attention alone do not match full fine-tuning (Dettmers et al. 2023,
    arXiv:2305.14314, figure 2). PEFT's own default is the query and value projections.

    Args:
        model_args: TRL's `ModelConfig`, or anything with its ``lora_*`` fields.
        model: Result of `skeleton_of`, on the meta device; it cannot be used afterwards.
        dropout_is_set: True if the user has chosen ``lora_dropout``; if not, it is 0 where it cannot be applied.
        place: Returns where a flag was set.
        note: Takes a sentence on linear layers that PEFT leaves without an adapter.

    Raises:
        ConfigError: for a rank below 1, targets that the model does not have or that cannot be trained, and an adapter
            on the output head: the loss multiplies by the head's weight directly and would never train it.
    """
    from peft import LoraConfig

    from accel_scale.modeling.adapter_targets import check_targets, exclusion, untrainable_linears

    if model_args.lora_r < 1:
        raise ConfigError(
            f"a rank of {model_args.lora_r} is not an adapter.", place=place("lora_r"), fix="use 1 or more."
        )
    targets = _target_modules(model_args.lora_target_modules)
    named = [targets] if isinstance(targets, str) else list(targets)
    if any(name == _HEAD or name.endswith(f".{_HEAD}") for name in named):
        raise ConfigError(
            f"{_HEAD} cannot have an adapter: the loss is computed from its weight directly.",
            place=place("lora_target_modules"),
            fix=f"remove {_HEAD} from the target modules; --lora_modules_to_save {_HEAD} trains it whole.",
        )
    task, task_flag = getattr(model_args, "lora_task_type", _LANGUAGE), "lora_task_type"
    if scores_rows(model.config):
        if task not in (_LANGUAGE, _SCORES):  # the first is TRL's default
            raise ConfigError(
                f"{task} has no head of scores.", place=place(task_flag), fix=f"remove it, or use {_SCORES}."
            )
        task = _SCORES  # PEFT then trains the head whole, and saves it with the adapter
    config = LoraConfig(
        task_type=task,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=targets,
        target_parameters=getattr(model_args, "lora_target_parameters", None),
        exclude_modules=exclusion(untrainable_linears(model)),
        modules_to_save=getattr(model_args, "lora_modules_to_save", None),
        use_rslora=getattr(model_args, "use_rslora", False),
        use_dora=getattr(model_args, "use_dora", False),
        bias="none",
    )
    if missed := check_targets(config, model, dropout_is_set=dropout_is_set, place=place):
        parts = [re.sub(r"\.\d+\.", ".*.", name).rpartition(".") for name in missed]
        names, parents = (", ".join(dict.fromkeys(part[end] for part in parts)) for end in (2, 0))
        note(f"no adapters on {names} of {parents}: PEFT gives those of their names to the stacked experts.")
    return config


def is_of_rewards(config: PeftConfig) -> bool:
    """True for adapters of a reward model, which are saved with its head of scores."""
    return str(getattr(config.task_type, "value", config.task_type)) == _SCORES


def leave_out(config: LoraConfig, leaves: Sequence[str]) -> None:
    """Exclude modules with these last names from the adapters."""
    patterns = [config.exclude_modules, *(rf"(?:.*\.)?{re.escape(leaf)}" for leaf in leaves)]
    config.exclude_modules = "|".join(filter(None, patterns)) or None  # type: ignore[arg-type]


def _target_modules(given: str | Sequence[str] | None) -> str | list[str]:
    """Module names for PEFT, which treats a string as a regular expression over whole paths.

    TRL turns a list of one name into a string (1.16), which then matches nothing: a plain name becomes a list here.
    """
    if given is None:
        return _ALL_LINEAR
    if isinstance(given, str):
        return [given] if given != _ALL_LINEAR and given.isidentifier() else given
    return _ALL_LINEAR if list(given) == [_ALL_LINEAR] else list(given)


def quantization_config(
    model_args: Any,
    *,
    precision: Precision,
    strategy: str = "single",
    place: Callable[[str], str] = "--{}".format,
) -> BitsAndBytesConfig | None:
    """How the frozen base is loaded: in 4 bits, in 8 bits, or (`None`) as it is.

    Weights are dequantised to, and multiplied in, the compute dtype of `precision`. Under FSDP2 and ZeRO-3 the 4-bit
    weights are packed in a floating dtype that sharding treats like other weights; otherwise in plain bytes.

    Args:
        model_args: TRL's `ModelConfig`, or anything with its ``load_in_*bit``, ``bnb_*`` and ``use_bnb_*`` fields.
        strategy: A name of `facts.strategies`.

    Raises:
        ConfigError: for a storage dtype that this launch would corrupt, or 8 bits if they cannot be sharded.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    if precision.fp8:
        raise ConfigError(
            "a quantised base does not multiply in fp8.", place=place("precision"), fix="use --precision bf16."
        )
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        if strategy_named(strategy).is_fsdp:
            raise ConfigError(
                "8-bit weights cannot be made FSDP2's sharded parameters (bitsandbytes' Int8Params).",
                place=place("load_in_8bit"),
                fix="use --method qlora, or a DDP or ZeRO launch file.",
            )
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=precision.compute_dtype,
        bnb_4bit_quant_storage=_storage(model_args.bnb_4bit_quant_storage, precision, strategy, place),
    )


def _storage(given: str | None, precision: Precision, strategy: str, place: Callable[[str], str]) -> str:
    """Dtype in which 4-bit weights are packed.

    Sharding casts floating weights to the compute dtype and leaves integers out: only a storage that already has the
    compute dtype is both sharded and kept bit for bit.
    """
    compute = str(precision.compute_dtype).removeprefix("torch.")
    launched = strategy_named(strategy)
    needed = compute if launched.shards_weights else "uint8"
    if given is None or given == needed:
        return needed
    # DeepSpeed casts every floating weight; other engines do not touch frozen ones.
    if not launched.shards_weights and not (launched.is_deepspeed and given != compute):
        return given
    raise ConfigError(
        f"4-bit weights stored as {given} would be {'left unsharded' if 'int' in given else 'cast and destroyed'} "
        f"under {strategy}, which computes in {compute}.",
        place=place("bnb_4bit_quant_storage"),
        fix=f"use {needed} or remove the flag.",
    )


def prepare_quantized_base(model: nn.Module, *, use_reentrant: bool = False) -> nn.Module:
    """Freeze a 4- or 8-bit base for adapters, keeping the dtypes in which it was loaded.

    PEFT's `prepare_model_for_kbit_training` also casts all weights that are not quantised to fp32: 4.2 GB for the two
    embeddings of an 8B Llama 3. Norms compute in fp32 anyway, and the head is multiplied in the compute dtype.

    Args:
        use_reentrant: True for reentrant activation checkpointing, which passes gradients on only if the embedding's
            output requires them.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        # On CPUs with AVX-512 bitsandbytes repacks 4-bit weights in the first evaluation-mode forward pass, for a
        # kernel without a backward pass: after one evaluation no gradient would pass through these layers (0.50.2).
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    if use_reentrant:
        model.enable_input_require_grads()  # type: ignore[operator]
    return model


def paged_optimizer_advice(*, method: str, optim: str, device_type: str) -> str | None:
    """Advice for QLoRA on a GPU without paged optimizer states; `None` otherwise."""
    if not METHOD_FACTS[method].quantises_base or device_type != "cuda" or optim.startswith("paged_"):
        return None
    return (
        "--optim paged_adamw_32bit moves optimizer states to host memory while a long batch needs the room, as in "
        "the QLoRA paper."
    )
