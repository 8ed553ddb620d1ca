"""The search finds what fits and misses nothing, puts the simplest of equals first, and plans 70B within a second."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.facts.names import METHODS
from accel_scale.facts.zero_buffers import TUNED_BUFFERS
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.cost.strategies import choices, conflict
from accel_scale.planning.cost.timing import predict_time
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.parameters import _groups
from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup
from accel_scale.planning.search.changes import cheapest_changes
from accel_scale.planning.search.launch_writing import launch_yaml
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, SFT_PLAN
from accel_scale.planning.search.search import Candidate, Request, search
from accel_scale.planning.search.writing import RecipeChoices, plan_files
from accel_scale.planning.tape.activations import _walk
from accel_scale.planning.traced.steps import _on_tape

GIB = 2**30


def machine(gpu: str, num_gpus: int = 1, **kwargs) -> Machine:
    return Machine(find_gpu(gpu), num_gpus=num_gpus, gpus_per_node=min(8, num_gpus), **kwargs)


def request(model: str, gpu: str, num_gpus: int = 1, **kwargs) -> Request:
    return Request(load_model_facts(model), machine(gpu, num_gpus), **kwargs)


def fits(asked: Request, setup: TrainingSetup) -> bool:
    return predict_memory(asked.model, setup).high_bytes <= asked.machine.gpu.memory_bytes


@pytest.mark.slow
def test_70b_on_8_cards_takes_less_than_a_second():
    asked = request("Llama-3.1-70B", "H100-SXM", 8, methods=METHODS)
    seconds = []
    for _ in range(3):
        for kept in (_walk, _on_tape, _groups):
            kept.cache_clear()
        before = time.process_time()
        plan = search(asked)
        seconds.append(time.process_time() - before)
    assert plan.num_considered > 500
    assert min(seconds) < 1.0


@pytest.mark.slow
def test_every_branch_is_answered():
    plan = search(request("Llama-3.1-8B", "A100-80GB-SXM", 4, methods=METHODS))
    answered = [(c.choice.label, c.setup.method) for c in plan.candidates]
    answered += [(r.label, r.method) for r in plan.rejections]
    labels = [choice.label for choice in choices(4, 4) if choice.is_open]
    assert sorted(answered) == sorted((label, method) for label in labels for method in METHODS)
    assert all(rejection.reason for rejection in plan.rejections)


def test_tuned_buffers_are_planned_where_their_launch_file_is_named():
    asked = request(
        "Llama-3.1-8B", "H100", 8, sequence_length=8192, fixed={"checkpointing": "full", "micro_batch_size": 4}
    )
    files = ("ZeRO-2", "ZeRO-2 tuned", "ZeRO-3", "ZeRO-3 tuned")
    found = {c.choice.label: c for c in search(replace(asked, strategies=files)).candidates}
    assert set(found) == set(files)
    two, tuned_two, three, tuned_three = (found[name].memory for name in files)
    # Backward pass: three buffers of 0.2 GB instead of two of 1 GB; then 0.4 GB instead of 2, and 0.1 GB more ahead.
    by_phase = [{phase.name: phase.total_bytes for phase in memory.phases} for memory in (two, tuned_two)]
    assert by_phase[0]["backward, last layer"] - by_phase[1]["backward, last layer"] == pytest.approx(2e9 - 6e8)
    assert three.peak_bytes - tuned_three.peak_bytes > 1e9
    assert found["ZeRO-3 tuned"].setup.parallel.zero == TUNED_BUFFERS


def test_what_is_found_fits_keeps_the_batch_and_can_run():
    asked = request("Qwen/Qwen2.5-7B", "L40S", 8, methods=METHODS, global_batch_size=96, sequence_length=4096)
    plan = search(asked)
    assert len(plan.candidates) > 10
    for candidate in plan.candidates:
        assert candidate.setup.global_batch_size == 96
        assert candidate.setup.sequence_length == 4096
        assert candidate.memory.high_bytes <= asked.machine.gpu.memory_bytes
        limit = asked.machine.gpu.memory_bytes
        assert candidate.memory == predict_memory(asked.model, candidate.setup, limit_bytes=limit)
        assert conflict(candidate.setup) is None


def test_what_is_rejected_does_not_fit_with_any_setting():
    asked = request("Llama-3.2-3B", "24GiB", 2)
    plan = search(asked)
    assert {r.label for r in plan.rejections} >= {"DDP"}
    parallel = next(choice.parallel for choice in choices(2, 2) if choice.label == "DDP")
    for policy in ("none", "selective", "full"):
        for optimizer in ("adamw_torch_fused", "adamw_torch_8bit", "paged_adamw_8bit"):
            for size in (1, 2, 4, 8, 16, 32):
                setup = TrainingSetup(
                    checkpointing=policy, optimizer=optimizer, micro_batch_size=size, accumulation=32 // size,
                    sequence_length=2048, parallel=parallel,
                )  # fmt: skip
                assert not fits(asked, setup)


def test_fastest_first_and_the_simplest_of_those_that_are_about_as_fast():
    plan = search(request("Llama-3.1-8B", "A100-80GB-SXM", 8, methods=("full", "lora")))
    times = [candidate.time.step_seconds for candidate in plan.candidates if candidate.time]
    for position, candidate in enumerate(plan.candidates[: len(times)]):
        fastest = min(times[position:])
        assert candidate.time.step_seconds <= fastest * 1.03
        for other in plan.candidates[position + 1 : len(times)]:
            if other.time.step_seconds <= fastest * 1.03:
                assert candidate.simplicity <= other.simplicity


def test_no_setting_of_the_best_strategy_is_faster():
    """Compared with brute force over all settings of one strategy, none left out."""
    asked = request("Llama-3.2-1B", "4090", strategies=("one GPU",), global_batch_size=16)
    best = search(asked).best
    everything = []
    for policy in ("none", "selective", "full"):
        for optimizer in ("adamw_torch_fused", "adamw_torch_8bit", "paged_adamw_8bit"):
            for size in (1, 2, 4, 8, 16):
                setup = replace(
                    best.setup, checkpointing=policy, optimizer=optimizer, micro_batch_size=size,
                    accumulation=16 // size,
                )  # fmt: skip
                if fits(asked, setup):
                    everything.append(predict_time(asked.model, setup, asked.machine).step_seconds)
    assert everything
    assert min(everything) <= best.time.step_seconds <= min(everything) * 1.03


def test_the_whole_share_in_one_micro_batch_is_tried_where_smaller_ones_do_not_fit():
    """Without accumulation no gradients wait during the forward pass, so more rows may need less memory."""
    asked = request("Llama-3.2-1B", "4090", global_batch_size=2, sequence_length=128)
    fixed = {"checkpointing": "full", "optimizer": "adamw_torch_fused"}
    one, two = (
        TrainingSetup(**fixed, micro_batch_size=size, accumulation=2 // size, sequence_length=128) for size in (1, 2)
    )
    low, high = (predict_memory(asked.model, setup).high_bytes for setup in (two, one))
    if low >= high:
        pytest.skip("the larger micro-batch needs more on this model")
    between = replace(asked.machine, gpu=replace(asked.machine.gpu, memory_bytes=int((low + high) / 2)))
    plan = search(replace(asked, machine=between, fixed=fixed, strategies=("one GPU",)))
    assert plan.best.setup.micro_batch_size == 2


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    small=st.integers(8, 40),
    more=st.integers(1, 60),
    num_gpus=st.sampled_from([1, 2, 4, 8]),
    method=st.sampled_from(METHODS),
)
def test_a_larger_card_never_fits_less(small, more, num_gpus, method):
    def labels(size: int) -> set[str]:
        asked = request("Llama-3.2-3B", f"{size}GiB", num_gpus, methods=(method,), global_batch_size=16)
        return {c.choice.label for c in search(asked).candidates}

    assert labels(small) <= labels(small + more)


def test_an_unknown_speed_prefers_the_simplest_and_the_fewest_micro_batches():
    plan = search(request("SmolLM2-360M", "80GiB", 2))
    assert all(candidate.time is None for candidate in plan.candidates)
    assert plan.best.choice.label == "DDP"
    assert plan.best.setup.checkpointing == "none"
    efforts = [candidate.choice.effort for candidate in plan.candidates]
    assert efforts == sorted(efforts)


def test_on_one_gpu_8_bit_states_come_before_offload_whose_buffers_are_larger_than_the_states():
    """On 16 GB, two rows of about 1,000 tokens need 8-bit states; DeepSpeed's buffer of 1 GB is larger than the
    states that it offloads, so that it must recompute more."""
    lora = {"precision": "fp16", "lora": LoraSetup(dropout=0.05)}
    for length in range(960, 1120, 8):
        asked = request("mistralai/Mistral-7B-v0.1", "V100-16GB", methods=("qlora",), sequence_length=length)
        found = search(replace(asked, fixed=lora)).candidates
        if found[0].setup.optimizer != "adamw_torch_fused":
            break
    assert (found[0].choice.label, found[0].setup.optimizer) == ("one GPU", "adamw_torch_8bit")
    offloaded = next(c for c in found if c.choice.label == "ZeRO-2 + CPU offload")
    assert (found[0].setup.micro_batch_size, found[0].setup.checkpointing) == (2, "selective")
    assert offloaded.setup.checkpointing == "full"
    assert offloaded.time.step_seconds > found[0].time.step_seconds
    fused = search(replace(asked, fixed={**lora, "optimizer": "adamw_torch_fused"})).candidates
    alone = next(c for c in fused if c.choice.label == "one GPU").setup
    assert (alone.micro_batch_size, alone.checkpointing) != (2, "selective")


def test_on_one_gpu_offload_comes_first_where_only_it_has_room_for_a_faster_micro_batch():
    fixed = {"precision": "bf16", "lora": LoraSetup(dropout=0.05), "checkpointing": "selective"}
    for length in range(640, 1024, 16):
        asked = request("Llama-3.1-8B", "RTX 4080", methods=("qlora",), sequence_length=length)
        found = search(replace(asked, fixed=fixed)).candidates
        if found[0].choice.label != "one GPU":
            break
    assert (found[0].choice.label, found[1].choice.label) == ("ZeRO-2 + CPU offload", "one GPU")
    assert found[0].setup.micro_batch_size == 2 * found[1].setup.micro_batch_size
    assert found[0].time.step_seconds * 1.03 < found[1].time.step_seconds


def test_host_memory_rules_out_offload():
    asked = request("Llama-3.1-8B", "4090", strategies=("ZeRO-3 + CPU offload",))
    assert search(asked).best is not None
    small = replace(asked, machine=replace(asked.machine, host_memory_bytes=64 * GIB))
    plan = search(small)
    assert plan.best is None
    assert "host memory > 64 GiB" in plan.rejections[0].reason


def test_fixed_settings_stay():
    fixed = {
        "checkpointing": "every_2",
        "optimizer": "adamw_bnb_8bit",
        "micro_batch_size": 2,
        "precision": "bf16_true",
    }
    plan = search(request("Llama-3.2-1B", "A100-80GB-SXM", 2, fixed=fixed))
    assert plan.best.choice.label == "DDP"
    for candidate in plan.candidates:
        setup = candidate.setup
        values = (setup.checkpointing, setup.optimizer, setup.micro_batch_size, setup.precision)
        assert values == ("every_2", "adamw_bnb_8bit", 2, "bf16_true")
    reasons = {rejection.label: rejection.reason for rejection in plan.rejections}
    assert reasons["FSDP2"] == "adamw_bnb_8bit does not work there: it cannot step the sharded tensors of FSDP2."
    assert reasons["ZeRO-3"] == "DeepSpeed does not run bf16_true."


def test_nearest_miss_and_changes_that_fit():
    asked = request("Llama-3.1-8B", "4090", strategies=("one GPU",))
    plan = search(asked)
    assert plan.best is None
    miss = plan.nearest_miss
    assert miss.memory.high_bytes > asked.machine.gpu.memory_bytes
    changes = cheapest_changes(asked, miss.setup)
    assert 1 <= len(changes) <= 3
    times = [predict_time(asked.model, setup, asked.machine).step_seconds for _, setup in changes]
    assert times == sorted(times)
    for _, setup in changes:
        assert fits(asked, setup)
        assert conflict(setup) is None


def test_another_method_may_come_with_another_policy_if_that_is_open():
    """LoRA on 8B fits a 4090 only if its layers are recomputed."""
    asked = request("Llama-3.1-8B", "4090", strategies=("one GPU",))
    miss = replace(search(asked).nearest_miss.setup, checkpointing="none")
    fixed = dict(cheapest_changes(asked, miss))
    free = dict(cheapest_changes(asked, miss, policy_is_open=True))
    assert "--method" not in fixed or fixed["--method"].method == "qlora"
    assert (free["--method"].method, free["--method"].checkpointing) == ("lora", "full")
    assert fits(asked, free["--method"])


def test_choices_grow_with_the_machine():
    alone = [choice.label for choice in choices(1, 8)]
    assert alone == ["one GPU", "ZeRO-2 + CPU offload", "ZeRO-3 + CPU offload", "ZeRO-Infinity"]
    assert "FSDP2 hybrid" not in [choice.label for choice in choices(8, 8)]
    hybrid = next(choice.parallel for choice in choices(16, 8) if choice.label == "FSDP2 hybrid")
    assert (hybrid.num_replicas, hybrid.num_shards) == (2, 8)


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ({"optimizer": "paged_adamw_8bit", "strategy": "fsdp2"}, "FSDP2"),
        ({"optimizer": "adamw_torch_8bit", "strategy": "zero2"}, "ZeRO flattens"),
        ({"optimizer": "adamw_torch_8bit", "strategy": "fsdp2"}, None),
        ({"optimizer": "deepspeed_cpu_adam", "strategy": "ddp"}, "host memory"),
        ({"optimizer": "adamw_cpu_offload", "strategy": "ddp"}, "one process"),
        ({"checkpointing": "selective", "method": "lora", "strategy": "zero3"}, "recompute"),
        ({"checkpointing": "selective", "method": "qlora", "strategy": "zero3"}, "recompute"),
        ({"checkpointing": "offload", "method": "qlora", "strategy": "zero3"}, None),
        ({"checkpointing": "full", "method": "lora", "strategy": "zero3"}, None),
        ({"checkpointing": "selective", "strategy": "zero3"}, None),
        ({"checkpointing": "segments_2", "method": "lora", "strategy": "zero3"}, "one by one"),
        ({"checkpointing": "segments", "strategy": "fsdp2"}, "one by one"),
        ({"checkpointing": "segments", "strategy": "zero2"}, None),
        ({"precision": "fp8", "strategy": "zero1"}, "fp8"),
        ({"sync_each_batch": True, "accumulation": 2, "strategy": "ddp"}, "FSDP2 only"),
        ({"sync_each_batch": True, "accumulation": 2, "strategy": "fsdp2"}, None),
    ],
)
def test_conflicts(setup, reason):
    strategy = setup.pop("strategy")
    found = conflict(TrainingSetup(**setup, parallel=ParallelSetup(strategy, 2)))
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_gradients_of_every_micro_batch_are_reduced_where_whole_ones_do_not_fit(tmp_path):
    asked = request(
        "Qwen/Qwen3-32B", "H100-SXM", 8, global_batch_size=256, sequence_length=4096, strategies=("FSDP2",)
    )
    best = search(asked).best
    assert best.setup.sync_each_batch
    assert best.setup.accumulation > 1
    (rejected,) = search(replace(asked, fixed={"sync_each_batch": False})).rejections
    assert "gradients 61" in rejected.reason  # GiB: 32.8 B gradients of two bytes each
    without = replace(best.setup, sync_each_batch=False)
    whole = predict_memory(asked.model, without).device_bytes - best.memory.device_bytes
    assert whole == pytest.approx((2 - 4 / 8) * asked.model.num_params, rel=0.02)  # an eighth of them waits, in fp32
    # If they fit, sending them once is faster.
    small = search(request("Llama-3.2-1B", "H100-SXM", 8, global_batch_size=512, strategies=("FSDP2",))).best
    assert not small.setup.sync_each_batch
    for recipe in (SFT_PLAN, PRETRAIN_PLAN):
        written = plan_files(replace(asked, recipe=recipe), best, RecipeChoices("Qwen/Qwen3-32B"), tmp_path)
        assert "sync_each_batch: true" in written.files[tmp_path / "recipe.yaml"]
    plain = plan_files(asked, replace(best, setup=without), RecipeChoices("Qwen/Qwen3-32B"), tmp_path)
    assert "sync_each_batch" not in plain.files[tmp_path / "recipe.yaml"]


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="use a multiple of 6") as error:
        search(request("Llama-3.2-1B", "4090", 6))
    assert error.value.place == "--global_batch_size"


def test_simplicity_orders_strategy_before_checkpointing_before_optimizer():
    plan = search(request("Llama-3.2-1B", "A100-80GB-SXM", 2))
    best: Candidate = plan.best
    slower = replace(best, setup=replace(best.setup, checkpointing="full"))
    leaner = replace(best, setup=replace(best.setup, optimizer="paged_adamw_8bit"))
    assert best.simplicity <= leaner.simplicity < slower.simplicity


def test_quantised_states_under_fsdp2_are_written_with_sharded_checkpoints(tmp_path):
    asked = request("Qwen/Qwen2.5-14B", "H100-SXM", 8)
    found = search(replace(asked, fixed={"optimizer": "adamw_torch_8bit"}, strategies=("FSDP2",)))
    assert found.best.setup.optimizer == "adamw_torch_8bit"
    written = launch_yaml(found.best, "accelerate launch", tmp_path)
    assert "  fsdp_state_dict_type: SHARDED_STATE_DICT\n" in written
    usual = replace(found.best, setup=replace(found.best.setup, optimizer="adamw_torch_fused"))
    assert "  fsdp_state_dict_type: FULL_STATE_DICT\n" in launch_yaml(usual, "accelerate launch", tmp_path)
