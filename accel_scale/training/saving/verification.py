"""Read back what was just saved and compare it with the weights in memory, under every sharding strategy."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.modeling.checkpoint_names import as_saved, stored_names
from accel_scale.modeling.gathering import (
    adapter_tensors,
    broadcast_from_main,
    gather_whole,
    named_tensors,
    process_index,
    unwrap,
)
from accel_scale.training.saving.tensor_difference import difference, tied_names
from accel_scale.training.saving.verification_sharded import compare_sharded

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
SHARDED_WEIGHTS = "pytorch_model_fsdp_0"
GATHERED_WEIGHTS = "pytorch_model_fsdp.bin"  # written by `Accelerator.save_state` under FSDP's FULL_STATE_DICT
_MAX_LISTED = 4


class CheckpointMismatch(ConfigError):
    """The saved files differ from the weights in memory; names the folder and the first tensors that differ."""


@dataclass(frozen=True)
class VerifyResult:
    """Result of reading a checkpoint back; a mismatch raises instead."""

    num_tensors: int
    max_abs_diff: float
    seconds: float
    source: str


def verify_checkpoint(model: nn.Module, folder: str | Path, *, accelerator: Accelerator | None = None) -> VerifyResult:
    """Compare every weight saved in `folder` with `model`, tensor by tensor; call it on every process.

    Understands full weights and adapters in safetensors (single file or index) and FSDP's sharded format.
    Every file must hold exactly the weights in memory, after rounding to the stored dtype.

    Args:
        model: The training model, wrapped or not: DDP, FSDP2, DeepSpeed engine, PEFT.
        folder: The folder just written, on a filesystem that rank 0 sees (sharded format: every rank).
        accelerator: Unwraps models it prepared; only needed for wrappers that `accelerate` adds.

    Raises:
        CheckpointMismatch: on every process, if a tensor is missing, empty, unexpected, or of another shape or value,
            or if a file cannot be read.
    """
    started = time.perf_counter()
    folder = Path(folder)
    base = unwrap(accelerator.unwrap_model(model, keep_torch_compile=False) if accelerator is not None else model)
    adapters = list(base.peft_config) if _is_peft(base) else []  # type: ignore[arg-type]
    if broadcast_from_main(_holds_whole_model(folder)):  # `Accelerator.save_state` writes base and adapter together
        adapters = []
    # Rank 0 looks and tells the others, which may not see the same filesystem but must take the same branch.
    sharded = broadcast_from_main((folder / SHARDED_WEIGHTS / ".metadata").is_file())
    problems: list[str] = []
    num_tensors, max_abs_diff, sources = 0, 0.0, list[str]()
    if not adapters and broadcast_from_main(_only_deepspeed_shards(folder)):
        return VerifyResult(0, 0.0, time.perf_counter() - started, "DeepSpeed shards, not compared")
    for adapter in adapters or [None]:
        expected = adapter_tensors(base, adapter) if adapter else named_tensors(base)
        subfolder = folder / adapter if adapter not in (None, "default") else folder
        has_files = broadcast_from_main(any((subfolder / f).is_file() for f in _weight_files(adapter)))
        if sharded and not has_files:
            count, diff, found = compare_sharded(expected, folder / SHARDED_WEIGHTS)
            sources.append(SHARDED_WEIGHTS)
        else:
            saved = SavedTensors(subfolder, adapter) if process_index() == 0 else None
            count, diff, found = _compare(base, expected, saved, is_adapter=adapter is not None)
            found_gathered = not adapter and not has_files
            sources.append(GATHERED_WEIGHTS if found_gathered else _weight_files(adapter)[0])
        num_tensors, max_abs_diff = num_tensors + count, max(max_abs_diff, diff)
        problems += found + _unsaved_trainable(base, expected, adapter)
    problems, num_tensors, max_abs_diff = broadcast_from_main((problems, num_tensors, max_abs_diff))
    if problems:
        raise mismatch(folder, problems)
    return VerifyResult(num_tensors, max_abs_diff, time.perf_counter() - started, " + ".join(sources))


def mismatch(folder: Path, problems: list[str]) -> CheckpointMismatch:
    """The error that names the first of `problems`."""
    listed = "; ".join(problems[:_MAX_LISTED])
    more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    return CheckpointMismatch(
        f"what was saved is not what is in memory: {listed}{more}.",
        place=str(folder),
        fix="check the disk, and fsdp_state_dict_type or zero3_save_16bit_model in the launch file; "
        "--verify_first_checkpoint false saves without this check.",
    )


def _is_peft(model: nn.Module) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _only_deepspeed_shards(folder: Path) -> bool:
    """True for ZeRO-3 without zero3_save_16bit_model: a checkpoint to resume from, not weights for others to load."""
    return (folder / "latest").is_file() and not _has_weights(folder)


def _holds_whole_model(folder: Path) -> bool:
    only_gathered = (folder / GATHERED_WEIGHTS).is_file() and not (folder / ADAPTER_WEIGHTS).is_file()
    return _has_weights(folder) or only_gathered


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _weight_files(None))


def _weight_files(adapter: str | None) -> tuple[str, ...]:
    name = ADAPTER_WEIGHTS if adapter else WEIGHTS
    return (name, f"{name}.index.json")


class SavedTensors:
    """The tensors of one safetensors file or index, read one at a time."""

    def __init__(self, folder: Path, adapter: str | None) -> None:
        self.folder, self.problems = folder, list[str]()
        self.file_of: dict[str, str] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        single, index = _weight_files(adapter)
        if (folder / index).is_file():
            self.file_of = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
        elif (folder / single).is_file():
            self._list(single)
        elif (folder / GATHERED_WEIGHTS).is_file():
            self._map(GATHERED_WEIGHTS)
        else:
            self.problems.append(f"there is no {single}")

    def _map(self, file: str) -> None:
        """Map a pickled state dict: its tensors are read from disk as they are compared."""
        import torch

        try:
            self._mapped = torch.load(self.folder / file, map_location="cpu", mmap=True, weights_only=True)
            self.file_of = dict.fromkeys(self._mapped, file)
        except (RuntimeError, OSError) as error:
            self.problems.append(f"{file} cannot be read ({error})")

    def _list(self, file: str) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.folder / file, framework="pt") as handle:
                self.file_of = dict.fromkeys(handle.keys(), file)
        except (SafetensorError, OSError) as error:
            self.problems.append(f"{file} cannot be read ({error})")

    def read(self, name: str) -> torch.Tensor | None:
        """The tensor on the CPU, or None after noting the problem."""
        from safetensors import SafetensorError, safe_open

        file = self.file_of[name]
        if name in self._mapped:
            return self._mapped[name]
        try:
            with safe_open(self.folder / file, framework="pt") as handle:
                return handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            problem = f"{file} cannot be read ({error})"
            if problem not in self.problems:
                self.problems.append(problem)
            return None


def _compare(
    model: nn.Module, expected: dict[str, torch.Tensor], saved: SavedTensors | None, *, is_adapter: bool
) -> tuple[int, float, list[str]]:
    """Compare with the files on rank 0; the other ranks only take part in the gathering."""
    pairs, tied = gather_whole(expected), _ties(model, expected)
    if not is_adapter and broadcast_from_main(saved is not None and not set(saved.file_of) <= set(expected)):
        pairs, tied = _in_checkpoint_names(model, expected), _ties_in_checkpoint_names(model, tied)
    seen, count, max_diff, problems = set(), 0, 0.0, list[str]()
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, tensor in pairs:
        if saved is None:
            continue
        seen.add(name)
        if name not in saved.file_of:
            if name not in ignored and not any(other in saved.file_of for other in tied.get(name, ())):
                problems.append(f"{name} is missing")
            continue
        stored = saved.read(name)
        if stored is None:
            continue
        problem, diff = difference(name, tensor, stored)
        count, max_diff = count + 1, max(max_diff, diff)
        problems += [problem] if problem else []
    if saved is not None:
        problems = saved.problems + problems + [f"{n} is unexpected" for n in sorted(set(saved.file_of) - seen)]
        if not saved.file_of and not saved.problems:
            problems.append("there is no tensor in it")
    return count, max_diff, problems


def _ties(model: nn.Module, expected: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Map each tied name to all its names: those of one tensor, or of two that the model's class declares as tied."""
    tied = tied_names(expected)
    for name, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in expected and other in expected and name not in tied:
            tied[name] = tied[other] = [*tied.get(other, [other]), name]
    return tied


