"""Plan terms checked by hand where tables would only repeat them: expert adapters, quantised bases, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.facts.optimizer_specs import (
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    OptimizerSpec,
    optimizer_spec,
    state_bytes_per_parameter,
    steps_in_backward,
)
from accel_scale.planning.cost.communication import gathered_weight_bytes, step_collectives
from accel_scale.planning.cost.efficiency import EFFICIENCY, micro_batch_time
from accel_scale.planning.cost.flops import hardware_flops_per_token, recomputed_fraction, trained_params
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.cost.rank_share import stage_layers
from accel_scale.planning.cost.sharding import NF4_DOUBLE_BYTES, state_bytes
from accel_scale.planning.cost.timing import predict_time
from accel_scale.planning.cost.traffic import layer_traffic
from accel_scale.planning.cost.transfers import transfers
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.parameters import adapter_rank, parameter_groups, quantised_weights
from accel_scale.planning.models.training_setup import (
    GenerationSetup,
    LoraSetup,
    ParallelSetup,
    TrainingSetup,
    VllmSetup,
    check_policy,
    period_of,
)
from accel_scale.planning.tape.activations import _walk

LLAMA = load_model_facts("meta-llama/Llama-3.2-1B", allow_download=False)
N = LLAMA.num_params
# 16 layers: query and output 2048², key and value 2048 × 512, three MLP matrices 2048 × 8192.
LINEARS = 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192)
MIXTRAL = load_model_facts("mixtral-8x7b", allow_download=False)
GPT_OSS = load_model_facts("openai/gpt-oss-20b", allow_download=False)
A100 = Machine(find_gpu("A100-80GB"), num_gpus=8, host_bandwidth=1e11, nvme_bytes_per_second=5e9)
LORA = TrainingSetup(method="lora")


def sharing(strategy: str, gpus: int = 8, **changes: object) -> TrainingSetup:
    return TrainingSetup(parallel=ParallelSetup(strategy, gpus), **changes)  # type: ignore[arg-type]


# ── Adapters ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_adapters_of_experts_are_those_that_peft_makes() -> None:
    """r = 16 on hidden size 4096: attention of 4096 and 1024, a router of 8, and eight experts whose fused gate and up
    projection matches two names and therefore has twice the rank."""
    attention = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    router, fused, down = 16 * (4096 + 8), 32 * (4096 + 28672), 16 * (14336 + 4096)
    assert trained_params(MIXTRAL, LORA) == 32 * (attention + router + 8 * (fused + down))
    # A token passes through two of the eight experts; a multiply-add counts as two FLOPs.
    flops = hardware_flops_per_token(MIXTRAL, LORA)
    assert flops.adapters == 2 * 32 * (attention + router + 2 * (fused + down))
    ranks = {item.name: adapter_rank(item, LORA.lora) for item in MIXTRAL.layers[0].linears}
    assert (ranks["q_proj"], ranks["gate_up_proj"], ranks["down_proj"]) == (16, 32, 16)
    queries = replace(LORA, lora=LoraSetup(8, ("q_proj",)))
    assert trained_params(MIXTRAL, queries) == 32 * 8 * (4096 + 4096)


def test_where_peft_reaches_no_expert_the_step_sends_and_computes_none() -> None:
    """gpt-oss: 24 layers, 64 heads of 64 on hidden size 2880, 8 key heads."""
    attention = 24 * 16 * (2 * (2880 + 4096) + 2 * (2880 + 512))
    assert trained_params(GPT_OSS, LORA) == attention == 7_962_624
    assert hardware_flops_per_token(GPT_OSS, LORA).adapters == 2 * attention
    (sent,) = step_collectives(GPT_OSS, sharing("ddp", method="lora"))
    assert sent.num_bytes == 4 * attention


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B", "openai-community/gpt2", "facebook/opt-350m"]
)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_time_and_memory_count_the_same_weights(name: str, method: str) -> None:
    facts = load_model_facts(name, allow_download=False)
    setup = TrainingSetup(method=method)
    groups = parameter_groups(facts, setup)
    assert trained_params(facts, setup) == groups.trainable
    assert groups.quantised == (quantised_weights(facts) if method == "qlora" else 0)
    expected = 2 * groups.trainable if method == "full" else 2 * (groups.trainable + facts.num_params)
    if method != "qlora":
        assert gathered_weight_bytes(facts, setup) == expected


def test_a_head_and_an_embedding_that_are_tied_are_trained_whole_as_two_copies() -> None:
    table = 128256 * 2048
    for names, copies in (((), 0), (("lm_head",), 1), (("embed_tokens", "lm_head"), 2), (("lm_head", "lm_head"), 1)):
        setup = replace(LORA, lora=LoraSetup(16, ("q_proj",), full_modules=names))
        assert trained_params(LLAMA, setup) == 16 * 16 * (2048 + 2048) + copies * table
    # The head's weight then has a gradient: 2 more FLOPs for each of its weights.
    whole = replace(LORA, lora=LoraSetup(full_modules=("lm_head",)))
    more = hardware_flops_per_token(LLAMA, whole).backward - hardware_flops_per_token(LLAMA, LORA).backward
    assert more == 2 * table
    # With all weights trained, settings for adapters change nothing.
    full = TrainingSetup()
    assert hardware_flops_per_token(LLAMA, replace(full, lora=whole.lora)) == hardware_flops_per_token(LLAMA, full)
    assert trained_params(LLAMA, replace(full, lora=whole.lora)) == N


def test_dora_learns_a_magnitude_for_each_output() -> None:
    dora = replace(LORA, lora=LoraSetup(16, ("q_proj", "k_proj"), dora=True))
    assert trained_params(LLAMA, dora) == 16 * (16 * (4096 + 2560) + 2048 + 512)


# ── Quantised bases ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_quantised_base_travels_in_four_bits_and_is_shared_in_them() -> None:
    setup = sharing("fsdp2", method="qlora")
    trained, rest = trained_params(LLAMA, setup), N - LINEARS
    assert quantised_weights(LLAMA) == LINEARS
    # 4.127 bits for each weight of the linear layers; embedding and norms in 16 bits.
    assert gathered_weight_bytes(LLAMA, setup) == pytest.approx(LINEARS * 4.127 / 8 + 2 * (rest + trained))
    kept = state_bytes(LLAMA, setup)
    assert kept.weight_bytes == pytest.approx((4 * trained + LINEARS * NF4_DOUBLE_BYTES + 2 * rest) / 8)
    moved = transfers(LLAMA, setup)
    layer = LLAMA.layer_params / 16
    assert moved.gathered_bytes == pytest.approx(2 * layer * NF4_DOUBLE_BYTES + 2 * (N - LLAMA.layer_params))
    assert moved.first_gathered_bytes == pytest.approx(layer * NF4_DOUBLE_BYTES + 2 * (N - LLAMA.layer_params))


def test_dequantising_reads_four_bits_and_writes_and_reads_sixteen() -> None:
    """4.6 B for each quantised weight and pass: forward, backward, and once more if layers are recomputed."""
    for policy, passes in (("none", 2), ("full", 3), ("every_2", 2.5)):
        times = [
            micro_batch_time(LLAMA, TrainingSetup(method=method, checkpointing=policy), A100.gpu).memory_seconds
            for method in ("lora", "qlora")
        ]
        added = 4.6 * LINEARS * passes / (0.8 * A100.gpu.bandwidth())
        assert times[1] - times[0] == pytest.approx(added, rel=1e-9)


# ── A step's parts ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_kernels_that_the_host_launches() -> None:
    """51 per layer, 14 more under autocast, 7 per adapter, 6 per dequantised matrix, at 14 µs; passes by policy."""
    query = {"method": "lora", "lora": LoraSetup(4, ("q_proj",))}
    for changes, kernels, passes, compiled_passes in (
        ({"checkpointing": "none"}, 65, 3, 3),
        ({"checkpointing": "none", "precision": "bf16_true"}, 51, 3, 3),
        ({"checkpointing": "none", "fused": ("RMSNorm", "RoPE", "SwiGLU")}, 65 - 14 - 11 - 1, 3, 3),
        ({"checkpointing": "full"}, 65, 6.7, 4),
        ({"checkpointing": "every_2"}, 65, 4.85, 3.5),
        ({"checkpointing": "selective"}, 65, 11.7, 4),
        ({"checkpointing": "none", "method": "lora"}, 65 + 7 * 7, 3, 3),
        ({"checkpointing": "none", "method": "qlora"}, 65 + 7 * 7 + 7 * 6, 3, 3),
        ({"checkpointing": "none", **query}, 65 + 7, 3, 3),
    ):
        setup = TrainingSetup(**changes)  # type: ignore[arg-type]
        found = micro_batch_time(LLAMA, setup, A100.gpu)
        assert found.launch_seconds == pytest.approx(16 * kernels * 14e-6 * passes), changes
        compiled = micro_batch_time(LLAMA, replace(setup, compile=True), A100.gpu)
        assert compiled.launch_seconds == pytest.approx(0.3 * 16 * kernels * 14e-6 * compiled_passes), changes
    hooks = micro_batch_time(LLAMA, sharing("zero3", checkpointing="none"), A100.gpu)
    assert hooks.launch_seconds == pytest.approx(16 * (65 * 14e-6 * 3 + 10e-3))
    staged = replace(TrainingSetup(checkpointing="none"), parallel=ParallelSetup(num_gpus=4, pipeline_parallel=4))
    assert micro_batch_time(LLAMA, staged, A100.gpu).launch_seconds == pytest.approx(4 * 65 * 14e-6 * 3)


def test_a_reference_models_forward_pass_is_one_pass_more() -> None:
    for policy, passes, host in (("none", 3, 3), ("full", 4, 6.7), ("every_2", 3.5, 4.85)):
        setup = TrainingSetup(checkpointing=policy)
        one, two = (micro_batch_time(LLAMA, replace(setup, reference_model=own), A100.gpu) for own in (False, True))
        for name, of in (("matmul_seconds", passes), ("memory_seconds", passes), ("launch_seconds", host)):
            assert getattr(two, name) == pytest.approx((1 + 1 / of) * getattr(one, name))


def test_gpu_and_host_wait_for_each_other_where_they_are_close() -> None:
    found = micro_batch_time(LLAMA, TrainingSetup(), A100.gpu)
    gpu = found.matmul_seconds + found.memory_seconds
    assert replace(found, launch_seconds=0.0).seconds == pytest.approx(gpu)
    assert replace(found, launch_seconds=gpu).seconds == pytest.approx(gpu * 2**0.25)
    assert replace(found, matmul_seconds=0.0, memory_seconds=0.0).seconds == pytest.approx(found.launch_seconds)


@pytest.mark.parametrize(
    ("card", "products", "attention"),
    [
        ("A100-80GB", 0.75, 0.43), ("H100", 0.62, 0.26), ("B200", 0.5, 0.26), ("MI300X", 0.28, 0.43),
        # Power to spare and half as many products per fp32 unit: near the peak for both.
        ("RTX 4090", 0.96, 0.86), ("RTX 5090", 0.97, 0.86), ("H20", 0.96, 0.80),
        # Little power for their peak.
        ("T4", 0.25, 0.22), ("RTX 2080 Ti", 0.75, 0.63),
        ("L4", 0.58, 0.51), ("L40S", 0.68, 0.58), ("V100 32GB", 0.75, 0.55), ("GH200", 0.62, 0.26),
    ],
)  # fmt: skip
def test_shares_of_the_peak(card: str, products: float, attention: float) -> None:
    gpu = find_gpu(card)
    assert EFFICIENCY.matmul_fraction(gpu) == pytest.approx(products, abs=0.005)
    assert EFFICIENCY.attention_share(gpu) == pytest.approx(attention, abs=0.005)


def test_cards_of_unknown_power_have_their_architectures_share() -> None:
    """0.75 × (700 W / 989.4 TFLOP/s over 400 / 312) ^ ⅓, and the fitted constants if watts or peaks are unknown."""
    h100 = find_gpu("H100 SXM")
    assert EFFICIENCY.matmul_fraction(h100) == pytest.approx(0.75 * (700 / 989.4 / (400 / 312)) ** (1 / 3))
    assert EFFICIENCY.matmul_fraction(replace(h100, watts=None)) == 0.62
    unknown = replace(h100, watts=None, peak_flops=None, compute_capability=None)
    assert (EFFICIENCY.matmul_fraction(unknown), EFFICIENCY.attention_share(unknown)) == (0.75, 0.43)


def test_traffic_of_a_layer_is_its_kernels() -> None:
    """Llama: two RMS norms of six kernels, two additions, RoPE on 40 heads of 64, SwiGLU; GPT-2 has other kernels."""
    layer, hidden, width = LLAMA.layers[0], 2048, LLAMA.intermediate_size
    plain = TrainingSetup(precision="bf16_true", loss="full")
    rotated = 64 * (LLAMA.num_heads + LLAMA.num_kv_heads)
    attention = 4 * LLAMA.num_heads * 64
    assert layer_traffic(LLAMA, layer, plain) == 84 * hidden + 20 * rotated + attention + 10 * width
    assert layer_traffic(LLAMA, layer, replace(plain, compile=True)) == 16 * hidden + 4 * rotated + 6 * width
    gpt2 = load_model_facts("openai-community/gpt2")
    layer, hidden = gpt2.layers[0], gpt2.hidden_size
    assert layer_traffic(gpt2, layer, plain) == (2 * 4 + 12 + 4) * hidden + 36 * 4 * hidden
    assert layer_traffic(gpt2, layer, TrainingSetup()) == (2 * 20 + 12 + 4) * hidden + 36 * 4 * hidden
    fused = replace(gpt2, activation="gelu")
    assert layer_traffic(fused, layer, plain) == (2 * 4 + 12 + 4) * hidden + 4 * 4 * hidden


def test_what_is_not_recomputed_takes_no_time() -> None:
    shares = {"none": 0, "selective": 0, "full": 1, "offload": 1, "attention": 1 / 3, "mlp": 2 / 3, "every_1": 1,
              "every_2": 1 / 2, "every_10": 1 / 10, "segments": 1, "segments_4": 1}  # fmt: skip
    assert {policy: recomputed_fraction(policy) for policy in shares} == pytest.approx(shares)
    for policy in ("every_0", "every_", "some", "every_2 ", "segments_0"):
        with pytest.raises(ConfigError, match="not a checkpointing policy"):
            recomputed_fraction(policy)


def test_deepspeed_has_its_buckets_on_one_card_too() -> None:
    for name in ("zero1", "zero2", "zero3"):
        assert transfers(LLAMA, sharing(name, 1)).bucket_bytes == 2 * 2 * 5e8
    assert transfers(LLAMA, sharing("fsdp2", 1)).gathered_bytes == 0
    few = replace(sharing("zero3", 1, method="lora"), lora=LoraSetup(4, ("q_proj",)))
    assert transfers(LLAMA, few).bucket_bytes == 2 * 5e8
    assert transfers(LLAMA, few).last_bucket_bytes == 2 * 5e8 + 2 * 16 * 4 * (2048 + 2048)


def test_on_the_processor_nothing_is_added_to_tensors() -> None:
    setup = TrainingSetup(checkpointing="none", sequence_length=256)
    card, processor = (predict_memory(LLAMA, setup, is_cuda=is_cuda) for is_cuda in (True, False))
    assert processor.device_bytes == processor.reserved_bytes == processor.peak_bytes
    parts = dict(processor.peak_phase.terms)
    states = sum(parts.get(name, 0.0) for name in ("weights", "optimizer states", "gradients"))
    margin = 0.04 * states + 0.25 * (processor.peak_bytes - states)
    assert processor.high_bytes == pytest.approx(processor.peak_bytes + margin)
    assert processor.low_bytes == pytest.approx(processor.peak_bytes - margin)
    assert card.device_bytes > card.reserved_bytes > card.peak_bytes
    watched = predict_memory(LLAMA, setup, is_cuda=False, is_tracked=True)
    # The tied head's and embedding's gradients are added out of place, which takes one more fp32 copy.
    more = watched.step.backward_bottom_bytes - processor.step.backward_bottom_bytes
    assert more == pytest.approx(4 * LLAMA.embedding_params, rel=0.01)


def test_inputs_of_layers_in_host_memory() -> None:
    """16 inputs of 2 × 1000 tokens with 2048 values; a GPU's pinned blocks are powers of two."""
    setup = TrainingSetup(checkpointing="offload", micro_batch_size=2, sequence_length=1000)
    block = 2 * 1000 * 2048 * 4
    for is_cuda, size in ((True, 2**24), (False, block)):
        found = predict_memory(LLAMA, setup, is_cuda=is_cuda)
        assert found.host_bytes == max(4 * N, 16 * size)
    lora = replace(setup, method="lora", parallel=ParallelSetup("fsdp2", 2, offload_params="cpu"))
    states = state_bytes(LLAMA, lora).host_bytes
    assert predict_memory(LLAMA, lora).host_bytes == 16 * 2**23 + states, "frozen weights' inputs have 16 bits"
    shared = replace(setup, parallel=ParallelSetup("fsdp2", 2, sequence_parallel=2, offload_params="cpu"))
    # FSDP2 casts to 16 bits, and each rank has half the tokens.
    assert predict_memory(LLAMA, shared).host_bytes == 16 * 2**22 + state_bytes(LLAMA, shared).host_bytes


