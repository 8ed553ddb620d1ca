"""Tensor parallelism: its refusals and the plans that it follows."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.parallel.gradient_norm import clip_gradients, global_grad_norm
from accel_scale.parallel.tensor import OWN_PLANS, apply_tensor_parallel, check_tensor_parallel

LLAMA = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 3072}


def config(model_type: str, **fields):
    return CONFIG_MAPPING[model_type](**fields)


@pytest.mark.parametrize(
    ("given", "degree", "message"),
    [
        (config("llama", **LLAMA), 8, "12 attention heads and 4 key-value heads cannot be divided by 8 ranks.*2 or 4"),
        (config("llama", **LLAMA | {"intermediate_size": 3075}), 4, "3075 intermediate features.*tp_size 1 and FSDP2"),
        (config("gemma", num_key_value_heads=1), 2, "1 key-value heads cannot be divided by 2 ranks.*tp_size 1"),
        (config("gpt2", n_head=12, n_embd=768), 8, "12 attention heads cannot be divided by 8 ranks.*2 or 3 or 4"),
        (config("opt"), 2, "opt models have no tensor-parallel plan.*FSDP2"),
        (config("qwen3_moe"), 2, "qwen3_moe models needs moe_tp_experts, packed_colwise.*not supported"),
    ],
)
def test_refusals_name_the_sizes_and_what_would_work(given, degree, message):
    with pytest.raises(ConfigError) as error:
        check_tensor_parallel(given, degree, method="full")
    assert re.search(message, str(error.value)), error.value
    check_tensor_parallel(given, 1, method="full")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "olmo2"])
def test_plans_of_transformers_are_understood(model_type):
    check_tensor_parallel(config(model_type), 2, method="full")


def test_parameters_that_a_plan_leaves_out_are_refused():
    given = config(
        "phi", hidden_size=64, num_attention_heads=4, intermediate_size=96, vocab_size=64, qk_layernorm=True
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(given)
    with pytest.raises(ConfigError, match=r"phi models leaves out model\.layers\.0\.self_attn\.q_layernorm"):
        apply_tensor_parallel(model, FakeMesh())


class FakeMesh:
    """The parts of a mesh that are used before anything is divided."""

    def size(self) -> int:
        return 2


def test_adapters_are_refused():
    with pytest.raises(ConfigError, match="--method lora does not work with tensor parallelism"):
        check_tensor_parallel(config("llama", **LLAMA), 2, method="lora")


def test_own_plans_name_layers_that_exist():
    for model_type, plan in OWN_PLANS.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config(model_type))
        names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.base_model.named_modules()} | {"lm_head"}
        assert set(plan) <= names


def test_norm_and_clipping_without_meshes_are_torchs_own():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(5, 3)) for _ in range(4)]
    theirs = [torch.nn.Parameter(torch.zeros(5, 3)) for _ in range(4)]
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        one.grad = torch.randn(5, 3)
        other.grad = one.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    norm = clip_gradients([*ours, ours[1]], 0.7)  # a parameter that is listed twice counts once
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert float(clip_gradients(ours, math.inf)) == pytest.approx(0.7, rel=1e-5)
    assert float(global_grad_norm([torch.nn.Parameter(torch.zeros(2))])) == 0.0


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, math.nan, 2.0])
    assert math.isnan(float(clip_gradients([parameter], 1.0)))


def test_what_needs_no_gradient_needs_no_ranks() -> None:
    from accel_scale.parallel.tensor_collectives import SharedInput, sum_gradients

    group: Any = None  # is never used
    fixed, trained = torch.ones(2), torch.ones(2, requires_grad=True)
    shared = SharedInput(group)
    assert shared(fixed) is sum_gradients(fixed, group) is fixed
    with torch.no_grad():
        assert shared(trained) is sum_gradients(trained, group) is trained
    first = shared(trained)
    assert first is not trained
    assert shared(trained) is first, "one all-reduce for all layers that read it"
    other = torch.ones(3, requires_grad=True)
    assert shared(other) is not first
    assert shared(trained) is not first
    shared.forget()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert shared(trained).dtype == torch.bfloat16
    shared.forget()
    assert shared(trained).dtype == torch.float32


def test_layers_of_different_sizes_must_all_come_out_even() -> None:
    given = config("llama", **LLAMA)
    vars(given)["intermediate_size"] = [96, 100, None]
    check_tensor_parallel(given, 4, method="full")
    vars(given)["intermediate_size"] = [96, 102]
    with pytest.raises(ConfigError, match="102 intermediate features cannot be divided by 4 ranks") as refused:
        check_tensor_parallel(given, 4, method="full")
    assert (refused.value.place, refused.value.fix) == ("--tp_size", "use --tp_size 2.")
    with pytest.raises(ConfigError) as nothing:
        check_tensor_parallel(config("llama", **LLAMA | {"intermediate_size": 97}), 2, method="full")
    assert nothing.value.fix == "use --tp_size 1 and FSDP2."
    large = config("llama", hidden_size=4096, num_attention_heads=128, num_key_value_heads=128, intermediate_size=128)
    with pytest.raises(ConfigError) as several:
        check_tensor_parallel(large, 3, method="full")
    assert several.value.fix == "use --tp_size 2 or 4 or 8 or 16 or 32 or 64."


@pytest.mark.parametrize(
    ("fields", "drops"),
    [({}, False), ({"attention_dropout": 0.1}, True), ({"resid_pdrop": 0.1}, True), ({"embd_pdrop": 0.1}, True)],
)
def test_ranks_draw_alike_where_something_is_dropped(fields: dict[str, float], drops: bool) -> None:
    from accel_scale.parallel.tensor import _has_dropout

    kind = "llama" if set(fields) <= {"attention_dropout"} else "gpt2"
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    without = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if kind == "gpt2" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(kind, **{**sizes, **without, **fields}))
    assert _has_dropout(model) == drops
