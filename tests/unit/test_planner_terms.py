"""Planner terms checked by hand: what a rank holds with offloading, and what it sends, waits for and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.facts.optimizer_specs import OPTIMIZERS as OPTIMIZER_FACTS
from accel_scale.facts.optimizer_specs import modelled_optimizer as optimizer_facts
from accel_scale.facts.zero_buffers import zero_buffers
from accel_scale.planning.cost.communication import collective_seconds, gathered_weight_bytes, step_collectives
from accel_scale.planning.cost.efficiency import EFFICIENCY
from accel_scale.planning.cost.flops import trained_params
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.cost.overheads import gpu_overhead
from accel_scale.planning.cost.sharding import NF4_BYTES, NF4_DOUBLE_BYTES, frozen_layer_bytes, frozen_weight_bytes
from accel_scale.planning.cost.sharding import state_bytes as state_bytes_of
from accel_scale.planning.cost.timing import optimizer_seconds, optimizer_traffic_bytes, predict_time
from accel_scale.planning.cost.transfers import Transfers, transfers
from accel_scale.planning.laws.scaling_laws import LAWS, compute_for_loss, plan_scaling
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.parameters import parameter_groups
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup

LLAMA = load_model_facts("meta-llama/Llama-3.2-1B", allow_download=False)
N = LLAMA.num_params
A100 = Machine(find_gpu("A100-80GB"), num_gpus=8)


def sharing(strategy: str = "single", gpus: int = 1, **parallel: object) -> TrainingSetup:
    return TrainingSetup(parallel=ParallelSetup(strategy, gpus, **parallel))  # type: ignore[arg-type]


def states(strategy: str, gpus: int = 8, **parallel: object):
    return state_bytes_of(LLAMA, sharing(strategy, gpus, **parallel))


# ── Where states live ────────────────────────────────────────────────────────────────────────────────────────────────


def test_deepspeeds_offloaded_optimizer_pins_masters_gradients_and_states() -> None:
    """On the host: 4 B of masters, 4 B of gradients and 8 B of Adam's moments for each parameter of a rank."""
    kept = states("zero2", 1, offload_optimizer="cpu")
    assert kept.host_bytes == 16 * N
    assert kept.weight_bytes == 2 * N
    assert (kept.master_bytes, kept.gradient_bytes, kept.optimizer_bytes, kept.update_bytes) == (0, 0, 0, 0)
    assert states("zero1", 1, offload_optimizer="cpu").gradient_bytes == 2 * N
    # With NVMe, three buffers of 12 B for each parameter of a sub-group of a billion.
    assert states("zero3", 1, offload_optimizer="nvme").host_bytes == 36e9
    assert states("zero3", 4, offload_optimizer="nvme").host_bytes == 36 * N / 4


def test_offloaded_weights_leave_the_card_and_lie_on_the_host() -> None:
    kept = states("zero3", 4, offload_optimizer="cpu", offload_params="cpu")
    assert kept.weight_bytes == 0
    assert kept.host_bytes == pytest.approx((16 + 2) * N / 4)
    on_drives = states("zero3", 4, offload_optimizer="cpu", offload_params="nvme")
    assert on_drives.host_bytes == pytest.approx(16 * N / 4)
    assert on_drives.weight_bytes == 0
    fsdp = states("fsdp2", 2, offload_params="cpu")
    assert fsdp.host_bytes == 16 * N / 2  # fp32 weights, gradients and two moments of a rank
    card = fsdp.weight_bytes + fsdp.master_bytes + fsdp.gradient_bytes + fsdp.optimizer_bytes + fsdp.update_bytes
    assert card == 0
    # Eight ranks hold less than rank 0 loads, which is the whole model in fp32.
    assert states("fsdp2", 8, offload_params="cpu").host_bytes == 4 * N


def test_an_offloaded_step_needs_its_copies_on_the_host_too() -> None:
    """FSDP's optimizer steps where the states are, and torch's foreach Adam copies what it updates."""
    setup = sharing("fsdp2", 2, offload_params="cpu")
    for name in ("adamw_torch_fused", "adamw_torch", "adagrad"):
        facts = optimizer_facts(name)
        kept = state_bytes_of(LLAMA, replace(setup, optimizer=name))
        assert kept.host_bytes == (4 + 4 + facts.state_bytes(4) + 4 * facts.transient_copies) * N / 2
    assert optimizer_facts("adamw_torch").transient_copies > 0


