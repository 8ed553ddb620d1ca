"""A Trainer's checkpoint: the files added to the Trainer's own, and strict loading."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from accel_scale.errors import ConfigError
from accel_scale.facts.strategies import strategy_named
from accel_scale.training.checkpoints.atomic import checkpoint_problems, staging_root
from accel_scale.training.checkpoints.contents import STATE, what_differs
from accel_scale.training.checkpoints.folders import TRAINER_STATE, Found
from accel_scale.training.checkpoints.manifest import TRAINER_LAYOUT, Manifest
from accel_scale.training.checkpoints.pickles import load_safely
from accel_scale.training.checkpoints.random_states import derive_random_states, put_random_states, take_random_states
from accel_scale.training.checkpoints.ranks import Meeting
from accel_scale.training.checkpoints.settings import meaning_of, model_record, rows_fingerprint, schedule_length
from accel_scale.training.checkpoints.signals import StopSignals

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedConfig, Trainer, TrainerControl, TrainerState, TrainingArguments

_RANDOM = "random_states_{rank}.pt"


class StopCallback(TrainerCallback):
    """Checks on all ranks after every step if a signal has arrived; the Trainer then saves and stops."""

    def __init__(self, meeting: Meeting, signals: StopSignals) -> None:
        self._meeting, self._signals = meeting, signals
        self.number = 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.number = self.number or self._meeting.largest(self._signals.received)
        if self.number:
            control.should_save, control.should_training_stop = True, True
            control.should_evaluate = False  # there is little time left

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Keep the Trainer from loading the best model at its end, or deleting for it the checkpoint just saved."""
        if self.number:
            state.best_model_checkpoint = None


def trainer_settings(trainer: Trainer) -> dict[str, Any]:
    """The settings that define the run of any trainer, from its arguments, model and rows."""
    args, model = trainer.args, trainer.model
    optim, schedule = (str(getattr(v, "value", v)) for v in (args.optim, args.lr_scheduler_type))
    config = getattr(model, "config", None)
    ranks = args.world_size // getattr(trainer, "sp_size", 1)
    adapters = getattr(model, "peft_config", {})
    return meaning_of(
        args,
        optim=getattr(args, "optimizer_name", optim),
        lr_scheduler_type=getattr(args, "schedule_name", schedule),
        length=schedule_length(schedule, args.max_steps, args.num_train_epochs),
        global_batch_size=args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks,
        precision=trainer.accelerator.mixed_precision,
        model=model_record(config, getattr(config, "name_or_path", None)) if config is not None else None,
        adapter={name: _adapter_record(adapter) for name, adapter in adapters.items()} or "none",
        data=rows_fingerprint(trainer.train_dataset) if trainer.train_dataset is not None else None,
    )


def _adapter_record(config: PreTrainedConfig) -> dict[str, Any]:
    names = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_dora")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def layout_of(trainer: Trainer) -> str:
    """For the manifest: the layout in which the strategy writes a Trainer's checkpoint."""
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    return f"{TRAINER_LAYOUT}/{plugin.state_dict_type.name}" if plugin is not None else TRAINER_LAYOUT


def check_trainer_fit(found: Found, strategy: str, *, place: str) -> None:
    """Refuse a checkpoint that no Trainer wrote, or that this strategy could load only in part.

    Raises:
        ConfigError: if it is such a checkpoint.
    """
    manifest = found.manifest
    if not manifest.layout.startswith(TRAINER_LAYOUT):
        raise ConfigError(f"{found.folder} was not written by a Trainer.", place=place, fix="name one that was.")
    if not strategy_named(strategy).loads_checkpoints_of(manifest.strategy):
        raise ConfigError(
            f"{found.folder} was written under {manifest.strategy}, this run is {strategy}.",
            place=place,
            fix=f"launch it with {manifest.strategy}, or start from the weights it saved.",
        )
    problem = _missing(found.folder)
    if problem:
        raise ConfigError(
            f"{found.folder} {problem}.", place=place, fix="name one with all states (save_only_model?)."
        )