def test_kinds_of_attention_take_turns_and_dense_layers_come_before_experts() -> None:
    """Four layers with a window and two without: at 1/8, 3/8, 5/8, 7/8 and at 1/4, 3/4 of the depth."""
    layer = LLAMA.layers[0]
    turns = replace(LLAMA, layers=(replace(layer, count=4, sliding_window=64), replace(layer, count=2)))
    assert stage_layers(turns, 1024, 6) == ((0,), (1,), (0,), (0,), (1,), (0,))
    mixture = MIXTRAL.layers[0]
    dense = replace(MIXTRAL, layers=(replace(layer, count=2), replace(mixture, count=4)))
    assert stage_layers(dense, 1024, 6) == ((0,), (0,), (1,), (1,), (1,), (1,))


def test_answers_are_written_beside_their_keys_and_values() -> None:
    """8 answers of 448 tokens to prompts of 64: 16 layers, 8 key heads of 64, keys and values in 16 bits."""
    setup = replace(sharing("zero3", 8, method="lora"), generation=GenerationSetup(8, 64, 448))
    phases = {phase.name: dict(phase.terms) for phase in predict_memory(LLAMA, setup).phases}
    writing = phases["generation"]
    assert writing["key-value cache"] == pytest.approx(8 * (64 + 448) * 16 * 2 * 8 * 64 * 2, rel=0.01)
    # During generation, TRL gathers the weights held by the other seven GPUs.
    assert writing["gathered weights"] == pytest.approx(2 * N - writing["weights"])
    assert "generation" not in {phase.name for phase in predict_memory(LLAMA, sharing("zero3", 8)).phases}


