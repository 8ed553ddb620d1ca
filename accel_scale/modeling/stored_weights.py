"""Weights on disk: headers are checked before they are trusted, tensors are read one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    import torch

_WANTED = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "*.py"]

_EMBEDDINGS = ("embed_tokens.weight", "embed_tokens.base_layer.weight", "wte.weight", "wte.base_layer.weight")

_LFS_POINTER = b"version https://git-lfs"


_LARGEST_HEADER_BYTES = 100_000_000  # safetensors' own limit


_AGAIN = "download or copy the file again; it must be whole."


def stored_shapes(folder: Path, stem: str = "model") -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a folder's safetensors files, from their headers; empty if there are none.

    Raises:
        ConfigError: for a file that is truncated, missing or not a safetensors file.
    """
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    files = [single] if single.is_file() else []
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / file for file in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError("no index of safetensors files.", place=str(index), fix=_AGAIN) from None
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, entry in read_header(file).items():
            shapes[name] = tuple(entry["shape"])
    return shapes


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, without its metadata.

    Raises:
        ConfigError: for a file that is missing, truncated, a Git LFS pointer, or of another format.
    """
    if not path.is_file():
        raise ConfigError("there is no such file, though the index names it.", place=str(path), fix=_AGAIN)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise ConfigError(
                "a Git LFS pointer and not the weights themselves.",
                place=str(path),
                fix="run `git lfs pull` in that repository, or download the file.",
            )
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        if size < 8 or length > _LARGEST_HEADER_BYTES:
            raise ConfigError("no safetensors file.", place=str(path), fix=_AGAIN)
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            what = f"cut off after {size:,} bytes" if length > size - 8 else "no safetensors file"
            raise ConfigError(f"{what}: its header cannot be read.", place=str(path), fix=_AGAIN) from None
    if size < end:
        raise ConfigError(f"cut off: it has {size:,} of {end:,} bytes.", place=str(path), fix=_AGAIN)
    return dict(header)


def local_folder(model: str, *, place: str) -> Path:
    """`model` itself if it is a folder, otherwise a hub id's files in the local cache (downloaded if necessary)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{model!r} is neither a folder nor a model that can be downloaded ({type(error).__name__}).",
            place=place,
            fix="give the folder of the model, or its name on the Hub.",
        ) from error


class SafetensorsReader:
    """Reads the tensors of a folder's safetensors files by name; a file is mapped only while a tensor is read."""

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        stored_shapes(folder, stem)  # refuses files that are not whole
        if index.is_file():
            self.file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif single.is_file():
            from safetensors import safe_open

            with safe_open(single, framework="pt") as handle:
                self.file_of = dict.fromkeys(handle.keys(), single.name)
        else:
            raise ConfigError(
                f"there is neither {single.name} nor {index.name}.",
                place=str(folder),
                fix="load the model and save it again with save_pretrained, which writes safetensors.",
            )

    def names(self) -> list[str]:
        """All names, file by file, so that reading in this order uses one file at a time."""
        return sorted(self.file_of, key=lambda name: (self.file_of[name], name))

    def read(self, name: str) -> torch.Tensor:
        """Read a copy into memory; nothing stays mapped."""
        from safetensors import safe_open

        with safe_open(self.folder / self.file_of[name], framework="pt") as handle:
            return handle.get_tensor(name).clone()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        from safetensors import safe_open

        with safe_open(self.folder / self.file_of[name], framework="pt") as handle:
            return tuple(handle.get_slice(name).get_shape())


def rows_of_embedding(adapter: SafetensorsReader) -> int | None:
    """Rows of the embedding stored whole in an adapter, e.g. after training with added tokens; None without one."""
    found = [name for name in adapter.file_of if name.endswith(_EMBEDDINGS)]
    return adapter.shape(found[0])[0] if found else None