# Files of models, adapters and shards; `latest` names DeepSpeed's folder.
_WEIGHTS = ("*.safetensors", "*model*.bin", "*.distcp", "latest")


def check_foreign(folder: Path, *, place: str) -> None:
    """Refuse an incomplete Trainer folder without a manifest.

    Raises:
        ConfigError: for the first missing part.
    """
    problems = checkpoint_problems(folder)
    problem = problems[0] if problems else _missing(folder)
    if problem is None and not any(next(folder.rglob(name), None) for name in _WEIGHTS):
        problem = "has no weights"
    if problem:
        raise ConfigError(f"{folder} is not a good checkpoint: {problem}.", place=place, fix="name another one.")


def _missing(folder: Path) -> str | None:
    """Name a missing state that the Trainer would silently continue without."""
    if not (folder / TRAINER_STATE).is_file():
        return f"has no {TRAINER_STATE}"
    has_optimizer = any(
        (folder / name).exists() for name in ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
    )
    if not has_optimizer:
        return "has no optimizer state"
    if not (folder / "scheduler.pt").is_file() and not (folder / "latest").is_file():
        return "has no scheduler.pt"
    if not any(folder.glob("rng_state*.pth")) and not (folder / _RANDOM.format(rank=0)).is_file():
        return "has no random states"
    return None


def refuse_nvme(trainer: Trainer, folder: Path, *, place: str) -> None:
    """Refuse optimizer states on NVMe, which no checkpoint holds: DeepSpeed 0.19.8 silently resumes without them.

    Raises:
        ConfigError: if there are any.
    """
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    section = plugin.deepspeed_config.get("zero_optimization", {}) if plugin is not None else {}
    if section.get("offload_optimizer", {}).get("device") == "nvme":
        raise ConfigError(
            f"{folder} holds no optimizer states: DeepSpeed does not restore those that are on NVMe.",
            place=place,
            fix="start over from its weights in another output folder; zero3_offload.yaml can resume.",
        )


# ── States of each rank, counters ────────────────────────────────────────────────────────────────────────────────────


def write_random_states(folder: Path, accelerator: Accelerator) -> None:
    """Write under one name for any number of ranks, and only the state of this rank's own device."""
    torch.save(take_random_states(accelerator.device), folder / _RANDOM.format(rank=accelerator.process_index))


def load_random_states(folder: Path, manifest: Manifest | None, accelerator: Accelerator) -> bool:
    """Load this rank's states, or derive those of a new rank; False if the folder holds the Trainer's own."""
    rank = accelerator.process_index
    path = folder / _RANDOM.format(rank=rank)
    if path.is_file():
        put_random_states(load_safely(path), accelerator.device)
    elif manifest is not None and manifest.world_size <= rank:
        derive_random_states(manifest.seed, manifest.step, rank)
    else:
        return False
    return True


def write_counters(folder: Path, counters: dict[str, Any]) -> None:
    """Write the run's counts so far, for a resumed run."""
    (folder / STATE).write_text(json.dumps({"state": counters}, indent=1) + "\n", encoding="utf-8")


def read_counters(folder: Path) -> dict[str, Any]:
    """Read the result of `write_counters`; empty for folders of other programs."""
    path = folder / STATE
    return json.loads(path.read_text(encoding="utf-8"))["state"] if path.is_file() else {}


# ── Writing: an error on one rank must not keep the others waiting ──────────────────────────────────────────────────


@contextlib.contextmanager
def errors_kept(errors: list[Exception] | None) -> Iterator[None]:
    """Collect write errors of this rank in `errors`, if there is a list."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if errors is None:
            raise
        errors.append(error)


@contextlib.contextmanager
def engine_errors_kept(trainer: Trainer, errors: list[Exception]) -> Iterator[None]:
    """The same for DeepSpeed's engine, if there is one."""
    if not trainer.is_deepspeed_enabled:
        yield
        return
    from accel_scale.training.checkpoints.zero import errors_kept_for_later

    with errors_kept(errors), errors_kept_for_later(trainer.model_wrapped):
        yield


