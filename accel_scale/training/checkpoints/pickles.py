"""Files from `torch.save` or pickled by libraries: read only if nothing in them can run code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from accel_scale.errors import ConfigError

# Classes that torch.distributed.checkpoint pickles into `.metadata` (2.13).
_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
    ("torch", "device"),
}
# The Trainer pickles its arguments into every folder, for people to look at; no code loads them.
NEVER_LOADED = "training_args.bin"
# Classes that DeepSpeed 0.19.8 pickles beside tensors; it reads its files without restrictions.
_DEEPSPEED_NAMES = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


def load_safely(path: Path) -> Any:
    """Load the tensors and plain values in `path` into host memory.

    Raises:
        ConfigError: if it holds anything else.
    """
    refuse_unsafe(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def refuse_unsafe(file: Any, *, allowed: set[str] | frozenset[str] = frozenset()) -> None:
    """Inspect a `torch.save` file without unpickling it.

    Raises:
        ConfigError: if reading it needs anything but tensors, plain values and `allowed`.
    """
    unsafe = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - allowed)
    if unsafe:
        name = file.name if isinstance(file, Path) else "a state"
        raise ConfigError(
            f"{name} holds {unsafe[0]}, which only an unrestricted unpickler reads.",
            place="checkpoint",
            fix="keep such state in a registered object, or pass its class to torch.serialization.add_safe_globals.",
        )


def refuse_unsafe_folder(folder: Path) -> None:
    """Inspect every pickled file below `folder`, before a library reads it without restrictions.

    Raises:
        ConfigError: if a file could run code.
    """
    for path in sorted(folder.rglob("*")):
        if path.name == ".metadata":
            _refuse_unsafe_metadata(path)
        elif path.suffix in (".pt", ".bin") and path.name != NEVER_LOADED and path.is_file():
            refuse_unsafe(path, allowed=_DEEPSPEED_NAMES)


class _MetadataUnpickler(pickle.Unpickler):
    """Accepts only the classes that belong in `.metadata`."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        if module in _METADATA_MODULES and "." not in name:  # a dotted name would reach through its imports
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _refuse_unsafe_metadata(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path.parent.name}/.metadata holds {error}, which does not belong there.",
            place="checkpoint",
            fix="do not load this checkpoint.",
        ) from error
