"""How flags, launches and GPUs translate into the planner's terms, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_resolve import settle

from accel_scale.errors import ConfigError
from accel_scale.facts import hardware
from accel_scale.facts.device import Device
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.launching.environment import LaunchEnvironment
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.parallel.layout import ParallelLayout
from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup, VllmSetup
from accel_scale.planning.search.recipe_choices import GRPO_PLAN, SFT_PLAN
from accel_scale.settings.planned_setup import SharedModel, parallel_of, recipe_value, setup_of, target_of
from accel_scale.settings.resolved import LaunchFacts

GIB = 2**30
GPU = LaunchFacts(device=Device("cuda"))


def launched(world_size: int = 1, local: int | None = None, **strategy: Any) -> LaunchEnvironment:
    parallel = LaunchStrategy(**{"name": "single", **strategy})
    return LaunchEnvironment(parallel, None, world_size, local or world_size, 0, 0)


def setup(flags: str = "", attention: str = "sdpa_packed", **strategy: Any) -> TrainingSetup:
    return setup_of(settle(flags, launch=GPU), launched(**strategy), attention)


def test_what_the_recipe_does_where_nothing_is_said() -> None:
    found = setup()
    assert (found.method, found.precision, found.optimizer) == ("full", "bf16", "adamw_torch_fused")
    assert (found.checkpointing, found.attention, found.loss) == ("full", "sdpa", "chunked")
    assert (found.micro_batch_size, found.sequence_length, found.accumulation) == (8, 1024, 1)
    assert (found.packing, found.compile, found.long_rows, found.sync_each_batch) == (True, False, False, False)
    assert (found.reduce_dtype, found.reference_model, found.fused) == (None, False, ())
    assert found.parallel == ParallelSetup(gpus_per_node=1)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--method qlora", "method", "qlora"), ("--precision fp16", "precision", "fp16"),
        ("--optim paged_adamw_8bit", "optimizer", "paged_adamw_8bit"),
        ("--checkpointing_policy every_3", "checkpointing", "every_3"), ("--long_rows", "long_rows", True),
        ("--loss_type dft", "loss", "full"), ("--label_smoothing_factor 0.1", "loss", "full"),
        ("--per_device_train_batch_size 3", "micro_batch_size", 3), ("--max_length 333", "sequence_length", 333),
        ("--packing false", "packing", False), ("--gradient_accumulation_steps 5", "accumulation", 5),
        ("--sync_each_batch", "sync_each_batch", True), ("--reduce_dtype fp32", "reduce_dtype", "fp32"),
        ("--torch_compile", "compile", True), ("--method qlora", "double_quantisation", True),
        ("--method qlora --lora_r 4 --lora_dropout 0.25", "lora", LoraSetup(4, dropout=0.25)),
        ("--method lora --lora_target_modules q_proj v_proj --use_dora --lora_dropout 0", "lora",
         LoraSetup(16, ("q_proj", "v_proj"), dora=True)),
        ("--method lora --lora_target_modules all-linear --lora_modules_to_save lm_head --lora_dropout 0", "lora",
         LoraSetup(16, full_modules=("lm_head",))),
    ],
)  # fmt: skip
def test_each_flag_reaches_the_plan(flags: str, field: str, value: Any) -> None:
    assert getattr(setup(flags), field) == value


def test_a_pair_is_two_rows_beside_a_reference_that_is_another_model_only_where_all_weights_learn() -> None:
    recipe = replace(SFT_PLAN, rows_per_example=2, has_reference_model=True)
    for flags, rows, reference in (
        ("--per_device_train_batch_size 3", 6, True),
        ("--per_device_train_batch_size 3 --method lora", 6, False),
    ):
        settings = settle(flags, launch=GPU)
        settings.recipe = recipe
        found = setup_of(settings, launched(), "sdpa")
        assert (found.micro_batch_size, found.reference_model) == (rows, reference)
        settings.values["precompute_ref_log_probs"] = True
        assert not setup_of(settings, launched(), "sdpa").reference_model


@pytest.mark.parametrize(
    ("values", "rows", "reference"),
    [
        ({}, 8 * 2, "none"), ({"beta": None}, 8 * 2, "none"), ({"beta": 0.0}, 8 * 2, "none"),
        ({"beta": 0.04}, 8 * 2, "before"), ({"steps_per_generation": 3}, 8 * 3, "none"),
        ({"generation_batch_size": 40}, 40, "none"), ({"generation_batch_size": 0}, 1, "none"),
    ],
)  # fmt: skip
def test_answers_are_written_for_a_step_and_scored_beside_a_reference_where_a_penalty_asks_for_one(
    values: dict[str, Any], rows: int, reference: str
) -> None:
    settings = settle("--gradient_accumulation_steps 2", launch=GPU)
    settings.recipe = replace(SFT_PLAN, generates=True)
    settings.values.update({"max_completion_length": 192, "beta": 0.0, **values})
    found = setup_of(settings, launched(), "sdpa")
    assert found.generation is not None
    assert (found.generation.rows, found.generation.completion_length) == (rows, 192)
    assert found.sequence_length == found.generation.total_length == found.generation.prompt_length + 192
    assert (found.reference_model, found.reference_pass) == (reference == "before", reference)


@pytest.mark.parametrize("name", ["use_transformers_continuous_batching", "cast_lm_head_to_fp32", "sync_ref_model"])
def test_ways_to_reward_that_are_not_modelled_are_named(name: str) -> None:
    settings = settle("", launch=GPU)
    settings.recipe = GRPO_PLAN
    settings.values.update({"max_completion_length": 64, name: True})
    with pytest.raises(ConfigError, match="not planned") as refused:
        setup_of(settings, launched(), "sdpa")
    assert refused.value.place == f"--{name}"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, VllmSetup(0.3 * 80)), ({"vllm_gpu_memory_utilization": 0.5}, VllmSetup(40)),
        ({"vllm_enable_sleep_mode": True, "vllm_tensor_parallel_size": 2}, VllmSetup(0.3 * 80, True, 2)),
        ({"vllm_mode": "server"}, VllmSetup()), ({"use_vllm": False}, None),
    ],
)  # fmt: skip
def test_vllm_holds_a_share_of_the_card_where_it_runs_beside_the_training(
    values: dict[str, Any], expected: VllmSetup | None
) -> None:
    settings = settle("", launch=GPU)
    settings.recipe = GRPO_PLAN
    settings.values.update({"use_vllm": True, **values})
    assert setup_of(settings, launched(), "sdpa", card_bytes=80).vllm == expected


@pytest.mark.parametrize(
    ("flags", "place", "says"),
    [
        ("--method lora --load_in_8bit", "--load_in_8bit", "8-bit base"),
        ("--method lora --lora_target_modules .*_proj", "--lora_target_modules", "pattern"),
        ("--method lora --lora_target_modules q_proj v.proj", "--lora_target_modules", "pattern"),
    ],
)
def test_what_is_not_modelled_is_named(flags: str, place: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        setup(flags)
    assert refused.value.place == place


def test_rows_of_any_length_cannot_be_planned() -> None:
    settings = settle("", launch=GPU)
    settings.values["max_length"] = None
    with pytest.raises(ConfigError, match="rows can have any length") as refused:
        setup_of(settings, launched(), "sdpa")
    assert refused.value.place == "--max_length"
    assert recipe_value(settings, "no_such_flag") is None
    assert recipe_value(settings, "packing") is True, "the recipe's default"


# ── Launches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"name": "ddp"}, ParallelSetup("ddp", 8, 4)),
        ({"name": "fsdp2"}, ParallelSetup("fsdp2", 8, 4)),
        ({"name": "fsdp2", "fsdp": {"fsdp_reshard_after_forward": False}},
         ParallelSetup("fsdp2", 8, 4, reshard_after_forward=False)),
        ({"name": "fsdp1", "fsdp": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
         ParallelSetup("fsdp1", 8, 4, reshard_after_forward=False)),
        ({"name": "fsdp1", "fsdp": {"fsdp_sharding_strategy": "FULL_SHARD"}}, ParallelSetup("fsdp1", 8, 4)),
        ({"name": "fsdp2", "num_replicas": 2, "num_shards": 4}, ParallelSetup("fsdp2", 8, 4, num_replicas=2)),
        ({"name": "fsdp2", "tensor_parallel_size": 2}, ParallelSetup("fsdp2", 8, 4, tensor_parallel=2)),
        ({"name": "fsdp2", "context_parallel_size": 2, "sequence_parallel_size": 2},
         ParallelSetup("fsdp2", 8, 4, sequence_parallel=2, in_engine=True)),
        ({"name": "zero3", "offload_optimizer": "nvme", "offload_params": "cpu"},
         ParallelSetup("zero3", 8, 4, offload_optimizer="nvme", offload_params="cpu")),
    ],
)  # fmt: skip
def test_launches_in_the_planners_terms(strategy: dict, expected: ParallelSetup) -> None:
    assert parallel_of(LaunchStrategy(**strategy), 8, 4) == expected
    plain = SharedModel(ParallelLayout(dp_shard=8, fsdp=True))
    assert parallel_of(LaunchStrategy(**strategy), 8, 4, plain) == expected, "nothing is shared"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"dp_shard": 2, "tp": 2, "fsdp": True}, ParallelSetup("fsdp2", 4, 4, tensor_parallel=2)),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "fsdp": True},
         ParallelSetup("fsdp2", 8, 4, num_replicas=2, tensor_parallel=2)),
        # With one shard, the ranks are replicas; with one replica too, no gradients are reduced.
        ({"dp_replicate": 2, "tp": 2, "fsdp": True}, ParallelSetup("ddp", 4, 4, tensor_parallel=2)),
        ({"tp": 2, "fsdp": True}, ParallelSetup("single", 2, 4, tensor_parallel=2)),
        ({"sp": 2, "fsdp": True}, ParallelSetup("fsdp2", 2, 4, sequence_parallel=2)),
        ({"sp": 2}, ParallelSetup("ddp", 2, 4, sequence_parallel=2)),
        ({"pp": 2, "dp_replicate": 2}, ParallelSetup(
            "ddp", 4, 4, pipeline_parallel=2, pipeline_schedule="interleaved", stages_per_rank=3)),
    ],
)  # fmt: skip
def test_models_that_ranks_share(layout: dict, expected: ParallelSetup) -> None:
    shared = SharedModel(ParallelLayout(**layout), "interleaved", 3)
    found = parallel_of(LaunchStrategy("fsdp2"), 99, 4, shared)
    assert found.pipeline_schedule == "interleaved"
    assert (found.strategy, found.num_gpus, found.gpus_per_node) == (
        expected.strategy, expected.num_gpus, expected.gpus_per_node,
    )  # fmt: skip
    assert (found.degrees, found.num_replicas) == (expected.degrees, expected.num_replicas)
    assert found.stages_per_rank == expected.stages_per_rank
    assert found.reshard_after_forward
    kept = LaunchStrategy("fsdp2", fsdp={"fsdp_reshard_after_forward": "no"})
    assert not parallel_of(kept, 99, 4, shared).reshard_after_forward


# ── Cards ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with 96 GiB of host memory and four GPUs of 40 GB."""
    local = Machine(find_gpu("A100-40GB"), num_gpus=4)
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 96 * GIB)
    monkeypatch.setattr(hardware, "detect_local", lambda: local)


