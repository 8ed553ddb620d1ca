"""Terms of predicted memory: states per parameter, additions of strategies, and what never gets worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.facts.loss_chunks import card_logits
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.cost.sharding import state_bytes
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup
from accel_scale.planning.search.search import Request, search
from accel_scale.planning.tape.activations import step_bytes

LLAMA = load_model_facts("meta-llama/Llama-3.2-1B", allow_download=False)
N = LLAMA.num_params
# bitsandbytes' 8-bit optimizers: a byte per state and its scales; embeddings have fp32 states.
BNB_8BIT = 2 + 2 * 4 / 256 + LLAMA.embedding_params / N * (8 - 2 - 2 * 4 / 256)


def states(**settings_):
    return state_bytes(LLAMA, TrainingSetup(**settings_))


@pytest.mark.parametrize(
    ("precision", "optimizer", "bytes_per_param"),
    [
        ("fp32", "adamw_torch_fused", 16),
        ("bf16", "adamw_torch_fused", 16),
        ("bf16_true", "adamw_torch_fused", 8),
        ("fp32", "sgd", 8),
        ("fp32", "sgd_momentum", 12),
        ("bf16", "adamw_bnb_8bit", 8 + BNB_8BIT),
        ("bf16_true", "adamw_torch_4bit", 4 + 1 + 2 * 4 / 256),
    ],
)
def test_full_training_states_per_parameter(precision, optimizer, bytes_per_param):
    found = states(precision=precision, optimizer=optimizer)
    total = found.weight_bytes + found.gradient_bytes + found.optimizer_bytes + found.master_bytes
    assert total / N == pytest.approx(bytes_per_param, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "bytes_per_param"),
    # Rajbhandari et al. 2020: 2 + 2 + 12/n, 2 + 14/n and 16/n, at n = 8.
    [("zero1", 2 + 2 + 12 / 8), ("zero2", 2 + 14 / 8), ("zero3", 16 / 8), ("fsdp2", 16 / 8), ("ddp", 16)],
)
def test_sharded_states_per_parameter(strategy, bytes_per_param):
    found = states(parallel=ParallelSetup(strategy, 8))
    total = found.weight_bytes + found.gradient_bytes + found.optimizer_bytes + found.master_bytes
    assert total / N == pytest.approx(bytes_per_param, rel=1e-9)


def test_qlora_keeps_the_linears_in_four_bits():
    small = states(method="qlora").weight_bytes
    lora = states(method="lora").weight_bytes
    linears = LLAMA.layer_params
    # 4 bits and 0.127 bits of constants instead of 16 bits, in all but embedding and norms.
    assert (lora - small) / linears == pytest.approx(2 - 0.5 - 0.0159, rel=1e-3)


def test_accumulation_under_fsdp_keeps_whole_gradients():
    one = TrainingSetup(parallel=ParallelSetup("fsdp2", 8), checkpointing="none", sequence_length=128)
    several = replace(one, accumulation=4)
    extra = predict_memory(LLAMA, several).phases[1].total_bytes - predict_memory(LLAMA, one).phases[1].total_bytes
    assert extra == pytest.approx(2 * N, rel=0.01)
    reduced = replace(several, sync_each_batch=True)  # only a rank's fp32 share of them waits
    extra = predict_memory(LLAMA, reduced).phases[1].total_bytes - predict_memory(LLAMA, one).phases[1].total_bytes
    assert extra == pytest.approx(4 * N / 8, rel=0.01)


def test_foreach_adam_needs_one_more_copy_in_its_step():
    fused, foreach = (
        predict_memory(LLAMA, TrainingSetup(optimizer=name, sequence_length=64)).phases[-1].total_bytes
        for name in ("adamw_torch_fused", "adamw_torch_foreach")
    )
    assert foreach - fused == pytest.approx(4 * N, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["full", "lora", "qlora"]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["fp32", "bf16", "bf16_true"]),
    st.integers(1, 4),
    st.sampled_from([64, 256, 1024]),
)
def test_more_tokens_never_need_less(method, checkpointing, precision, micro_batch, length):
    setup = TrainingSetup(
        method=method,
        checkpointing=checkpointing,
        precision=precision,
        micro_batch_size=micro_batch,
        sequence_length=length,
        lora=LoraSetup(8),
    )
    estimate = predict_memory(LLAMA, setup)
    for larger in (replace(setup, micro_batch_size=micro_batch + 1), replace(setup, sequence_length=2 * length)):
        # When the loss goes from one chunk to two, it saves a cast of the head's gradient.
        assert predict_memory(LLAMA, larger).peak_bytes >= estimate.peak_bytes * 0.98
    assert estimate.low_bytes < estimate.device_bytes < estimate.high_bytes
    assert estimate.peak_bytes <= estimate.reserved_bytes <= estimate.device_bytes


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_blocks_are_lost_of_a_ranks_gradients_only(strategy):
    """A rank of 64 holds 1 GiB of a 70B model's gradients, which are 131 GiB."""
    big = load_model_facts("meta-llama/Llama-3.1-70B", allow_download=False)
    found = {
        num_gpus: predict_memory(big, TrainingSetup(parallel=ParallelSetup(strategy=strategy, num_gpus=num_gpus)))
        for num_gpus in (8, 64)
    }
    lost = {
        num_gpus: estimate.reserved_bytes - estimate.hoarded_bytes - estimate.peak_bytes
        for num_gpus, estimate in found.items()
    }
    assert lost[64] < lost[8] < 6 * 2**30
    shards = found[8].states.gradient_bytes - found[64].states.gradient_bytes
    assert lost[8] - lost[64] <= 0.15 * shards + 1


