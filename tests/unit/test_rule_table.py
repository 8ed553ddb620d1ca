"""Which rules report on which launch file and machine, for many settings: catches any change.

The table is a snapshot. `python tests/unit/test_rule_table.py` rewrites it; judge each changed line:

- Where a rule now reports, an error means that the launch fails on that machine, a warning that it loses something.
- Where a rule is now silent, the launch runs.
- The rule's own test, in test_checks.py, test_rule_branches.py or a neighbouring file, covers it.
- Rules, machines and launch files that are unrelated to the change stay the same.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_checks import ALL_RULES, AMPERE, HOPPER, LAPTOP, ROOT, TURING, bare

from accel_scale.checks.case import Case
from accel_scale.checks.ddp_rules import DDP_RULES
from accel_scale.checks.run_settings import RunSettings
from accel_scale.launching.environment import LaunchEnvironment, current_launch
from accel_scale.launching.launch_file import LaunchFile, read_launch_file
from accel_scale.launching.machine import LocalMachine

TABLE = Path(__file__).with_name("rule_table.json")
# One letter for each machine, as in the table.
MACHINES: dict[str, LocalMachine] = {
    "l": LAPTOP,
    "h": HOPPER,
    "a": AMPERE,
    "t": TURING,
    "2": replace(AMPERE, num_devices=2, num_cores=4, gpu_links=(("X", "PHB"), ("PHB", "X"))),
    "n": replace(bare(AMPERE, "deepspeed", "bitsandbytes", "torchao"), has_compiler=False, has_ninja=False),
}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    *({"precision": name} for name in ("fp32", "fp16", "bf16", "bf16_true", "fp8")),
    {"precision": "fp8", "fp8_emulate": True}, {"bf16": True}, {"fp16": True}, {"dtype": "float16"},
    *({"method": name} for name in ("full", "lora", "qlora")), {"load_in_4bit": True}, {"load_in_8bit": True},
    {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, {"use_cpu": True},
    {"use_cpu": True, "precision": "fp16"},
    *({"optim": name} for name in ("adamw_8bit", "paged_adamw_8bit", "adafactor", "lion_32bit", "adamw_torch_4bit")),
    *({"attn_implementation": name} for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3")),
    {"packing": False}, {"packing": False, "padding_free": True}, {"max_length": None},
    {"packing_strategy": "wrapped"}, {"optim": "adamw_cpu_offload"}, {"optim": "deepspeed_cpu_adam"},
    {"torch_compile": True}, {"long_rows": True}, {"fused_kernels": "liger"}, {"use_liger_kernel": True},
    *({"checkpointing_policy": name} for name in ("none", "full", "selective", "every_2", "offload", "attention")),
    {"activation_checkpointing": True}, {"use_reentrant": True}, {"use_reentrant": False, "method": "lora"},
    {"global_batch_size": 12}, {"global_batch_size": 256}, {"gradient_accumulation_steps": 4, "global_batch_size": 64},
    {"sync_each_batch": True}, {"max_grad_norm": 0.0}, {"auto_find_batch_size": True}, {"dataset_streaming": True},
    {"dataset_streaming": True, "max_steps": 10}, {"dataset_bytes": 10**12}, {"ddp_timeout": 60},
    {"ddp_bucket_cap_mb": 50}, *({"ddp_comm_hook": name} for name in ("fp16", "bf16", "powersgd")),
    {"ddp_comm_hook": "powersgd", "powersgd_rank": 4}, {"powersgd_rank": 4}, {"reduce_dtype": "bf16"},
    {"save_strategy": "no"}, {"resume_from_checkpoint": "true"}, {"model_dropout": 0.1, "long_rows": True},
    {"tp_size": 2, "pp_size": 1}, {"sp_size": 2}, {"sp_size": 2, "pp_size": 1}, {"pp_size": 2},
    {"tp_size": 3, "pp_size": 1},
)  # fmt: skip


@functools.cache
def launches() -> dict[str, LaunchEnvironment | LaunchFile]:
    """Every shipped launch file, and a plain ``python recipes/sft.py``."""
    files = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
    shipped = {name: read_launch_file(f"accelerate_configs/{name}.yaml") for name in files}
    return {"alone": current_launch({}), **shipped}


def differing(changes: dict[str, Any]) -> dict[str, str]:
    """The entries of `spoken` that differ from those without the setting; a finding that is gone is empty."""
    usual, found = spoken({}), spoken(changes)
    if not changes:
        return usual
    return {key: found.get(key, "") for key in usual | found if found.get(key) != usual.get(key)}


def spoken(changes: dict[str, Any]) -> dict[str, str]:
    """``{"rule, level, place": "launch machines launch machines"}``."""
    run = RunSettings(**changes)
    found: dict[str, dict[str, list[str]]] = {}
    for name, launch in launches().items():
        for letter, machine in MACHINES.items():
            for key in _rules(Case(run, launch, machine)):
                found.setdefault(key, {}).setdefault(name, []).append(letter)
    return {key: " ".join(f"{name} {''.join(letters)}" for name, letters in at.items()) for key, at in found.items()}


def _rules(case: Case) -> Iterator[str]:
    for name, rule in {**ALL_RULES, **{rule.__name__: rule for rule in DDP_RULES}}.items():
        finding = rule(case)
        if finding is not None:
            place = "the launch file" if ".yaml" in finding.place else finding.place
            yield f"{name}, {finding.level}, {place}"


@functools.cache
def table() -> dict[str, dict[str, str]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def _name(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in changes.items()) or "nothing"


@pytest.mark.parametrize("changes", CHANGES, ids=_name)
def test_the_rules_that_speak_are_those_of_the_table(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert differing(changes) == table()[_name(changes)]


def write() -> None:
    os.chdir(ROOT)
    found = {_name(changes): differing(changes) for changes in CHANGES}
    TABLE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
