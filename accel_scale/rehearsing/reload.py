"""Reload what a rehearsal saved with plain `from_pretrained`, and compare weights and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_scale.modeling.adapters import is_of_rewards

# Relative to the largest logit. Weights saved in 16 bit may be rounded the other way if the CPU Adam of an offloading
# launch vectorised differently (1 value in 10,000 by its last bit, 2.4e-4 measured); a lost state changes all of them.
LOGIT_TOLERANCE, LOGIT_TOLERANCE_16_BIT = 1e-5, 1e-3
ROUNDED_OTHERWISE = 1e-3  # largest share of differing values for which the wider tolerance applies


def compare_final_folders(*, start: Path | None, uninterrupted: Path, resumed: Path | None) -> str:
    """Load the final folders as a user would, and check that they are complete, trained and equal.

    Args:
        start: The model before training; None if the runs began with random weights, which were not kept.
        uninterrupted: Final folder of the uninterrupted run.
        resumed: Final folder of the same run resumed half-way; None if the launch cannot resume.

    Returns:
        One line that says what was compared.

    Raises:
        CheckFailed: if something is missing, nothing was trained, or the two differ.
    """
    import torch

    from accel_scale.rehearsing.plan import CheckFailed

    ids = torch.arange(3, 35).unsqueeze(0)
    loaded = [_load(folder) for folder in (uninterrupted, resumed) if folder is not None]
    with torch.no_grad():
        logits = [model(input_ids=ids).logits.float() for model, _ in loaded]
    if not torch.isfinite(logits[0]).all():
        raise CheckFailed("the reloaded model's logits are not finite")
    text = f"{type(loaded[0][0]).__name__}: {len(loaded[0][1])} tensors"
    if start is not None:
        trained = _trained_tensors(loaded[0][1], start)
        if not trained:
            raise CheckFailed(f"nothing in {uninterrupted.name} differs from the model before training")
        text += f", {len(trained)} trained"
    if len(logits) == 1:
        return f"{text}; logits finite"
    logit_diff = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    is_rounding = _only_rounded_otherwise(loaded[0][1], loaded[1][1])
    if not logit_diff <= (LOGIT_TOLERANCE_16_BIT if is_rounding else LOGIT_TOLERANCE):
        raise CheckFailed(f"logits of the resumed and the uninterrupted run differ by {logit_diff:.1e} of the largest")
    if logit_diff > LOGIT_TOLERANCE:
        return f"{text}; logits equal to {logit_diff:.0e} after both runs (weights saved in 16 bit)"
    return f"{text}; logits equal after both runs"


def _only_rounded_otherwise(saved: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if these are 16-bit weights of which only a few values differ."""
    if saved.keys() != other.keys() or any(tensor.itemsize != 2 for tensor in saved.values()):
        return False
    num_different = sum(int((tensor != other[name]).sum()) for name, tensor in saved.items())
    return num_different <= ROUNDED_OTHERWISE * sum(tensor.numel() for tensor in saved.values())


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of `folder` on the CPU in fp32, and the tensors saved there, all of which must have been loaded."""
    import torch

    from accel_scale.rehearsing.plan import CheckFailed

    if (folder / "adapter_config.json").is_file():
        from peft import (
            AutoPeftModelForCausalLM,
            AutoPeftModelForSequenceClassification,
            PeftConfig,
            PeftModel,
            get_peft_model_state_dict,
        )
        from transformers import AutoConfig, AutoModelForCausalLM

        from accel_scale.modeling.model_class import language_model_class

        dtype = torch.float32
        model: Any
        adapter = PeftConfig.from_pretrained(str(folder))
        kind = language_model_class(AutoConfig.from_pretrained(adapter.base_model_name_or_path))
        if is_of_rewards(adapter):
            model = AutoPeftModelForSequenceClassification.from_pretrained(folder, dtype=dtype, num_labels=1)
        elif kind is AutoModelForCausalLM:
            model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=dtype)
        else:  # a multimodal model, for which PEFT has no class
            base = kind.from_pretrained(adapter.base_model_name_or_path, dtype=dtype)
            model = PeftModel.from_pretrained(base, str(folder))
        saved = _read_tensors(folder, "adapter_model*.safetensors")
        absent = set(saved) ^ set(get_peft_model_state_dict(model))
    else:
        from transformers import AutoConfig

        from accel_scale.modeling.model_class import language_model_class

        kind = language_model_class(AutoConfig.from_pretrained(folder))
        loaded: Any = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        model, info = loaded
        saved = _read_tensors(folder, "model*.safetensors")
        absent = {*info["missing_keys"], *info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"])}
    if absent or not saved:
        raise CheckFailed(f"{folder.name} does not load whole: {', '.join(sorted(absent)[:3]) or 'no tensors'}")
    model.config.use_cache = False  # a cache is not compared, and not every class can make one
    return model.eval(), saved


def _read_tensors(folder: Path, pattern: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob(pattern)) for name, tensor in load_file(path).items()}


def _trained_tensors(saved: dict[str, Any], start: Path) -> list[str]:
    """Names of the tensors that training changed; LoRA's B matrix starts at zero."""
    before = _read_tensors(start, "model*.safetensors")
    return [
        name
        for name, tensor in saved.items()
        if (bool(tensor.any()) if ".lora_" in name else _differs(tensor, before.get(name))) and "lora_A" not in name
    ]


def _differs(tensor: Any, before: Any) -> bool:
    return before is not None and bool((tensor.float() != before.float()).any())
