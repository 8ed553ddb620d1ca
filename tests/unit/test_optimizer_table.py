"""The single table of optimizers: the planner, the doctor and training see every entry in it."""

from __future__ import annotations

import pytest
import torch

from accel_scale.checks.registry import check_run
from accel_scale.checks.run_settings import RunSettings
from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_specs import LEAN_OPTIMIZERS, OPTIMIZERS, OptimizerSpec
from accel_scale.facts.strategies import Refusal
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.launching.machine import LocalMachine
from accel_scale.optimization import optimizers
from accel_scale.planning.cost.sharding import state_bytes
from accel_scale.planning.cost.strategies import conflict
from accel_scale.planning.cost.timing import optimizer_traffic_bytes
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.parameters import parameter_groups
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup

SPEC = OptimizerSpec(
    "SGD with one 16-bit state",
    options={"momentum": float},
    num_states=1,
    state_bits=16,
    refused={"fsdp": Refusal("it is not made for DTensors", "use --optim sgd.")},
)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> str:
    """Add an entry to the table and a builder, as for any new optimizer."""
    monkeypatch.setitem(OPTIMIZERS, "small_sgd", SPEC)
    build = lambda adam, options, strategy: (torch.optim.SGD, {"lr": adam["lr"], **options})  # noqa: E731
    monkeypatch.setitem(optimizers._OWN, "small_sgd", build)
    return "small_sgd"


def test_the_planner_counts_its_states_and_traffic(added: str) -> None:
    model, setup = load_model_facts("HuggingFaceTB/SmolLM2-135M"), TrainingSetup(optimizer=added)
    groups = parameter_groups(model, setup)
    assert state_bytes(model, setup).optimizer_bytes == 2 * groups.trainable
    assert optimizer_traffic_bytes(setup) == 2 * 4 + 4 * 4 + 2 * 2
    sharded = TrainingSetup(optimizer=added, parallel=ParallelSetup("fsdp2", 2, 2))
    assert conflict(sharded) == "small_sgd does not work there: it is not made for DTensors"


def test_doctor_and_training_refuse_it_with_the_same_words(added: str) -> None:
    found = check_run(RunSettings(optim=added), read_launch_file("accelerate_configs/fsdp2.yaml"), LocalMachine())
    (finding,) = [finding for finding in found if finding.place == "--optim"]
    with pytest.raises(ConfigError) as refused:
        optimizers.check_optimizer(added, device_type="cuda", strategy="fsdp2")
    assert (finding.problem, finding.fix) == (refused.value.problem, refused.value.fix)
    assert finding.fix == "use --optim sgd."


def test_training_builds_it_with_its_options(added: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    made = optimizers.create_optimizer(added, [weight], lr=0.5, optim_args="momentum=0.25")
    assert (type(made), made.defaults["momentum"], made.defaults["lr"]) == (torch.optim.SGD, 0.25, 0.5)
    with pytest.raises(ConfigError, match="small_sgd has no option 'beta'"):
        optimizers.create_optimizer(added, [weight], lr=0.5, optim_args="beta=1")


def test_what_the_planner_tries_is_in_the_table() -> None:
    assert set(LEAN_OPTIMIZERS) <= set(OPTIMIZERS)
    assert all(spec.num_states is not None for spec in OPTIMIZERS.values())
