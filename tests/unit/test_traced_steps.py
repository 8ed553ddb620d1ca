"""Results of traces in small models of real classes, number by number: catches any change.

The table is a snapshot. `python tests/unit/test_traced_steps.py` rewrites it; judge the difference by
`pytest tests/unit/test_tracing.py tests/unit/test_traced_cache.py tests/unit/test_traced_outliers.py`, slow tests
included, and by `python benchmarks/planner_accuracy.py`. Another version of transformers may count other tensors.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import as_stored
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup
from accel_scale.tracing import service
from accel_scale.tracing.cache import read_cache
from accel_scale.tracing.step import FakeStep

TABLE = Path(__file__).with_name("traced_steps.json")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KEYS = {"num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "ernie4_5": KEYS,
    "ministral": {**KEYS, "sliding_window": 24, "num_hidden_layers": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "modernbert-decoder": {"cls_token_id": 1, "sep_token_id": 2},
    "gpt_neo": {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]]},
    "openai-gpt": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "logits_scaling": 4.0},
    "gemma4_text": {
        "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
PLAIN = TrainingSetup(packing=False, checkpointing="none", micro_batch_size=2, sequence_length=32)
LORA = replace(PLAIN, method="lora", lora=LoraSetup(rank=4))
# On the CPU unless stated otherwise, and without a memory tracker, as in training.
SETUPS = {
    "fp32": replace(PLAIN, precision="fp32"),
    "bf16": PLAIN,
    "true bf16": replace(PLAIN, precision="bf16_true"),
    "eager, padded": replace(PLAIN, attention="eager", mean_length=20.0),
    "checkpointed": replace(PLAIN, checkpointing="full"),
    "every other": replace(PLAIN, checkpointing="every_2"),
    "offloaded": replace(PLAIN, checkpointing="offload", precision="fp32"),
    "lora": LORA,
    "lora, dropout": replace(LORA, lora=LoraSetup(rank=4, dropout=0.1), checkpointing="full"),
    "lora, attention again": replace(LORA, checkpointing="attention"),
    "dora": replace(LORA, lora=LoraSetup(rank=4, dora=True, targets=("q_proj", "down_proj"))),
    "lora and whole": replace(LORA, lora=LoraSetup(rank=4, full_modules=("lm_head",))),
    "qlora": replace(LORA, method="qlora"),
    "qlora, true bf16": replace(LORA, method="qlora", precision="bf16_true"),
}
TRACED = {
    "ernie4_5": tuple(SETUPS),
    "ministral": ("every other",),
    "olmoe": ("bf16", "lora"),
    "lfm2": ("bf16",),
    "modernbert-decoder": ("bf16",),
    "openai-gpt": ("lora",),
    "mamba": ("checkpointed",),
    "granitemoe": ("true bf16",),
}
ON_CUDA = ("bf16", "checkpointed", "lora", "qlora", "lora, dropout", "eager, padded")
# Mamba's layers loop over tokens here, so its rows are short.
LENGTHS = {"mamba": 8}
KEPT = (("ernie4_5", "fp32"), ("ernie4_5", "qlora"), ("ministral", "true bf16"), ("lfm2", "fp32"), ("gpt_neo", "bf16"))
FITTED = (("ernie4_5", "true bf16", False), ("lfm2", "fp32", True))


@functools.cache
def facts_of(family: str) -> ModelFacts:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    return service.facts_of(json.loads(json.dumps(config.to_dict(), default=str)), name=family, place="here")


def facts(family: str) -> Mapping[str, Any]:
    return json.loads(json.dumps(as_stored(facts_of(family))))


def segments(run: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """For each segment: the number of events, the bytes left, the highest point and the bytes allocated in all."""
    return {
        name: [
            len(events),
            sum(events),
            max(itertools.accumulate(events, initial=0)),
            sum(event for event in events if event > 0),
        ]
        for name, events in run.items()
    }


def step(family: str, name: str, is_cuda: bool) -> dict[str, Any]:
    step = FakeStep(facts_of(family), SETUPS[name], is_cuda=is_cuda, is_tracked=name == "fp32")
    return {
        **segments(step.run(2, LENGTHS.get(family, 32))),
        "layers": [step.chosen, step.stands_for, step.kinds],
        "widths": [step.hidden_bytes, step.given_bytes],
        "takes_logits": step.takes_logits,
    }


def kept(family: str, name: str) -> list[Any]:
    layers = read_cache(facts_of(family), SETUPS[name])
    return [[layer.count, layer.window, [list(part) for part in layer.parts]] for layer in layers]


def fit(family: str, name: str, is_exact: bool) -> Mapping[str, Any]:
    setup, how = SETUPS[name], {"is_cuda": False, "is_tracked": True, "is_exact": is_exact}
    return service.traced_fit(facts_of(family), setup, **how)


PARTS = {
    **{f"facts of {family}": functools.partial(facts, family) for family in FAMILIES},
    **{
        f"step of {family}, {name}, {'cuda' if is_cuda else 'cpu'}": functools.partial(step, family, name, is_cuda)
        for family, names in TRACED.items()
        for name in names
        for is_cuda in ((False, True) if name in ON_CUDA else (False,))
    },
    **{f"kept by {family}, {name}": functools.partial(kept, family, name) for family, name in KEPT},
    **{
        f"fit of {family}, {name}": functools.partial(fit, family, name, is_exact) for family, name, is_exact in FITTED
    },
}


@functools.cache
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", PARTS)
def test_the_trace_is_that_of_the_table(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PARTS[part]() == table()[part]


def write() -> None:
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("XDG_CACHE_HOME", cache)
        lines = [f" {json.dumps(part)}: {json.dumps(make())}" for part, make in PARTS.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
