"""Stage `merge`: trains adapters, merges them into their base, and compares the logits."""

from __future__ import annotations

import functools
import shutil

from gpu_stages.box import Cases, expect
from gpu_stages.inputs import written_documents, written_model
from gpu_stages.recipe import train


def merge(cases: Cases) -> None:
    """Merge LoRA into the original base and QLoRA into the dequantised one."""
    for method in ("lora", "qlora"):
        cases.case(method, functools.partial(merged, cases, method))


def merged(cases: Cases, method: str) -> str:
    """Train a few steps at a rate that changes the logits, then run `accel-scale merge`, which compares them."""
    from accel_scale.merging.adapter import merge_adapter

    train(
        cases.folder / method,
        model_name_or_path=written_model(cases.folder, "tiny", cases.device),
        dataset_name=written_documents(cases.folder, 80),
        method=method,
        max_length=128,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        max_steps=4,
        learning_rate=1e-2,
        plan="off",
    )
    shutil.rmtree(cases.folder / f"{method}_merged", ignore_errors=True)
    result = merge_adapter(cases.folder / method, cases.folder / f"{method}_merged")
    found = f"{result.num_merged_modules} modules into {result.base_weights} weights, {result.check}"
    return expect(result.max_logit_diff is not None, found)