def test_an_optimizer_on_the_host_leaves_weights_and_gradients_on_the_card() -> None:
    setup = TrainingSetup(optimizer="adamw_cpu_offload")
    kept = state_bytes_of(LLAMA, setup)
    assert (kept.weight_bytes, kept.gradient_bytes, kept.optimizer_bytes) == (4 * N, 4 * N, 0)
    assert kept.host_bytes == (8 + 8) * N  # two moments, plus gradients and weights in transit


def test_zero_steps_on_fp32_copies_of_its_part_of_the_gradients() -> None:
    """The copies are made from these gradients in 16 bits as one piece, which is held too."""
    assert states("zero1").update_bytes == 6 * N / 8
    assert states("zero2", 1).update_bytes == 6 * N
    assert states("zero3", 1).update_bytes == 6e9  # a sub-group of a billion at a time
    assert states("zero3").update_bytes == 6 * N / 8
    fp32 = state_bytes_of(LLAMA, replace(sharing("zero2", 8), precision="fp32"))
    assert (fp32.master_bytes, fp32.update_bytes) == (0, 0)


def test_frozen_weights_are_four_bits_and_their_constants() -> None:
    """64 weights share an fp32 maximum; with double quantisation an 8-bit one, 256 of which share an fp32 one."""
    assert NF4_BYTES == (64 / 2 + 4) / 64
    assert abs(NF4_DOUBLE_BYTES - (64 / 2 + 1 + 4 / 256) / 64) < 1e-12
    for double, each in ((True, NF4_DOUBLE_BYTES), (False, NF4_BYTES)):
        setup = TrainingSetup(method="qlora", double_quantisation=double)
        groups = parameter_groups(LLAMA, setup)
        assert frozen_layer_bytes(setup, 100.0) == 100 * each
        others = groups.frozen - groups.quantised
        assert frozen_weight_bytes(setup, groups) == pytest.approx(groups.quantised * each + 2 * others)


# ── What is held for a while ─────────────────────────────────────────────────────────────────────────────────────────


def test_buckets_of_replicas_and_of_deepspeed() -> None:
    assert transfers(LLAMA, sharing()) == Transfers(0, 0, 0, 0, 0, 0, 0)
    assert transfers(LLAMA, sharing("fsdp2", 1)) == Transfers()
    ddp = transfers(LLAMA, sharing("ddp", 2))
    # A second copy of fp32 gradients.
    assert ddp == Transfers(bucket_bytes=4 * N, last_bucket_bytes=4 * N, step_bucket_bytes=4 * N)
    one, two, three = (transfers(LLAMA, sharing(name, 8)) for name in ("zero1", "zero2", "zero3"))
    for found in (one, two, three):
        assert found.bucket_bytes == 2 * 2 * 5e8  # a buffer, and its copy that is reduced
    assert one.last_bucket_bytes == 2 * 2 * 5e8 + 2 * N / 8  # the rank's part, next to gradients that stay whole
    assert two.last_bucket_bytes == three.last_bucket_bytes == 2 * 2 * 5e8
    assert (one.step_bucket_bytes, two.step_bucket_bytes, three.step_bucket_bytes) == (0, 0, 2 * 5e8)
    small = 16 * 2 * 2048 + 2048  # norms, which are not sharded
    live = min(LLAMA.layer_params - small, 1e9) + 5e7  # prefetched parameters come through a buffer
    assert three.gathered_bytes == three.first_gathered_bytes == 2 * (live + small + LLAMA.embedding_params)
    assert one.gathered_bytes == two.gathered_bytes == 0
    lora = replace(sharing("zero2", 8), method="lora")
    few = trained_params(LLAMA, lora)
    assert transfers(LLAMA, lora).bucket_bytes == 2 * 5e8  # whole, however little it will hold
    assert transfers(LLAMA, lora).last_bucket_bytes == 2 * 5e8 + 2 * few
    assert transfers(LLAMA, lora, fills_buffers=True).last_bucket_bytes == 2 * 2 * few
    quantised = transfers(LLAMA, replace(sharing("zero3", 8), method="qlora"))
    assert quantised.gathered_bytes == live + 2 * (small + LLAMA.embedding_params)


