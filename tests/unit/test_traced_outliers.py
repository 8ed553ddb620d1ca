"""Omissions of earlier traces and families: buffers besides parameters, loops over experts, a factor of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_scale.planning.cost.sharding import state_bytes
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.tape import activations

GPTJ = {
    "model_type": "gptj", "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 16, "vocab_size": 512,
    "n_positions": 2048,
}  # fmt: skip
LLAMA_LIKE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 4096, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_tables_of_positions_are_on_every_card_whole() -> None:
    facts = facts_from_config(GPTJ, name="small")
    assert facts.buffer_bytes == 4 * 2048 * 16 * 4
    alone, sharded = (
        state_bytes(facts, TrainingSetup(precision="fp32", parallel=parallel)).weight_bytes
        for parallel in (ParallelSetup(), ParallelSetup("fsdp2", 4, 4))
    )
    assert alone == facts.num_params * 4 + facts.buffer_bytes
    assert sharded == facts.num_params + facts.buffer_bytes


@pytest.mark.slow
def test_masks_that_a_class_keeps_are_counted() -> None:
    """GPT-Neo keeps a mask of all positions by all positions in every layer."""
    from transformers import AutoConfig

    fields = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    config = AutoConfig.for_model("gpt_neo", max_position_embeddings=512, vocab_size=512, **fields).to_dict()
    facts = facts_of_any(json.loads(json.dumps(config, default=str)), name="small")
    assert facts.buffer_bytes == 2 * 512**2


@pytest.mark.parametrize(("scaling", "chunks"), [(1.0, 0), (8.0, 1)])
def test_a_factor_of_one_costs_our_loss_nothing(scaling: float, chunks: int) -> None:
    """Logits of 512 tokens and 4,096 words are multiplied out of place, except for a factor of one."""
    plain, scaled = (
        facts_from_config({"model_type": name, **LLAMA_LIKE, **extra}, name=name)
        for name, extra in (("granite", {"logits_scaling": 1.0}), ("granite", {"logits_scaling": scaling}))
    )
    setup = TrainingSetup(precision="fp32", packing=False, micro_batch_size=2, sequence_length=257)
    more = [activations.step_bytes(facts, setup, is_cuda=False).loss_bytes for facts in (plain, scaled)]
    assert more[1] - more[0] == chunks * 512 * 4096 * 4


def test_all_experts_have_tokens() -> None:
    """A query for the experts that were hit returns all of them; a query for one expert's tokens, a share."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from accel_scale.tracing.recording import Recorder

    with FakeTensorMode() as mode, Recorder(mode, adds_in_place=True, is_padded=False, num_experts=8):
        hit = torch.empty(9, dtype=torch.bool).nonzero()
        tokens = torch.empty(2, 64, dtype=torch.bool).nonzero()
    assert hit.shape == (8, 1)
    assert tokens.shape == (16, 2)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_what_is_recomputed_has_cudas_kernels_too(policy: str) -> None:
    """Mamba 2's softplus is fp32 under CUDA's autocast; torch refuses a recomputation in which it is not."""
    from transformers import AutoConfig

    from accel_scale.planning.traced.steps import step_bytes

    sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 64}
    config = AutoConfig.for_model("mamba2", num_hidden_layers=2, vocab_size=512, **sizes).to_dict()
    facts = facts_of_any(json.loads(json.dumps(config, default=str)), name="small")
    kept, again = (
        step_bytes(facts, TrainingSetup(checkpointing=name, packing=False, sequence_length=256), is_cuda=True)
        for name in ("none", policy)
    )
    assert again.saved_bytes < kept.saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
@pytest.mark.parametrize("precision", ["bf16", "bf16_true"])
def test_weights_that_layers_share_are_cast_and_have_gradients_once(model_type: str, precision: str) -> None:
    """Few layers stand for all: what both passes leave is what they leave in the whole model."""
    from transformers import AutoConfig

    from accel_scale.planning.models.training_setup import TrainingSetup
    from accel_scale.tracing.service import facts_of
    from accel_scale.tracing.step import FakeStep

    sizes = {
        "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 30, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 128, "mamba_d_state": 8, "mamba_headdim": 16,
    }  # fmt: skip
    sizes["n_mamba_heads"] = 2 if model_type == "zamba" else 8
    kinds = AutoConfig.for_model(model_type).layer_types[:30]
    config = AutoConfig.for_model(model_type, **sizes, layer_types=kinds).to_dict()
    facts = facts_of(json.loads(json.dumps(config, default=str)), name=model_type, place="here")
    setup = TrainingSetup(precision=precision, checkpointing="none", packing=False, sequence_length=64)
    left = []
    for layers in ("few", "all"):
        step = FakeStep(facts, setup, is_cuda=True, is_tracked=False, layers=layers)
        nets = {name: sum(events) for name, events in step.run(2, 8).items()}
        forward, backward = (
            sum(nets[f"{way} {index}"] for index in step.stands_for) for way in ("forward", "backward")
        )
        left.append((forward, forward + backward))
    assert len(step.stands_for) == 30
    assert left[0] == pytest.approx(left[1], rel=0.005)
