"""Peak FLOP/s of a device: the denominator of MFU."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SIZE = 1024
_SECONDS = 0.25


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s and the source of the figure: the data sheet's dense peak of a known GPU, else measured here.

    Data sheets are used for 16 bit; 32-bit matrix products and unknown devices are measured, with a quarter of a
    second of square products of size 1024 (4096 on an accelerator).
    """
    import torch

    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        from accel_scale.errors import ConfigError
        from accel_scale.facts.hardware import find_gpu

        try:
            known = find_gpu(torch.cuda.get_device_name(device))
            return known.flops("bf16" if dtype == torch.bfloat16 else "fp16"), f"{known.name}, data sheet"
        except ConfigError:
            pass  # not in the catalogue, so measure it
    return measured_peak_flops(device.type, dtype), "matrix products measured here"


@functools.lru_cache(maxsize=8)
def measured_peak_flops(device_type: str, dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products, the fastest of the repetitions within a quarter of a second."""
    import torch

    size = _SIZE if device_type == "cpu" else 4 * _SIZE
    # The run's own random numbers must not depend on when this is measured: a resumed run measures after its RNG state
    # has been restored.
    generator = torch.Generator(device_type).manual_seed(0)
    a, b = (torch.randn(size, size, device=device_type, generator=generator).to(dtype) for _ in range(2))
    flops, best, spent = 2.0 * size**3, float("inf"), 0.0
    synchronize = torch.accelerator.synchronize if device_type != "cpu" else (lambda: None)
    with torch.no_grad():
        a @ b  # the first product selects a kernel
        while spent < _SECONDS:
            synchronize()
            started = time.perf_counter()
            a @ b
            synchronize()
            seconds = time.perf_counter() - started
            best, spent = min(best, seconds), spent + seconds
    return flops / best


def model_flops(config: object, *, sequence_length: int, num_params: int) -> tuple[float, str]:
    """FLOPs per token and how they were counted: 6N + attention for a modelled architecture, else 6 × parameters."""
    from accel_scale.errors import ConfigError
    from accel_scale.planning.cost.flops import model_flops_per_token
    from accel_scale.planning.models.model_config import facts_from_config
    from accel_scale.planning.models.training_setup import TrainingSetup

    try:
        facts = facts_from_config(config.to_dict(), name="model")  # type: ignore[attr-defined]
    except ConfigError:
        return 6.0 * num_params, "6 × parameters: the architecture is not modelled"
    return model_flops_per_token(facts, TrainingSetup(sequence_length=sequence_length)), "6N + attention"