def test_more_ranks_never_need_more_states():
    for strategy in ("zero1", "zero2", "zero3", "fsdp2"):
        sizes = [state_bytes(LLAMA, TrainingSetup(parallel=ParallelSetup(strategy, n))) for n in (2, 4, 8, 16)]
        totals = [s.weight_bytes + s.gradient_bytes + s.optimizer_bytes + s.master_bytes for s in sizes]
        assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"optimizer": "adamw_fused"}, "--optim"),
        ({"checkpointing": "some"}, "checkpointing"),
    ],
)
def test_what_is_not_modelled_is_named(change, place):
    with pytest.raises(ConfigError) as error:
        predict_memory(LLAMA, TrainingSetup(**change))
    assert error.value.place == place
    assert error.value.fix


def test_the_planner_counts_the_states_that_the_recipes_optimizers_keep():
    """test_optimizers.py measures the states of the recipe's optimizers; both read the same table."""
    from accel_scale.facts.optimizer_specs import OPTIMIZERS, state_bytes_per_parameter

    one = TrainingSetup(precision="bf16_true")
    for name in OPTIMIZERS:
        states = state_bytes(LLAMA, replace(one, optimizer=name))
        kept = states.optimizer_bytes if not OPTIMIZERS[name].on_host else None
        expected = LLAMA.num_params * state_bytes_per_parameter(name, weight_bytes=2)
        if OPTIMIZERS[name].widens_embeddings:
            wide = 4 * OPTIMIZERS[name].num_states - state_bytes_per_parameter(name, weight_bytes=2)
            expected += LLAMA.embedding_params * wide
        assert kept is None or kept == pytest.approx(expected), name
    assert state_bytes_per_parameter("adamw_torch_4bit") == 2 * (0.5 + 4 / 256)


@pytest.mark.parametrize(
    ("card", "logits"),
    [("3060", 2**25), ("T4", 2**26), ("4090", 2**26), ("A100-40GB-SXM", 2**27), ("H100-SXM", 2**28)],
)
def test_small_cards_hold_fewer_logits_at_once_and_plans_count_them(card, logits):
    """A logit takes 16 bytes: a chunk takes 4 GiB on a large card, and at most a thirteenth of a small one."""
    gpu = find_gpu(card)
    assert card_logits(gpu.memory_bytes) == logits
    assert 16 * logits <= gpu.memory_bytes / 13
    # Memory that the driver keeps to itself changes nothing.
    assert card_logits(0.97 * gpu.memory_bytes) == logits
    request = Request(LLAMA, Machine(gpu), global_batch_size=8, methods=("qlora",), fixed={"checkpointing": "full"})
    assert {candidate.setup.chunk_logits for candidate in search(request).candidates} == {logits}
    one = TrainingSetup(method="qlora", micro_batch_size=4, sequence_length=4096)
    large, small = (step_bytes(LLAMA, replace(one, chunk_logits=n)) for n in (2**28, logits))
    assert large.loss_bytes - small.loss_bytes == pytest.approx(16 * (2**28 - logits), rel=0.01)