def test_the_buffers_that_a_launch_file_names() -> None:
    def moved(name: str, method: str = "full", **keys: object) -> Transfers:
        return transfers(LLAMA, replace(sharing(name, 8, zero=zero_buffers(keys)), method=method))

    assert moved("zero2") == transfers(LLAMA, sharing("zero2", 8))
    assert moved("zero2", reduce_bucket_size=1e8).bucket_bytes == 2 * 2 * 1e8
    assert moved("zero2", reduce_bucket_size=1e8, overlap_comm=True).bucket_bytes == 3 * 2 * 1e8
    scattered = {"reduce_bucket_size": 1e8, "overlap_comm": True, "contiguous_gradients": False}
    assert moved("zero2", **scattered).bucket_bytes == 2 * 2 * 1e8
    assert moved("zero2", "lora", contiguous_gradients=False).bucket_bytes < 1e8
    assert moved("zero3", reduce_bucket_size=1e8, overlap_comm=True).bucket_bytes == 2 * 2 * 1e8
    # A bucket larger than the model is reduced once, at the end, and contains whole gradients.
    assert moved("zero1", reduce_bucket_size=2e9).bucket_bytes == 2 * 2e9
    assert moved("zero1", reduce_bucket_size=2e9).last_bucket_bytes == 2 * 2e9
    # `auto` is filled in from the hidden size, 2,048.
    assert moved("zero2", reduce_bucket_size="auto").bucket_bytes == 2 * 2 * 2048**2
    usual, few = moved("zero3"), {"stage3_max_live_parameters": 1e8, "stage3_max_reuse_distance": 1e8}
    layers = LLAMA.layer_params - 33 * 2048
    assert usual.gathered_bytes - moved("zero3", **few).gathered_bytes == 2 * (layers - 1e8)
    ahead = moved("zero3", stage3_prefetch_bucket_size=1e7)
    assert usual.gathered_bytes - ahead.gathered_bytes == 2 * (5e7 - 1e7)
    none_ahead = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    layer = parameter_groups(LLAMA, sharing("zero3", 8)).largest_layer
    assert moved("zero3", **none_ahead).gathered_bytes == 2 * (layer + 33 * 2048 + LLAMA.embedding_params)
    # Key and value matrices, 512 × 2,048, stay whole up to this size, so they are not gathered.
    assert moved("zero3", stage3_param_persistence_threshold=2**20).gathered_bytes == usual.gathered_bytes
    whole = moved("zero3", stage3_param_persistence_threshold=2**20, stage3_max_live_parameters=1e8)
    assert whole.gathered_bytes == 2 * (1e8 + 5e7 + 33 * 2048 + 16 * 2 * 512 * 2048 + LLAMA.embedding_params)
    grouped = sharing("zero3", 1, zero=zero_buffers({"sub_group_size": 1e8}))
    assert state_bytes_of(LLAMA, grouped).update_bytes == 6e8
    reduced = replace(sharing("zero2", 8), reduce_dtype="fp32")
    assert transfers(LLAMA, reduced).bucket_bytes == 2 * 5e8 + (2 + 4) * 5e8


def test_what_fsdp_gathers_and_keeps_whole() -> None:
    layer, outside = LLAMA.layer_params / LLAMA.num_layers, N - LLAMA.layer_params
    found = transfers(LLAMA, sharing("fsdp2", 8))
    assert found.gathered_bytes == 2 * (2 * layer + outside)  # the current layer and the next one
    assert found.first_gathered_bytes == 2 * (layer + outside)
    assert found.bucket_bytes == 2 * layer
    assert found.last_bucket_bytes == 2 * max(layer, outside)
    assert found.unreduced_bytes == 2 * outside
    assert found.unreduced_share == pytest.approx(outside / N)
    assert found.waiting_gradient_bytes == 2 * N
    assert transfers(LLAMA, replace(sharing("fsdp2", 8), reduce_dtype="fp32")).waiting_gradient_bytes == 4 * N
    assert transfers(LLAMA, replace(sharing("fsdp2", 8), sync_each_batch=True)).waiting_gradient_bytes == 0
    kept = transfers(LLAMA, sharing("fsdp2", 8, reshard_after_forward=False))
    assert kept.gathered_bytes == 2 * (LLAMA.layer_params + outside)
    assert kept.first_gathered_bytes == found.first_gathered_bytes
    lora = transfers(LLAMA, replace(sharing("fsdp2", 8), method="lora"))
    assert (lora.bucket_bytes, lora.last_bucket_bytes, lora.unreduced_bytes, lora.unreduced_share) == (0, 0, 0, 0)


def test_what_stages_and_shared_models_hold() -> None:
    staged = sharing("fsdp2", 8, pipeline_parallel=2)
    layer, outside = LLAMA.layer_params / LLAMA.num_layers, N - LLAMA.layer_params
    found = transfers(LLAMA, staged)
    assert found.gathered_bytes == found.first_gathered_bytes == 2 * (LLAMA.layer_params + outside)
    assert (found.bucket_bytes, found.last_bucket_bytes) == (0, 4 * layer)
    assert found.unreduced_bytes == found.waiting_gradient_bytes == 4 * N
    assert found.unreduced_share == 1
    divided = transfers(LLAMA, sharing("fsdp2", 8, tensor_parallel=2))
    assert divided.waiting_gradient_bytes == 4 * N  # already reduced, so kept in fp32
    replicas = transfers(LLAMA, sharing("ddp", 8, tensor_parallel=2))
    assert replicas.bucket_bytes == 2 * layer  # torch's `replicate` works by blocks, as FSDP2 does
    assert replicas.gathered_bytes == 2 * N


