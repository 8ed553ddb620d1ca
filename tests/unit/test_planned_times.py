"""The planner's seconds and bytes for many setups, as last checked against published runs: catches any change.

For an intended change, `python tests/unit/test_planned_times.py` rewrites the table, and
`pytest tests/unit/test_timing.py tests/unit/test_memory_terms.py tests/unit/test_planner_accuracy.py` measures whether
it is right.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from test_timing import FACTS, llama

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.cost.timing import predict_time
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import GenerationSetup, LoraSetup, ParallelSetup, TrainingSetup

TABLE = Path(__file__).with_name("planned_times.json")
PLAIN = TrainingSetup(precision="bf16", micro_batch_size=2, sequence_length=4096, accumulation=3)
# The last two (latent attention and shared experts; learned positions and plain MLPs) run no shared setups.
PARTS = [
    *itertools.product(("llama", "windows", "experts"), ("seconds", "bytes", "shared, seconds", "shared, bytes")),
    *itertools.product(("latent", "gpt2"), ("seconds", "bytes")),
]
CARDS = ("H100", "A100-80GB", "B200", "RTX 4090", "MI300X")
TWO_SERVERS = {"num_gpus": 16, "gpus_per_node": 8}


def machine(name: str, num_gpus: int = 16) -> Machine:
    return Machine(
        find_gpu(name), num_gpus=num_gpus, host_memory_bytes=2 * 10**12, host_bandwidth=3e11,
        internode_bytes_per_second=5e10, nvme_bytes_per_second=6e9,
    )  # fmt: skip


def _name(changes: dict[str, Any]) -> str:
    usual = asdict(LoraSetup())
    own = {k: v for k, v in asdict(changes.get("lora", LoraSetup())).items() if v != usual[k]}
    return ", ".join(f"{key} {value}" for key, value in {**changes, **({"lora": own} if own else {})}.items())


def setups() -> Iterator[tuple[str, TrainingSetup]]:
    for changes in (
        *({"precision": name} for name in ("fp32", "fp16", "bf16", "bf16_true", "fp8")),
        *({"checkpointing": name} for name in ("none", "selective", "every_2", "attention", "offload")),
        *({"method": name, "checkpointing": kept} for name in ("lora", "qlora") for kept in ("none", "full")),
        {"method": "lora", "lora": LoraSetup(rank=64), "precision": "bf16_true", "compile": True},
        {"method": "qlora", "double_quantisation": False},
        {"method": "lora", "lora": LoraSetup(full_modules=("embed_tokens", "lm_head"))},
        *({"optimizer": name} for name in ("adamw_8bit", "adafactor", "lion_32bit", "sgd", "paged_adamw_8bit")),
        {"attention": "eager"}, {"attention": "flash_attention_2"}, {"loss": "full"}, {"compile": True},
        {"packing": False, "mean_length": 1024.0}, {"mean_length": 700.0}, {"reference_model": True},
        {"reference_model": True, "method": "lora"}, {"long_rows": True}, {"micro_batch_size": 1, "accumulation": 1},
        *({"method": name, "checkpointing": "offload"} for name in ("lora", "qlora")), {"checkpointing": "mlp"},
        {"method": "lora", "lora": LoraSetup(rank=4, targets=("q_proj", "v_proj", "q_proj"), dropout=0.1)},
        {"method": "lora", "lora": LoraSetup(dora=True)}, {"method": "lora", "frozen_dtype": "float32"},
        {"weight_dtype": "bfloat16"}, {"loss": "liger"}, {"fused": ("RMSNorm", "SwiGLU")},
        {"attention": "eager", "packing": False, "mean_length": 3000.0, "checkpointing": "none", "loss": "full"},
        {"precision": "fp32", "attention": "sdpa", "checkpointing": "none", "sequence_length": 512},
        {"method": "qlora", "optimizer": "adamw_cpu_offload", "checkpointing": "every_3"},
        *({"method": name, "generation": GenerationSetup(8, 64, 448)} for name in ("full", "lora")),
        {"loss": "log_probs", "reference_model": True}, {"loss": "log_probs", "method": "lora"},
        {"loss": "chunked_logits"},
    ):  # fmt: skip
        yield _name(changes), replace(PLAIN, **changes)
    for changes in (
        *({"strategy": name} for name in ("ddp", "fsdp2", "zero1", "zero2", "zero3")),
        {"strategy": "fsdp2", "reshard_after_forward": False}, {"strategy": "fsdp2", "num_replicas": 2},
        *({"strategy": name, "offload_optimizer": "cpu"} for name in ("zero1", "zero2", "zero3")),
        {"strategy": "zero3", "offload_optimizer": "cpu", "offload_params": "cpu"},
        {"strategy": "zero3", "offload_optimizer": "nvme", "offload_params": "nvme"},
        {"strategy": "fsdp2", "offload_optimizer": "cpu", "offload_params": "cpu"},
        {"tensor_parallel": 4, "strategy": "fsdp2"}, {"tensor_parallel": 2, "strategy": "ddp"},
        {"sequence_parallel": 4, "strategy": "fsdp2"},
        {"sequence_parallel": 2, "strategy": "zero3", "in_engine": True},
        {"pipeline_parallel": 4, "strategy": "ddp"}, {"pipeline_parallel": 4, "pipeline_schedule": "gpipe"},
        {"pipeline_parallel": 4, "pipeline_schedule": "interleaved", "stages_per_rank": 2, "strategy": "ddp"},
        {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble", "strategy": "ddp"},
        {"pipeline_parallel": 2, "tensor_parallel": 2, "strategy": "fsdp2"},
        {"pipeline_parallel": 2, "sequence_parallel": 2, "strategy": "ddp"},
        {"tensor_parallel": 2, "sequence_parallel": 4, "strategy": "fsdp2"}, {"sequence_parallel": 16},
        {"tensor_parallel": 16}, {"strategy": "ddp", "num_gpus": 24}, {"strategy": "zero2", "num_gpus": 12},
        {"strategy": "fsdp2", "num_gpus": 32, "num_replicas": 4, "gpus_per_node": 4},
        {"pipeline_parallel": 3, "pipeline_schedule": "interleaved", "stages_per_rank": 2, "num_gpus": 6},
    ):  # fmt: skip
        parallel = ParallelSetup(**{**TWO_SERVERS, **changes})
        rows = {"accumulation": 8} if parallel.pipeline_parallel > 1 else {}
        yield _name(changes), replace(PLAIN, parallel=parallel, **rows)
        for method in ("lora", "qlora"):
            yield f"{_name(changes)}, {method}", replace(PLAIN, parallel=parallel, method=method, **rows)
        if not parallel.is_divided:
            variants = {"sync_each_batch": True, "reduce_dtype": "bf16"}
            for name, value in variants.items():
                yield f"{_name(changes)}, {name}", replace(PLAIN, parallel=parallel, **{name: value})
    for name in ("ddp", "fsdp2", "zero3"):  # one server, not all of its GPUs
        yield f"{name} on 4", replace(PLAIN, parallel=ParallelSetup(strategy=name, num_gpus=4))
    for name in ("zero1", "zero2", "zero3", "fsdp2", "ddp"):
        yield f"{name} on 1", replace(PLAIN, parallel=ParallelSetup(strategy=name))
    shared = ParallelSetup(strategy="fsdp2", sequence_parallel=2, in_engine=True, **TWO_SERVERS)
    yield "offloaded inputs of shared rows", replace(PLAIN, parallel=shared, checkpointing="offload")
    for name in ("fsdp2", "zero3"):
        writing = replace(PLAIN, parallel=ParallelSetup(name, **TWO_SERVERS), generation=GenerationSetup(8, 64, 448))
        yield f"{name} that generates", writing


@functools.cache
def models() -> dict[str, ModelFacts]:
    windows = llama(hidden=1024, layers=6, heads=16, kv_heads=4, width=4096, vocab=32000, window=512, tied=True)
    named = {"experts": "mixtral-8x7b", "latent": "deepseek-ai/DeepSeek-V2-Lite", "gpt2": "openai-community/gpt2"}
    return {"llama": FACTS, "windows": windows, **{key: load_model_facts(name) for key, name in named.items()}}


def planned(model: str, kind: str) -> dict[str, list[float]]:
    """Times or bytes of each case; an empty list if it is refused."""
    facts, found = models()[model], {}
    for index, (name, setup) in enumerate(setups()):
        is_shared = setup.parallel != ParallelSetup()
        if is_shared != kind.startswith("shared"):
            continue
        gpu = CARDS[index % len(CARDS)]
        place = machine(gpu, setup.parallel.num_gpus)
        if "seconds" in kind:
            found[f"{name}, {gpu}"] = _figures(lambda setup=setup, place=place: predict_time(facts, setup, place))
        else:
            found[name] = _figures(lambda setup=setup: predict_memory(facts, setup))
    return found


def _figures(estimate: Callable[[], Any]) -> list[float]:
    try:
        return _numbers(asdict(estimate()))
    except ConfigError:
        return []


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _numbers(value[key])]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in _numbers(each)]
    return [float(f"{value:.6g}")] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


@functools.cache
def table() -> dict[str, dict[str, list[float]]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("model", "kind"), PARTS)
def test_seconds_and_bytes_are_those_of_the_table(model: str, kind: str) -> None:
    found, expected = planned(model, kind), table()[f"{model}, {kind}"]
    assert set(found) == set(expected)
    for name, figures in found.items():
        assert figures == pytest.approx(expected[name], rel=1e-5), name


def write() -> None:
    tables = []
    for model, kind in PARTS:
        rows = (
            f"  {json.dumps(name)}: [{', '.join(f'{value:g}' for value in row)}]"
            for name, row in planned(model, kind).items()
        )
        tables.append(f' "{model}, {kind}": {{\n' + ",\n".join(rows) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(tables) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