def test_vllm_holds_its_share_of_the_card_beside_the_training() -> None:
    """20 GB: always, or only during generation if it sleeps; nothing if it is a server elsewhere."""
    setup = replace(sharing("zero3", 8), generation=GenerationSetup(8, 64, 448))
    alone = predict_memory(LLAMA, setup)
    held, asleep, server = (
        predict_memory(LLAMA, replace(setup, vllm=found))
        for found in (VllmSetup(2e10), VllmSetup(2e10, sleeps=True), VllmSetup())
    )
    plain, beside = ({p.name: p.total_bytes for p in found.phases} for found in (alone, held))
    assert {name: beside[name] - plain[name] for name in plain if name != "generation"} == {
        name: 0 if name == "load" else 2e10 for name in plain if name != "generation"
    }
    writing = {p.name: dict(p.terms) for p in held.phases}["generation"]
    assert "key-value cache" not in writing, "it lies in vLLM's share"
    assert writing["gathered weights"] == LLAMA.vocab_size * LLAMA.hidden_size * 4, "one parameter after the other"
    assert asleep.peak_phase.name == "generation"
    assert asleep.peak_bytes == held.phases[-1].total_bytes < held.peak_bytes
    assert server.peak_bytes == pytest.approx(held.peak_bytes - 2e10, rel=1e-9)
    merged = predict_memory(LLAMA, replace(setup, method="lora", vllm=VllmSetup(2e10)))
    terms = dict(merged.phases[-1].terms)
    assert terms["gathered weights"] == pytest.approx(2 * N - terms["weights"]), "adapters are merged into all of them"


