"""Resolve the pretraining recipe's flags: refuse contradictions, convert lengths into steps, derive defaults."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import refuse_compiled_segments
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.flags.trackers import refuse_unknown_trackers
from accel_scale.modeling.scratch import parse_count
from accel_scale.optimization.schedules import schedule_name
from accel_scale.pretraining.trunk import ScheduleSettings
from accel_scale.settings.resolved import Resolved
from accel_scale.settings.stored_model import refuse_stored_model
from accel_scale.units import parse_duration, three_digits

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.parallel.model_parallel import ModelParallel
    from accel_scale.training.checkpoints.manager import CheckpointManager

_SOURCES = ("model_name_or_path", "model_config", "num_params")
_DEFAULT_WARMUP_RATIO = 0.02
_PARTS_OF_A_RUN = 10


@dataclass(frozen=True)
class RunLength:
    """Length of the training.

    Attributes:
        num_steps: Optimizer steps, including those of a trunk.
        first_step: Step at which the schedule's branch leaves its trunk; 0 without one.
        eval_steps, save_steps: Steps between validations and checkpoints; 0 for only the last, and none.
        seconds: Wall time after which to save and stop; None for no limit.
    """

    num_steps: int
    first_step: int
    eval_steps: int
    save_steps: int
    seconds: float | None

    def reason_to_stop(self, manager: CheckpointManager, started: float) -> str | None:
        """A signal on any rank, or the time limit by rank 0's clock; the same answer on all ranks."""
        from accel_scale.modeling.gathering import broadcast_from_main

        if manager.should_stop():
            return "a signal"
        if self.seconds is None:
            return None
        return "--max_train_time" if broadcast_from_main(time.perf_counter() - started > self.seconds) else None


def refuse_contradictions(parsed: ParsedFlags) -> None:
    """Refuse flags that cannot both be honoured, naming one of them and the fix.

    Raises:
        ConfigError: for the first contradiction found.
    """
    given = parsed.explicit
    sources = [name for name in _SOURCES if given.get(name)]
    if len(sources) > 1:
        raise _refuse(parsed, sources[1], f"--{sources[0]} and --{sources[1]} both say which model.", "keep one.")
    if sources and not given.get("data"):
        raise _refuse(parsed, sources[0], "a model is given but nothing to train it on.", "add --data.")
    if given.get("method") == "lora" and not given.get("model_name_or_path"):
        raise _refuse(parsed, "method", "adapters need a trained base.", "add --model_name_or_path.")
    for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
        if name in given and given.get("method") != "lora":
            raise _refuse(parsed, name, f"--{name} does nothing without adapters.", "add --method lora.")
    refuse_unknown_trackers(given.get("report_to"), place=parsed.place("report_to"), in_trainer=False)
    refuse_compiled_segments(given, parsed.place)
    _refuse_tokenizers(parsed)
    _refuse_lengths(parsed)
    _refuse_branches(parsed)
    if given.get("model_name_or_path"):
        refuse_stored_model(parsed)
    if given.get("validation_data") and "validation_share" in given:
        problem = "--validation_data and --validation_share both say what is held out."
        raise _refuse(parsed, "validation_share", problem, "keep one.")
    if given.get("max_grad_norm") == 0:
        raise _refuse(parsed, "max_grad_norm", "gradients are always clipped here.", "use more than 0.")


def _refuse(parsed: ParsedFlags, name: str, problem: str, fix: str) -> ConfigError:
    return ConfigError(problem, place=parsed.place(name), fix=fix)


def _refuse_tokenizers(parsed: ParsedFlags) -> None:
    given = parsed.explicit
    if given.get("train_tokenizer") and given.get("tokenizer"):
        raise _refuse(parsed, "tokenizer", "a tokenizer is named and another is to be trained.", "keep one of them.")
    if "vocab_size" in given and not given.get("train_tokenizer"):
        problem = "--vocab_size is that of a trained tokenizer."
        raise _refuse(parsed, "vocab_size", problem, "add --train_tokenizer, or remove it.")
    if given.get("model_name_or_path") and (given.get("train_tokenizer") or given.get("tokenizer")):
        name = "train_tokenizer" if given.get("train_tokenizer") else "tokenizer"
        problem = "a trained model's embedding belongs to its own tokenizer."
        raise _refuse(parsed, name, problem, f"remove --{name}.")
    if given.get("num_params") and not (given.get("train_tokenizer") or given.get("tokenizer")):
        problem = "a model from nothing has no tokenizer."
        raise _refuse(
            parsed, "num_params", problem, "add --tokenizer with a name, byte or char, or --train_tokenizer."
        )


def _refuse_lengths(parsed: ParsedFlags) -> None:
    given = parsed.explicit
    if given.get("max_tokens"):
        parse_count(str(given["max_tokens"]), place=parsed.place("max_tokens"))
    if given.get("max_steps", -1) > 0 and given.get("max_tokens"):
        raise _refuse(parsed, "max_tokens", "--max_steps and --max_tokens both say how long.", "keep one.")
    if given.get("max_train_time"):
        parse_duration(str(given["max_train_time"]), place=parsed.place("max_train_time"))


def _refuse_branches(parsed: ParsedFlags) -> None:
    given = parsed.explicit
    if bool(given.get("decay_from")) != bool(given.get("decay_steps")):
        name = "decay_from" if given.get("decay_from") else "decay_steps"
        other = "decay_steps" if name == "decay_from" else "decay_from"
        raise _refuse(parsed, name, f"--{name} needs --{other}.", f"add --{other}.")
    if not given.get("decay_from"):
        return
    for name in ("max_steps", "max_tokens", "decay_ratio", "warmup_ratio", "warmup_steps"):
        if given.get(name):
            raise _refuse(parsed, name, f"--{name} is the trunk's; a branch takes --decay_steps.", "remove it.")
    if schedule_name(given.get("lr_scheduler_type", "wsd")) != "warmup_stable_decay":
        raise _refuse(parsed, "lr_scheduler_type", "only WSD has branches.", "remove it.")
    if given.get("resume", "auto") not in ("auto", "no"):
        raise _refuse(parsed, "resume", "--resume and --decay_from both name a checkpoint.", "keep one.")


