"""Settings of a config that change a family's layers: they are modelled by hand, or the class is traced."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.api import plan
from accel_scale.planning.traced.steps import step_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

SIZES = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRACED = {
    "OPT with norms after its blocks": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 64}),
    "StableLM with norms of heads": ("stablelm", {"qk_layernorm": True}),
    "GPT-2 with scores in fp32": ("gpt2", {"reorder_and_upcast_attn": True, "attn_pdrop": 0.0, "resid_pdrop": 0.0}),
    "BLOOM with residuals after norms": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "Llama with quick GELU": ("llama", {"hidden_act": "quick_gelu"}),
    "BERT that decodes": ("bert", {"is_decoder": True, "hidden_dropout_prob": 0.0}),
    "BERT": ("bert", {"attention_probs_dropout_prob": 0.0}),
}
SETUP = TrainingSetup(precision="fp32", checkpointing="none", packing=False, micro_batch_size=2, sequence_length=96)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_a_variant_is_planned_as_its_class_runs(name: str) -> None:
    from traced_models import measured_peak
    from transformers import AutoConfig

    model_type, fields = TRACED[name]
    config = AutoConfig.for_model(model_type, **SIZES, **fields)
    facts = facts_of_any(json.loads(json.dumps(config.to_dict(), default=str)), name=name)
    assert facts.traced_config
    found = predict_memory(facts, SETUP, is_cuda=False, is_tracked=True).peak_bytes
    assert found == pytest.approx(measured_peak(config, SETUP), rel=0.02)


def test_usual_layers_need_no_class() -> None:
    for model_type, fields in TRACED.values():
        if model_type != "bert":
            assert not facts_of_any({**SIZES, "model_type": model_type}, name="usual").traced_config
            assert not facts_from_config({**SIZES, "model_type": model_type, **fields}, name="x").layers_are_modelled


@pytest.mark.parametrize("model", ["facebook/opt-350m", "google-bert/bert-large-uncased"])
def test_variants_in_the_catalogue_are_planned(model: str) -> None:
    assert load_model_facts(model, allow_download=False).traced_config
    assert plan(model, gpu="24GiB", max_length=512).candidates


def test_traces_of_a_cpu_and_of_a_gpu_are_kept_apart() -> None:
    """Dropout keeps a byte per value on a GPU and four on a CPU, with or without autocast."""
    model_type, fields = TRACED["OPT with norms after its blocks"]
    facts = facts_of_any({**SIZES, "model_type": model_type, "dropout": 0.1, **fields}, name="small")
    on_gpu, on_cpu = (step_bytes(facts, SETUP, is_cuda=is_cuda).saved_bytes for is_cuda in (True, False))
    values = 2 * 96 * 128
    # Attention's result and the MLP's pass a dropout in each of three layers; attention weights do on the CPU alone.
    assert on_cpu - on_gpu >= 3 * 2 * 3 * values