def test_layers_are_walked_once_for_all_settings_that_leave_their_tensors_alone() -> None:
    """The search asks for hundreds of such settings."""
    setup = TrainingSetup(micro_batch_size=3, sequence_length=333)
    predict_memory(LLAMA, setup)
    walked = _walk.cache_info().misses
    for changes in ({"accumulation": 8}, {"optimizer": "sgd"}, {"parallel": ParallelSetup("ddp", 8)}):
        predict_memory(LLAMA, replace(setup, **changes))
    assert _walk.cache_info().misses == walked
    predict_memory(LLAMA, replace(setup, parallel=ParallelSetup("fsdp2", 8)))  # casts the layers' inputs
    assert _walk.cache_info().misses > walked


# ── What is asked of a plan ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_budget_is_of_something_and_at_a_price() -> None:
    found = predict_time(LLAMA, TrainingSetup(), A100)
    for tokens, price, place in ((0, None, "--tokens"), (-1.0, 1.0, "--tokens"), (1e9, 0.0, "--price_per_gpu_hour")):
        with pytest.raises(ConfigError) as refused:
            found.budget(tokens, price_per_gpu_hour=price)
        assert refused.value.place == place


def test_a_loader_is_waited_for_only_where_it_is_the_slower_one() -> None:
    setup = TrainingSetup(micro_batch_size=2, sequence_length=512, accumulation=3)
    plain = predict_time(LLAMA, setup, A100)
    enough = 2 * 512 * 3 / plain.step_seconds
    assert predict_time(LLAMA, setup, A100, loader_tokens_per_second=1.01 * enough).data_seconds == 0
    half = predict_time(LLAMA, setup, A100, loader_tokens_per_second=enough / 2)
    assert half.data_seconds == pytest.approx(plain.step_seconds)
    assert half.step_seconds == pytest.approx(2 * plain.step_seconds)
    assert (half.mfu, half.hfu) == pytest.approx((plain.mfu / 2, plain.hfu / 2))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 3, 8]), st.sampled_from([128, 1000, 4096]), st.sampled_from(["full", "lora", "qlora"]))
