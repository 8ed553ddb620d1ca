"""Flag for the parts that recipes/vision.py trains besides the language model."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.flags.common import _flag

TRAIN_VISION = ("none", "projector", "all")


@dataclass
class VisionArguments:
    """Parts of a vision-language model."""

    train_vision: str = _flag(
        "none",
        "What is trained of the parts that see, beside the language model: none; projector, which turns what the "
        "vision tower sees into the language model's tokens; all, the tower too. With adapters: none, and "
        "--lora_modules_to_save trains a projector.",
        choices=TRAIN_VISION,
    )
