"""Measured steps compared with the planner's predictions for them."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.verifying.measured_memory import StorageTracker, comparison_line
from accel_scale.verifying.trial_step import StepMeasurement, TrialRun, build_trial, measure_step, one_process
from accel_scale.verifying.verify_plan import TRACED_LAYERS, pass_bytes, verify_plan


def test_tracker_counts_what_lives() -> None:
    kept = torch.zeros(1000)
    tracker = StorageTracker()
    assert tracker.adopt([kept, kept[10:]]) == 4000  # both share one storage
    with tracker:
        for _ in range(3):
            made = kept + 1
            assert tracker.live_bytes == 8000
            del made
        view = kept[:10].add_(1)  # in place, in memory that is already counted
    assert (tracker.live_bytes, tracker.peak_bytes) == (4000, 8000)
    del view


def test_line_gives_the_error_of_the_prediction() -> None:
    compared = {
        "planned_bytes": 2**30,
        "interval_bytes": 2**27,
        "positions": 2048,
        "allocated_bytes": 2**29,
        "reserved_bytes": None,
        "step_seconds": 1.0,
    }
    measured = {"allocated_bytes": 2**28, "reserved_bytes": None, "step_seconds": 1.25, "positions": 1024}
    assert comparison_line(compared, measured) == (
        "memory: predicted 1 ± 0.12 GiB, 512 MiB for 1,024 of 2,048 positions, measured 256 MiB (+100.0 %); "
        "step: predicted 1 s, measured 1.25 s (-20.0 %)"
    )
    nothing = {"allocated_bytes": None, "reserved_bytes": None, "step_seconds": None, "positions": None}
    assert comparison_line(compared, nothing) == "memory: predicted 1 ± 0.12 GiB, not measured here"


def setup_for(method: str, **changes: object) -> TrainingSetup:
    small = {"precision": "fp32", "micro_batch_size": 2, "sequence_length": 96}
    return one_process(TrainingSetup(method=method, **{**small, **changes}))  # type: ignore[arg-type]


def measured(setup: TrainingSetup, *, is_fake: bool) -> StepMeasurement:
    return measure_step(AutoConfig.from_pretrained(default_model_path()), setup, is_fake=is_fake)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_step_of_the_embedded_model_is_predicted(method: str, checkpointing: str) -> None:
    setup = setup_for(method, checkpointing=checkpointing)
    found = measured(setup, is_fake=False)
    memory = predict_memory(load_model_facts(default_model_path()), setup, is_cuda=False, is_tracked=True)
    assert found.peak_bytes == pytest.approx(memory.peak_bytes, rel=0.05)
    assert found.pass_bytes == pytest.approx(pass_bytes(memory), rel=0.05)
    assert found.weight_bytes == pytest.approx(memory.states.weight_bytes, rel=0.02)
    assert found.gradient_bytes == pytest.approx(memory.states.gradient_bytes, rel=0.01)
    assert found.optimizer_bytes == pytest.approx(memory.states.optimizer_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_a_step_without_values_measures_the_same(method: str) -> None:
    setup = setup_for(method, checkpointing="full", accumulation=2)
    real, fake = measured(setup, is_fake=False), measured(setup, is_fake=True)
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-3)
    assert fake.pass_bytes == pytest.approx(real.pass_bytes, rel=1e-3)
    # bitsandbytes repeats a table of 16 values; everything else is the same to the byte.
    assert fake.weight_bytes == pytest.approx(real.weight_bytes, rel=1e-3)
    assert (fake.gradient_bytes, fake.optimizer_bytes) == (real.gradient_bytes, real.optimizer_bytes)


@pytest.mark.slow
def test_a_plan_of_a_large_model_is_verified_without_a_gpu() -> None:
    name = "meta-llama/Llama-3.1-8B"
    setup = TrainingSetup(method="lora", attention="flash_attention_2", parallel=ParallelSetup("ddp", 2))
    found = verify_plan(name, load_model_facts(name), setup, device="cpu")
    assert f"{TRACED_LAYERS} layers" in found.what
    assert "attention sdpa" in found.what
    assert "one process" in found.what
    assert [row[0] for row in found.rows][-1] == "peak"
    for part, predicted, got in found.rows:
        assert predicted == pytest.approx(got, rel=0.05), part


@pytest.mark.parametrize("kind", ["bert", "mixtral"])
def test_a_trial_step_computes_the_models_own_loss(kind: str) -> None:
    """A head of several layers and a router's auxiliary loss are included, as in training."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    own = {
        "bert": {"is_decoder": True},
        "mixtral": {"num_key_value_heads": 2, "num_local_experts": 3, "output_router_logits": True},
    }[kind]
    config = CONFIG_MAPPING[kind](**sizes, vocab_size=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, **own)
    setup = setup_for("full")
    torch.manual_seed(0)
    run = TrialRun(build_trial(config, setup, "cpu").eval(), setup, "cpu")
    expected = run.model(input_ids=run.ids, labels=run.ids, use_cache=False).loss
    assert run.loss().item() == pytest.approx(expected.item(), abs=1e-5)


def test_what_cannot_be_verified_is_said() -> None:
    name = "mistralai/Mixtral-8x7B-v0.1"
    with pytest.raises(ConfigError, match="experts"):
        verify_plan(name, load_model_facts(name), TrainingSetup(), device="cpu")
    with pytest.raises(ConfigError, match="transformers has no 'qwen' models"):
        verify_plan("Qwen/Qwen-7B", load_model_facts("Qwen/Qwen-7B"), TrainingSetup(), device="cpu")
    with pytest.raises(ConfigError, match="one process"):
        measure_step(None, TrainingSetup(parallel=ParallelSetup("ddp", 2)))
