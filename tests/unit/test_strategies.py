"""One table of strategies: launch files, the planner, optimizers' refusals and checkpoints agree with it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from accel_scale.errors import ConfigError
from accel_scale.facts import strategies
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.facts.optimizer_specs import OPTIMIZERS
from accel_scale.facts.strategies import LAUNCH_FILE_LABELS, STRATEGIES, VARIANTS, Strategy, StrategyVariant
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.cost.strategies import choices, conflict
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.recipe_choices import SFT_PLAN
from accel_scale.planning.search.request_strategy import strategy_label
from accel_scale.settings.planned_setup import parallel_of

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "accelerate_configs"


def test_a_variant_is_what_its_launch_file_sets() -> None:
    for variant in VARIANTS:
        parallel = read_launch_file(FILES / f"{variant.launch_file}.yaml").parallel
        found = parallel_of(parallel, 8, 8)
        asked = (variant.strategy, variant.offload_params, variant.offload_optimizer, variant.reshard_after_forward)
        assert (found.strategy, found.offload_params, found.offload_optimizer, found.reshard_after_forward) == asked
        stage = found.kind.zero_stage or 0
        assert found.zero.as_keys(stage) == variant.zero.as_keys(stage)
        assert (parallel.kind, parallel.label.split(",")[0]) == (STRATEGIES[variant.strategy], parallel.kind.label)
    assert {stem for stem in LAUNCH_FILE_LABELS if stem != "single"} <= {path.stem for path in FILES.glob("*.yaml")}


def test_zero_stages_shard_one_thing_more_each() -> None:
    sharded = [(s.shards_states, s.shards_gradients, s.shards_weights) for s in STRATEGIES.values() if s.is_deepspeed]
    assert sharded == [(n >= 1, n >= 2, n >= 3) for n in range(4)]
    assert [s.name for s in STRATEGIES.values() if s.partitions_weights] == ["zero3"]


def test_checkpoints_load_between_replicas_and_from_ranks_that_shared_the_model() -> None:
    loads = {(a, b) for a in STRATEGIES for b in STRATEGIES if STRATEGIES[a].loads_checkpoints_of(b)}
    assert loads - {(a, a) for a in STRATEGIES} == {
        ("single", "ddp"),
        ("ddp", "single"),
        ("single", "model_parallel"),
        ("ddp", "model_parallel"),
    }
    assert not STRATEGIES["single"].loads_checkpoints_of("of a later version")


def test_a_launch_file_cannot_name_a_stage_or_version_that_does_not_exist(tmp_path: Path) -> None:
    text = {
        "zero4": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 4\n",
        "fsdp3": "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 3\n",
    }
    for name, lines in text.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"compute_environment: LOCAL_MACHINE\n{lines}num_machines: 1\nnum_processes: 2\n")
        with pytest.raises(ConfigError, match=f"'{name}' is not a strategy"):
            read_launch_file(file)


def test_a_strategy_in_the_table_is_known_to_planner_launch_and_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-2 under another name, with optimizer states on NVMe: one entry in each table and no other line."""
    made = replace(STRATEGIES["zero2"], name="zero2_drives", label="ZeRO-2 on drives", refused_precisions={})
    monkeypatch.setitem(STRATEGIES, made.name, made)
    variant = StrategyVariant(made.label, made.name, "zero2_drives", offload_optimizer="nvme", for_one_gpu=True)
    monkeypatch.setattr("accel_scale.planning.cost.strategies.VARIANTS", (*VARIANTS, variant))
    model, machine = load_model_facts("meta-llama/Llama-3.1-8B"), Machine(find_gpu("H100 SXM"), 8, 8)
    (choice,) = [choice for choice in choices(8, 8) if choice.label == made.label]
    assert strategy_label("zero-2 on drives", machine, model, SFT_PLAN) == made.label
    setup = TrainingSetup(parallel=choice.parallel)
    known = replace(setup, parallel=replace(choice.parallel, strategy="zero2"))
    assert predict_memory(model, setup).high_bytes == predict_memory(model, known).high_bytes
    assert conflict(replace(setup, precision="bf16_true")) is None
    assert LaunchStrategy(made.name).label == "ZeRO-2 on drives"
    where = {"device_type": "cuda", "zero_offload": False, "precision": None}
    assert OPTIMIZERS["adamw_torch_8bit"].refusal(strategy=made.name, **where)[0] == "zero"


def test_nothing_compares_a_strategys_name() -> None:
    """Code must ask for properties: a comparison with a name would miss the next strategy."""
    names = set(STRATEGIES) - {"model_parallel"}
    for path in (*(ROOT / "accel_scale").rglob("*.py"), *(ROOT / "recipes").glob("*.py")):
        text = path.read_text()
        if path.parent.name == "facts" or not any(f'"{name}"' in text for name in names):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare):
                strings = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
                assert not strings & names, f"{path.relative_to(ROOT)}:{node.lineno} compares {strings & names}"
    assert isinstance(strategies.strategy_named("ddp"), Strategy)


@pytest.mark.parametrize("name", ["zero2_tuned", "zero3_tuned"])
def test_a_written_plan_keeps_the_buffers_it_was_made_for(name: str, tmp_path: Path) -> None:
    from accel_scale.cli.main import main

    words = ["meta-llama/Llama-3.2-1B", "--gpu", "H100", "--num_gpus", "8", "--strategy", name]
    assert main(["plan", *words, "--method", "full", "--write", str(tmp_path)]) == 0
    file = read_launch_file(tmp_path / "launch.yaml")
    assert file.deepspeed_file is not None
    shipped = read_launch_file(FILES / f"{name}.yaml")
    assert parallel_of(file.parallel, 8, 8) == parallel_of(shipped.parallel, 8, 8)
    assert file.values["deepspeed_config"].get("zero3_init_flag") == shipped.values["deepspeed_config"].get(
        "zero3_init_flag"
    )
    assert file.parallel.deepspeed == shipped.parallel.deepspeed
