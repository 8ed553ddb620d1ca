"""Ring volumes, traffic per strategy, and the reference tables built from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.planning.cost.communication import collective_seconds, step_collectives
from accel_scale.planning.cost.flops import trained_params
from accel_scale.planning.laws.reference_tables import reference_tables
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts, ModelFacts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup


def llama_2_7b() -> ModelFacts:
    hidden, width = 4096, 11008
    attention = tuple(LinearFacts(name, hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    mlp = (
        LinearFacts("gate_proj", hidden, width),
        LinearFacts("up_proj", hidden, width),
        LinearFacts("down_proj", width, hidden),
    )
    return ModelFacts(
        name="llama-2-7b",
        model_type="llama",
        hidden_size=hidden,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=width,
        vocab_size=32000,
        tied_embeddings=False,
        gated_mlp=True,
        activation="silu",
        norm="rms",
        layers=(LayerFacts(32, attention, mlp, 2 * hidden),),
        final_norm_params=hidden,
    )


FACTS = llama_2_7b()


def setup(
    strategy: str, gpus: int = 8, accumulation: int = 1, method: str = "full", **parallel: object
) -> TrainingSetup:
    sharing = ParallelSetup(strategy=strategy, num_gpus=gpus, **parallel)  # type: ignore[arg-type]
    return TrainingSetup(method=method, precision="bf16_true", accumulation=accumulation, parallel=sharing)


def bytes_sent(chosen: TrainingSetup) -> float:
    return sum(entry.bytes_per_rank for entry in step_collectives(FACTS, chosen))


def test_volumes_per_strategy() -> None:
    """DDP, ZeRO-1/2: two passes of N per step. ZeRO-3: three per micro-batch; FSDP: the third only once by default."""
    one_pass = 2 * FACTS.num_params * 7 / 8
    for strategy in ("ddp", "zero1", "zero2"):
        assert bytes_sent(setup(strategy)) == pytest.approx(2 * one_pass)
    for strategy in ("fsdp1", "fsdp2", "zero3"):
        assert bytes_sent(setup(strategy)) == pytest.approx(3 * one_pass)
        passes = 12 if strategy == "zero3" else 9
        assert bytes_sent(setup(strategy, accumulation=4)) == pytest.approx(passes * one_pass)
    each = replace(setup("fsdp2", accumulation=4), sync_each_batch=True)
    assert bytes_sent(each) == pytest.approx(12 * one_pass)
    assert bytes_sent(setup("fsdp2", reshard_after_forward=False)) == pytest.approx(2 * one_pass)
    assert bytes_sent(setup("ddp", accumulation=4)) == pytest.approx(2 * one_pass)
    assert bytes_sent(setup("zero2", accumulation=4)) == pytest.approx(5 * one_pass)
    assert bytes_sent(setup("single", gpus=1)) == 0


def test_a_frozen_base_is_gathered_twice_and_has_no_gradients() -> None:
    lora = setup("fsdp2", method="lora")
    trained = trained_params(FACTS, lora)
    assert trained == 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    expected = (2 * (FACTS.num_params + trained) + trained) * 2 * 7 / 8
    assert bytes_sent(lora) == pytest.approx(expected)
    assert bytes_sent(setup("ddp", method="lora")) < 0.02 * bytes_sent(setup("ddp"))
    assert bytes_sent(setup("fsdp2", method="qlora")) < 0.4 * bytes_sent(lora)


def test_hybrid_sharding_keeps_gathers_inside_a_server() -> None:
    machine = Machine(find_gpu("H100"), num_gpus=32, internode_bytes_per_second=50e9)

    def seconds(chosen: TrainingSetup) -> float:
        return sum(collective_seconds(entry, machine) for entry in step_collectives(FACTS, chosen))

    assert seconds(setup("fsdp2", 32, num_replicas=4)) < 0.75 * seconds(setup("fsdp2", 32))


def test_between_servers_the_network_is_what_counts() -> None:
    slow = Machine(find_gpu("H100"), num_gpus=16, internode_bytes_per_second=1.25e9)
    gradients = step_collectives(FACTS, setup("ddp", 16))[0]
    seconds = collective_seconds(gradients, slow)
    # 2(n−1)/n × K over a server's 10 Gbit/s at 80%, with n = 2 servers.
    assert seconds == pytest.approx(2 * FACTS.num_params / 1e9, rel=0.05)
    fast = replace(slow, internode_bytes_per_second=400e9)
    assert collective_seconds(gradients, fast) < seconds / 50


def test_model_parallel_traffic() -> None:
    tensor = setup("single", 4, tensor_parallel=4)
    (entry,) = step_collectives(FACTS, tensor)
    assert entry.count == 2 * 32 * 3  # two all-reduces per layer in forward, backward and recomputation
    assert entry.num_bytes == 1024 * 4096 * 2
    assert not entry.overlaps
    (ulysses,) = step_collectives(FACTS, setup("single", 4, sequence_parallel=4, accumulation=1))[-1:]
    assert ulysses.kind == "all_to_all"
    stages = step_collectives(FACTS, setup("single", 4, pipeline_parallel=4, accumulation=8))
    assert [entry.kind for entry in stages] == ["point_to_point"]


def test_all_reduce_table() -> None:
    rows = {row[0]: row[1:] for row in reference_tables()["all_reduce"]}
    assert rows[8] == (14, 1.75)
    assert rows[64] == (126, pytest.approx(2 * 63 / 64))


def test_link_table() -> None:
    table = reference_tables()["links"]
    rows = {row[0]: row[1:] for row in table}
    assert rows["PCIe 4.0 x16"] == (256, 512)
    assert rows["PCIe 5.0 x16"] == (512, 1024)
    assert rows["NVLink A100"][1] == 4800
    assert rows["NVLink H100"][1] == 7200
    assert "128 and 256 each way" in table.note


def test_memory_tables() -> None:
    tables = reference_tables()
    assert [row[-1] for row in tables["bytes_per_parameter"]] == [16, 16]
    assert tables["bytes_per_parameter"].rows[0][1:] == (4, 4, 0, 8, 16)
    assert tables["bytes_per_parameter"].rows[1][1:] == (2, 2, 4, 8, 16)
    assert dict(tables["memory_1b"].rows)["total"] == "18–24"
    seven = {row[0]: row[1:] for row in tables["memory_7b"]}
    assert seven["weights"] == (28, 14)
    assert seven["gradients"] == (28, 14)
    assert seven["master weights"] == (0, 28)
    assert seven["Adam states"] == (56, 56)
    assert seven["states"] == (112, 112)
    assert seven["total"][1] == "122–132"
    assert "102–122" in tables["memory_7b"].note


def test_zero_paper() -> None:
    gigabytes = [round(float(row[1]), 1) for row in reference_tables()["zero"]]
    assert gigabytes == [120, 31.4, 16.6, 1.9]


def test_precision_table() -> None:
    largest = {row[0]: row[3] for row in reference_tables()["precisions"]}
    assert largest["fp16"] == 65504
    assert largest["fp8 E4M3"] == 448
    assert largest["bf16"] == pytest.approx(3.39e38, rel=1e-3)