# ── What is sent, and how long it takes ──────────────────────────────────────────────────────────────────────────────


def only(setup: TrainingSetup, name: str):
    (found,) = [entry for entry in step_collectives(LLAMA, setup) if entry.name == name]
    return found


def test_gradients_are_reduced_over_every_rank_that_saw_other_tokens() -> None:
    """Ranks that share rows see different tokens of them; ranks that share a matrix product see the same."""
    assert only(sharing("ddp", 8), "gradients").workers == 8
    assert only(sharing("ddp", 8, sequence_parallel=2), "gradients").workers == 8
    divided = only(sharing("ddp", 8, tensor_parallel=2), "gradients")
    assert (divided.workers, divided.spread) == (4, 2)
    assert divided.num_bytes == 4 * N / 2
    both = only(sharing("ddp", 8, tensor_parallel=2, pipeline_parallel=2), "gradients")
    assert (both.workers, both.num_bytes) == (2, 4 * N / 4)


def test_hybrid_shards_are_reduced_between_replicas() -> None:
    found = only(sharing("fsdp2", 32, num_replicas=4), "replicas")
    assert (found.kind, found.workers, found.count, found.spread) == ("all_reduce", 4, 1, 8)
    assert found.num_bytes == 2 * N / 8
    several = replace(sharing("fsdp2", 32, num_replicas=4), accumulation=3, sync_each_batch=True)
    assert only(several, "replicas").count == 3


def test_stages_gather_their_weights_once_a_step() -> None:
    """Without stages, each micro-batch gathers them, twice if they are dropped after the forward pass."""
    setup = replace(sharing("fsdp2", 8), accumulation=4)
    assert (only(setup, "weights").count, only(setup, "gradients").count) == (
        LLAMA.num_layers * 4 * 2,
        LLAMA.num_layers,
    )
    kept = replace(setup, parallel=replace(setup.parallel, reshard_after_forward=False))
    assert only(kept, "weights").count == LLAMA.num_layers * 4
    stages = replace(setup, parallel=replace(setup.parallel, pipeline_parallel=2))
    assert only(stages, "weights").count == LLAMA.num_layers * 2
    deepspeed = replace(sharing("zero3", 8), accumulation=4)
    assert only(deepspeed, "gradients").count == LLAMA.num_layers * 4


def test_short_documents_in_a_packed_row_are_attended_to_faster() -> None:
    """All figures of the estimate follow: the computation, and how much of it was useful."""
    setup = replace(sharing(), sequence_length=8192, packing=True)
    rows, documents = (predict_time(LLAMA, setup, A100, document_length=length) for length in (None, 256))
    assert documents.matmul_seconds < 0.95 * rows.matmul_seconds
    saved = rows.matmul_seconds + rows.memory_seconds - documents.matmul_seconds - documents.memory_seconds
    assert rows.step_seconds - documents.step_seconds == pytest.approx(saved, rel=1e-3)
    assert documents.tokens_per_second > rows.tokens_per_second


def test_sizes_of_what_ranks_that_share_a_model_send() -> None:
    heads, keys, size = LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim
    setup = replace(sharing("single", 4, sequence_parallel=4), sequence_length=1024, micro_batch_size=2)
    exchange = only(setup, "sequence parallel")
    # Queries, keys and values one way, the result back, for a quarter of the row's tokens: the mean of both.
    sent = (heads + 2 * max(4, keys) + heads) / 2
    assert exchange.num_bytes == 2 * (2 * 1024 / 4) * sent * size
    assert exchange.count == 2 * LLAMA.num_layers * 3
    message = only(replace(sharing("single", 4, pipeline_parallel=4), accumulation=8), "pipeline")
    assert (message.count, message.workers, message.overlaps) == (16, 4, False)
    assert message.num_bytes == 2 * 1024 * LLAMA.hidden_size


def test_what_computation_hides_but_for_the_edge() -> None:
    """For one micro-batch, the last bucket of a layer has nothing to overlap with, whatever the rest does."""
    setup = replace(sharing("ddp", 8), accumulation=4, sequence_length=4096)
    found = predict_time(LLAMA, setup, A100)
    assert found.communication_seconds > 0
    assert found.exposed_communication_seconds == pytest.approx(found.communication_seconds / (LLAMA.num_layers * 4))
    # ZeRO-3 overlaps nothing.
    three = predict_time(LLAMA, replace(sharing("zero3", 8), sequence_length=4096), A100)
    assert three.exposed_communication_seconds == pytest.approx(three.communication_seconds)


