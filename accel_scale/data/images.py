"""Images of a row: find them, check that they can be read, and place them in the conversation."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from accel_scale.data.bad_rows import UnusableRow
from accel_scale.errors import ConfigError, first_sentence

if TYPE_CHECKING:
    from PIL.Image import Image

# Column names that data sets use; the last is that of `datasets`' image folders.
IMAGE_COLUMNS = ("images", "image", "file_name")
# Marks the position of an image in a text, as in LLaVA's rows.
PLACEHOLDER = "<image>"
_NOT_FILES = ("http://", "https://", "data:", "s3://", "gs://", "hf://")
# JPEGs are decoded at an eighth of their size, which shows just as well whether they are complete.
_DRAFT_SIDE = 64


class StoredImage(TypedDict):
    """An image as stored in a row: bytes or the path of a file, and where the row was found."""

    bytes: bytes | None
    path: str | None
    place: str


class TurnPart(TypedDict, total=False):
    """A part of a turn: text, or the place of an image."""

    type: str
    text: str


def require_pillow() -> None:
    """Check that Pillow, which reads images, is installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Pillow, which reads images, is not installed.", place="recipes/vision.py", fix="pip install pillow."
        ) from None


def images_of(value: object, column: str, *, folder: str, place: str, whole: bool) -> list[StoredImage]:
    """The images of a row, after checking that each exists and can be opened.

    Args:
        value: Value of the row's `column`: one image or a list, each a path or an object with `bytes` or `path`.
        folder: Folder that relative paths start from.
        place: Location of the row.
        whole: Whether to read each image to its end.

    Raises:
        UnusableRow: for a row without an image, or with one that cannot be used.
    """
    items = value if isinstance(value, list) else [value]
    images = [_stored(item, column, folder, place) for item in items if item not in (None, "")]
    if not images:
        raise UnusableRow(f"no image in `{column}`")
    for image in images:
        _check(image, whole=whole)
    return images


def _stored(item: object, column: str, folder: str, place: str) -> StoredImage:
    data, path = (item.get("bytes"), item.get("path")) if isinstance(item, Mapping) else (None, item)
    if isinstance(data, bytes) and data:
        return {"bytes": data, "path": path if isinstance(path, str) else None, "place": place}
    if not isinstance(path, str) or not path:
        raise UnusableRow(f"`{column}` holds something that is no image", type(item).__name__)
    if path.startswith(_NOT_FILES):
        raise UnusableRow("an image is not a file on this machine", f"{path[:80]}; download it first")
    return {"bytes": None, "path": os.path.abspath(os.path.join(folder, os.path.expanduser(path))), "place": place}


def name_of(image: StoredImage) -> str:
    """The name of an image in messages."""
    return image["path"] or "bytes without a name"


def open_image(image: StoredImage) -> Image:
    """The image with its size and format; its pixels are read later."""
    from PIL import Image as images

    return images.open(io.BytesIO(image["bytes"]) if image["bytes"] is not None else str(image["path"]))


def why_unreadable(image: StoredImage, *, whole: bool) -> str | None:
    """The reason why an image cannot be opened, or read to its end if `whole`; None if it can."""
    from PIL import Image as images

    try:
        with open_image(image) as opened:
            if not whole:
                return None
            if opened.format == "PNG":
                opened.verify()  # lengths and checksums of all chunks, without decoding them
            else:
                opened.draft("RGB", (_DRAFT_SIDE, _DRAFT_SIDE))
                opened.load()
    except (OSError, ValueError, SyntaxError, EOFError, images.DecompressionBombError) as error:
        return "it is no image" if isinstance(error, images.UnidentifiedImageError) else first_sentence(error)
    return None


def _check(image: StoredImage, *, whole: bool) -> None:
    if image["bytes"] is None and not os.path.isfile(str(image["path"])):
        raise UnusableRow("an image does not exist", name_of(image))
    if (reason := why_unreadable(image, whole=whole)) is not None:
        raise UnusableRow("an image cannot be read", f"{name_of(image)}: {reason}")


# ── Turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def content_parts(content: Sequence[object], column: str) -> list[TurnPart]:
    """The parts of a turn whose content is a list of parts, without empty keys.

    Raises:
        UnusableRow: for parts that are neither text nor the place of an image.
    """
    parts: list[TurnPart] = []
    for item in content:
        if isinstance(item, str):
            parts.append({"type": "text", "text": item})
            continue
        if not isinstance(item, Mapping):
            raise UnusableRow(f"a turn in `{column}` has a part that is no object", type(item).__name__)
        kind, text = item.get("type", "text"), item.get("text")
        if kind == "image":
            if held := [key for key, value in item.items() if key not in ("type", "text") and value is not None]:
                raise UnusableRow(f"a turn in `{column}` holds an image itself", f"{held[0]}; name it in a column")
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(text, str):
            parts.append({"type": "text", "text": text})
        else:
            raise UnusableRow(f"a turn in `{column}` has content that is neither text nor image", str(kind))
    return parts


def is_blank_content(content: str | Sequence[TurnPart] | None) -> bool:
    """True if a turn has neither text nor images."""
    if isinstance(content, str) or content is None:
        return not content or content.isspace()
    return all(part["type"] == "text" and is_blank_content(part["text"]) for part in content)


def show_images(row: Mapping[str, object], count: int) -> None:
    """Convert the turns of a row to parts, with images in place of ``<image>``, else before the first question.

    Raises:
        UnusableRow: if the number of images differs from the number of places for them.
    """
    found = 0
    for name, turns in row.items():
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn["content"], str):
                turn["content"] = _split(turn["content"])
            shown = sum(part["type"] == "image" for part in turn["content"])
            if shown and name == "completion":
                raise UnusableRow("an image is shown in an answer", "images belong to the prompt")
            found += shown
    if found == 0:
        opening = row.get("messages", row.get("prompt"))
        turns = opening if isinstance(opening, list) else []
        first = next((turn for turn in turns if turn["role"] == "user"), None)
        if first is None:
            raise UnusableRow("no user turn to show an image in")
        places: list[TurnPart] = [{"type": "image"} for _ in range(count)]
        first["content"] = [*places, *first["content"]]
    elif found != count:
        raise UnusableRow("another number of images than of places for them", f"{count} and {found}")


def _split(text: str) -> list[TurnPart]:
    """Split text into parts; line ends beside a placeholder, as in LLaVA's rows, are left to the template."""
    first, *others = text.split(PLACEHOLDER)
    pieces = [first.removesuffix("\n") if others else first]
    parts: list[TurnPart] = [{"type": "text", "text": pieces[0]}] if pieces[0] or not others else []
    for index, piece in enumerate(others):
        parts.append({"type": "image"})
        piece = piece.removeprefix("\n")
        piece = piece.removesuffix("\n") if index + 1 < len(others) else piece
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts
