"""Stage `planner`: compares whole steps of real shapes on the device with predictions made beforehand."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu_stages.box import Cases, Needs, expect
from gpu_stages.training import MEMORY_TOLERANCE, TIME_FACTOR

SMALL, LARGE = "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B"
# Shape for training an architecture on a CPU in seconds.
CPU_SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 512, "vocab_size": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One step, by its differences from mixed bf16 with fused AdamW."""

    model: str
    method: str = "full"
    checkpointing: str = "full"
    micro_batch: int = 1
    length: int = 1024
    precision: str = "bf16"
    optimizer: str = "adamw_torch_fused"

    @property
    def label(self) -> str:
        """Label for the page."""
        parts = [self.model, self.method, f"checkpointing {self.checkpointing}", f"{self.micro_batch} × {self.length}"]
        extra = [v for v in (self.precision, self.optimizer) if v not in ("bf16", "adamw_torch_fused")]
        return ", ".join([*parts, *extra])

    @property
    def setup(self) -> Any:
        """The case as the planner's `TrainingSetup`."""
        from accel_scale.facts.hardware import detect_local
        from accel_scale.facts.loss_chunks import CARD_LOGITS, card_logits
        from accel_scale.planning.models.training_setup import TrainingSetup
        from accel_scale.verifying.trial_step import one_process

        here = detect_local()
        return one_process(
            TrainingSetup(
                chunk_logits=card_logits(here.gpu.memory_bytes) if here else CARD_LOGITS,
                method=self.method,
                checkpointing=self.checkpointing,
                micro_batch_size=self.micro_batch,
                sequence_length=self.length,
                precision=self.precision,
                optimizer=self.optimizer,
            )
        )

    @property
    def config(self) -> Any:
        """The model's transformers configuration."""
        from transformers import AutoConfig

        from accel_scale.planning.models.catalogue import catalogue_config

        return AutoConfig.for_model(**(catalogue_config(self.model) or {"model_type": self.model, **CPU_SHAPE}))


def chosen(*, on_gpu: bool, default_precision: str) -> list[Case]:
    """The cases to measure, largest model first, since there may not be enough time for all."""
    if not on_gpu:
        base = [Case(model, length=128, precision="fp32", micro_batch=2) for model in ("llama", "qwen3")]
        found = [replace(base[0], method=method) for method in ("full", "lora", "qlora")]
        return [
            *found,
            replace(base[1], checkpointing="none"),
            replace(base[1], method="lora", checkpointing="selective"),
        ]
    large, small = Case(LARGE, precision=default_precision), Case(SMALL, precision=default_precision)
    return [
        replace(large, method="qlora", micro_batch=4),
        replace(large, method="qlora", checkpointing="none"),
        replace(large, method="lora", micro_batch=4),
        replace(small, micro_batch=8),
        replace(small, micro_batch=4, checkpointing="none"),
        replace(small, method="lora", micro_batch=4, checkpointing="selective"),
        replace(small, micro_batch=4, optimizer="adamw_8bit"),
        replace(large, method="qlora", length=8192),
    ]


def planner(cases: Cases) -> None:
    """Measure each case; those that are far too large are not tried."""
    from accel_scale.launching.machine import detect_device

    precision = detect_device(cases.device).default_precision
    for case in chosen(on_gpu=cases.on_gpu, default_precision=precision):
        cases.case(case.label, functools.partial(measured, cases, case))


def measured(cases: Cases, case: Case) -> str:
    """Allocated and reserved memory and seconds, each with the prediction's error; on a GPU also tokens/s and MFU."""
    from accel_scale.facts.hardware import detect_local
    from accel_scale.planning.cost.memory import predict_memory
    from accel_scale.planning.cost.timing import predict_time
    from accel_scale.planning.models.model_config import facts_from_config
    from accel_scale.verifying.trial_step import measure_step

    facts, machine = facts_from_config(case.config.to_dict(), name=case.model), detect_local()
    memory = predict_memory(facts, case.setup, is_cuda=cases.on_gpu, is_tracked=not cases.on_gpu)
    if machine is not None and memory.low_bytes > machine.gpu.memory_bytes:
        raise Needs(f"needs a card of {memory.device_bytes / 2**30:.0f} GiB")
    gc.collect()
    if cases.on_gpu:
        torch.cuda.empty_cache()
    found = measure_step(case.config, case.setup, device=cases.device, num_steps=5 if cases.on_gpu else 2)
    error = memory.peak_bytes / found.peak_bytes - 1
    parts, is_near = [f"allocated {found.peak_bytes / 2**30:.3f} GiB, predicted {error:+.1%}"], True
    if found.reserved_bytes is not None:
        parts.append(f"reserved {memory.reserved_bytes / found.reserved_bytes - 1:+.1%}")
    if found.step_seconds is not None:
        seconds, positions = found.step_seconds, case.micro_batch * case.length
        parts.append(f"step {seconds:.3g} s, {positions / seconds:,.0f} tokens/s")
        if machine is not None and machine.gpu.peak_flops is not None:
            expected = predict_time(facts, case.setup, machine)
            ratio = expected.step_seconds / seconds
            parts.append(f"time predicted {ratio - 1:+.0%}, MFU {expected.mfu * ratio:.1%}")
            is_near = 1 / TIME_FACTOR <= ratio <= TIME_FACTOR
    return expect(is_near and abs(error) <= MEMORY_TOLERANCE, "; ".join(parts))
