"""Weights and optimizers of DeepSpeed ZeRO: written by its engine, converted for another number of ranks."""

from __future__ import annotations

import contextlib
import io
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_scale.errors import ConfigError, first_line
from accel_scale.training.checkpoints.contents import Write
from accel_scale.training.checkpoints.manifest import Manifest
from accel_scale.training.checkpoints.pickles import refuse_unsafe_folder
from accel_scale.training.checkpoints.ranks import FailedSomewhere, Meeting

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed import ProcessGroup

TAG = "pytorch_model"  # Accelerate's name for the first model's folder


class ZeroContents:
    """ZeRO stages 1, 2 and 3, with one model in the engine."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        stage = accelerator.state.deepspeed_plugin.zero_stage
        self.layout = f"zero{stage}"
        if stage not in (1, 2, 3):
            raise ConfigError(
                f"ZeRO-{stage} partitions nothing.", place="zero_stage", fix="use stage 1, 2 or 3, or DDP."
            )

    def refuse_asynchronous(self) -> str | None:
        return "DeepSpeed's engine writes its partitions from where they are trained, while all ranks wait"

    def capture(self, *, copy: bool, group: ProcessGroup | None) -> Write:
        def write(folder: Path) -> None:
            with errors_kept_for_later(self._engine()) as engine:
                engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
            if self._accelerator.is_main_process:
                (folder / "latest").write_text(TAG, encoding="utf-8")

        return write

    def load(self, folder: Path, manifest: Manifest, scratch: Path) -> None:
        self._engine()
        refuse_unsafe_folder(folder / TAG)
        load_engine(self._accelerator, folder, TAG, scratch, written_by=manifest.world_size)

    def _engine(self) -> Any:
        models = self._accelerator._models
        if len(models) != 1:
            raise ConfigError(
                f"DeepSpeed holds {len(models)} models.", place="accelerator.prepare", fix="prepare exactly one."
            )
        return models[0]


@contextlib.contextmanager
def errors_kept_for_later(engine: Any) -> Iterator[Any]:
    """Let `save_checkpoint` finish on every rank, because it waits for the other ranks after each write.

    Replaces the engine's writer and its copying of a script, checked on DeepSpeed 0.19.8; raises the first error at
    the end.
    """
    writer, copy_script = engine.checkpoint_engine, engine._copy_recovery_script
    errors: list[Exception] = []

    class Keeping:
        def __getattr__(self, name: str) -> Any:
            return getattr(writer, name)

        def save(self, *args: object, **kwargs: object) -> None:
            self._keep(writer.save, *args, **kwargs)

        def makedirs(self, *args: object, **kwargs: object) -> None:
            self._keep(writer.makedirs, *args, **kwargs)

        def _keep(self, work: Any, *args: Any, **kwargs: Any) -> None:
            try:
                work(*args, **kwargs)
            except (OSError, RuntimeError) as error:
                errors.append(error)

    keeping = Keeping()
    engine.checkpoint_engine = keeping
    engine._copy_recovery_script = lambda path: keeping._keep(copy_script, path)
    try:
        yield engine
    finally:
        engine.checkpoint_engine, engine._copy_recovery_script = writer, copy_script
    if errors:
        raise errors[0]


def load_engine(
    accelerator: Accelerator,
    folder: Path,
    tag: str,
    scratch: Path,
    *,
    written_by: int,
    strict: bool = True,
    place: str = "resume",
) -> None:
    """Load the engine's checkpoint in ``folder/tag``, converted in `scratch` if other ranks wrote it; collective.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    engine, ranks = accelerator._models[0], accelerator.num_processes
    if written_by == ranks:
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=strict)
    else:
        try:
            Meeting().on_main(lambda: _convert(folder / tag, scratch / tag))
        except FailedSomewhere as error:
            raise ConfigError(
                f"DeepSpeed cannot convert {folder.name} from {written_by} ranks to {ranks} ({error}).",
                place=place,
                fix=f"resume on {written_by} ranks.",
            ) from error
        loaded = _load_universal(engine, scratch, tag, strict=strict, place=place)
        _load_buffers(accelerator, folder / tag)
    if loaded is None:
        raise ConfigError(f"DeepSpeed found nothing to load in {folder.name}.", place=place)


def _convert(source: Path, target: Path) -> None:
    """Convert into DeepSpeed's universal format: one folder per parameter, whole, readable by any number of ranks."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    arguments = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # this process only: forking a process with threads and devices is unsafe
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)


def _load_universal(engine: Any, folder: Path, tag: str, *, strict: bool, place: str) -> str | None:
    """Load a converted checkpoint; `load_checkpoint` reads a flag of the engine's parsed configuration (0.19.8)."""
    engine._config.load_universal_checkpoint = True
    try:
        loaded = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=strict)[0]
        _separate_groups(engine.optimizer.optimizer, folder / tag / "zero" / "optimizer_state.pt")
        return loaded
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"DeepSpeed cannot load the converted checkpoint ({first_line(error)}).",
            place=place,
            fix="resume on as many ranks as wrote it.",
        ) from error
    finally:
        engine._config.load_universal_checkpoint = False


def _separate_groups(optimizer: Any, written: Path) -> None:
    """Undo what stage 3 of DeepSpeed 0.19.8 does: all groups get the first one's hyperparameters, states one `step`.

    With a shared `step`, a fused or for-each optimizer counts it once per state.
    """
    if written.is_file():  # converted here, from files that were inspected
        saved = torch.load(written, map_location="cpu", weights_only=False)
        groups = saved.get("optimizer_state_dict", {}).get("param_groups", [])  # only stage 3 keeps them there
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            group.update({name: value for name, value in values.items() if name != "params"})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _load_buffers(accelerator: Accelerator, folder: Path) -> None:
    """Load persistent buffers from the first rank's model file: the universal format holds parameters only."""
    base = accelerator.unwrap_model(accelerator._models[0])
    parameters = {name for name, _ in base.named_parameters(remove_duplicate=False)}
    held = {name: tensor for name, tensor in base.state_dict().items() if name not in parameters}
    if not held:
        return
    path = sorted(folder.glob("*model_states.pt"))[0]
    # It holds DeepSpeed's own classes; `refuse_unsafe_folder` has inspected it before.
    stored = torch.load(path, map_location="cpu", weights_only=False)["module"]
    for name, tensor in held.items():
        tensor.copy_(stored[name])
