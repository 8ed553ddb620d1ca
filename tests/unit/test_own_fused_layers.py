"""Norms, gated MLPs and rotary embeddings of this project: what they replace, their gradients, what they keep."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from accel_scale.modeling.fused.own import fuse_own_layers, restore_layers
from accel_scale.start_check.fused import fused_parts

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
IDS = torch.arange(2 * 40).view(2, 40) % 300


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a weight that is left out
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def step(model: Any, *, bf16: bool = False) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the bytes kept for the backward pass, weights not counted."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, num_bytes


def gap(ours: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient, as a share of its norm."""
    assert ours.keys() == own.keys()
    return max(float((ours[name] - own[name]).norm() / own[name].norm()) for name in own)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", ("RMSNorm", "RoPE", "SwiGLU")),
        ("qwen3", ("RMSNorm", "RoPE", "SwiGLU")),
        ("olmo2", ("RMSNorm", "SwiGLU")),  # rotates in fp32
        ("gemma2", ("RMSNorm", "RoPE", "GEGLU")),
        ("gemma3_text", ("RMSNorm", "RoPE", "GEGLU")),
        ("qwen3_next", ("RMSNorm", "RoPE", "SwiGLU")),
        ("phi3", ("RMSNorm", "RoPE")),
        ("cohere2", ("SwiGLU",)),  # rotates pairs of neighbours
        ("gpt2", ()),
        ("starcoder2", ("RoPE",)),
    ],
)
def test_they_replace_the_layers_that_compute_the_same_and_no_others(family: str, parts: tuple[str, ...]) -> None:
    found, reason = fused_parts(AutoConfig.for_model(family), device=torch.device("cpu"), of_liger=False)
    assert found == parts
    assert (reason is None) == bool(parts)


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_the_models_own_and_less_is_kept(bf16: bool) -> None:
    own, ours = llama(), llama()
    assert fuse_own_layers(ours) == ("RMSNorm", "RoPE", "SwiGLU")
    (loss, gradients, num_bytes), (expected, references, own_bytes) = step(ours, bf16=bf16), step(own, bf16=bf16)
    assert loss == pytest.approx(expected, rel=1e-3 if bf16 else 1e-6)
    assert gap(gradients, references) < (2e-2 if bf16 else 1e-5)
    assert num_bytes < 0.85 * own_bytes  # logits and the copies of weights that autocast makes are in both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_weights_and_rows_in_other_dtypes(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(32)
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    fused = copy.deepcopy(norm)
    fuse_own_layers(fused)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for module in (norm, fused):
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        results.append((out, given.grad, module.weight.grad))
    for own, ours in zip(*results, strict=True):
        assert own.dtype == ours.dtype
        assert torch.allclose(own, ours, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_gradients_of_gradients_are_refused_rather_than_wrong() -> None:
    norm = LlamaRMSNorm(8)
    fuse_own_layers(norm)
    x = torch.randn(3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_layers_of_one_class_may_have_other_activations() -> None:
    config = copy.deepcopy(CONFIG)
    config.hidden_act = "relu"
    model = torch.nn.ModuleList([LlamaMLP(CONFIG), LlamaMLP(config)])
    expected = [mlp(torch.ones(1, 64)) for mlp in model]
    assert fuse_own_layers(model) == ("SwiGLU",)
    assert ["forward" in vars(mlp) for mlp in model] == [True, False]
    assert all(torch.allclose(mlp(torch.ones(1, 64)), own) for mlp, own in zip(model, expected, strict=True))


def test_a_gate_and_a_value_in_different_dtypes_are_multiplied_in_the_wider_one() -> None:
    mlp = LlamaMLP(CONFIG)
    mlp.gate_proj.to(torch.bfloat16)
    mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    expected = mlp(torch.ones(1, 64))
    fuse_own_layers(mlp)
    out = mlp(torch.ones(1, 64))
    assert out.dtype is torch.float32
    assert torch.equal(out, expected)
    out.sum().backward()


def test_a_second_backward_pass_gives_the_same_gradients() -> None:
    model = llama()
    fuse_own_layers(model)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward(retain_graph=True)
    first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(parameter.grad, 2 * first[name]) for name, parameter in model.named_parameters())


def test_a_layer_of_the_name_with_another_formula_is_left_alone() -> None:
    class ScaledMLP(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.01 * super().forward(x)

    class NoisyRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.01

    model = torch.nn.ModuleList([ScaledMLP(CONFIG), NoisyRMSNorm(64), LlamaMLP(CONFIG)])
    assert fuse_own_layers(model) == ("SwiGLU",)
    assert [hasattr(module, "forward") and "forward" in vars(module) for module in model] == [False, False, True]


def test_a_class_whose_forward_was_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    forward = LlamaMLP.forward

    def watched(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", watched)
    model = llama()
    assert fuse_own_layers(model) == ("RMSNorm", "RoPE")
    model(input_ids=IDS)
    assert len(seen) == 2


def test_they_hold_no_weights_of_the_probe_and_can_be_undone() -> None:
    model = llama()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fuse_own_layers(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert restore_layers(model)
    assert not restore_layers(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_adapters_on_the_linears_of_a_fused_mlp_are_trained() -> None:
    results = []
    for fused in (False, True):
        model = llama()
        if fused:
            fuse_own_layers(model)
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        results.append(step(adapted))
    (_, own, _), (_, ours, _) = results
    assert any("down_proj.lora_B" in name for name in ours)
    assert gap(ours, own) < 1e-5


def test_rotations_of_one_model_leave_its_class_and_its_module_unchanged() -> None:
    forward, rotate = LlamaAttention.forward, modeling_llama.apply_rotary_pos_emb
    ours, others = llama(), llama()
    fuse_own_layers(ours)
    assert (LlamaAttention.forward, modeling_llama.apply_rotary_pos_emb) == (forward, rotate)
    assert not any("forward" in vars(module) for module in others.modules())
    twin = copy.deepcopy(ours)
    assert twin.model.layers[0].self_attn.forward.__self__ is twin.model.layers[0].self_attn
    assert torch.equal(twin(IDS).logits, ours(IDS).logits)
    assert restore_layers(twin)
    torch.testing.assert_close(twin(IDS).logits, others(IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_queries_and_keys_of_other_dtypes_and_layouts_rotate_as_before(dtype: torch.dtype, unsqueeze_dim: int) -> None:
    rotate = _fused_rotation()
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, 6, 8) if unsqueeze_dim == 1 else (2, 6, 4, 8)
    q, k = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    angles = torch.rand(2, 6, 4, generator=generator).repeat(1, 1, 2)
    found = []
    for function in (rotate, modeling_llama.apply_rotary_pos_emb):
        out = function(q, k[..., :2, :] if unsqueeze_dim == 2 else k[:, :2], angles.cos(), angles.sin(), unsqueeze_dim)
        found.append([*out, *torch.autograd.grad(sum(part.square().sum() for part in out), [q, k])])
    for ours, own in zip(*found, strict=True):
        assert ours.dtype == own.dtype
        torch.testing.assert_close(ours, own, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)


def test_angles_of_fewer_dimensions_or_with_gradients_go_to_the_models_own_function() -> None:
    rotate, own = _fused_rotation(), modeling_llama.apply_rotary_pos_emb
    q = torch.randn(1, 2, 3, 8)
    trained = torch.rand(1, 3, 8, requires_grad=True)
    rotate(q, q, trained.cos(), trained.sin())[0].sum().backward()
    assert trained.grad is not None
    assert trained.grad.abs().sum() > 0
    narrow = torch.rand(1, 3, 1)  # broadcast by the model's own function
    assert torch.equal(rotate(q, q, narrow.cos(), narrow.sin())[0], own(q, q, narrow.cos(), narrow.sin())[0])


def _fused_rotation() -> Any:
    model = llama()
    fuse_own_layers(model)
    return model.model.layers[0].self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