@example(1, 1, "full")
def test_rows_cost_what_their_tokens_cost(rows: int, length: int, method: str) -> None:
    """Matrix products and logits grow with the rows of a micro-batch; the cost of the weights does not."""
    setup = TrainingSetup(method=method, sequence_length=length, micro_batch_size=1)
    one, many, twice = (
        micro_batch_time(LLAMA, replace(setup, micro_batch_size=count), A100.gpu) for count in (1, rows, 2 * rows)
    )
    assert many.matmul_seconds == pytest.approx(rows * one.matmul_seconds)
    assert twice.matmul_seconds == pytest.approx(2 * many.matmul_seconds)
    per_row = (twice.memory_seconds - many.memory_seconds) / rows
    assert many.memory_seconds - rows * per_row == pytest.approx(one.memory_seconds - per_row)
    assert one.launch_seconds == many.launch_seconds == twice.launch_seconds


@pytest.mark.parametrize(
    ("changes", "place", "says"),
    [
        ({"method": "adapters"}, "method", "lora"), ({"precision": "int4"}, "precision", "bf16_true"),
        ({"attention": "sdpa_packed"}, "attention", "flash_attention_2"), ({"loss": "half"}, "loss", "chunked"),
        ({"fused": ("RMSNorm", "Embedding")}, "fused", "SwiGLU"), ({"micro_batch_size": 0}, "micro_batch_size", "pos"),
        ({"sequence_length": -1}, "sequence_length", "positive"), ({"accumulation": float("nan")}, "acc", "positive"),
        ({"accumulation": float("inf")}, "acc", "positive"), ({"micro_batch_size": "2"}, "micro", "positive"),
        ({"lora": LoraSetup(0)}, "lora rank", "positive"),
        ({"parallel": {"strategy": "multi_cpu"}}, "strategy", "zero3"),
        ({"parallel": {"offload_optimizer": "disk"}}, "offload_optimizer", "nvme"),
        ({"parallel": {"offload_params": "disk"}}, "offload_params", "nvme"),
        ({"parallel": {"pipeline_schedule": "2f2b"}}, "pipeline_schedule", "1f1b"),
        ({"parallel": {"num_gpus": 0}}, "num_gpus", "positive"),
        ({"parallel": {"gpus_per_node": 0}}, "gpus_per_node", "positive"),
        ({"parallel": {"num_replicas": 0}}, "num_replicas", "positive"),
        ({"parallel": {"stages_per_rank": 0}}, "stages_per_rank", "positive"),
        ({"parallel": {"tensor_parallel": 0}}, "tensor_parallel", "positive"),
        ({"parallel": {"pipeline_parallel": -2}}, "pipeline_parallel", "positive"),
        ({"parallel": {"sequence_parallel": 0}}, "sequence_parallel", "positive"),
    ],
)  # fmt: skip
def test_settings_that_do_not_exist_are_refused_with_those_that_do(changes: dict, place: str, says: str) -> None:
    parallel = ParallelSetup(**changes.pop("parallel", {}))
    with pytest.raises(ConfigError) as refused:
        TrainingSetup(parallel=parallel, **changes)
    assert refused.value.place.startswith(place)
    assert says in refused.value.fix