@pytest.mark.parametrize("precision", ["fp8", "fp16"])
def test_fsdp2_hands_every_mixed_precisions_layers_16_bit_weights(precision):
    """fp8 layers are bf16 layers around their products, so under FSDP2 autocast has nothing to cast in them either."""
    fsdp = TrainingSetup(
        parallel=ParallelSetup("fsdp2", 8), micro_batch_size=2, sequence_length=4096, checkpointing="none"
    )
    expected = predict_memory(LLAMA, replace(fsdp, precision="bf16"))
    found = predict_memory(LLAMA, replace(fsdp, precision=precision))
    assert found.peak_bytes == expected.peak_bytes
    # In a single process the weights are fp32, and autocast makes the copies.
    one = predict_memory(LLAMA, replace(fsdp, precision=precision, parallel=ParallelSetup()))
    assert one.step.peak_bytes > found.step.peak_bytes


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_4_bit_base_is_whole_on_every_card_before_it_is_sharded(strategy):
    """transformers quantises on each card; sharding comes only afterwards."""
    setup = TrainingSetup(method="qlora", micro_batch_size=1, sequence_length=128, checkpointing="full")
    eight = replace(setup, parallel=ParallelSetup(strategy, 8))
    alone = predict_memory(LLAMA, setup)
    sharded = predict_memory(LLAMA, eight)
    whole = state_bytes(LLAMA, replace(setup, parallel=ParallelSetup())).weight_bytes
    load = next(phase for phase in sharded.phases if phase.name == "load")
    assert load.total_bytes == pytest.approx(whole, rel=0.05)  # adapters are added later
    assert sharded.peak_bytes >= load.total_bytes
    assert sharded.states.weight_bytes < alone.states.weight_bytes / 4
    # Other methods load in shards, and so do strategies that shard only states or gradients.
    assert predict_memory(LLAMA, replace(eight, method="lora")).states.load_extra_bytes == 0
    assert predict_memory(LLAMA, replace(setup, parallel=ParallelSetup("zero2", 8))).states.load_extra_bytes == 0


def test_a_70b_4_bit_base_is_not_promised_to_two_24_gib_cards():
    large = load_model_facts("meta-llama/Llama-3.1-70B", allow_download=False)
    setup = TrainingSetup(method="qlora", micro_batch_size=1, sequence_length=512, parallel=ParallelSetup("fsdp2", 2))
    estimate = predict_memory(large, setup)
    assert estimate.states.weight_bytes < 20 * 2**30  # the memory that training would need
    assert estimate.peak_phase.name == "load"
    assert estimate.low_bytes > 24 * 2**30


@pytest.mark.parametrize("checkpointing", ["full", "every_2"])
def test_dense_layers_before_experts_do_not_count_every_gradient_as_one_layers(checkpointing):
    """DeepSeek V3 (modelled) and V3.2 (traced) begin with three dense layers; their gradients take 1.2 TiB."""
    setup = TrainingSetup(checkpointing=checkpointing, parallel=ParallelSetup("zero3", 512))
    estimates = [
        predict_memory(load_model_facts(f"deepseek-ai/DeepSeek-{name}", allow_download=False), setup)
        for name in ("V3", "V3.2")
    ]
    for estimate in estimates:
        assert estimate.step.gradient_bytes > 1.2 * 2**40
        assert estimate.peak_bytes < 0.1 * 2**40
    assert estimates[0].peak_bytes == pytest.approx(estimates[1].peak_bytes, rel=0.02)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.2"])
def test_gradients_of_a_second_micro_batch_are_added_layer_by_layer(name):
    facts = load_model_facts(name, allow_download=False)
    setup = TrainingSetup(precision="bf16_true", checkpointing="full")
    one, two = (predict_memory(facts, replace(setup, accumulation=count)) for count in (1, 2))
    assert one.peak_bytes - one.states.weight_bytes > one.step.gradient_bytes
    assert 0 <= two.peak_bytes - one.peak_bytes < 0.05 * one.step.gradient_bytes