@pytest.mark.usefixtures("host")
def test_what_a_run_is_planned_for() -> None:
    """The named GPU, else the one in this machine, else each process's share of the host's memory."""
    for flags, facts, name, memory, host_bytes, is_cuda, is_here in (
        ("--plan_gpu H100", GPU, "H100 SXM", None, None, True, False),
        ("--plan_gpu H100", LaunchFacts(), "H100 SXM", None, None, True, False),
        ("", GPU, "A100 40GB", None, 96 * GIB, True, True),
        ("", LaunchFacts(), "this machine's memory", 48 * GIB, None, False, True),
    ):
        target = target_of(settle(flags, launch=facts), launched(4, 2, name="ddp"))
        machine = target.machine
        assert machine.gpu.name.startswith(name)
        assert memory is None or (machine.gpu.memory_bytes, machine.gpu.usable_bytes) == (memory, memory)
        assert (machine.num_gpus, machine.gpus_per_node, machine.host_memory_bytes) == (4, 2, host_bytes)
        assert (target.is_cuda, target.is_here) == (is_cuda, is_here)


@pytest.mark.usefixtures("host")
def test_a_cap_lowers_the_cards_memory_and_never_raises_it() -> None:
    card = find_gpu("H100")
    for cap, expected in (("24GiB", 24 * GIB), ("500GiB", card.memory_bytes)):
        gpu = target_of(settle(f"--plan_gpu H100 --device_memory {cap}", launch=GPU), launched()).machine.gpu
        assert gpu.memory_bytes == expected
        assert gpu.usable_bytes == min(expected, card.usable_bytes)
        assert gpu.name.endswith(", capped") == (cap == "24GiB")
    with pytest.raises(ConfigError) as refused:
        target_of(settle("--plan_gpu H100 --device_memory much", launch=GPU), launched())
    assert refused.value.place == "--device_memory"
    with pytest.raises(ConfigError) as refused:
        target_of(settle("--plan_gpu H1000", launch=GPU), launched())
    assert refused.value.place == "--plan_gpu"
