"""Step times: FLOPs by method, what makes a step slower or faster, and published speeds within the stated error."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Gpu, Machine, find_gpu
from accel_scale.planning.cost.efficiency import EFFICIENCY, micro_batch_time
from accel_scale.planning.cost.flops import (
    attention_flops,
    hardware_flops_per_token,
    mean_context,
    model_flops_per_token,
    trained_params,
)
from accel_scale.planning.cost.rank_share import stage_imbalance
from accel_scale.planning.cost.timing import optimizer_traffic_bytes, predict_time
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, MixtureFacts, ModelFacts
from accel_scale.planning.models.parameters import lora_params
from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

A100 = Machine(find_gpu("A100-80GB"), num_gpus=8)


def llama(
    hidden: int = 4096,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    width: int = 14336,
    vocab: int = 128256,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    fused: bool = False,
    window: int | None = None,
) -> ModelFacts:
    """A dense gated decoder; Llama-3.1-8B by default."""
    head_dim = head_dim or hidden // heads
    query, value = heads * head_dim, kv_heads * head_dim
    separate = (
        LinearFacts("q_proj", hidden, query),
        LinearFacts("k_proj", hidden, value),
        LinearFacts("v_proj", hidden, value),
    )
    inputs = (LinearFacts("c_attn", hidden, query + 2 * value),) if fused else separate
    mlp = tuple(LinearFacts(name, hidden, width) for name in ("gate_proj", "up_proj"))
    mlp += (LinearFacts("down_proj", width, hidden),)
    attention = (*inputs, LinearFacts("o_proj", query, hidden))
    return ModelFacts(
        name="llama",
        model_type="llama",
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width,
        vocab_size=vocab,
        tied_embeddings=tied,
        gated_mlp=True,
        activation="silu",
        norm="rms",
        layers=(LayerFacts(layers, attention, mlp, 2 * hidden, sliding_window=window),),
        final_norm_params=hidden,
    )


FACTS = llama()
SETUP = TrainingSetup(precision="bf16_true", micro_batch_size=2, sequence_length=4096, checkpointing="none")


def with_method(method: str, checkpointing: str) -> TrainingSetup:
    return replace(SETUP, method=method, checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("method", "checkpointing", "k"),
    [
        ("full", "none", 6),
        ("full", "full", 8),
        ("full", "offload", 8),
        ("full", "every_2", 7),
        ("full", "selective", 6),
        ("lora", "none", 4),
        ("lora", "full", 6),
        ("qlora", "full", 6),
    ],
)
def test_flops_per_weight(method: str, checkpointing: str, k: float) -> None:
    """k FLOPs for each weight of the layers, and 6 or 4 for the head's, which is never recomputed."""
    flops = hardware_flops_per_token(FACTS, with_method(method, checkpointing))
    weights = 32 * sum(linear.in_features * linear.out_features for linear in FACTS.layers[0].linears)
    without_attention = flops.total - flops.attention * (
        3 + {"none": 0, "selective": 0, "every_2": 0.5}.get(checkpointing, 1)
    )
    expected = k * weights + (6 if method == "full" else 4) * 128256 * 4096
    # Adapters of rank 16 add a few of their own.
    assert without_attention == pytest.approx(expected, rel=1e-12 if method == "full" else 0.02)
    assert without_attention >= expected * (1 - 1e-12)


def test_mfu_counts_six_per_weight_whatever_the_method() -> None:
    weights = FACTS.num_active_params
    useful = model_flops_per_token(FACTS, SETUP)
    assert useful == pytest.approx(6 * weights + 3 * attention_flops(FACTS, 4096))
    assert model_flops_per_token(FACTS, with_method("lora", "full")) == useful


def test_attention_is_the_usual_12_l_h_s() -> None:
    full = attention_flops(FACTS, 4096, scores="full")
    assert 3 * full == 12 * 32 * 4096 * 4096
    assert attention_flops(FACTS, 4096) == pytest.approx(full / 2, rel=1e-3)
    eager = hardware_flops_per_token(FACTS, replace(SETUP, attention="eager"))
    assert eager.attention == full


