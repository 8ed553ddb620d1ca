"""The router's auxiliary loss in pretraining and fine-tuning is the model's own, for every mixture of experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.optimization.fast_loss import add_fast_lm_head, language_model_loss
from accel_scale.optimization.router_loss import (
    RouterLoss,
    forward_with_router,
    refuse_shared_model,
    router_coefficient,
)

IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "intermediate_size": 48, "num_experts_per_tok": 2, "output_router_logits": True, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 20, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 3, "head_dim": 8},
    "phimoe": {"num_local_experts": 3},
    "granitemoe": {"num_local_experts": 3, "logits_scaling": 2.0},
    "minimax": {"num_local_experts": 3, "block_size": 4, "head_dim": 8},
    "jamba": {"num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2},
    "jetmoe": {"num_local_experts": 3, "kv_channels": 8, "num_key_value_heads": 2},
}


def one_process():
    return SimpleNamespace(num_processes=1, device="cpu", reduce=lambda value, how: value)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_models_own(family):
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()  # eval mode, without router noise
    own = model(input_ids=IDS, labels=IDS, use_cache=False)
    own.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    add_fast_lm_head(model)
    router = RouterLoss.of(one_process(), config)
    num_items = IDS[:, 1:].numel()
    loss = language_model_loss(model, {"input_ids": IDS, "labels": IDS}, num_items, router=router)
    assert loss.item() == pytest.approx(own.loss.item(), abs=1e-6)
    loss.backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6)
    assert router.mean() == pytest.approx(own.aux_loss.item(), abs=1e-6)
    # The auxiliary loss makes a difference, and validation leaves it out.
    plain = language_model_loss(model, {"input_ids": IDS, "labels": IDS}, num_items)
    assert loss.item() - plain.item() == pytest.approx(router_coefficient(config) * own.aux_loss.item(), abs=1e-6)
    assert loss.item() - plain.item() > 1e-4


def test_accumulation_and_ranks_average_it():
    router = RouterLoss(SimpleNamespace(num_processes=2, device="cpu", reduce=lambda value, how: value), 0.1)
    parts = [router.weighted(torch.tensor(value), 4) for value in (1.0, 2.0, 3.0, 4.0)]
    # Summed over four micro-batches here and over two ranks: 0.1 times the mean.
    assert 2 * sum(parts).item() == pytest.approx(0.1 * 2.5)
    assert router.mean() == 2.5
    router.weighted(torch.tensor(7.0), 4)
    assert router.mean() == 7.0, "what was told once does not count again"
    with torch.device("meta"):  # a device other than the run's, where its tensors are
        assert router.mean() == 0.0, "no micro-batch since the last call"


def test_nothing_is_added_unasked():
    config = CONFIG_MAPPING["mixtral"](**{**SIZES, "output_router_logits": False})
    assert RouterLoss.of(one_process(), config) is None


def test_refused_where_ranks_share_the_model():
    config = CONFIG_MAPPING["mixtral"](**SIZES)
    refuse_shared_model(config, is_plain=True)
    with pytest.raises(ConfigError, match="not divided among ranks") as error:
        refuse_shared_model(config, is_plain=False)
    assert "output_router_logits" in error.value.fix


def test_a_forward_that_fails_leaves_no_hook_behind():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"](**{**SIZES, **FAMILIES["mixtral"]}))
    hidden, aux_loss = forward_with_router(model.forward, model.model, input_ids=IDS)
    assert hidden.shape == (*IDS.shape, SIZES["hidden_size"])
    assert aux_loss.ndim == 0
    with pytest.raises(ValueError, match="input_ids"):
        forward_with_router(model.forward, model.model)
    assert not model.model._forward_hooks
