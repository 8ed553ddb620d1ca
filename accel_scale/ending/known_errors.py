"""Library errors caused by a setting, a file or the machine, as one line that names the cause.

Only errors known to come from outside become a line; any other keeps its traceback, because it is a fault of the
program. Libraries are recognised by the names of their classes and modules, so nothing is imported here.
"""

from __future__ import annotations

import errno
import json
import os
import traceback

from accel_scale.errors import ConfigError, first_line

# Errors with which a file system refuses; other errors of the operating system may be the program's fault.
_REFUSED_BY_THE_SYSTEM = {
    errno.EACCES: "choose a place that may be written, or change its permissions",
    errno.EPERM: "choose a place that may be written",
    errno.EROFS: "choose a place that may be written",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOTDIR: "name a folder whose parents are folders",
}
# Libraries whose classes check the settings they are built from.
_CHECKING_LIBRARIES = ("accelerate", "bitsandbytes", "peft", "torch", "torchao", "transformers", "trl")
_CHECKING_FUNCTIONS = ("__init__", "__post_init__", "_validate_args", "validate", "validate_environment")


def as_setting(error: BaseException) -> ConfigError | None:
    """`error` as a `ConfigError` for the user; None if it is not known to be caused by settings, files or machine."""
    if isinstance(error, ConfigError):
        return error
    name, module = type(error).__name__, type(error).__module__.split(".")[0]
    if name == "SafetensorError":
        return ConfigError(
            f"a weights file cannot be read: {first_line(error)}.",
            place=_path_in_frames(error) or "safetensors",
            fix="download or copy the file again; it must be whole.",
        )
    if module == "huggingface_hub":
        return ConfigError(
            f"the hub says: {first_line(error)}.",
            place="Hugging Face Hub",
            fix="check the name, your access to it (`hf auth login`) and the connection.",
        )
    if module == "datasets" and name.startswith("Dataset"):
        cause = error.__cause__ or error
        return ConfigError(
            f"the data cannot be read: {first_line(cause)}.", place="--dataset_name", fix="repair or re-export it."
        )
    if isinstance(error, OSError) and error.errno in _REFUSED_BY_THE_SYSTEM:
        return ConfigError(
            f"{os.strerror(error.errno)}.",
            place=str(error.filename or "file system"),
            fix=f"{_REFUSED_BY_THE_SYSTEM[error.errno]}.",
        )
    if isinstance(error, json.JSONDecodeError) and _is_library(_innermost(error, skip=("json",))):
        return ConfigError(
            f"a JSON file cannot be read: {first_line(error)}.",
            place=_path_in_frames(error) or "a configuration of the model or the data",
            fix="repair the file, or copy it again.",
        )
    if isinstance(error, (ValueError, ImportError, NotImplementedError)) and _is_check(error):
        library = _library(_innermost(error))
        return ConfigError(f"{library} refuses: {first_line(error)}.", place=library, fix="change that setting.")
    if isinstance(error, RuntimeError) and ("size mismatch" in str(error) or "ignore_mismatched_sizes" in str(error)):
        return ConfigError(
            f"weights and model do not have the same shapes: {first_line(error)}.",
            place="--model_name_or_path",
            fix="use the config.json that belongs to the weights.",
        )
    return None


def _innermost(error: BaseException, skip: tuple[str, ...] = ()) -> traceback.FrameSummary | None:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(f"{os.sep}{name}{os.sep}" in frame.filename for name in skip)
    ]
    return frames[-1] if frames else None


def _library(frame: traceback.FrameSummary | None) -> str:
    """The package in site-packages that a frame belongs to; empty if none."""
    if frame is None or "site-packages" not in frame.filename:
        return ""
    return frame.filename.split("site-packages" + os.sep)[-1].split(os.sep)[0]


def _is_library(frame: traceback.FrameSummary | None) -> bool:
    return _library(frame) in (*_CHECKING_LIBRARIES, "datasets", "huggingface_hub")


def _is_check(error: BaseException) -> bool:
    """True if a library raised `error` while checking its settings."""
    frame = _innermost(error)
    return frame is not None and _library(frame) in _CHECKING_LIBRARIES and frame.name in _CHECKING_FUNCTIONS


def _path_in_frames(error: BaseException) -> str | None:
    """A file passed to one of the functions in the traceback; the innermost that exists."""
    found, step = None, error.__traceback__
    while step is not None:
        for name in ("checkpoint_file", "filename", "resolved_config_file", "json_file", "path", "file"):
            value = step.tb_frame.f_locals.get(name)
            if isinstance(value, (str, os.PathLike)) and os.path.exists(value):
                found = os.fspath(value)
        step = step.tb_next
    return None if found is None else str(found)
