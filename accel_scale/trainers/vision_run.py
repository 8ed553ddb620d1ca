"""A run on rows with images: the model's processor, its vision parts, and what is not supported for images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError, first_line
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.flags.vision import VisionArguments
from accel_scale.planning.search.recipe_choices import PlannedRecipe
from accel_scale.settings.vision_refused import no_processor
from accel_scale.trainers.trainer_run import TrainerRun, check_run, load_run_model
from accel_scale.trainers.trainer_start import resolve_trainer_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

    from accel_scale.settings.trl_config import RecipeVisionConfig
    from accel_scale.trainers.sft_trainer import ScaleSFTTrainer

_NOT_CHECKED = (
    "note: the start check takes rows of text; images, the vision tower and the projector are not part of it, and "
    "memory is not predicted."
)


@dataclass
class VisionRun(TrainerRun):
    """A `TrainerRun` with the processor that turns images into model inputs."""

    processor: ProcessorMixin = field(init=False)  # set by `check_vision_run`
    parts: dict[str, str] = field(default_factory=dict)  # of the model, and whether they are trained

    @property
    def train_vision(self) -> str:
        """The vision parts that are trained besides the language model."""
        return self.settings.build(VisionArguments).train_vision

    def record(
        self, program: str, *, parameters: tuple[int, int], attention: str, strategy: str | None = None
    ) -> dict[str, object]:
        known = super().record(program, parameters=parameters, attention=attention, strategy=strategy)
        return {**known, "parts": self.parts}


def resolve_vision_run(parsed: ParsedFlags, plan: PlannedRecipe) -> VisionRun:
    """Same as `resolve_trainer_run`.

    Raises:
        ConfigError: as there.
    """
    run = resolve_trainer_run(parsed, plan, preset={})
    return VisionRun(settings=run.settings, start=run.start, script=run.script, model_args=run.model_args)


def check_vision_run(run: VisionRun) -> None:
    """Same as `check_run`, after checking that the model takes images and has a processor for them."""
    from accel_scale.modeling.loading import load_config

    trusts = bool(run.settings.values.get("trust_remote_code"))
    revision = run.model_args.model_revision
    load_config(run.model_name, revision=revision, trust_remote_code=trusts, images=True)
    run.processor = load_processor(run.model_name, revision=revision, trust_remote_code=trusts)
    check_run(run)
    run.tokenizer = run.processor.tokenizer
    run.say(_NOT_CHECKED)


def load_processor(name: str, *, revision: str = "main", trust_remote_code: bool = False) -> ProcessorMixin:
    """Load the model's processor; if its tokenizer has no padding token, it pads with the end-of-sequence token.

    Raises:
        ConfigError: if there is no processor, or a library that it needs is not installed.
    """
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise ConfigError(
            f"the processor of {name!r} cannot be loaded: {first_line(error)}.",
            place="--model_name_or_path",
            fix="install what it names, e.g. pip install torchvision.",
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise no_processor(name, why=first_line(error)) from error
    if not isinstance(processor, ProcessorMixin):
        raise no_processor(name)
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor


def prepare_images_chat(run: VisionRun, args: RecipeVisionConfig) -> str:
    """Give the processor a template suitable for training; returns the token that ends a turn."""
    from accel_scale.data.chat import ensure_image_chat

    stop_token = ensure_image_chat(
        run.processor,
        assistant_only_loss=args.assistant_only_loss,
        chat_template_path=args.chat_template_path,
    )
    args.chat_template_path = None  # the processor already has it, with an end of turn if that was missing
    return stop_token


def load_vision_model(run: VisionRun, args: RecipeVisionConfig) -> PreTrainedModel:
    """Load the model, with vision parts frozen or trained as ``--train_vision`` says, and print which are trained."""
    from accel_scale.modeling.adapter_targets import parts_beside_language, train_vision_parts

    which = run.train_vision
    if which != "none" and run.settings.trains_adapters:
        raise ConfigError(
            f"{which} is trained as it is, and this run trains adapters.",
            place=run.settings.sources.get("train_vision", "--train_vision"),
            fix="use --method full, or --lora_modules_to_save with the projector's name.",
        )
    model = load_run_model(run, args)
    train_vision_parts(model, which, place=run.settings.sources.get("train_vision", "--train_vision"))
    if which == "all" and args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = True  # a tower's last layers may be unused
    run.parts = {"language model": "adapters" if run.settings.trains_adapters else "trained"}
    for part, parameters in parts_beside_language(model).items():
        flags = {parameter.requires_grad for parameter in parameters}
        run.parts[part] = "partly trained" if len(flags) > 1 else "trained" if flags == {True} else "frozen"
    run.say("parts: " + ", ".join(f"{part} {how}" for part, how in run.parts.items()))
    return model


def read_images(trainer: ScaleSFTTrainer) -> None:
    """Give TRL's collator the images that rows only name."""
    from accel_scale.data.image_batches import ImageCollator, image_token_of

    trainer.data_collator = ImageCollator(  # type: ignore[assignment]  # called as any collator is
        trainer.data_collator, image_token_of(trainer.model.config), trainer.args.max_length
    )