def _ties_in_checkpoint_names(model: nn.Module, tied: dict[str, list[str]]) -> dict[str, list[str]]:
    spelled = stored_names(model, tied)  # type: ignore[arg-type]
    return {spelled[name]: [spelled[other] for other in others] for name, others in tied.items()}


def _in_checkpoint_names(model: nn.Module, expected: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Split weights that the architecture fuses when loading (e.g. experts), one layer at a time."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in expected.items():
        match = re.search(r"^.*?\.\d+\.", name)
        layers.setdefault(match.group(0) if match else name, {})[name] = tensor
    for layer in layers.values():
        gathered = gather_whole(layer)
        if process_index() != 0:
            for _ in gathered:  # takes part in the gathering, keeps nothing
                pass
            continue
        whole = {name: tensor.to("cpu", copy=True) for name, tensor in gathered}
        yield from as_saved(model, whole).items()  # type: ignore[arg-type]


def _unsaved_trainable(model: nn.Module, expected: dict[str, torch.Tensor], adapter: str | None) -> list[str]:
    """Trained parameters that the saved format leaves out, e.g. an embedding unfrozen beside an adapter."""
    covered = {id(tensor) for tensor in expected.values()}
    trained = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if adapter is not None:  # another adapter's weights are in its own file
        others = [other for other in model.peft_config if other != adapter]  # type: ignore[union-attr,operator]
        trained = [n for n in trained if not any(f".{other}." in n or n.endswith(f".{other}") for other in others)]
    return [f"{name} is trained but not part of what is saved" for name in trained]
