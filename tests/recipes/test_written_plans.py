"""The output of `accel-scale plan --write` runs unchanged: it reads back as the plan, is accepted, and rehearsed."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from accel_scale.checks.doctor import diagnose
from accel_scale.checks.run_settings import RunSettings
from accel_scale.cli.doctor import read_recipe_flags
from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.facts.device import device_of
from accel_scale.facts.hardware import Machine as PlannedMachine
from accel_scale.facts.hardware import find_gpu
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.launching import machine as machine_module
from accel_scale.launching.launch_file import LaunchFile, read_launch_file
from accel_scale.launching.machine import PACKAGES, LocalMachine
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, SFT_PLAN
from accel_scale.planning.search.requests import build_request
from accel_scale.planning.search.search import Candidate, Plan, Request, search
from accel_scale.planning.search.wish import Wish
from accel_scale.planning.search.writing import RecipeChoices, WrittenPlan, plan_files, write_files
from accel_scale.recipe_specs.trl import SFT
from accel_scale.settings.planned_setup import setup_of
from accel_scale.settings.resolve import resolve
from accel_scale.settings.resolved import LaunchFacts
from accel_scale.starting.layout import row_group_size

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import rehearse_plans  # noqa: E402

# Plans of the pretraining recipe are in test_shared_plans.py.
FINE_TUNING = [name for name, words in rehearse_plans.REQUESTS.items() if "--recipe pretrain" not in words]
TOOLS = {"packages": dict.fromkeys(PACKAGES, "1"), "has_compiler": True, "has_ninja": True, "has_libaio": True}
CPU = LocalMachine(**TOOLS)


def cuda(request: Request) -> LocalMachine:
    """The machine that the plan is for, as the doctor would detect it."""
    gpu, planned = request.machine.gpu, request.machine
    return LocalMachine(
        accelerator=device_of(gpu),
        num_devices=planned.gpus_per_node,
        folders={"outputs": True},
        **TOOLS,
    )


def errors(written: WrittenPlan, machine: LocalMachine) -> list[str]:
    """Errors of the doctor's rules and of the recipe's own refusals about written files."""
    launch, parsed = read(written)
    found = diagnose(RunSettings.from_flags(parsed.explicit, parsed.origins), launch, machine).findings
    lines = [finding.one_line() for finding in found if not is_expected(finding.one_line(), machine)]
    try:
        resolve(parsed, facts_of(launch, parsed, machine))
    except ConfigError as error:
        lines.append(error.one_line())
    return lines


def read(written: WrittenPlan) -> tuple[LaunchFile, ParsedFlags]:
    launch_path, recipe_path = list(written.files)[:2]
    # fp8 must be emulated without a card that supports it; nothing else is changed.
    emulated = ["--fp8_emulate", "true"] if "precision: fp8" in written.files[recipe_path] else []
    return read_launch_file(launch_path), read_recipe_flags(["--config_file", str(recipe_path), *emulated], SFT)


def in_groups(launch: LaunchFile, parsed: ParsedFlags) -> Any:
    """The launch's strategy as the recipe sees it, with the row groups that its own flag sets."""
    size = row_group_size(parsed, launch)
    return replace(launch.parallel, sequence_parallel_size=size, context_parallel_size=size)


def is_expected(line: str, machine: LocalMachine) -> bool:
    """Node 0's address is left for the user to fill in; paging on a CPU does not matter for a rehearsal."""
    return "other nodes cannot reach node 0" in line or (machine is CPU and "paging needs CUDA" in line)


def facts_of(launch: LaunchFile, parsed: ParsedFlags, machine: LocalMachine) -> LaunchFacts:
    return LaunchFacts(
        world_size=(launch.num_processes or 1) // row_group_size(parsed, launch),
        strategy=launch.strategy,
        mixed_precision=launch.mixed_precision,
        device=machine.accelerator,
    )


def plan_of(name: str) -> Plan:
    """The plan of the request called `name`, built like the command's."""
    import argparse

    from accel_scale.cli import plan

    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    args = parser.parse_args(shlex.split(rehearse_plans.REQUESTS[name]))
    request, _ = plan._request(args, plan._wish(args))
    return search(request)


def write(plan: Plan, candidate: Candidate, folder: Path, **choices: Any) -> WrittenPlan:
    written = plan_files(plan.request, candidate, RecipeChoices(plan.request.model.name, **choices), folder)
    write_files(written)
    return written


@pytest.mark.parametrize("name", FINE_TUNING)
def test_written_plans_pass_the_doctor(name, tmp_path):
    """Both on the machine they were made for and on the CPU they are rehearsed on."""
    plan = plan_of(name)
    assert plan.best is not None
    written = write(plan, plan.best, tmp_path)
    assert errors(written, cuda(plan.request)) == []
    assert errors(written, CPU) == []


@pytest.mark.parametrize("name", FINE_TUNING)
def test_written_plans_read_back_as_the_plan(name, tmp_path):
    """The recipe's own planner reads the planned setting from the two files: nothing is lost."""
    plan = plan_of(name)
    assert read_back(write(plan, plan.best, tmp_path), plan.request) == plan.best.setup