def test_windows_and_documents_shorten_attention() -> None:
    windowed = llama(window=1024)
    # Queries after the first 1,023 see 1,024 keys instead of up to 8,192.
    assert attention_flops(windowed, 8192) == pytest.approx(0.2344 * attention_flops(FACTS, 8192), rel=1e-3)
    assert attention_flops(windowed, 512) == attention_flops(FACTS, 512)
    assert attention_flops(FACTS, 8192, document_length=512) == attention_flops(FACTS, 512)
    assert attention_flops(FACTS, 512, document_length=8192) == attention_flops(FACTS, 512)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_mean_context_is_the_mean(length: int, window: int) -> None:
    counted = sum(min(position + 1, window) for position in range(length)) / length
    assert mean_context(length, window) == pytest.approx(counted)


def test_experts_count_only_where_a_token_passes() -> None:
    layer = FACTS.layers[0]
    experts = tuple(replace(linear, copies=8, active_copies=2) for linear in layer.mlp)
    mixture = MixtureFacts(8, 2, FACTS.intermediate_size)
    sparse = replace(FACTS, layers=(replace(layer, mlp=experts, mixture=mixture),))
    dense_linears = hardware_flops_per_token(FACTS, SETUP).linears
    mlp = 32 * 3 * 2 * 4096 * 14336
    assert hardware_flops_per_token(sparse, SETUP).linears == dense_linears + mlp


def test_trained_parameters() -> None:
    assert trained_params(FACTS, SETUP) == FACTS.num_params
    query_only = replace(SETUP, method="lora", lora=LoraSetup(rank=8, targets=("q_proj",), full_modules=("lm_head",)))
    assert trained_params(FACTS, query_only) == 32 * 8 * (4096 + 4096) + 128256 * 4096


speeds = st.floats(1.05, 8)


@settings(max_examples=25, deadline=None)
@given(speeds, st.sampled_from(["full", "lora", "qlora"]), st.sampled_from(["ddp", "fsdp2", "zero2", "zero3"]))
def test_a_faster_machine_is_never_slower(factor: float, method: str, strategy: str) -> None:
    setup = replace(SETUP, method=method, parallel=ParallelSetup(strategy=strategy, num_gpus=8))
    base = predict_time(FACTS, setup, A100).step_seconds
    gpu = A100.gpu
    peaks = {dtype: peak and peak * factor for dtype, peak in (gpu.peak_flops or {}).items()}
    for faster in (
        replace(gpu, memory_bandwidth=gpu.bandwidth() * factor),
        replace(gpu, peak_flops=peaks),
        replace(gpu, link_bytes_per_second=gpu.link_bandwidth() * factor),
    ):
        assert predict_time(FACTS, setup, replace(A100, gpu=faster)).step_seconds <= base
    assert predict_time(FACTS, setup, replace(A100, gpu=replace(gpu, peak_flops=peaks))).step_seconds < base


def test_terms_add_up_and_speeds_follow() -> None:
    parallel = ParallelSetup(strategy="fsdp2", num_gpus=8)
    setup = replace(SETUP, accumulation=4, mean_length=1024.0, parallel=parallel)
    found = predict_time(FACTS, setup, A100)
    parts = (
        found.matmul_seconds
        + found.memory_seconds
        + found.launch_wait_seconds
        + found.bubble_seconds
        + found.exposed_communication_seconds
        + found.optimizer_seconds
        + found.offload_seconds
        + found.data_seconds
    )
    assert parts == pytest.approx(found.step_seconds)
    assert (found.low_seconds, found.high_seconds) == pytest.approx(
        (0.8 * found.step_seconds, 1.3 * found.step_seconds)
    )
    # A quarter of every row is text: padding is computed but not counted.
    assert found.tokens_per_second * found.step_seconds == pytest.approx(8 * 4 * 2 * 1024)
    assert found.tokens_per_second_per_gpu == pytest.approx(found.tokens_per_second / 8)
    assert 0.45 < found.mfu < 0.65
    assert found.hfu == pytest.approx(found.mfu)