def test_frozen_weights_travel_as_they_are_stored() -> None:
    assert gathered_weight_bytes(LLAMA, TrainingSetup()) == 2 * N
    lora = TrainingSetup(method="lora")
    assert gathered_weight_bytes(LLAMA, lora) == 2 * (N + trained_params(LLAMA, lora))


def test_what_cannot_be_hidden_is_added_to_what_can() -> None:
    for setup in (sharing("fsdp2", 8), sharing("fsdp2", 8, tensor_parallel=2), sharing("ddp", 8, pipeline_parallel=2)):
        each = [(one.overlaps, collective_seconds(one, A100)) for one in step_collectives(LLAMA, setup)]
        found = predict_time(LLAMA, setup, A100)
        assert found.communication_seconds == pytest.approx(sum(seconds for _, seconds in each))
        waiting = sum(seconds for overlaps, seconds in each if not overlaps)
        edge = (found.communication_seconds - waiting) / LLAMA.num_layers
        assert found.exposed_communication_seconds >= waiting + edge - 1e-12


def test_each_rank_steps_on_its_share() -> None:
    whole = optimizer_seconds(LLAMA, sharing("ddp", 8), A100)
    speed = A100.gpu.bandwidth() * EFFICIENCY.bandwidth_fraction
    assert whole == pytest.approx(N * optimizer_traffic_bytes(sharing("ddp", 8)) / speed)
    assert optimizer_seconds(LLAMA, sharing("fsdp2", 8), A100) == pytest.approx(whole / 8)
    assert optimizer_seconds(LLAMA, sharing("ddp", 8, tensor_parallel=4), A100) == pytest.approx(whole / 4)
    divided = sharing("ddp", 8, tensor_parallel=2, pipeline_parallel=2)
    assert optimizer_seconds(LLAMA, divided, A100) == pytest.approx(whole / 4)
    assert optimizer_seconds(LLAMA, sharing("zero2", 8, offload_optimizer="cpu"), A100) == 0


def test_bytes_that_a_step_moves() -> None:
    """fp32 weights and moments are read and written; gradients are read by norm and update, and scaled in place."""
    full = TrainingSetup()
    assert optimizer_traffic_bytes(full) == 2 * 4 + 4 * 4 + 2 * 2 * 4
    assert optimizer_traffic_bytes(sharing("zero2", 2)) == 2 * 4 + 2 + 4 * 2 + 2 * 2 * 4
    assert optimizer_traffic_bytes(replace(full, optimizer="adamw_torch_4bit")) == 8 + 16 + 2 * 2 * 0.5
    assert optimizer_traffic_bytes(replace(full, optimizer="sgd_momentum")) == 8 + 16 + 2 * 4


def test_offloaded_steps_take_what_pcie_and_host_memory_take() -> None:
    known = replace(A100, host_bandwidth=100e9, nvme_bytes_per_second=5e9)
    pcie = A100.gpu.pcie_bandwidth()
    held = predict_time(LLAMA, sharing("zero2", 4, offload_optimizer="cpu"), known).offload_seconds
    assert held == pytest.approx(2 * 2 * N / 4 / pcie + 7 * 4 * N / 100e9)
    weights = predict_time(LLAMA, sharing("zero3", 4, offload_params="cpu"), known).offload_seconds
    assert weights == pytest.approx(2 * 2 * N / 4 / pcie)
    quantised = replace(sharing("zero3", 4, offload_params="cpu"), method="qlora")
    packed = predict_time(LLAMA, quantised, known).offload_seconds
    assert packed == pytest.approx(2 * gathered_weight_bytes(LLAMA, quantised) / 4 / pcie)
    assert packed < 0.5 * weights, "a base in 4 bits travels in 4 bits"
    drives = predict_time(LLAMA, sharing("zero3", 4, offload_params="nvme"), known).offload_seconds
    assert drives == pytest.approx(weights + 2 * 2 * N / 5e9)
    states_too = predict_time(LLAMA, sharing("zero3", 4, offload_optimizer="nvme"), known).offload_seconds
    assert states_too == pytest.approx(held + 24 * N / 5e9)
    kept = predict_time(LLAMA, replace(sharing(), checkpointing="offload", accumulation=2), known).offload_seconds
    saved = LLAMA.num_layers * 2 * 1024 * LLAMA.hidden_size * 2
    assert kept == pytest.approx(0.25 * 2 * saved / pcie)


# ── Laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_kaplans_loss_by_hand() -> None:
    """Equation 1.5 of Kaplan et al. 2020; with unlimited data it is (N_c/N)^α_N, their equation 1.1."""
    kaplan = LAWS["kaplan"]
    assert kaplan.loss(1e9, 1e22) == pytest.approx((6.4e13 / 1e9) ** 0.076, rel=1e-6)
    assert kaplan.loss(1e30, 1e10) == pytest.approx((1.8e13 / 1e10) ** 0.103, rel=1e-6)
    # (64,000^0.73786 + 1,800)^0.103 = (3,514.6 + 1,800)^0.103
    assert kaplan.loss(1e9, 1e10) == pytest.approx(5314.6**0.103, rel=1e-4)
    assert LAWS["rule"].loss(1e9, 1e10) is None


def test_the_least_compute_of_a_loss() -> None:
    law = LAWS["chinchilla"]
    plan = plan_scaling(law, compute=1e21)
    assert plan.loss is not None
    assert compute_for_loss(law, plan.loss) == pytest.approx(1e21, rel=1e-6)
    assert compute_for_loss(law, 1.69) is None  # the law's irreducible loss
    assert compute_for_loss(LAWS["rule"], 2.0) is None
    assert plan.tokens_per_param == pytest.approx(plan.tokens / plan.params)
    assert plan_scaling("kaplan", compute=1e21).extra_compute is None
    two = plan_scaling("refit", tokens=2e10, compute=1.2e20)
    assert (two.params, two.tokens) == (pytest.approx(1e9), pytest.approx(2e10))


# ── Phases of a step ─────────────────────────────────────────────────────────────────────────────────────────────────


def phases(setup: TrainingSetup) -> dict[str, dict[str, float]]:
    return {phase.name: dict(phase.terms) for phase in predict_memory(LLAMA, setup).phases}


def test_what_each_phase_holds_under_each_strategy() -> None:
    for setup in (
        sharing(),
        replace(sharing("ddp", 8), accumulation=4),
        replace(sharing("fsdp2", 8), accumulation=4),
        replace(sharing("zero2", 8), accumulation=4),
        sharing("zero3", 8),
    ):
        kept, moved = state_bytes_of(LLAMA, setup), transfers(LLAMA, setup)
        found = phases(setup)
        for name in ("forward and loss", "backward, last layer", "backward, first layer", "optimizer step"):
            assert found[name]["weights"] == kept.weight_bytes
            assert found[name]["master weights"] == kept.master_bytes
            assert found[name]["optimizer states"] == kept.optimizer_bytes
        # Gradients of earlier micro-batches, whole if they are not reduced yet; none with a single micro-batch.
        # ZeRO-3 has a buffer for its part of them.
        has_earlier = setup.accumulation > 1 or setup.parallel.strategy == "zero3"
        earlier = max(kept.gradient_bytes, moved.waiting_gradient_bytes) if has_earlier else 0
        assert found["forward and loss"]["gradients"] == earlier
        assert found["backward, last layer"]["gradients"] == earlier
        assert found["forward and loss"]["gathered weights"] == moved.gathered_bytes
        assert found["backward, last layer"]["communication buckets"] == moved.bucket_bytes
        assert found["backward, first layer"]["communication buckets"] == moved.last_bucket_bytes
        assert found["backward, first layer"]["gathered weights"] == moved.first_gathered_bytes
        assert found["backward, first layer"]["unreduced gradients"] == moved.unreduced_bytes
        whole = earlier > 0 and moved.unreduced_share < 1
        share = 1 if whole else 1 - moved.unreduced_share
        assert found["backward, first layer"]["gradients"] == pytest.approx(kept.gradient_bytes * share)
        assert found["optimizer step"]["gradients"] == kept.gradient_bytes
        assert found["optimizer step"]["update"] == kept.update_bytes
        step = predict_memory(LLAMA, setup).step
        assert found["forward and loss"]["activations and loss"] == max(step.forward_bytes, step.loss_bytes)
        assert found["backward, last layer"]["activations and loss"] == step.backward_top_bytes
        bottom = max(0.0, step.backward_bottom_bytes - step.gradient_bytes)
        assert found["backward, first layer"]["activations and loss"] == bottom
        assert found["optimizer step"]["communication buckets"] == moved.step_bucket_bytes
        assert found["load"] == {
            "weights": kept.weight_bytes,
            "rest of the base, before it is sharded": kept.load_extra_bytes,
        }


