"""The tensors that models keep during generation, compared with those of transformers' own `generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_scale.planning.cost.generation import cache_bytes, generation_bytes
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import GenerationSetup, TrainingSetup

ROWS, PROMPT, ANSWER = 4, 40, 8


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_config(model_type: str):
    """The class's defaults, shrunk; windows are 32 tokens, which is shorter than the prompts."""
    from transformers import AutoConfig

    from accel_scale.shrinking.shrink import shrink_model_config

    config = AutoConfig.for_model(model_type)
    return shrink_model_config(config, vocab_size=512, min_layers=4, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def generated(config):
    """Bytes in the model's cache at the end, and the peak without the weights."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from accel_scale.measuring.storages import StorageTracker
    from accel_scale.tracing.cache import cached_tensors
    from accel_scale.verifying.measured_memory import resident_tensors

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(3, 512, (ROWS, PROMPT))
    mask = torch.ones_like(ids)
    mask[: ROWS // 2, :3] = 0
    drawn = GenerationConfig(
        max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=2,
        return_dict_in_generate=True,
    )  # fmt: skip
    tracker = StorageTracker()
    weights = tracker.adopt(resident_tensors(model))
    with tracker, torch.no_grad():
        cache = model.generate(input_ids=ids, attention_mask=mask, generation_config=drawn).past_key_values
    storages = [tensor.untyped_storage() for layer in cache.layers for tensor in cached_tensors(layer)]
    kept = sum({id(storage): storage.nbytes() for storage in storages}.values())
    return kept, tracker.peak_bytes - weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "peak_error"),
    [
        ("ernie4_5", 0.1), ("lfm2", 0.1), ("granite_swa", 0.1), ("llama4_text", 0.1), ("minicpm3", 0.1),
        pytest.param("deepseek_v32", 0.1, marks=pytest.mark.soak),
        # Their layers fill chunks of 64 to 256 tokens, so the pass over such a short prompt is not predicted.
        ("mamba2", None), ("falcon_mamba", None), ("jamba", None), ("falcon_h1", None), ("qwen3_next", None),
    ],
)  # fmt: skip
def test_a_traced_models_cache_is_its_own(model_type: str, peak_error: float | None) -> None:
    """Keys and values, states, windows, chunks, latent attention, indices. The last token is never fed."""
    config = small_config(model_type)
    facts = facts_of_any(json.loads(json.dumps(config.to_dict(), default=str)), name=model_type)
    assert facts.traced_config
    setup = TrainingSetup(precision="fp32", packing=False, generation=GenerationSetup(ROWS, PROMPT, ANSWER))
    kept, peak = generated(config)
    assert cache_bytes(facts, setup, ROWS, PROMPT + ANSWER - 1) == kept
    if peak_error is not None:
        assert generation_bytes(facts, setup, is_cuda=False).total_bytes == pytest.approx(peak, rel=peak_error)