def test_what_the_field_knows_about_speed() -> None:
    def seconds(facts: ModelFacts = FACTS, **changes: Any) -> float:
        return predict_time(facts, replace(SETUP, **changes), A100).step_seconds

    base = seconds()
    for low, high, changes in (
        (1.2, 1.4, {"checkpointing": "full"}),  # ~30% more for activation checkpointing
        (1.1, 1.2, {"checkpointing": "every_2"}),
        (1.02, 1.1, {"checkpointing": "selective"}),
        (0.75, 0.95, {"compile": True}),
        (0.75, 0.9, {"method": "lora"}),
        (1.3, 2.0, {"attention": "eager"}),
        (10.0, 16.0, {"precision": "fp32"}),  # 19.5 versus 312 TFLOP/s
    ):
        assert low < seconds(**changes) / base < high, changes
    assert 1.0 < seconds(method="qlora") / seconds(method="lora") < 1.1
    eight = ParallelSetup(strategy="ddp", num_gpus=8)
    offloaded = replace(eight, strategy="zero2", offload_optimizer="cpu")
    assert 1.5 < seconds(parallel=offloaded) / seconds(parallel=replace(eight, strategy="zero2")) < 2.5


def test_ddp_scales_as_the_field_says() -> None:
    """Four GPUs are expected to be 3.6–3.9 times as fast as one."""
    one = predict_time(FACTS, SETUP, A100).tokens_per_second
    four = replace(SETUP, parallel=ParallelSetup(strategy="ddp", num_gpus=4))
    assert 3.6 <= predict_time(FACTS, four, A100).tokens_per_second / one <= 4.0


def test_pipelines_wait() -> None:
    staged = ParallelSetup(num_gpus=4, pipeline_parallel=4)
    setup = replace(SETUP, accumulation=12, parallel=staged)
    found = predict_time(FACTS, setup, A100)
    computing = found.matmul_seconds + found.memory_seconds + found.launch_wait_seconds
    slowest = stage_imbalance(FACTS, setup)  # the stage with the head, which sets the pace for all
    assert 1.03 < slowest < 1.08
    assert computing / (computing + found.bubble_seconds) == pytest.approx((1 - 3 / 15) / slowest)


def test_slow_loaders_show() -> None:
    fed = predict_time(FACTS, SETUP, A100)
    starved = predict_time(FACTS, SETUP, A100, loader_tokens_per_second=100.0)
    assert fed.data_seconds == 0
    assert starved.step_seconds == pytest.approx(2 * 4096 / 100)


def test_offloaded_gradients_come_back_for_every_micro_batch_but_the_first() -> None:
    """Four micro-batches instead of one: three more round trips, at 2 bytes for each parameter of the adapters."""
    parallel = ParallelSetup(strategy="zero2", num_gpus=1, offload_optimizer="cpu")
    once = replace(SETUP, method="lora", parallel=parallel, accumulation=1)
    adapters = lora_params(FACTS, once.lora)
    more = predict_time(FACTS, replace(once, accumulation=4), A100).offload_seconds
    more -= predict_time(FACTS, once, A100).offload_seconds
    assert more == pytest.approx(3 * 2 * 2 * adapters / A100.gpu.pcie_bandwidth())


def test_offload_says_what_it_assumes() -> None:
    parallel = ParallelSetup(strategy="zero3", num_gpus=8, offload_optimizer="cpu", offload_params="cpu")
    setup = replace(SETUP, parallel=parallel)
    found = predict_time(FACTS, setup, A100)
    assert found.optimizer_seconds == 0
    assert "host memory" in found.assumptions[0]
    known = predict_time(FACTS, setup, replace(A100, host_bandwidth=200e9))
    assert not known.assumptions
    # CPU Adam: 28 B per parameter; all ranks of a server share its memory bandwidth.
    assert found.offload_seconds - known.offload_seconds == pytest.approx(
        28 * FACTS.num_params * (1 / 100e9 - 1 / 200e9)
    )
    with pytest.raises(ConfigError, match="NVMe"):
        predict_time(FACTS, replace(setup, parallel=replace(parallel, offload_optimizer="nvme")), A100)


def test_optimizer_traffic_follows_the_states() -> None:
    fused = optimizer_traffic_bytes(SETUP)
    by_name = {
        name: optimizer_traffic_bytes(replace(SETUP, optimizer=name))
        for name in ("adamw_bnb_8bit", "sgd", "lion_32bit")
    }
    assert fused == 2 * 2 + 4 * 2 + 2 * 2 * 2
    assert by_name["adamw_bnb_8bit"] == fused - 4
    assert by_name["sgd"] == fused - 8
    assert by_name["lion_32bit"] == fused  # one state of 4 bytes; the fused AdamW has two states of 2


