"""Where vLLM can generate a run's answers, and which weights TRL (1.16) can pass to it. Does not import vLLM."""

from __future__ import annotations


def why_no_vllm(*, is_installed: bool, device_type: str | None) -> tuple[str, str] | None:
    """The problem and its fix if vLLM cannot generate; None if it can.

    Args:
        is_installed: Whether the vLLM distribution is installed.
        device_type: torch's name of the device that the run uses; None if not known yet.
    """
    if device_type not in (None, "cuda"):
        return (
            f"vLLM generates on CUDA GPUs, and this run computes on {device_type}.",
            "remove it, so that transformers generates, or run on a machine with a CUDA GPU.",
        )
    if not is_installed:
        return "vLLM is not installed.", "pip install 'accel-scale[vllm]'."
    return None


def why_no_weights(*, is_quantised: bool, trains_adapters: bool, is_fsdp: bool) -> tuple[str, str] | None:
    """The problem and its fix if the trained weights cannot be passed to vLLM; None if they can.

    Args:
        is_quantised: Whether the base model is quantised.
        trains_adapters: Whether adapters are trained; they are merged for vLLM.
        is_fsdp: Whether FSDP shards the weights.
    """
    if is_quantised:
        return (
            "vLLM gets merged weights, and merging into a quantised base rounds what adapters have learnt.",
            "use --method lora or full, or remove it.",
        )
    if trains_adapters and is_fsdp:
        return (
            "vLLM gets merged weights, and TRL is not known to merge adapters into weights that FSDP shards.",
            "use a launch file of DDP or DeepSpeed, or --method full.",
        )
    return None
