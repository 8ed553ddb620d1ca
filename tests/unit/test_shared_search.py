"""The search with shared models: only if nothing simpler fits, at the lowest degrees, and at what cost."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu, network_bytes_per_second
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.cost.rank_share import _rank_shares, micro_batches_in_flight, rank_shares, stage_imbalance
from accel_scale.planning.cost.timing import predict_time
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.search.model_parallel import (
    NO_SEQUENCE_PARALLEL_TYPES,
    Degrees,
    divides_tensors,
    families,
    sharing_conflict,
)
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, SFT_PLAN
from accel_scale.planning.search.requests import build_request
from accel_scale.planning.search.search import Request, search
from accel_scale.planning.search.wish import Wish
from accel_scale.planning.tape.activations import _walk

GIB = 2**30


def h100s(num_gpus: int, gpu: str = "H100-SXM") -> Machine:
    network = network_bytes_per_second("infiniband-8xndr") if num_gpus > 8 else None
    return Machine(
        find_gpu(gpu), num_gpus=num_gpus, gpus_per_node=min(8, num_gpus), internode_bytes_per_second=network
    )


def asked(model: str, num_gpus: int, gpu: str = "H100-SXM", **kwargs) -> Request:
    return Request(load_model_facts(model), h100s(num_gpus, gpu), recipe=PRETRAIN_PLAN, **kwargs)


def test_nothing_is_shared_while_data_parallelism_fits():
    plan = search(asked("Llama-3.2-1B", 8))
    assert plan.candidates
    assert all(candidate.setup.parallel.model_parallel == 1 for candidate in plan.candidates)


@pytest.mark.slow
def test_the_fine_tuning_recipe_shares_long_rows_and_nothing_else():
    request = replace(asked("Llama-3.1-8B", 8, global_batch_size=8, sequence_length=131072), recipe=SFT_PLAN)
    plan = search(request)
    assert plan.best.setup.parallel.sequence_parallel > 1
    assert all(c.setup.parallel.tensor_parallel * c.setup.parallel.pipeline_parallel == 1 for c in plan.candidates)
    # The same for 4-bit weights, which stay as they are: activations are exchanged.
    assert search(replace(request, methods=("qlora",))).best.setup.parallel.sequence_parallel > 1
    # With short rows no degree of it helps, and nothing else is shared.
    too_large = replace(request, model=load_model_facts("Llama-3.1-405B"), sequence_length=2048)
    host = replace(request.machine, host_memory_bytes=2**40)  # offloaded to, one and a half TiB would do
    assert search(replace(too_large, machine=host)).best is None
    assert search(replace(too_large, recipe=PRETRAIN_PLAN, machine=h100s(512), global_batch_size=512)).best is not None


def test_a_row_that_does_not_fit_is_shared():
    request = asked("Llama-3.1-8B", 8, global_batch_size=8, sequence_length=131072)
    plan = search(request)
    best = plan.best.setup.parallel
    assert best.sequence_parallel > 1
    assert best.tensor_parallel * best.sequence_parallel <= 8
    reasons = {rejection.label: rejection.reason for rejection in plan.rejections}
    assert "activations and loss" in reasons["FSDP2"]
    # The lowest degree of its kind: the next lower one is rejected, with a reason.
    alone = [c.setup.parallel for c in plan.candidates if c.setup.parallel.degrees[:2] == (1, 1)]
    assert alone
    lower = f"FSDP2 × SP{alone[0].sequence_parallel // 2}"
    assert alone[0].sequence_parallel == 2 or "GiB >" in reasons[lower]
    for candidate in plan.candidates:
        assert candidate.setup.global_batch_size == 8
        assert candidate.memory.high_bytes <= request.machine.gpu.memory_bytes
        assert sharing_conflict(candidate.setup, request.model) is None


def test_a_batch_too_small_for_data_parallelism_alone_is_no_error():
    plan = search(asked("Llama-3.1-8B", 16, global_batch_size=8))
    assert "8 sequences do not divide among 16 ranks" in plan.rejections[0].reason
    assert plan.best is not None
    assert plan.best.setup.parallel.model_parallel >= 2
    with pytest.raises(ConfigError, match="use a multiple of 16"):
        search(replace(asked("Llama-3.1-8B", 16, global_batch_size=8), recipe=SFT_PLAN))


def test_70b_on_4_by_4_by_4():
    """Pipeline stages × shards × tensor-parallel ranks on 64 GPUs, with the numbers by hand."""
    plan = search(asked("Llama-3.1-70B", 64, global_batch_size=256, sequence_length=4096, degrees=Degrees(4, 4)))
    best = plan.best
    parallel = best.setup.parallel
    assert (parallel.strategy, *parallel.degrees, parallel.data_parallel) == ("fsdp2", 4, 4, 1, 4)
    assert best.choice.label == "FSDP2 × TP4 × PP4"
    states = best.memory.states
    # 70.6e9 parameters × 12 bytes (weights and moments) ÷ 64, at most 7 % more on the fullest stage.
    assert 1 <= (states.weight_bytes + states.optimizer_bytes) / (70.55e9 * 12 / 64) < 1.07
    # Whole fp32 gradients of a stage until its last micro-batch: 70.6e9 × 4 ÷ 16.
    terms = dict(best.memory.peak_phase.terms)
    assert terms["unreduced gradients"] == pytest.approx(70.55e9 * 4 / 16, rel=0.07)
    m = best.setup.accumulation
    time = best.time
    waiting = time.bubble_seconds / (time.matmul_seconds + time.memory_seconds + time.launch_wait_seconds)
    assert waiting == pytest.approx(stage_imbalance(plan.request.model, best.setup) * (1 + 3 / m) - 1, rel=1e-6)
    assert plan.best.memory.host_bytes == pytest.approx(
        70.55e9 * 4, rel=0.01
    )  # the whole model on the rank that builds it


@pytest.mark.slow
def test_405b_on_16_nodes_takes_seconds():
    _walk.cache_clear()
    _rank_shares.cache_clear()
    before = time.process_time()
    plan = search(asked("Llama-3.1-405B", 128, global_batch_size=256, sequence_length=4096))
    assert time.process_time() - before < 4.0
    assert plan.num_considered > 200
    # Gradients of several micro-batches would wait whole, and a pipeline keeps buffers for all of them.
    assert plan.best.setup.parallel.offload_params == "cpu"
    assert all(rejection.reason for rejection in plan.rejections)
    best = search(asked("Llama-3.1-405B", 128, global_batch_size=16, sequence_length=4096)).best
    assert best.choice.label == "FSDP2 × TP8"
    states = best.memory.states
    assert states.weight_bytes + states.optimizer_bytes == pytest.approx(405.9e9 * 12 / 128, rel=0.01)


def test_degrees_that_were_asked_for_are_the_only_ones():
    plan = search(asked("Llama-3.2-1B", 8, degrees=Degrees(tensor=2)))
    assert {candidate.setup.parallel.degrees for candidate in plan.candidates} == {(2, 1, 1)}
    assert {"DDP × TP2", "FSDP2 × TP2"} <= {candidate.choice.label for candidate in plan.candidates}
    plan = search(asked("Llama-3.2-1B", 8, degrees=Degrees(tensor=16 // 2, sequence=1)))
    assert plan.best.choice.label == "TP8"


def test_tensor_parallelism_stays_inside_of_a_server():
    model = load_model_facts("Llama-3.1-405B")
    found = [c for family in families(model, 128, 8, Degrees(), long_rows=True) for level in family for c in level]
    assert max(c.parallel.tensor_parallel * c.parallel.sequence_parallel for c in found) == 8
    assert max(c.parallel.pipeline_parallel for c in found) == 64
    setup = TrainingSetup(parallel=ParallelSetup("fsdp2", 128, 8, tensor_parallel=16))
    assert "do not fit into a server of 8" in sharing_conflict(setup, model)


@pytest.mark.parametrize(
    ("changes", "parallel", "reason"),
    [
        ({}, {"tensor_parallel": 3, "num_gpus": 3}, "32 attention heads cannot be divided by 3"),
        ({"method": "lora"}, {"tensor_parallel": 2}, "adapters"),
        ({"precision": "fp16"}, {"pipeline_parallel": 2, "num_gpus": 2}, "fp16"),
        ({"accumulation": 1}, {"pipeline_parallel": 2}, "needs as many micro-batches, and a step has 1"),
        ({"accumulation": 6}, {"pipeline_parallel": 4, "num_gpus": 4, "pipeline_schedule": "interleaved"}, None),
        ({"accumulation": 5}, {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}, "needs a multiple of 2"),
        ({"accumulation": 64}, {"pipeline_parallel": 32, "num_gpus": 32}, "16 layers"),
        ({"sequence_length": 1001}, {"sequence_parallel": 2}, "1001 tokens"),
        ({"sequence_length": 1024}, {"sequence_parallel": 64, "num_gpus": 64}, "32 attention heads with 8 key heads"),
        ({"optimizer": "adamw_torch_8bit"}, {"tensor_parallel": 2}, "adamw_torch_8bit"),
    ],
)
def test_what_cannot_be_shared_says_why(changes, parallel, reason):
    setup = TrainingSetup(**changes, parallel=ParallelSetup(**{"num_gpus": 2, "gpus_per_node": 64, **parallel}))
    found = sharing_conflict(setup, load_model_facts("Llama-3.2-1B"))
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_types_are_those_that_the_recipe_can_divide():
    from activation_models import FIELDS
    from transformers import CONFIG_MAPPING

    from accel_scale.parallel.sequence_checks import check_sequence_parallel
    from accel_scale.parallel.tensor import check_tensor_parallel

    sizes = {"num_attention_heads": 8, "n_head": 8, "hidden_size": 128, "n_embd": 128, "num_key_value_heads": 4}
    for kind, fields in FIELDS.items():
        usual = {name: sizes.get(name, value) for name, value in fields.items() if name != "head_dim"}
        config = CONFIG_MAPPING[kind](**usual)
        assert divides_tensors(kind) == _passes(check_tensor_parallel, config, 2, method="full"), kind
        divides = _passes(check_sequence_parallel, config, 2, 128, "sdpa_packed")
        assert (kind not in NO_SEQUENCE_PARALLEL_TYPES) == divides, kind


def _passes(check, *args, **kwargs) -> bool:
    try:
        check(*args, **kwargs)
    except ConfigError:
        return False
    return True


def test_stages_hold_all_parameters_once():
    for name in ("Llama-3.1-8B", "Llama-3.2-1B", "gemma-2-9b"):
        model = load_model_facts(name)
        setup = TrainingSetup(
            accumulation=16, sequence_length=4096, parallel=ParallelSetup("single", 4, pipeline_parallel=4)
        )
        shares = rank_shares(model, setup)
        first, last = shares[0].facts, shares[-1].facts
        assert first.has_embedding
        assert not first.has_head
        assert last.has_head
        assert not last.has_embedding
        assert [share.waiting for share in shares[:1] + shares[-1:]] == [3, 0]
        two = rank_shares(model, replace(setup, parallel=replace(setup.parallel, num_gpus=2, pipeline_parallel=2)))
        copies = model.embedding_params if model.tied_embeddings else 0
        assert sum(share.facts.num_params for share in two) == model.num_params + copies


def test_micro_batches_in_flight_by_schedule():
    def counts(schedule: str, stages: int = 1, micro_batches: int = 16) -> list[float]:
        parallel = ParallelSetup(num_gpus=4, pipeline_parallel=4, pipeline_schedule=schedule, stages_per_rank=stages)
        return [micro_batches_in_flight(parallel, rank, micro_batches) for rank in range(4)]

    assert counts("1f1b") == [4, 3, 2, 1]
    assert counts("1f1b", micro_batches=2) == [2, 2, 2, 1]
    assert counts("gpipe") == [16] * 4
    assert counts("interleaved", 2) == [5.5, 4.5, 3.5, 2.5]
    assert counts("zero_bubble", 2) == [4, 4.5, 5, 5.5]


def test_the_fullest_stage_decides():
    """A vocabulary of 128,000 makes the last stage the fullest; many micro-batches in flight make it the first."""
    model = load_model_facts("Llama-3.2-1B")
    parallel = ParallelSetup("single", 4, pipeline_parallel=4)
    kept = TrainingSetup(
        checkpointing="none", accumulation=16, sequence_length=4096, micro_batch_size=2, parallel=parallel
    )
    lean = replace(kept, checkpointing="full", sequence_length=128, micro_batch_size=1)
    assert predict_memory(model, lean).states.weight_bytes > rank_shares(model, lean)[1].facts.num_params * 4
    in_flight = predict_memory(model, kept)
    assert in_flight.step.saved_bytes > 3 * predict_memory(model, replace(kept, accumulation=1)).step.saved_bytes


def test_a_bubble_costs_time():
    model, machine = load_model_facts("Llama-3.1-8B"), h100s(8)
    base = TrainingSetup(
        accumulation=8, sequence_length=4096, parallel=ParallelSetup("single", 8, pipeline_parallel=8)
    )
    few = predict_time(model, base, machine)
    many = predict_time(model, replace(base, accumulation=64), machine)
    assert many.step_seconds < 6.5 * few.step_seconds
    zero_bubble = replace(base, parallel=replace(base.parallel, pipeline_schedule="zero_bubble"))
    gapless = predict_time(model, zero_bubble, machine)
    assert gapless.bubble_seconds < few.bubble_seconds


@pytest.mark.parametrize(
    ("wish", "place", "message"),
    [
        ({"tp_size": "2"}, "--tp_size", "recipes/sft.py does not share its model"),
        ({"recipe": "pretrain", "tp_size": "3"}, "--tp_size", "8 GPUs cannot be divided by --tp_size 3"),
        ({"recipe": "pretrain", "pp_schedule": "gpipe"}, "--pp_schedule", "does nothing without a pipeline"),
        ({"recipe": "pretrain", "method": "qlora"}, "--method", "does not train by qlora"),
        ({"recipe": "pretran"}, "--recipe", "did you mean pretrain"),
        ({"strategy": ("FSDP2 x TP2",)}, "--strategy", "add --recipe pretrain"),
        ({"lora_r": "64"}, "--lora_r", "does nothing under --method full"),
        ({"lora_dropout": "0.2"}, "--lora_dropout", "does nothing under --method full"),
        ({"use_dora": True}, "--use_dora", "does nothing under --method full"),
    ],
)
def test_what_is_asked_for_is_checked(wish, place, message):
    with pytest.raises(ConfigError, match=message) as error:
        build_request(Wish("Llama-3.1-8B", gpu="H100", num_gpus="8", **wish))
    assert error.value.place == place


def test_strategies_by_name_and_degrees_reach_the_request():
    request = build_request(
        Wish("Llama-3.1-8B", gpu="H100", num_gpus="8", recipe=PRETRAIN_PLAN, strategy=("fsdp2 x tp2",))
    )
    assert request.strategies == ("FSDP2 × TP2",)
    wish = Wish("Llama-3.1-8B", gpu="H100", num_gpus="8", recipe=PRETRAIN_PLAN, pp_size="4", pp_schedule="zero_bubble")
    plan = search(build_request(wish))
    assert plan.best.setup.parallel.pipeline_schedule == "zero_bubble"
    assert plan.best.setup.parallel.stages_per_rank == 2
