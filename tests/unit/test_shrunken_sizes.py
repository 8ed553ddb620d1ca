"""The values that change in each family's configuration when it is made tiny: catches any change.

The table is a snapshot. `python tests/unit/test_shrunken_sizes.py` rewrites it; judge the difference by
`pytest tests/unit/test_shrink.py tests/unit/test_shrink_parts.py`, slow tests included: such a model trains, has every
kind of module of the real one, and keeps its ratio of heads. Families that are unrelated to the change stay as they
are, and a size that grows needs a reason.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from accel_scale.shrinking.shrink import shrink_model_config

TABLE = Path(__file__).with_name("shrunken_sizes.json")
FAMILIES = (
    "llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gemma3", "gemma3n_text", "phi3", "phi", "olmo2", "glm4",
    "cohere2", "smollm3", "granite", "stablelm", "starcoder2", "gpt_neox", "opt", "gpt2", "falcon", "gptj", "bloom",
    "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_moe", "qwen2_moe", "qwen3_next", "mamba", "mamba2",
    "bamba", "jamba", "falcon_h1", "zamba2", "granitemoehybrid", "dbrx", "mpt", "xglm", "llava", "qwen2_vl", "llama4",
    "minimax", "recurrent_gemma", "rwkv", "nemotron_h", "ernie4_5_moe", "glm4_moe", "exaone4", "lfm2", "t5", "codegen",
    "xlnet", "jetmoe", "olmoe", "phimoe", "modernbert-decoder", "idefics3", "kimi_linear",
)  # fmt: skip
SPECIAL = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def shrunken(family: str) -> dict[str, Any]:
    """The values that differ from the class's defaults."""
    config = CONFIG_MAPPING[family]()
    tiny = shrink_model_config(copy.deepcopy(config), **SPECIAL)
    return _changes(json.loads(config.to_json_string(False)), json.loads(tiny.to_json_string(False)))


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            value, before = _changes(before, value), {}
        if value != before:
            found[name] = value
    return found


@functools.cache
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sizes_are_those_of_the_table(family: str) -> None:
    assert shrunken(family) == table()[family]


def write() -> None:
    lines = [f" {json.dumps(family)}: {json.dumps(shrunken(family))}" for family in FAMILIES]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
