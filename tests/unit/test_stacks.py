"""Plans for other stacks: what each holds that ours does not, and the source of each fact."""

from __future__ import annotations

import inspect

import pytest

from accel_scale import plan
from accel_scale.errors import ConfigError
from accel_scale.facts.stacks import OURS, STACKS
from accel_scale.planning.models.catalogue import load_model_facts

MODEL = "meta-llama/Llama-3.1-8B"
CARD = {"gpu": "300GiB", "strategy": "one GPU", "per_device_train_batch_size": 2}
CARD |= {"max_length": 2048, "checkpointing_policy": "full", "optim": "adamw_torch_fused"}


def planned(stack: str, method: str, **settings):
    return plan(MODEL, stack=stack, method=method, **{**CARD, **settings}).best


def test_every_stack_names_its_source():
    assert set(STACKS) == {"ours", "trl", "axolotl", "llamafactory", "unsloth", "torchtune"}
    for stack in STACKS.values():
        assert ".py" in stack.source or ".yaml" in stack.source or "/" in stack.source


def test_what_is_said_of_trl_is_so():
    """Checked against the installed version."""
    from dataclasses import fields

    from trl import ModelConfig, SFTConfig, SFTTrainer

    assert next(f.default for f in fields(ModelConfig) if f.name == "dtype") == "float32"
    assert next(f.default for f in fields(SFTConfig) if f.name == "gradient_checkpointing") is True
    assert next(f.default for f in fields(SFTConfig) if f.name == "loss_type") == "nll"
    source = inspect.getsource(SFTTrainer)
    assert "prepare_model_for_kbit_training" not in source
    assert "param.data = param.data.to(torch.bfloat16)" in source
    assert "fused_lm_head=True" in source


def test_trl_holds_its_frozen_base_in_fp32():
    facts = load_model_facts(MODEL)
    ours, theirs = (planned(stack, "lora").memory.states.weight_bytes for stack in (OURS, "trl"))
    assert theirs - ours == pytest.approx(2 * facts.num_params, rel=1e-3)
    ours, theirs = (planned(stack, "qlora").memory.states.weight_bytes for stack in (OURS, "trl"))
    kept = facts.num_params - facts.layer_params  # approximately embedding, head and last norm
    adapters = planned(OURS, "qlora").setup.lora
    assert adapters.rank == 16
    assert theirs - ours == pytest.approx(2 * kept - 2 * 41_943_040, rel=0.01), "adapters are in bf16 there"


def test_whole_logits_cost_what_they_weigh():
    """4,096 tokens and a vocabulary of 128,256: 16-bit logits, fp32 logits, their log-softmax and gradient."""
    ours, theirs = (dict(planned(s, "lora").memory.peak_phase.terms) for s in (OURS, "llamafactory"))
    assert theirs["activations and loss"] > 4096 * 128256 * 10
    assert theirs["activations and loss"] > 1.3 * ours["activations and loss"]
    tune = planned("torchtune", "lora")
    assert tune.setup.precision == "bf16_true"
    assert tune.setup.loss == "chunked_logits"


def test_half_width_training_halves_the_states():
    ours, theirs = (planned(stack, "full").memory.states for stack in (OURS, "axolotl"))
    assert theirs.optimizer_bytes == ours.optimizer_bytes / 2
    assert theirs.weight_bytes == ours.weight_bytes / 2


def test_allocators_that_extend_their_segments_hoard_nothing():
    rows = {"method": "lora", "packing": False, "mean_length": "700", "max_length": 2048}
    assert planned("axolotl", **rows).memory.hoarded_bytes == 0
    assert planned("llamafactory", **rows).memory.hoarded_bytes > 0


def test_a_base_that_is_quantised_in_shards_is_never_whole():
    settings = {"gpu": "H100", "num_gpus": 8, "strategy": "FSDP2", "max_length": 2048, "method": "qlora"}
    big = "meta-llama/Llama-3.1-405B"
    whole, shards = (plan(big, stack=stack, **settings) for stack in (OURS, "torchtune"))
    assert whole.best is None
    assert "before it is sharded" in whole.rejections[0].reason
    assert shards.best is not None


def test_what_the_user_sets_wins():
    found = planned("torchtune", "full", precision="bf16", optim="adamw_bnb_8bit").setup
    assert (found.precision, found.optimizer) == ("bf16", "adamw_bnb_8bit")
    assert plan(MODEL, gpu="H100", method="lora", stack="unsloth").best.setup.checkpointing == "offload"


def test_a_gradient_that_is_spent_at_once_takes_no_room():
    from dataclasses import replace

    from accel_scale.planning.cost.memory import predict_memory

    facts = load_model_facts("meta-llama/Llama-3.2-3B")
    setup = replace(planned("torchtune", "full").setup, accumulation=1)
    kept, spent = (
        predict_memory(facts, replace(setup, steps_in_backward=at_once)).states.gradient_bytes
        for at_once in (False, True)
    )
    assert kept == facts.num_params * 2
    assert spent == facts.embedding_params * 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stack": "trlx"}, "--stack: 'trlx' is unknown.*did you mean trl"),
        ({"stack": "trl", "recipe": "dpo"}, "--stack: other stacks are planned for fine-tuning"),
    ],
)
def test_stacks_that_cannot_be_planned_are_named(settings, said):
    with pytest.raises(ConfigError, match=said):
        plan(MODEL, gpu="H100", **settings)