def run_length(settings: Resolved, *, trunk_step: int | None, num_params: int) -> RunLength:
    """Compute the number of steps, and the steps between validations and checkpoints.

    Args:
        settings: The recipe's flags.
        trunk_step: The step of ``--decay_from``'s checkpoint; None without one.
        num_params: For the advice if no length is given.

    Raises:
        ConfigError: if no length is given.
    """
    values = settings.values
    tokens_per_step = settings.global_batch_size * int(values["max_length"])
    if trunk_step is not None:
        num_steps = trunk_step + int(values["decay_steps"])
    elif values.get("max_tokens"):
        place = settings.sources.get("max_tokens", "--max_tokens")
        num_steps = -(-parse_count(values["max_tokens"], place=place) // tokens_per_step)
    else:
        num_steps = int(values.get("max_steps", -1))
    if num_steps < 1:
        tokens = 20 * num_params
        raise ConfigError(
            "nothing says how long to train.",
            place="--max_steps",
            fix="add --max_steps, or --max_tokens: 20 for each parameter (Chinchilla) are "
            f"{three_digits(tokens / 1e9)}B.",
        )
    first = trunk_step or 0
    part = max(1, (num_steps - first) // _PARTS_OF_A_RUN)
    steps = {name: values.get(name) for name in ("eval_steps", "save_steps")}
    if values.get("guard") == "rollback" and steps["save_steps"] == 0:
        raise ConfigError(
            "without checkpoints there is nothing to roll back to.",
            place=settings.sources.get("guard", "--guard"),
            fix="give --save_steps, or use --guard skip.",
        )
    limit = values.get("max_train_time")
    return RunLength(
        num_steps=num_steps,
        first_step=first,
        eval_steps=part if steps["eval_steps"] is None else int(steps["eval_steps"]),
        save_steps=part if steps["save_steps"] is None else int(steps["save_steps"]),
        seconds=parse_duration(limit) if limit else None,
    )


def schedule_settings(settings: Resolved, length: RunLength) -> ScheduleSettings:
    """Keyword arguments of `create_schedule`; a branch decays over its own steps only."""
    scale, values = settings.scale, settings.values
    is_branch = bool(length.first_step or values.get("decay_from"))
    rates: ScheduleSettings = {
        "name": "warmup_stable_decay" if is_branch else schedule_name(values.get("lr_scheduler_type", "cosine")),
        "num_training_steps": length.num_steps,
        "decay_ratio": scale.decay_ratio,
        "decay_shape": scale.decay_shape,
        "min_lr_ratio": scale.min_lr_ratio,
    }
    if is_branch:
        rates["decay_ratio"] = (length.num_steps - length.first_step) / length.num_steps
        return rates
    rates["warmup_steps"] = float(values.get("warmup_steps") or 0)
    ratio = scale.warmup_ratio
    is_open = not rates["warmup_steps"] and "warmup_steps" not in settings.sources
    if ratio is None and is_open and rates["name"] != "constant":
        ratio = _DEFAULT_WARMUP_RATIO
    rates["warmup_ratio"] = ratio
    return rates


class ParameterGroup(TypedDict):
    """A parameter group of an optimizer."""

    params: list[torch.nn.Parameter]
    weight_decay: float


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Parameter groups: matrices decay; norms, biases and embeddings do not.

    It needs whole shapes, so call it before the model is sharded; under ZeRO-3 DeepSpeed's record of them is used.
    """
    from accel_scale.modeling.gathering import whole_shape

    base = cast("PreTrainedModel", model)  # a PeftModel passes these on
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    embeddings = {id(module.weight) for module in ends if module is not None}

    def is_decayed(parameter: torch.nn.Parameter) -> bool:
        return len(whole_shape(parameter)) >= 2 and id(parameter) not in embeddings

    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[ParameterGroup] = [
        {"params": [p for p in trained if is_decayed(p)], "weight_decay": weight_decay},
        {"params": [p for p in trained if not is_decayed(p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: torch.nn.Module | ModelParallel, settings: Resolved, launch: LaunchEnvironment
) -> torch.optim.Optimizer:
    """The optimizer chosen by the flags, over `decay_groups`.

    Args:
        model: The model before it is sharded, or a `ModelParallel`, whose weights already are.
        settings: The recipe's flags.
        launch: How the process was launched.
    """
    from accel_scale.optimization.optimizers import create_optimizer, keep_embeddings_wide
    from accel_scale.parallel.model_parallel import ModelParallel, decay_groups_of

    values = settings.values
    decay, is_shared = values["weight_decay"], isinstance(model, ModelParallel)
    if not isinstance(model, ModelParallel):
        keep_embeddings_wide(values["optim"], model)
    return create_optimizer(
        values["optim"],
        decay_groups_of(model, decay) if isinstance(model, ModelParallel) else decay_groups(model, decay),
        lr=values["learning_rate"],
        weight_decay=values["weight_decay"],
        betas=(values["adam_beta1"], values["adam_beta2"]),
        eps=values["adam_epsilon"],
        optim_args=values["optim_args"],
        device_type=settings.launch.device_type,
        strategy="fsdp2" if is_shared else launch.strategy,  # both hold DTensors
        offload_optimizer=launch.parallel.offloads_optimizer,
    )
