"""The SFT recipe and packed attention on a real GPU; skipped without CUDA."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(repository: Path, out: Path, *flags: str) -> dict:
    command = [sys.executable, "recipes/sft.py", "--max_steps", "4", "--logging_steps", "1"]
    command += ["--exact_match_samples", "0", "--output_dir", str(out), *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "run_summary.json").read_text())


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_first_command_trains_with_the_devices_own_settings(repository: Path, tmp_path: Path, method: str) -> None:
    from accel_scale.launching.machine import detect_device

    summary = run(repository, tmp_path, "--method", method)
    assert all(math.isfinite(loss) for loss in summary["losses"])
    assert summary["peak_device_bytes"]["allocated_bytes"] > 0
    assert summary["tokens_per_second"] > 0
    precision = detect_device().default_precision
    assert (summary["settings"]["bf16"], summary["settings"]["fp16"]) == (precision == "bf16", precision == "fp16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_packed_attention_gives_each_document_what_it_has_alone(dtype: torch.dtype) -> None:
    from accel_scale.launching.machine import detect_device
    from accel_scale.modeling.packed_attention import packed_attention_forward
    from accel_scale.modeling.packed_mask import attach_layout, packed_layout

    if dtype == torch.bfloat16 and not detect_device().supports_bf16:
        pytest.skip("no bf16 here")
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 4, True
    torch.manual_seed(0)
    lengths = (37, 200, 5, 318)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (8, 2, 2)
    )
    starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    starts[0, begins] = True
    layout = packed_layout(starts, None, torch.device("cuda"))
    packed, _ = packed_attention_forward(module, query, key, value, attach_layout(layout))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for begin, length in zip(begins, lengths, strict=True):
        part = slice(begin, begin + length)
        scores = query[:, :, part].float() @ key[:, :, part].float().repeat_interleave(4, 1).transpose(2, 3) / 8
        hidden = torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1)
        alone = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, :, part].float().repeat_interleave(4, 1)
        assert torch.allclose(packed[:, part].float(), alone.transpose(1, 2), atol=tolerance, rtol=tolerance)
    packed.float().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


def test_the_meters_clock_stops_when_the_device_has_finished() -> None:
    import time

    from accel_scale.measuring.meters import ThroughputMeter, clock_of

    meter, matrix = ThroughputMeter(clock_of("cuda")), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for step in range(1, 12):
        if step == 2:
            began = time.perf_counter()
        meter.start_step()
        meter.fetched()
        for _ in range(20):
            matrix @ matrix
        meter.add_tokens(100)
        meter.end_step(settle=step in (1, 11))
    torch.cuda.synchronize()
    assert meter.timed_seconds == pytest.approx(time.perf_counter() - began, rel=0.05)
