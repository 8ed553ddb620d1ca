"""Our flags and defaults in addition to TRL's, for the recipes that use its trainers; nothing here imports TRL.

python -m accel_scale.flags.sft     # writes the shipped table of TRL's flags, as installed
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from accel_scale.flags.common import OptimizerArguments
from accel_scale.flags.ddp import DdpHookArguments
from accel_scale.flags.library import SHIPPED, LaterClass, make_table
from accel_scale.flags.trackers import TrackerArguments


@dataclass
class ModelDefaults:
    """Overrides of TRL's `ModelConfig`: double quantisation is on and the weights' dtype follows ``--precision``."""

    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype the weights are loaded in. Default: what --precision and --method call for.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    use_bnb_nested_quant: bool = field(
        default=True, metadata={"help": "Quantise the quantisation constants too (QLoRA, section 3)."}
    )


@dataclass
class TrainerDefaults(OptimizerArguments, TrackerArguments):
    """Overrides for the configurations of all TRL trainers: every optimizer and schedule as a choice, quiet output."""

    resume_from_checkpoint: str | None = field(
        default="auto",
        metadata={
            "help": "auto: continue from the newest good checkpoint in --output_dir, if there is one; no: start over, "
            "and refuse a folder with leftovers; or the path of a checkpoint."
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide NaN losses from the log; off, so that they are seen."}
    )
    collective_timeout: str | None = field(
        default=None,
        metadata={
            "help": "How long ranks wait for one another, e.g. 10m, before the run ends and says which is missing "
            "and where. Default: --ddp_timeout."
        },
    )
    disable_tqdm: bool | None = field(default=False, metadata={"help": "No progress bar, not even on a terminal."})
    gradient_checkpointing: bool | None = field(
        default=None,
        metadata={
            "help": "TRL's switch for activation checkpointing; --checkpointing_policy says more.",
            "nargs": "?",
            "const": True,
        },
    )


@dataclass
class SFTDefaults(TrainerDefaults):
    """Overrides of TRL's `SFTConfig`: packing is on."""

    output_dir: str | None = field(default="outputs/sft", metadata={"help": "Where checkpoints and the result go."})
    packing: bool = field(
        default=True,
        metadata={"help": "Pack documents into rows of --max_length; attention never crosses documents."},
    )


@dataclass
class DPODefaults(TrainerDefaults):
    """Overrides of TRL's `DPOConfig`."""

    output_dir: str | None = field(default="outputs/dpo", metadata={"help": "Where checkpoints and the result go."})


@dataclass
class KTODefaults(TrainerDefaults):
    """Overrides of TRL's `KTOConfig`."""

    output_dir: str | None = field(default="outputs/kto", metadata={"help": "Where checkpoints and the result go."})


@dataclass
class GRPODefaults(TrainerDefaults):
    """Overrides of TRL's `GRPOConfig`."""

    output_dir: str | None = field(default="outputs/grpo", metadata={"help": "Where checkpoints and the result go."})


@dataclass
class RLOODefaults(TrainerDefaults):
    """Overrides of TRL's `RLOOConfig`, whose clip range has a type that no command line can express."""

    output_dir: str | None = field(default="outputs/rloo", metadata={"help": "Where checkpoints and the result go."})
    reward_clip_range: list[float] | None = field(
        default=None, metadata={"help": "Least and largest reward, e.g. -1 1; others are moved there."}
    )


@dataclass
class RewardDefaults(TrainerDefaults):
    """Overrides of TRL's `RewardConfig`."""

    output_dir: str | None = field(default="outputs/reward", metadata={"help": "Where checkpoints and the result go."})


@dataclass
class VisionDefaults(TrainerDefaults):
    """Overrides of TRL's `SFTConfig` for rows with images, which are not cut."""

    output_dir: str | None = field(default="outputs/vision", metadata={"help": "Where checkpoints and the result go."})
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of a row, those of its images among them; longer rows are cut, and refused where that "
            "cuts an image. Default: rows are not cut."
        },
    )


def _library_classes(config: str, library: str, defaults: type) -> tuple[LaterClass, ...]:
    """The classes of TRL's flags that a recipe reads; the classes themselves are in `settings.trl_config`."""
    module = "accel_scale.settings.trl_config"
    return (
        LaterClass("trl:ScriptArguments", library="trl:ScriptArguments"),
        LaterClass(f"{module}:{config}", library=library, own=(defaults, DdpHookArguments)),
        LaterClass(f"{module}:RecipeModelConfig", library="trl:ModelConfig", own=(ModelDefaults,)),
    )


LIBRARY_CLASSES = _library_classes("RecipeSFTConfig", "trl:SFTConfig", SFTDefaults)
DPO_LIBRARY_CLASSES = _library_classes("RecipeDPOConfig", "trl:DPOConfig", DPODefaults)
KTO_LIBRARY_CLASSES = _library_classes("RecipeKTOConfig", "trl:KTOConfig", KTODefaults)
GRPO_LIBRARY_CLASSES = _library_classes("RecipeGRPOConfig", "trl:GRPOConfig", GRPODefaults)
RLOO_LIBRARY_CLASSES = _library_classes("RecipeRLOOConfig", "trl:RLOOConfig", RLOODefaults)
REWARD_LIBRARY_CLASSES = _library_classes("RecipeRewardConfig", "trl:RewardConfig", RewardDefaults)
VISION_LIBRARY_CLASSES = _library_classes("RecipeVisionConfig", "trl:SFTConfig", VisionDefaults)
SHIPPED_CLASSES = (
    *LIBRARY_CLASSES, *DPO_LIBRARY_CLASSES, *KTO_LIBRARY_CLASSES, *GRPO_LIBRARY_CLASSES, *RLOO_LIBRARY_CLASSES,
    *REWARD_LIBRARY_CLASSES, *VISION_LIBRARY_CLASSES,
)  # fmt: skip


def main() -> None:
    """Write the shipped table."""
    from accel_scale.flags.parsing import build_parser

    table = make_table(SHIPPED_CLASSES, lambda found: build_parser(found, program=""))
    SHIPPED.write_text(json.dumps(table).replace('{"names"', '\n{"names"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
