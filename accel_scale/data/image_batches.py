"""Micro-batches of rows with images, which stay files or bytes until they are collated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from accel_scale.data.images import StoredImage, name_of, open_image
from accel_scale.errors import ConfigError, first_sentence

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PreTrainedConfig

    Batch: TypeAlias = Mapping[str, torch.Tensor]
    Collate: TypeAlias = Callable[[list[dict[str, object]]], Batch]


class ImageCollator:
    """TRL's collator for rows as stored by `accel_scale.data.images`; errors name the row.

    Args:
        collate: TRL's collator, with a `max_length`.
        image_token: Id of the token that images become; None if not known.
        max_length: Length at which rows are cut.
    """

    def __init__(self, collate: Collate, image_token: int | None, max_length: int | None) -> None:
        self._collate, self._image_token, self._max_length = collate, image_token, max_length

    def __call__(self, rows: Sequence[Mapping[str, object]]) -> Batch:
        shown = [{**row, "images": [decoded(image) for image in _images_of(row)]} for row in rows]
        try:
            batch = self._collate([dict(row) for row in shown])
        except ValueError as error:
            self._refuse_cut_images(rows, shown, None)
            raise ConfigError(
                f"the processor does not take this row, or one of its micro-batch: {first_sentence(error)}.",
                place=_images_of(rows[0])[0]["place"],
                fix="repair the row.",
            ) from error
        if self._max_length is not None and batch["input_ids"].shape[1] >= self._max_length:
            self._refuse_cut_images(rows, shown, batch)
        return batch

    def _refuse_cut_images(
        self, rows: Sequence[Mapping[str, object]], shown: Sequence[dict[str, object]], batch: Batch | None
    ) -> None:
        """Refuse a row that loses image tokens at ``--max_length``; the model would too, without naming the row."""
        limit = self._max_length
        if limit is None or self._image_token is None:
            return
        self._collate.max_length = None  # type: ignore[attr-defined]
        try:
            whole = self._collate([dict(row) for row in shown])
        except ValueError:
            return  # cutting is not the cause
        finally:
            self._collate.max_length = limit  # type: ignore[attr-defined]
        ids = whole["input_ids"]
        lost = (ids[:, limit:] == self._image_token).any(dim=1)
        for index in lost.nonzero().flatten().tolist():
            length = int(whole["attention_mask"][index].sum())
            raise ConfigError(
                f"the row has {length:,} tokens, and --max_length {limit:,} cuts those of its images.",
                place=_images_of(rows[index])[0]["place"],
                fix=f"use --max_length {length} or more, or leave it out.",
            )


def _images_of(row: Mapping[str, object]) -> list[StoredImage]:
    images: list[StoredImage] = row["images"]  # type: ignore[assignment]  # as `Layout.features` has them
    return images


def decoded(image: StoredImage) -> Image:
    """The pixels of an image, rotated according to its EXIF data, as `datasets` reads images.

    Raises:
        ConfigError: naming the row and the file, which were fine when the rows were first read.
    """
    from PIL import Image as images
    from PIL import ImageOps

    try:
        opened = open_image(image)
        opened.load()
        turned = opened.getexif().get(images.ExifTags.Base.Orientation) is not None
        return ImageOps.exif_transpose(opened) if turned else opened
    except (OSError, ValueError, SyntaxError, EOFError, images.DecompressionBombError) as error:
        raise ConfigError(
            f"the image {name_of(image)} can no longer be read: {first_sentence(error)}.",
            place=image["place"],
            fix="put the file back, or leave the row out.",
        ) from error


def image_token_of(config: PreTrainedConfig) -> int | None:
    """Id of the token that stands for images in a model's inputs."""
    found = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    return next((token for token in found if isinstance(token, int)), None)