def test_policies_and_their_periods() -> None:
    for policy, period in (("full", 1), ("every_1", 1), ("every_12", 12), ("mlp", 1), ("offload", 1),
                           ("segments_3", 3)):  # fmt: skip
        setup = TrainingSetup(checkpointing=policy)
        check_policy(setup)
        assert period_of(setup) == period
    for policy in ("every_0", "every_", "every_2x", "some", "", "segments_", "every"):
        with pytest.raises(ConfigError, match="not a checkpointing policy") as refused:
            check_policy(TrainingSetup(checkpointing=policy))
        assert refused.value.place == "checkpointing"


def test_what_each_optimizer_needs_and_can() -> None:
    def those(condition: Callable[[OptimizerSpec], object]) -> set[str]:
        return {name for name, spec in OPTIMIZERS.items() if condition(spec)}

    assert those(lambda spec: spec.in_torch) == {
        "adamw_torch_fused", "adamw_torch", "adamw_torch_foreach", "sgd", "sgd_momentum", "adagrad", "rmsprop",
    }  # fmt: skip
    assert those(lambda spec: spec.shares_weights) == {"adamw_torch_fused", "adamw_torch"}
    assert those(lambda spec: spec.compiles) == {"adamw_torch_8bit", "adamw_torch_4bit"}
    assert those(lambda spec: not spec.whole_checkpoints) == {"adamw_torch_8bit"}
    assert {name: OPTIMIZERS[name].compilers for name in those(lambda spec: spec.compilers)} == {
        "deepspeed_cpu_adam": ("g++", "ninja"),
    }  # fmt: skip
    assert those(lambda spec: spec.steps_in_backward) == set()
    assert those(lambda spec: spec.block_size != 256) == set()
    assert those(lambda spec: spec.package == "torchao") == {
        "adamw_torch_8bit", "adamw_torch_4bit", "adamw_cpu_offload",
    }  # fmt: skip
    backward = {name for name in OPTIMIZER_NAMES if steps_in_backward(name)}
    assert backward == {
        "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
        "apollo_adamw_layerwise", "lomo", "adalomo",
    }  # fmt: skip
    assert not steps_in_backward("of a script's own")
    assert state_bytes_per_parameter("galore_adamw") is None
    assert state_bytes_per_parameter("sgd_momentum") == 4
    assert state_bytes_per_parameter("lion_8bit", weight_bytes=2) == 1 + 4 / 256
    with pytest.raises(ConfigError, match="'adamw' is not an optimizer"):
        optimizer_spec("adamw")
    options = {**OPTIMIZERS["ademamix"].options, **OPTIMIZERS["sgd"].options}
    assert [options[name]("3") for name in ("t_alpha", "beta3", "momentum")] == [3, 3.0, 3.0]
    assert isinstance(options["t_alpha"]("3"), int)
    assert [options["nesterov"](text) for text in ("True", "1", "yes", "false", "0", "NO")] == [True] * 3 + [False] * 3
    with pytest.raises(ValueError, match="perhaps"):
        options["nesterov"]("perhaps")


