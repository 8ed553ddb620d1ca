"""The planner's bytes of every family, as they stood when slow tests last measured real passes: a change is noticed.

Where a change is meant: `python tests/unit/test_planned_bytes.py` writes the table anew, and
`pytest tests/unit/test_activations.py tests/unit/test_planner_accuracy.py` measures whether it is right.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from activation_models import EAGER_ONLY, FIELDS, LORA, PLAIN, VARIANTS
from test_activations import FAMILY_SETUPS, LLAMA_SETUPS, LONG_SETUPS
from transformers import CONFIG_MAPPING

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.activations import step_bytes

TABLE = Path(__file__).with_name("planned_bytes.json")
# Each with a card's kernels and on the CPU.
LINEARS = ("llama", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3")
QUANTISED = replace(LORA, method="qlora", sequence_length=128)


def cases(architecture: str) -> Iterator[tuple[str, dict, TrainingSetup, bool]]:
    """(name, fields of the configuration, setup, whether CUDA's kernels run)."""
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


def planned(architecture: str) -> dict[str, list[int]]:
    """The six figures of `StepBytes` for each case; none where it is refused."""
    found = {}
    for name, fields, setup, is_cuda in cases(architecture):
        config = CONFIG_MAPPING[architecture](**{**FIELDS[architecture], **fields}).to_dict()
        facts = facts_from_config(config, name=architecture)
        try:
            figures = astuple(step_bytes(facts, setup, is_cuda=is_cuda, is_tracked=True))
        except ConfigError:
            figures = ()
        found[name] = [round(value) for value in figures]
    return found


@functools.cache
def table() -> dict[str, dict[str, list[int]]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("architecture", FIELDS)
def test_the_bytes_are_those_of_the_table(architecture: str) -> None:
    found, expected = planned(architecture), table()[architecture]
    assert set(found) == set(expected)
    for name, figures in found.items():
        assert figures == pytest.approx(expected[name], rel=1e-6, abs=1), name


def write() -> None:
    lines = [
        f' "{architecture}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in planned(architecture).items())
        + "\n }"
        for architecture in FIELDS
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
