"""Build a model once per server for ranks that share it: one rank builds it, the others map its weights.

The pages of a mapped file are in memory only once, however many ranks map it, and only if they are read. So a server
needs room for one whole model instead of one for each of its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.modeling.gathering import gather_values, process_index, wait_for_everyone

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

_PREFIX = "accel-scale-weights-"
_PIECE_BYTES = 2 << 30  # safetensors copies what it writes
_RANDOM_STATE = "state of the random number generator"
_ABANDONED_SECONDS = 24 * 3600
_READY, _FAILED = "ready.json", "failed.txt"


def build_once_per_server(
    build: Callable[[], PreTrainedModel],
    skeleton: Callable[[], PreTrainedModel],
    *,
    local_rank: int,
    num_bytes: int,
    fits_on_each: bool,
) -> PreTrainedModel:
    """Return the model of `build` on every rank: built by the first rank of each server, mapped by the others.

    Afterwards torch's random number generator is in the state left by building, on every rank. Collective.

    Args:
        build: Makes the model in host memory, with its weights.
        skeleton: Makes the same modules on the meta device.
        local_rank: Rank of this process on its server, whose processes have consecutive ranks.
        num_bytes: Approximate size of the weights.
        fits_on_each: True if each rank may build its own model when the disk has no room for the file.

    Raises:
        ConfigError: if neither disk nor host memory has room; also any error of `build`.
    """
    folder, problem = _new_folder(num_bytes, fits_on_each) if local_rank == 0 else ("", "")
    everyone = gather_values((folder, problem))
    problem = next((said for _, said in everyone if said), "")
    if problem:
        raise ConfigError(problem, place="TMPDIR", fix="free space, or set TMPDIR to a folder on a larger local disk.")
    shared = everyone[process_index() - local_rank][0]
    try:
        if not shared:
            return build()
        return _built(build, Path(shared)) if local_rank == 0 else _mapped(skeleton, Path(shared))
    finally:
        if any(path for path, _ in everyone):
            wait_for_everyone()  # a mapped file no longer needs a name
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _new_folder(num_bytes: int, fits_on_each: bool) -> tuple[str, str]:
    """(folder for the weights, or empty if ranks build their own; the problem, if any)."""
    root = Path(tempfile.gettempdir())
    for leftover in root.glob(f"{_PREFIX}*"):
        if _is_abandoned(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(root).free
    if free > 1.05 * num_bytes:
        return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root), ""
    if fits_on_each:
        return "", ""
    return "", f"{root} has {free / 2**30:,.1f} GiB free; the model's weights take {num_bytes / 2**30:,.1f} there."


def _is_abandoned(folder: Path) -> bool:
    """True if the run that created it was killed; a container that shares the folder has its own process ids."""
    import psutil

    pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
    try:
        is_old = time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS
    except FileNotFoundError:  # another run has just ended
        return False
    return is_old and pid.isdigit() and not psutil.pid_exists(int(pid))


# ── The rank that builds ─────────────────────────────────────────────────────────────────────────────────────────────


def _built(build: Callable[[], Any], folder: Path) -> Any:
    try:
        model = build()
        _write(model, folder)
    except BaseException as error:
        (folder / _FAILED).write_text(str(error))
        raise
    return model


def _write(model: nn.Module, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    names: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            aliases[name] = first
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # Buffers may be views of each other; they are small.
    tensors |= {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    tensors[_RANDOM_STATE] = torch.get_rng_state()
    pieces = 0
    for pieces, piece in enumerate(_pieces(tensors), 1):
        save_file({name: tensor.contiguous() for name, tensor in piece.items()}, folder / f"{pieces:05d}.safetensors")
    generation = getattr(model, "generation_config", None)
    ready = {"pieces": pieces, "aliases": aliases, "generation": generation.to_dict() if generation else None}
    (folder / "unfinished").write_text(json.dumps(ready))
    os.replace(folder / "unfinished", folder / _READY)


def _pieces(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    piece: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if piece and size + tensor.nbytes > _PIECE_BYTES:
            yield piece
            piece, size = {}, 0
        piece[name] = tensor
        size += tensor.nbytes
    if piece:
        yield piece


# ── The ranks that map ───────────────────────────────────────────────────────────────────────────────────────────────


def _mapped(skeleton: Callable[[], Any], folder: Path) -> Any:
    import torch

    model = skeleton()
    ready = _wait(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = _read(folder, ready["pieces"])
    torch.set_rng_state(tensors.pop(_RANDOM_STATE))
    made = {
        name: torch.nn.Parameter(tensor, requires_grad=parameters[name].requires_grad)
        for name, tensor in tensors.items()
        if name in parameters
    }
    for name in parameters:
        _owner(model, name)._parameters[name.rpartition(".")[2]] = made[ready["aliases"].get(name, name)]
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        _owner(model, name)._buffers[name.rpartition(".")[2]] = tensors[name]
    if ready["generation"] is not None:
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_dict(ready["generation"])
    return model


def _wait(folder: Path) -> dict[str, Any]:
    """Wait for the first rank's record that all is written; drawing a large model's weights takes many minutes."""
    while not (folder / _READY).exists():
        if (folder / _FAILED).exists():
            raise ConfigError(f"the model was not built: {(folder / _FAILED).read_text()}")
        time.sleep(0.05)
    found: dict[str, Any] = json.loads((folder / _READY).read_text())
    return found


def _read(folder: Path, num_pieces: int) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for piece in range(1, num_pieces + 1):
            file = stack.enter_context(safe_open(folder / f"{piece:05d}.safetensors", "pt"))
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return tensors


def _owner(model: Any, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


def fits_on_each(num_params: int, processes_on_node: int) -> bool:
    """True if each rank can hold the model in fp32 within a quarter of the host's memory."""
    import psutil

    return bool(4 * num_params * processes_on_node <= psutil.virtual_memory().total / 4)