def test_degrees_and_replicas_divide_the_cards() -> None:
    for changes, says in (
        ({"tensor_parallel": 3}, "8 GPUs do not divide into 3 model-parallel ranks × 1 replicas"),
        ({"tensor_parallel": 2, "num_replicas": 8}, "2 model-parallel ranks × 8 replicas"),
    ):
        with pytest.raises(ConfigError, match=says):
            TrainingSetup(parallel=ParallelSetup("fsdp2", 8, **changes))
    shared = ParallelSetup("fsdp2", 64, tensor_parallel=2, pipeline_parallel=2, sequence_parallel=4, num_replicas=2)
    assert (shared.model_parallel, shared.data_parallel, shared.num_shards) == (16, 4, 8)
    assert shared.degrees == (2, 2, 4)
    assert TrainingSetup(parallel=shared, micro_batch_size=3, accumulation=5).global_batch_size == 3 * 5 * 4
    assert TrainingSetup(parallel=shared, micro_batch_size=3, sequence_length=10).tokens_per_step == 3 * 4 * 10


def test_who_divides_the_model_and_who_may_reduce_each_batch() -> None:
    for parallel, divided, each in (
        (ParallelSetup("fsdp2", 8), False, True),
        (ParallelSetup("fsdp2", 8, tensor_parallel=2), True, False),
        (ParallelSetup("fsdp2", 8, sequence_parallel=2, in_engine=True), False, True),
        (ParallelSetup("ddp", 8), False, False),
    ):
        assert (parallel.is_divided, parallel.can_sync_each_batch) == (divided, each)
    for where, offloads in (({}, False), ({"offload_optimizer": "cpu"}, True), ({"offload_params": "nvme"}, True)):
        assert ParallelSetup("zero3", 8, **where).offloads is offloads


@pytest.mark.parametrize(
    ("precision", "compute", "trained", "autocast"),
    [
        ("fp32", 4, 4, False),
        ("fp16", 2, 4, True),
        ("bf16", 2, 4, True),
        ("bf16_true", 2, 2, False),
        ("fp8", 2, 4, True),
    ],
)
def test_bytes_of_each_precision(precision: str, compute: int, trained: int, autocast: bool) -> None:
    setup = TrainingSetup(precision=precision)
    assert (setup.compute_bytes, setup.trained_bytes, setup.frozen_bytes) == (compute, trained, compute)
    assert (setup.autocast, setup.reduce_bytes) == (autocast, None)
    assert replace(setup, weight_dtype="bfloat16", frozen_dtype="float32").trained_bytes == 2
    assert replace(setup, frozen_dtype="float32").frozen_bytes == 4
    assert [replace(setup, reduce_dtype=name).reduce_bytes for name in ("fp32", "bf16")] == [4, 2]