def save_fsdp(trainer: Any, folder: Path, errors: list[Exception] | None) -> None:
    """Same as `Trainer._save_optimizer_and_scheduler` (transformers 5.23), but each file separately."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from transformers.trainer import get_fsdp_ckpt_kwargs

    from accel_scale.training.checkpoints.fsdp import one_reason

    accelerator, plugin = trainer.accelerator, trainer.accelerator.state.fsdp_plugin
    with errors_kept(errors), one_reason():
        save_fsdp_model(plugin, accelerator, trainer.model, str(folder), **get_fsdp_ckpt_kwargs())
    with errors_kept(errors), one_reason():
        save_fsdp_optimizer(plugin, accelerator, trainer.optimizer, trainer.model, str(folder))
    if trainer.args.should_save:
        with errors_kept(errors):
            torch.save(trainer.lr_scheduler.state_dict(), folder / "scheduler.pt")


# ── Loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def fits(folder: Path, *, place: str) -> Iterator[None]:
    """Turn a mismatch of checkpoint and model or optimizer into a one-line error."""
    try:
        yield
    except ConfigError:
        raise
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"{folder} does not fit this model and optimizer ({what_differs(error)}).",
            place=place,
            fix="resume with those it was written by.",
        ) from error


def refuse_partial(model: Any, load_result: Any, *, place: str) -> None:
    """Refuse weights that do not match the model's names; a tied weight is stored under one of its names.

    Raises:
        ConfigError: naming the first.
    """
    held = model.state_dict(keep_vars=True)
    loaded = {id(held[name]) for name in held if name not in set(load_result.missing_keys)}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    missing = [
        n for n in load_result.missing_keys if n not in ignored and (n not in held or id(held[n]) not in loaded)
    ]
    unexpected = list(load_result.unexpected_keys)
    for names, problem in ((missing, "is not in the checkpoint"), (unexpected, "is not in this model")):
        if names:
            more = f", nor are {len(names) - 1} others" if len(names) > 1 else ""
            raise ConfigError(
                f"{names[0]} {problem}{more}.", place=place, fix="resume with the model it was written by."
            )


@contextlib.contextmanager
def fsdp_layout(trainer: Trainer, manifest: Manifest | None) -> Iterator[None]:
    """Read in the layout of the checkpoint, and write in the configured one."""
    written = (manifest.layout if manifest else "").partition("/")[2]
    if not trainer.is_fsdp_enabled or not written:
        yield
        return
    from accel_scale.training.checkpoints.fsdp import layout_of_checkpoint, one_reason

    with layout_of_checkpoint(trainer.accelerator.state.fsdp_plugin, written), one_reason():
        yield


def load_zero(trainer: Any, folder: Path, manifest: Manifest | None, *, place: str) -> None:
    """Load weights and optimizer into DeepSpeed's engine; `refuse_unsafe_folder` must have inspected the folder."""
    from accel_scale.training.checkpoints.zero import load_engine

    tag = (folder / "latest").read_text(encoding="utf-8").strip() if (folder / "latest").is_file() else ""
    if not tag or not (folder / tag).is_dir():
        raise ConfigError(f"{folder} holds no state of DeepSpeed's.", place=place, fix="name one that ZeRO wrote.")
    scratch = staging_root(Path(trainer.args.output_dir).absolute()) / "converted"
    written_by = manifest.world_size if manifest else trainer.args.world_size
    with fits(folder, place=place):
        load_engine(
            trainer.accelerator, folder, tag, scratch, written_by=written_by,
            strict=not hasattr(trainer.model, "peft_config"), place=place,
        )  # fmt: skip