def read_back(written: WrittenPlan, request: Request) -> TrainingSetup:
    launch, parsed = read(written)
    settings = resolve(parsed, facts_of(launch, parsed, cuda(request)))
    as_launched = SimpleNamespace(
        parallel=in_groups(launch, parsed),
        world_size=launch.num_processes,
        local_world_size=request.machine.gpus_per_node,
    )
    attention, card = settings.values.get("attn_implementation") or "sdpa", request.machine.gpu.memory_bytes
    found = setup_of(settings, as_launched, attention, card_bytes=card)
    # Full fine-tuning has no adapters, so their settings are not written.
    return replace(found, lora=request.fixed["lora"]) if found.method == "full" else found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_gpus", "precision", "policy"),
    [(1, "bf16", "selective"), (16, "bf16", "offload"), (2, "fp16", "every_2"), (8, "fp32", "none"),
     (16, "bf16_true", "full"), (2, "fp8", "selective")],
)  # fmt: skip
def test_no_plan_at_all_is_one_that_the_doctor_refuses(num_gpus, precision, policy, tmp_path):
    """Every strategy × method that the search finds, not just the first."""
    machine = PlannedMachine(find_gpu("H100 SXM"), num_gpus, min(8, num_gpus), internode_bytes_per_second=4e11)
    wish = Wish("Llama-3.2-1B", precision=precision, checkpointing_policy=policy, method="auto")
    asked = build_request(wish, detect=lambda: machine)
    plan = search(asked)
    assert len(plan.candidates) >= 8
    for position, candidate in enumerate(plan.candidates):
        written = write(plan, candidate, tmp_path / str(position))
        said = errors(written, cuda(asked))
        assert said == [], (candidate.choice.label, candidate.setup)
        assert read_back(written, asked) == candidate.setup


def test_doctor_command_accepts_what_the_plan_command_prints(tmp_path, capsys, monkeypatch):
    """The two commands as typed, on a machine like the one planned for."""
    monkeypatch.chdir(REPOSITORY)
    words = ["plan", "Qwen/Qwen3-8B", "--gpu", "H100-SXM", "--num_gpus", "8", "--method", "lora", "--json"]
    assert main([*words, "--write", str(tmp_path / "a plan")]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    run, rehearsal = shlex.split(written["run"]), shlex.split(written["rehearse"])
    assert run[:2] == ["accelerate", "launch"]
    assert run[2:] == rehearsal[2:]
    assert all(Path(path).is_file() for path in written["files"])
    request = SimpleNamespace(machine=PlannedMachine(find_gpu("H100 SXM"), 8, 8))
    monkeypatch.setattr(machine_module, "detect_machine", lambda folders=(): cuda(request))
    assert main(["doctor", "--json", *rehearsal[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_files_say_what_was_planned(tmp_path):
    plan = plan_of("zero-infinity")
    written = write(plan, plan.best, tmp_path)
    launch, recipe = (yaml.safe_load(text) for text in list(written.files.values())[:2])
    config = json.loads(Path(launch["deepspeed_config"]["deepspeed_config_file"]).read_text())
    zero = config["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"]
    assert Path(zero["offload_param"]["nvme_path"]).is_relative_to(tmp_path)
    # A buffer holds one GPU's share of the largest weight, the embedding.
    assert zero["offload_param"]["buffer_size"] >= 152064 * 3584 / 2
    assert recipe["global_batch_size"] == 64
    memory = plan.best.memory
    assert memory.text in written.files[tmp_path / "recipe.yaml"]

    plan = plan_of("zero3-lora-two-nodes")
    written = write(plan, plan.best, tmp_path / "nodes")
    launch = yaml.safe_load(written.files[tmp_path / "nodes" / "launch.yaml"])
    assert (launch["num_machines"], launch["num_processes"]) == (2, 16)
    assert "--machine_rank $SLURM_NODEID --main_process_ip $NODE_0" in written.command

    plan = plan_of("zero3-offload-moe")
    written = write(plan, plan.best, tmp_path / "moe", tokens=1e8, dataset="a.jsonl", columns=("text=body",))
    recipe = yaml.safe_load(written.files[tmp_path / "moe" / "recipe.yaml"])
    assert recipe["max_steps"] == 763  # 10⁸ ÷ (64 × 2048), rounded up
    assert "num_train_epochs" not in recipe
    assert (recipe["dataset_name"], recipe["columns"]) == ("a.jsonl", ["text=body"])


def test_files_of_others_are_left_alone_and_those_of_plans_replaced(tmp_path):
    plan = plan_of("one-gpu-full")
    write(plan, plan.best, tmp_path)
    write(plan, plan.best, tmp_path)
    (tmp_path / "launch.yaml").write_text("distributed_type: MULTI_GPU\n")
    (tmp_path / "recipe.yaml").unlink()
    with pytest.raises(ConfigError, match=r"launch\.yaml: exists and is not a plan's"):
        write(plan, plan.best, tmp_path)
    assert not (tmp_path / "recipe.yaml").exists()
    with pytest.raises(ConfigError, match="cannot be written"):
        write(plan, plan.best, tmp_path / "launch.yaml" / "below")


def test_plans_that_share_the_model_are_not_written_for_a_recipe_that_cannot(tmp_path):
    machine = PlannedMachine(find_gpu("H100 SXM"), 8, 8)
    wish = Wish("Llama-3.1-8B", strategy=("FSDP2 x TP2",), recipe=PRETRAIN_PLAN)
    plan = search(build_request(wish, detect=lambda: machine))
    assert plan.best.setup.parallel.tensor_parallel == 2
    other = replace(plan, request=replace(plan.request, recipe=SFT_PLAN))
    with pytest.raises(ConfigError, match="does not share its model"):
        write(other, other.best, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["ddp-lora"])
def test_a_written_plan_is_rehearsed(name, tmp_path):
    """One plan for real; benchmarks/rehearse_plans.py does all of them."""
    outcome = rehearse_plans.rehearse(name, tmp_path)
    assert outcome.status == "passed", outcome
    assert "same losses" in outcome.details