def test_unknown_speeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="not known"):
        predict_time(FACTS, SETUP, Machine(find_gpu("24GiB")))
    two_servers = replace(SETUP, parallel=ParallelSetup(strategy="ddp", num_gpus=16))
    with pytest.raises(ConfigError, match="network"):
        predict_time(FACTS, two_servers, replace(A100, num_gpus=16))
    with pytest.raises(ConfigError, match="machine has 8"):
        predict_time(FACTS, two_servers, A100)
    with pytest.raises(ConfigError, match="lack"):
        predict_time(FACTS, SETUP, Machine(find_gpu("T4")))


def test_budget() -> None:
    found = predict_time(FACTS, SETUP, A100)
    budget = found.budget(1e9, price_per_gpu_hour=1.5)
    assert budget.hours == pytest.approx(1e9 / found.tokens_per_second / 3600)
    assert budget.gpu_hours == budget.hours
    assert budget.price == pytest.approx(1.5 * budget.gpu_hours)
    assert budget.energy_kwh == pytest.approx(budget.gpu_hours * 0.4 * 0.9 * 1.5)
    assert found.budget(1e9).price is None
    with pytest.raises(ConfigError, match="tokens"):
        found.budget(0)


def test_power_that_is_not_known_gives_no_energy() -> None:
    gpu = replace(A100.gpu, watts=None)
    assert isinstance(gpu, Gpu)
    assert predict_time(FACTS, SETUP, replace(A100, gpu=gpu)).budget(1e9).energy_kwh is None


def published(shared_data: Path) -> list[dict[str, Any]]:
    rows = json.loads((shared_data / "memory_measurements.json").read_text())
    return [
        row
        for row in rows
        if row["grade"] in "AB" and row["seq_len"] and row["n_gpus"] == 1 and row["gpu"][:4] == "A100"
    ]


