"""Liger's kernels on the CPU: run with TRITON_INTERPRET=1; prints the result of the check for each family."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from transformers import CONFIG_MAPPING
from triton.runtime import interpreter

from accel_scale.start_check.fused import fused_parts

SHAPE = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SHAPE, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
FAMILIES = {"llama": GROUPED, "qwen3": GROUPED, "gemma2": GROUPED, "opt": {**SHAPE, "ffn_dim": 96}}


def complete_interpreter() -> None:
    """Adds what Triton's interpreter lacks compared with its compiler: floats as tensors, and CUDA's math library."""
    convert = interpreter._implicit_cvt

    def convert_floats(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return convert(value)

    interpreter._implicit_cvt = convert_floats
    from liger_kernel.ops import geglu, rms_norm

    replace(rms_norm, "rsqrt", lambda x: 1 / tl.sqrt(x))
    replace(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


def replace(module: ModuleType, name: str, function: Any) -> None:
    assert hasattr(module, name)
    setattr(module, name, function)


if __name__ == "__main__":
    complete_interpreter()
    for family, fields in FAMILIES.items():
        policies = ("none", "selective") if family == "llama" else ("none",)  # a step takes seconds in the interpreter
        parts, why = fused_parts(CONFIG_MAPPING[family](**fields), device=torch.device("cpu"), policies=policies)
        print(f"{family}: {parts} {why}")
