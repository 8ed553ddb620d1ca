"""The planner's choices and refusals, with reasons, for many requests: catches any change of its answers.

The table is a snapshot. `python tests/unit/test_planned_choices.py` rewrites it; judge each line of the diff by
the purpose of the change:

- A setting moves up only if its predicted step became shorter, or if it is the simplest within 3 %.
- A setting disappears only if it no longer fits or cannot run, and the stated reason is true.
- A changed line whose model, GPU and flags are unrelated to the change is a defect, however small.

Separate tests check that settings fit, keep the batch and come fastest first, whatever the table says.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.facts.names import METHODS
from accel_scale.planning.cost.memory import MemoryEstimate
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import GenerationSetup, LoraSetup, TrainingSetup
from accel_scale.planning.search.model_parallel import Degrees
from accel_scale.planning.search.plan import Plan
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, SFT_PLAN
from accel_scale.planning.search.search import Request, memory_of, search

TABLE = Path(__file__).with_name("planned_choices.json")
PAIRS = replace(SFT_PLAN, rows_per_example=2, has_reference_model=True)
TENTH = 2 * 10**11


def machine(card: str, num_gpus: int = 1, host: int | None = None, per_server: int = 8, **changes: Any) -> Machine:
    network = 5e10 if num_gpus > per_server else None
    gpu = replace(find_gpu(card), **changes)
    servers = {"gpus_per_node": min(per_server, num_gpus), "internode_bytes_per_second": network}
    return Machine(gpu, num_gpus=num_gpus, host_memory_bytes=host, **servers)


# (model, machine, the rest of the request)
REQUESTS: dict[str, tuple[str, Machine, dict[str, Any]]] = {
    "one card": ("Llama-3.2-1B", machine("RTX 4090"), {"methods": METHODS, "global_batch_size": 8}),
    "one card, 3 rows": ("Llama-3.2-1B", machine("RTX 4090"), {"global_batch_size": 3}),
    "too large for one": ("Llama-3.1-8B", machine("RTX 4090", host=TENTH), {"methods": METHODS}),
    "host memory": ("Llama-3.1-8B", machine("A100-80GB", 4, TENTH // 4), {"methods": METHODS, "global_batch_size": 8}),
    "four cards": ("Llama-3.1-8B", machine("A100-80GB", 4, TENTH), {"methods": METHODS, "global_batch_size": 8}),
    "no speed": ("Llama-3.2-1B", machine("H100", 2, peak_flops=None), {"methods": METHODS, "global_batch_size": 64}),
    "two servers": ("Llama-3.1-8B", machine("H100", 16, 10**12), {"methods": METHODS, "global_batch_size": 64}),
    "12 rows on 8": ("Llama-3.1-8B", machine("A100-40GB", 8), {"recipe": PRETRAIN_PLAN, "global_batch_size": 12}),
    "2 rows on 4": (
        "Llama-3.1-8B",
        machine("H100", 4, per_server=2),
        {"recipe": PRETRAIN_PLAN, "global_batch_size": 2},
    ),
    "70B": ("Llama-3.1-70B", machine("H100", 16), {"recipe": PRETRAIN_PLAN, "global_batch_size": 16}),
    "experts": ("Mixtral-8x7B", machine("H100", 8), {"recipe": PRETRAIN_PLAN, "global_batch_size": 32}),
    "long rows": ("Llama-3.1-8B", machine("H100", 8), {"global_batch_size": 8, "sequence_length": 131072}),
    "long rows, pretraining": (
        "Llama-3.2-1B",
        machine("H100", 4),
        {"recipe": PRETRAIN_PLAN, "global_batch_size": 4, "sequence_length": 524288},
    ),
    "asked for TP": (
        "Llama-3.1-8B",
        machine("H100", 8),
        {"recipe": PRETRAIN_PLAN, "global_batch_size": 16, "degrees": Degrees(tensor=4)},
    ),
    "asked for stages": (
        "Llama-3.1-8B",
        machine("H100", 8),
        {"recipe": PRETRAIN_PLAN, "global_batch_size": 32, "degrees": Degrees(pipeline=4)},
    ),
    "pairs": (
        "Llama-3.2-1B", machine("H100", 2), {"recipe": PAIRS, "methods": ("full", "lora"), "global_batch_size": 8},
    ),
    "answers": (
        "Llama-3.2-1B",
        machine("H100", 2),
        {"fixed": {"generation": GenerationSetup(0, 64, 448), "loss": "log_probs"}, "global_batch_size": 16},
    ),
    "fixed": (
        "Llama-3.1-8B",
        machine("H100", 4),
        {
            "fixed": {"checkpointing": "every_2", "optimizer": "adafactor", "micro_batch_size": 2},
            "strategies": ("FSDP2", "ZeRO-2"),
            "methods": ("full", "qlora"),
        },
    ),
    "fp32": ("Llama-3.2-1B", machine("RTX 3090", 2), {"fixed": {"precision": "fp32"}, "methods": METHODS}),
    "DoRA": (
        "Llama-3.2-1B",
        machine("RTX 3090"),
        {"fixed": {"lora": LoraSetup(rank=64, dora=True), "attention": "eager"}, "methods": ("lora", "qlora")},
    ),
}  # fmt: skip


@functools.cache
def planned(name: str) -> Plan:
    model, place, rest = REQUESTS[name]
    return search(Request(load_model_facts(model), place, **rest))


def chosen(name: str) -> list[str]:
    """One line for each candidate, best first, and one for each strategy that is refused."""
    plan = planned(name)
    lines = [f"{plan.num_considered} considered"]
    for candidate in plan.candidates:
        setup = candidate.setup
        words = [candidate.choice.label, setup.method, setup.checkpointing, setup.optimizer]
        words += [f"{setup.accumulation} × {setup.micro_batch_size} rows"]
        words += ["reduced each"] * setup.sync_each_batch + ["a reference"] * setup.reference_model
        words += [f"{setup.generation.rows} answers"] if setup.generation else []
        lines.append(", ".join(words))
    return lines + [f"not {refused.label}, {refused.method}: {refused.reason}" for refused in plan.rejections]


@functools.cache
def table() -> dict[str, list[str]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REQUESTS)
def test_the_choices_are_those_of_the_table(name: str) -> None:
    assert chosen(name) == table()[name]


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_chosen_fits_keeps_the_batch_and_comes_fastest_first(name: str) -> None:
    """Among settings within 3 % of the fastest, the simplest comes first."""
    plan = planned(name)
    asked, waiting = plan.request, [candidate.time for candidate in plan.candidates]
    for candidate in plan.candidates:
        fastest = min((time.step_seconds for time in waiting if time is not None), default=None)
        time = waiting.pop(0)
        assert (time is None) is (fastest is None)
        assert time is None or time.step_seconds <= 1.03 * fastest
        assert candidate.memory.high_bytes <= asked.machine.gpu.memory_bytes
        assert candidate.setup.global_batch_size == asked.global_batch_size
        assert candidate.setup.micro_batch_size % asked.recipe.rows_per_example == 0
        assert all(getattr(candidate.setup, key) == value for key, value in asked.fixed.items() if key != "generation")


@pytest.mark.parametrize("name", REQUESTS)
def test_policies_that_are_left_out_would_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights, gradients and states alone are too large, one checkpointing policy shows it for all of them."""
    plan = planned(name)
    monkeypatch.setattr("accel_scale.planning.search.search.states_exceed", lambda setup, request: False)
    whole = search(plan.request)
    assert whole.candidates == plan.candidates
    assert whole.num_considered == plan.num_considered
    assert [(r.label, r.method) for r in whole.rejections] == [(r.label, r.method) for r in plan.rejections]


def test_no_policy_is_traced_for_states_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 layers of a 26B model and its fp32 states on one card."""
    policies = set()

    def noted(request: Request, setup: TrainingSetup) -> MemoryEstimate:
        policies.add((setup.checkpointing, setup.precision))
        return memory_of(request, setup)

    monkeypatch.setattr("accel_scale.planning.search.search.memory_of", noted)
    search(
        Request(
            load_model_facts("google/gemma-4-26B-A4B"), machine("H100"), methods=("full",), strategies=("one GPU",)
        )
    )
    assert policies == {("full", "bf16")}


def write() -> None:
    found = {name: chosen(name) for name in REQUESTS}
    TABLE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