def row_facts(row: dict[str, Any], fused: bool) -> ModelFacts:
    model = row["model"]
    sizes = [model[name] for name in ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab")]
    return llama(*sizes, head_dim=model["head_dim"], tied=model["tied_embeddings"], fused=fused)


def median_error(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(abs(predicted / measured - 1) for predicted, measured in pairs)


def test_published_lora_steps_with_checkpointing(shared_data: Path) -> None:
    """Qwen's table: 1.8B to 14B, 256 to 8,192 tokens, launch-bound to compute-bound; fitted rows.

    Checkpointing was reentrant then, without hooks: a recomputed layer costs the host one forward pass.
    """
    reentrant = replace(EFFICIENCY, checkpointed_passes=1.0)
    pairs = []
    for row in published(shared_data):
        if "QwenLM" not in row["source"] or row["strategy"] != "single" or row["peft"].get("modules_to_save"):
            continue
        lora = LoraSetup(rank=64, targets=("c_attn", "o_proj", "gate_proj", "up_proj", "down_proj"))
        setup = TrainingSetup(
            method="lora",
            sequence_length=row["seq_len"],
            accumulation=row["grad_accum"],
            attention="flash_attention_2",
            loss="full",
            lora=lora,
        )
        found = predict_time(row_facts(row, True), setup, A100, efficiency=reentrant)
        pairs.append((found.step_seconds, row["step_time_s"]))
    assert len(pairs) == 18
    assert median_error(pairs) < 0.08
    assert max(abs(predicted / measured - 1) for predicted, measured in pairs) < 0.25


def test_kernels_of_a_layer_are_those_of_a_real_one() -> None:
    """Forward passes of Qwen2 layers; under LoRA, each of their linear layers has an adapter."""
    from host_passes import kernels_of_layer

    for changes, expected in (
        ({"precision": "bf16_true"}, EFFICIENCY.base_kernels),
        ({"precision": "bf16"}, EFFICIENCY.base_kernels + EFFICIENCY.autocast_kernels),
        ({"precision": "bf16", "method": "lora"}, 65 + 7 * EFFICIENCY.adapter_kernels),
    ):
        counted = kernels_of_layer(TrainingSetup(checkpointing="none", **changes))
        assert counted.equivalents == pytest.approx(expected, rel=0.07)


def test_reentrant_checkpointing_costs_the_host_one_pass() -> None:
    """Only ZeRO-3 with adapters needs it; its hooks around the layers are the same with and without adapters."""
    seconds = {}
    for method in ("full", "lora"):
        for strategy in ("fsdp2", "zero3"):
            for policy in ("none", "full"):
                setup = TrainingSetup(
                    method=method, checkpointing=policy, parallel=ParallelSetup(strategy=strategy, num_gpus=8)
                )
                seconds[method, strategy, policy] = micro_batch_time(llama(), setup, A100.gpu).launch_seconds
    for method, strategy in (("full", "fsdp2"), ("full", "zero3"), ("lora", "fsdp2"), ("lora", "zero3")):
        added = seconds[method, strategy, "full"] - seconds[method, strategy, "none"]
        forward = seconds[method, "fsdp2", "none"] / 3
        passes = 1 if (method, strategy) == ("lora", "zero3") else EFFICIENCY.checkpointed_passes
        assert added == pytest.approx(passes * forward), (method, strategy)


# Model, method, policy, rows, tokens, seconds of a step: benchmarks/results/gpu_check_h200.md.
ON_AN_H200: tuple[tuple[str, str, str, int, int, str, float], ...] = (
    ("meta-llama/Llama-3.1-8B", "qlora", "full", 4, 1024, "adamw_torch_fused", 0.571),
    ("meta-llama/Llama-3.1-8B", "qlora", "none", 1, 1024, "adamw_torch_fused", 0.253),
    ("meta-llama/Llama-3.1-8B", "lora", "full", 4, 1024, "adamw_torch_fused", 0.53),
    ("meta-llama/Llama-3.1-8B", "qlora", "full", 1, 8192, "adamw_torch_fused", 1.09),
    ("Qwen/Qwen2.5-0.5B", "full", "full", 8, 1024, "adamw_torch_fused", 0.211),
    ("Qwen/Qwen2.5-0.5B", "full", "none", 4, 1024, "adamw_torch_fused", 0.0953),
    ("Qwen/Qwen2.5-0.5B", "lora", "selective", 4, 1024, "adamw_torch_fused", 0.417),
    ("Qwen/Qwen2.5-0.5B", "full", "full", 4, 1024, "adamw_8bit", 0.171),
)


def test_steps_that_were_measured_on_an_h200() -> None:
    """In half of them the GPU waits for the host; `launch_seconds` is fitted to these."""
    machine, pairs = Machine(find_gpu("H200")), []
    for name, method, policy, rows, length, optimizer, seconds in ON_AN_H200:
        setup = TrainingSetup(
            method=method,
            checkpointing=policy,
            micro_batch_size=rows,
            sequence_length=length,
            packing=False,
            optimizer=optimizer,
        )
        facts = load_model_facts(name, allow_download=False)
        pairs.append((predict_time(facts, setup, machine).step_seconds, seconds))
    assert median_error(pairs) < 0.16
    assert max(abs(predicted / measured - 1) for predicted, measured in pairs) < 0.26


def test_published_full_steps_by_flag(shared_data: Path) -> None:
    """torchtune's ladder on Llama-3.2-3B: eager, compiled, chunked loss, checkpointing, 8-bit Adam; fitted rows."""
    pairs = {}
    for row in published(shared_data):
        if "ladder" not in row["source"] or row["peft"]:
            continue
        kept = "offload" if "offload" in row["checkpointing"] else row["checkpointing"]
        setup = replace(
            SETUP,
            checkpointing=kept,
            compile=row["torch_compile"],
            loss="chunked" if "chunk" in row["loss"] else "full",
            optimizer="adamw_bnb_8bit" if "8bit" in row["optimizer"] else "adamw_torch_fused",
        )
        predicted = predict_time(row_facts(row, False), setup, A100).tokens_per_second
        pairs[row["id"]] = (predicted, row["tokens_per_s"])
    assert len(pairs) == 7
    assert median_error(list(pairs.values())) < 0.06
    # Every flag changes the time in the direction that was measured.
    assert pairs[55][0] < pairs[56][0]
    assert pairs[57][0] > pairs[58][0] > pairs[61][0] * 0.98
