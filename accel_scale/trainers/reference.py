"""The reference model of a preference loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.trainers.trainer_run import TrainerRun, load_run_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from accel_scale.settings.trl_config import RecipeDPOConfig, RecipeKTOConfig


def load_with_reference(
    run: TrainerRun, args: RecipeDPOConfig | RecipeKTOConfig
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Load the model, and a frozen copy if the loss needs one.

    With adapters, the reference is the model with the adapters switched off. Log probabilities computed before
    training use the model itself, but FSDP shards the model later than a reference.
    """
    options = args.model_init_kwargs
    model = load_run_model(run, args)
    if run.settings.trains_adapters or (args.precompute_ref_log_probs and not run.launch.parallel.is_fsdp):
        return model, None
    args.model_init_kwargs = options
    return model, load_run_model(run, args)
