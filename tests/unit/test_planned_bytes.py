"""The planner's bytes for every family, as of the last slow tests that measured real passes: catches any change.

For an intended change, `python tests/unit/test_planned_bytes.py` rewrites the table, and
`pytest tests/unit/test_activations.py tests/unit/test_planner_accuracy.py` measures whether it is right.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from activation_models import DROPOUTS, EAGER_ONLY, FIELDS, LORA, PLAIN, VARIANTS
from test_activations import FAMILY_SETUPS, LLAMA_SETUPS, LONG_SETUPS
from transformers import CONFIG_MAPPING

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup
from accel_scale.planning.tape.activations import step_bytes

TABLE = Path(__file__).with_name("planned_bytes.json")
# Each with a GPU's kernels and on the CPU.
LINEARS = ("llama", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3")
QUANTISED = replace(LORA, method="qlora", sequence_length=128)
BF16 = replace(PLAIN, precision="bf16", checkpointing="full")
STAGES = {
    "whole, not tracked": {},
    "first stage": {"has_head": False},
    "stage between": {"has_head": False, "has_embedding": False},
    "last stage": {"has_embedding": False},
}
MORE_SETUPS = {
    "liger's loss": replace(BF16, loss="liger"),
    "fused": replace(PLAIN, precision="bf16_true", fused=("RMSNorm", "SwiGLU")),
    "packed": replace(PLAIN, packing=True),
    "rows shared": replace(BF16, parallel=ParallelSetup(num_gpus=4, sequence_parallel=4)),
    "rows shared, kept": replace(PLAIN, parallel=ParallelSetup(num_gpus=2, sequence_parallel=2)),
    "products shared": replace(PLAIN, parallel=ParallelSetup(num_gpus=2, tensor_parallel=2)),
    "lora beside fp32": replace(LORA, frozen_dtype="float32", lora=LoraSetup(rank=8, dropout=0.1)),
    "lora, offloaded": replace(LORA, checkpointing="offload", packing=True),
    "masks, offloaded": replace(PLAIN, checkpointing="offload", attention="eager"),
    "masks of padded rows, offloaded": replace(PLAIN, checkpointing="offload", mean_length=72),
    "dora, fp32": replace(LORA, precision="fp32", lora=LoraSetup(rank=8, dora=True)),
    "dora, qlora": replace(QUANTISED, lora=LoraSetup(rank=8, dora=True)),
    "lora and whole modules": replace(LORA, lora=LoraSetup(rank=8, full_modules=("lm_head",)), loss="full"),
    "eager, true bf16": replace(PLAIN, precision="bf16_true", attention="eager"),
    "tiles, true bf16": replace(LONG_SETUPS["kept"], precision="bf16_true"),
    "lora of experts": replace(LORA, lora=LoraSetup(rank=8, targets=("down_proj", "gate_proj", "up_proj"))),
}


def cases(architecture: str) -> Iterator[tuple[str, dict, TrainingSetup, bool]]:
    """Yields (name, configuration fields, setup, whether CUDA's kernels run)."""
    setups = dict(FAMILY_SETUPS)
    setups |= LLAMA_SETUPS | LONG_SETUPS if architecture == "llama" else {}
    if architecture in LINEARS:
        setups |= {"qlora": QUANTISED, "qlora, checkpointed": replace(QUANTISED, checkpointing="full")}
        setups |= {f"long, {name}": setup for name, setup in LONG_SETUPS.items()}
        setups |= {name: LLAMA_SETUPS[name] for name in ("lora", "padded", "selective", "true bf16", "one row")}
    for name, setup in setups.items():
        if architecture in EAGER_ONLY:
            setup = replace(setup, attention="eager")
        for is_cuda in (False, True) if architecture in LINEARS else (False,):
            yield f"{name}, {'cuda' if is_cuda else 'cpu'}", {}, setup, is_cuda
    for name, (family, fields) in VARIANTS.items():
        if family == architecture:
            yield name, fields, replace(PLAIN, precision="bf16"), False
    for family, fields in DROPOUTS:
        for is_cuda in (False, True) if family == architecture else ():
            name = f"{', '.join(fields)} {'cuda' if is_cuda else 'cpu'}"
            yield name, fields, replace(PLAIN, attention="eager", precision="bf16"), is_cuda


def planned(architecture: str) -> dict[str, list[int]]:
    """The six values of `StepBytes` for each case; an empty list if it is refused."""
    found = {}
    for name, fields, setup, is_cuda in cases(architecture):
        found[name] = _figures(_facts(architecture, **fields), setup, is_cuda=is_cuda, is_tracked=True)
    return found


def planned_in_detail(architecture: str) -> dict[str, list[int]]:
    """The same for more setups without a memory tracker, and for the stages of a pipeline."""
    found, facts = {}, _facts(architecture)
    attention = {"attention": "eager"} if architecture in EAGER_ONLY else {}
    for name, setup in MORE_SETUPS.items():
        for kernels in ("cpu", "cuda"):
            found[f"{name}, {kernels}"] = _figures(facts, replace(setup, **attention), is_cuda=kernels == "cuda")
    for name, held in STAGES.items():
        setup = replace(BF16, attention="eager")
        found[name] = _figures(replace(facts, **held), setup, is_cuda=True)
        found[f"{name}, kept"] = _figures(replace(facts, **held), replace(setup, checkpointing="none"))
    return found


def _facts(architecture: str, **fields: object) -> ModelFacts:
    config = CONFIG_MAPPING[architecture](**{**FIELDS[architecture], **fields}).to_dict()
    return facts_from_config(config, name=architecture)


def _figures(facts: ModelFacts, setup: TrainingSetup, **kernels: bool) -> list[int]:
    try:
        return [round(value) for value in astuple(step_bytes(facts, setup, **kernels))]
    except ConfigError:
        return []


def rows(name: str) -> dict[str, list[int]]:
    architecture, _, more = name.partition(", ")
    return planned_in_detail(architecture) if more else planned(architecture)


@functools.cache
def table() -> dict[str, dict[str, list[int]]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [*FIELDS, *(f"{architecture}, more" for architecture in FIELDS)])
def test_the_bytes_are_those_of_the_table(name: str) -> None:
    found, expected = rows(name), table()[name]
    assert set(found) == set(expected)
    for case, figures in found.items():
        assert figures == pytest.approx(expected[case], rel=1e-6, abs=1), case


def write() -> None:
    lines = [
        f' "{part}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows(part).items())
        + "\n }"
        for part in (*FIELDS, *(f"{architecture}, more" for architecture in FIELDS))
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