def test_the_peak_is_the_fullest_phase_and_its_interval_is_around_the_card() -> None:
    estimate = predict_memory(LLAMA, sharing("fsdp2", 8))
    totals = {phase.name: phase.total_bytes for phase in estimate.phases}
    assert estimate.peak_bytes == max(totals.values())
    assert totals[estimate.peak_phase.name] == estimate.peak_bytes
    said = estimate.as_dict()
    assert said["peak_phase"] == estimate.peak_phase.name
    assert sum(said["phases"][said["peak_phase"]].values()) == pytest.approx(said["allocated_bytes"], abs=10)
    assert estimate.high_bytes - estimate.device_bytes == pytest.approx(estimate.device_bytes - estimate.low_bytes)
    overhead = gpu_overhead(sharing("fsdp2", 8), is_cuda=True)
    beside = overhead.context_bytes + overhead.communication_bytes
    assert estimate.device_bytes - estimate.reserved_bytes == pytest.approx(beside)
    step = estimate.step
    # Of the gradients that the walk leaves whole, this rank has a shard.
    bottom = step.backward_bottom_bytes - step.gradient_bytes + estimate.states.gradient_bytes
    passes = max(step.forward_bytes, step.loss_bytes, step.backward_top_bytes, bottom)
    assert passes < step.peak_bytes
    churn = passes - 0.75 * step.saved_bytes
    lost = overhead.fragmentation_share * churn + overhead.fragmentation_bytes
    kept = estimate.hoarded_bytes
    assert kept > 0
    assert estimate.reserved_bytes - estimate.peak_bytes == pytest.approx(lost + kept)
    parts = dict(estimate.peak_phase.terms)
    fixed = ("weights", "master weights", "optimizer states", "gradients", "update")
    states = sum(parts.get(name, 0.0) for name in fixed)
    margin = 0.04 * states + 0.25 * (estimate.peak_bytes - states) + 0.5 * lost + 0.3 * beside
    assert estimate.high_bytes == pytest.approx(estimate.device_bytes + margin + 0.5 * kept)
    assert estimate.least_bytes == pytest.approx(estimate.device_bytes - kept + margin)
    assert estimate.host_bytes == estimate.states.host_bytes


def test_stages_hold_no_shard_of_a_gradient_before_all_are_reduced() -> None:
    staged = replace(sharing("fsdp2", 8, pipeline_parallel=2), accumulation=4)
    found = phases(staged)
    assert found["backward, first layer"]["gradients"] == 0
    assert found["backward, first layer"]["unreduced gradients"] > 0
    whole = found["forward and loss"]["unreduced gradients"]
    gpipe = replace(staged, parallel=replace(staged.parallel, pipeline_schedule="gpipe"))
    later = max(0.0, whole - predict_memory(LLAMA, gpipe).step.saved_bytes / 4)
    assert phases(gpipe)["forward and loss"]["unreduced gradients"] == pytest.approx(later)


def test_a_shared_model_is_built_whole_in_host_memory() -> None:
    divided = predict_memory(LLAMA, sharing("ddp", 8, tensor_parallel=4))
    assert divided.host_bytes == 4 * N
    staged = sharing("ddp", 4, pipeline_parallel=2)
    received = {phase.name: dict(phase.terms) for phase in predict_memory(LLAMA, staged).phases}
    assert "pipeline buffers" not in phases(sharing("ddp", 4))["forward and loss"]
    assert received["forward and loss"].get("pipeline buffers", 1) > 0


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["fsdp2", "zero3"]), st.sampled_from([2, 3, 8, 64]), st.sampled_from(["full", "lora", "qlora"]))
@example("zero3", 3, "qlora")  # a number of ranks that divides no tensor
def test_shards_of_all_ranks_are_the_whole(strategy, ranks, method) -> None:
    one, many = (state_bytes_of(LLAMA, replace(sharing(strategy, n), method=method)) for n in (1, ranks))
    for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes", "master_bytes"):
        assert ranks * getattr(many, name) == pytest.approx(getattr(one, name)), name


def test_paged_optimizers_are_those_that_say_so() -> None:
    paged = {name for name, facts in OPTIMIZER_FACTS.items() if facts.is_paged}
    assert paged == {name for name in OPTIMIZER_FACTS if name.startswith("paged_")}
    assert paged


