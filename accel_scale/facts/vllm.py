"""Where vLLM can write the answers of a run, and which weights TRL can give it (1.16); it is not imported."""

from __future__ import annotations


def why_no_vllm(*, is_installed: bool, device_type: str | None) -> tuple[str, str] | None:
    """The problem and its fix where vLLM cannot generate; None where it can.

    Args:
        is_installed: Whether its distribution is.
        device_type: torch's name of what the run computes on; None: not known yet.
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
    """The problem and its fix where the weights that are trained cannot be given to vLLM; None where they can.

    Args:
        is_quantised: Whether the base is.
        trains_adapters: Whether adapters learn, which are merged for vLLM.
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
