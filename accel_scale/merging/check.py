"""Compare the logits of a merged model with those of its base and adapter, if they fit in memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.merging.weights import base_config, dtype_of
from accel_scale.modeling.adapters import is_of_rewards
from accel_scale.units import format_bytes

_NUM_TOKENS = 24
_NUM_ROWS = 8
# Largest difference explained by rounding the merged weights to their dtype, as a share of the logits' spread.
_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
_BYTES_PER_PARAMETER = 4
_HEADROOM = 1.3


def compare_logits(
    base: Path, adapter: Path, merged: Path, quantization: dict[str, Any] | None
) -> tuple[float | None, str]:
    """Largest difference of the logits on a few tokens, and a sentence about it; both models compute in float32.

    Raises:
        ConfigError: if the difference is larger than rounding explains.
    """
    import psutil
    import torch
    from peft import PeftConfig

    num_bytes = sum(path.stat().st_size for path in merged.glob("*.safetensors"))
    dtype = _dtype_of(merged)
    needed = num_bytes // torch.empty(0, dtype=dtype).element_size() * _BYTES_PER_PARAMETER * _HEADROOM
    available = psutil.virtual_memory().available
    if needed > available:
        return None, (
            f"logits not compared: one model in float32 needs {format_bytes(needed)}, "
            f"{format_bytes(available)} of memory are free"
        )
    rewards = is_of_rewards(PeftConfig.from_pretrained(str(adapter)))
    expected = _logits(base, adapter, quantization, rewards=rewards)
    got = _logits(merged, None, None, rewards=rewards)
    width = min(expected.shape[-1], got.shape[-1])
    difference = float((expected[..., :width] - got[..., :width]).abs().max())
    spread = float(expected.max() - expected.min())
    if rewards:  # rows of random tokens may all get the same score
        spread = max(spread, float(expected.abs().max()))
    limit = _TOLERANCE.get(str(dtype).removeprefix("torch."), 1e-1) * spread
    if not difference <= limit:
        raise ConfigError(
            f"the merged model's logits differ by {difference:.3g} from base + adapter, where rounding to {dtype} "
            f"explains {limit:.3g}.",
            place=str(adapter),
            fix="report it with adapter_config.json; nothing was written.",
        )
    return difference, f"logits differ by at most {difference:.2g} (their spread is {spread:.3g})"


def _dtype_of(folder: Path) -> Any:
    import torch

    return getattr(torch, dtype_of(folder))


def _logits(folder: Path, adapter: Path | None, quantization: dict[str, Any] | None, *, rewards: bool) -> Any:
    """Logits of seeded tokens in float32; a 4-bit base is loaded as in training.

    For a reward model, the scores of several rows.
    """
    import torch
    from transformers import BitsAndBytesConfig

    from accel_scale.inference.saved import with_adapter
    from accel_scale.modeling.model_class import language_model_class

    settings: dict[str, Any] = {"dtype": torch.float32, **({"num_labels": 1} if rewards else {})}
    if quantization is not None:
        values = dict(quantization)
        settings["dtype"] = getattr(torch, values.pop("base_dtype"))
        settings["quantization_config"] = BitsAndBytesConfig.from_dict({**values, "bnb_4bit_compute_dtype": "float32"})
    config = base_config(folder, rewards=rewards)
    model: Any = language_model_class(config).from_pretrained(folder, **settings)
    if quantization is not None:
        model.dequantize()  # bitsandbytes' CPU kernel for 4-bit weights rounds activations to bf16
    if adapter is not None:
        model = with_adapter(model, adapter)
    model.float().eval()
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab_size, (_NUM_ROWS if rewards else 1, _NUM_TOKENS), generator=generator)
    with torch.no_grad():
        rows = [model(input_ids=row[None].to(model.device), use_cache=False).logits.float().cpu() for row in ids]
    logits = torch.cat(rows)
    del model
    gc.collect()
    return logits