# Values per weight, their bits, and where it is refused: one accelerator, DDP, FSDP2, ZeRO, fp16, a CPU.
OPTIMIZERS = {
    "adamw_torch_fused": (2, None, ""), "adamw_torch": (2, None, ""), "adamw_torch_foreach": (2, None, ""),
    "sgd": (0, None, ""), "sgd_momentum": (1, None, ""), "adagrad": (1, None, ""), "rmsprop": (1, None, ""),
    "adafactor": (0, None, "fsdp"), "adamw_bnb_8bit": (2, 8, "fsdp"), "adamw_8bit": (2, 8, "fsdp"),
    "paged_adamw_32bit": (2, 32, "fsdp"), "paged_adamw_8bit": (2, 8, "fsdp"), "lion_32bit": (1, 32, "fsdp"),
    "lion_8bit": (1, 8, "fsdp"), "paged_lion_32bit": (1, 32, "fsdp"), "paged_lion_8bit": (1, 8, "fsdp"),
    "rmsprop_bnb": (1, 32, "fsdp"), "rmsprop_bnb_32bit": (1, 32, "fsdp"), "rmsprop_bnb_8bit": (1, 8, "fsdp"),
    "ademamix": (3, 32, "fsdp"), "ademamix_8bit": (3, 8, "fsdp"), "paged_ademamix_32bit": (3, 32, "fsdp"),
    "paged_ademamix_8bit": (3, 8, "fsdp"), "adamw_torch_8bit": (2, 8, "zero"),
    "adamw_torch_4bit": (2, 4, "fsdp zero"), "adamw_cpu_offload": (2, None, "ddp fsdp zero fp16 cpu"),
    "deepspeed_cpu_adam": (2, 32, "cuda fsdp zero"),
}  # fmt: skip


def test_every_optimizers_states_and_places() -> None:
    assert set(OPTIMIZERS) == set(OPTIMIZER_FACTS)
    for name, (num_states, bits, places) in OPTIMIZERS.items():
        facts = optimizer_facts(name)
        assert (facts.num_states, facts.state_bits, set(facts.refused)) == (num_states, bits, set(places.split())), (
            name
        )
        each = {None: 4.0, 32: 4.0, 8: 1 + 4 / 256, 4: 0.5 + 4 / 256}[bits]
        assert facts.state_bytes(4) == num_states * each, name
    copies = {name for name, facts in OPTIMIZER_FACTS.items() if facts.transient_copies == 1}
    assert copies == {"adamw_torch", "adamw_torch_foreach", "adagrad", "rmsprop"}
    assert {name for name, facts in OPTIMIZER_FACTS.items() if facts.on_host} == {
        "adamw_cpu_offload", "deepspeed_cpu_adam",
    }  # fmt: skip
    instead = {name: facts.zero_offload for name, facts in OPTIMIZER_FACTS.items() if facts.zero_offload}
    lion = dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "DeepSpeed CPU Lion")
    adam = ("adamw_torch_fused", "adamw_torch", "adamw_torch_foreach", "paged_adamw_32bit", "deepspeed_cpu_adam")
    assert instead == {**lion, **dict.fromkeys(adam, "DeepSpeed CPU Adam")}


@pytest.mark.parametrize(
    ("name", "where", "condition"),
    [
        ("adamw_8bit", {"strategy": "fsdp2"}, "fsdp"),
        ("adamw_8bit", {"strategy": "ddp"}, None),
        ("adamw_torch_8bit", {"strategy": "zero2"}, "zero"),
        ("adamw_torch_8bit", {"strategy": "zero2", "zero_offload": True}, None),
        ("deepspeed_cpu_adam", {"device_type": "cuda"}, "cuda"),
        ("deepspeed_cpu_adam", {"device_type": "cpu"}, None),
        ("deepspeed_cpu_adam", {"device_type": "cuda", "strategy": "zero3", "zero_offload": True}, None),
        ("adamw_cpu_offload", {"precision": "fp16", "strategy": "ddp"}, "fp16"),
        ("adamw_cpu_offload", {"precision": "bf16", "device_type": "cpu"}, "cpu"),
        ("adamw_cpu_offload", {"device_type": None}, None),
        ("adamw_cpu_offload", {"device_type": "cpu", "strategy": "zero1"}, "zero"),
    ],
)
def test_where_an_optimizer_does_not_work(name, where, condition) -> None:
    usual = {"device_type": None, "strategy": "single", "zero_offload": False, "precision": None}
    found = optimizer_facts(name).refusal(**{**usual, **where})
    assert (found and found[0]) == condition
    assert found is None or found[1] == OPTIMIZER_FACTS[name].refused[condition]


def test_an_unknown_optimizer_is_told_its_neighbour() -> None:
    for name, hint in (("adamw_tourch", "did you mean adamw_torch? use one of"), ("zzz", "use one of")):
        with pytest.raises(ConfigError) as refused:
            optimizer_facts(name)
        assert refused.value.fix.startswith(hint)
