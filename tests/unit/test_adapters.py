"""Adapters and quantised bases on real layers: which weights are trained, which are quantised, and their bytes."""

from __future__ import annotations

import types

import pytest
import torch
from activation_memory import peak_tensor_bytes

from accel_scale.errors import ConfigError
from accel_scale.modeling.adapters import (
    lora_config,
    paged_optimizer_advice,
    prepare_quantized_base,
    quantization_config,
)
from accel_scale.modeling.loading import skeleton_of
from accel_scale.modeling.precision import precision_named
from accel_scale.quiet import quiet_imports

quiet_imports()
NUM_LAYERS, HIDDEN, INTERMEDIATE, KV, VOCABULARY = 2, 256, 512, 128, 512
# (in, out) of every linear layer in a block.
BLOCK_SHAPES = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (HIDDEN, KV),
    "v_proj": (HIDDEN, KV),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (HIDDEN, INTERMEDIATE),
    "up_proj": (HIDDEN, INTERMEDIATE),
    "down_proj": (INTERMEDIATE, HIDDEN),
}
BLOCK_WEIGHTS = sum(a * b for a, b in BLOCK_SHAPES.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama, saved as a user's model would be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def model_args(**kwargs):
    from trl import ModelConfig

    return ModelConfig(**kwargs)


def load(folder, args=None, precision="bf16", strategy="single"):
    from transformers import LlamaForCausalLM

    chosen = precision_named(precision)
    config = quantization_config(args, precision=chosen, strategy=strategy) if args else None
    return LlamaForCausalLM.from_pretrained(folder, dtype=chosen.frozen_dtype, quantization_config=config)


def adapted(model, **kwargs):
    from peft import get_peft_model

    config = lora_config(model_args(use_peft=True, **kwargs), skeleton_of(model.config))
    return get_peft_model(model, config)


def loss_of(model):
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (4, 32))
    return model(input_ids=tokens, labels=tokens).loss


def losses_of_steps(model, count):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(count):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class TestLora:
    def test_every_linear_layer_but_the_head_by_default(self, folder):
        model = adapted(load(folder, precision="fp32"), lora_r=8)
        names = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
        assert {name.rsplit(".", 1)[-1] for name in names} == set(BLOCK_SHAPES)
        assert len(names) == NUM_LAYERS * len(BLOCK_SHAPES)

    def test_trainable_parameters(self, folder):
        """r × (in + out) for each linear layer."""
        for rank in (4, 16):
            model = adapted(load(folder, precision="fp32"), lora_r=rank)
            expected = NUM_LAYERS * rank * sum(a + b for a, b in BLOCK_SHAPES.values())
            assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected

    @pytest.mark.parametrize(("use_rslora", "expected"), [(False, 32 / 16), (True, 32 / 16**0.5)])
    def test_scaling_factor(self, folder, use_rslora, expected):
        model = adapted(load(folder, precision="fp32"), lora_r=16, lora_alpha=32, use_rslora=use_rslora)
        layer = model.base_model.model.model.layers[0].mlp.up_proj
        assert layer.scaling["default"] == pytest.approx(expected)
        # The factor is actually applied: the adapter's output is scaling × B A x.
        inputs = torch.randn(3, HIDDEN)
        torch.nn.init.normal_(layer.lora_B["default"].weight)
        layer.lora_dropout["default"].p = 0.0
        product = inputs @ layer.lora_A["default"].weight.t() @ layer.lora_B["default"].weight.t()
        torch.testing.assert_close(layer(inputs) - layer.base_layer(inputs), expected * product, rtol=1e-4, atol=1e-4)

    def test_dora_magnitudes_are_column_norms_and_train(self, folder):
        model = adapted(load(folder, precision="fp32"), lora_r=4, use_dora=True, lora_dropout=0.0)
        magnitudes = {n: p for n, p in model.named_parameters() if "lora_magnitude_vector" in n}
        assert len(magnitudes) == NUM_LAYERS * len(BLOCK_SHAPES)
        layer = model.base_model.model.model.layers[0].mlp.up_proj
        magnitude = layer.lora_magnitude_vector["default"].weight
        torch.testing.assert_close(magnitude.detach(), layer.base_layer.weight.norm(dim=1))
        before = {name: p.detach().clone() for name, p in magnitudes.items()}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        first = loss_of(model)
        first.backward()
        optimizer.step()
        assert all(not torch.equal(before[name], p) for name, p in magnitudes.items())
        assert loss_of(model) < first

    def test_frozen_weights_are_bf16_and_adapters_fp32_under_bf16(self, folder):
        model = adapted(load(folder, precision="bf16"))
        precision = precision_named("bf16")
        dtypes = {p.requires_grad: set() for p in model.parameters()}
        for parameter in model.parameters():
            dtypes[parameter.requires_grad].add(parameter.dtype)
        assert dtypes == {True: {precision.adapter_dtype}, False: {precision.frozen_dtype}}
        assert (precision.adapter_dtype, precision.frozen_dtype) == (torch.float32, torch.bfloat16)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (["q_proj"], {"q_proj"}),  # TRL turns this into a string, which PEFT takes for a regular expression
            (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
            (["all-linear"], set(BLOCK_SHAPES)),
            ([r".*\.mlp\..*_proj"], {"gate_proj", "up_proj", "down_proj"}),
        ],
    )
    def test_target_modules(self, folder, given, expected):
        model = adapted(load(folder, precision="fp32"), lora_target_modules=given)
        names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}
        assert names == expected

    @pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"], ["model.lm_head", "q_proj"]])
    def test_the_head_is_refused(self, targets):
        args = model_args(use_peft=True, lora_target_modules=targets)
        with pytest.raises(ConfigError) as error:
            lora_config(args, None, place=lambda flag: f"x.yaml:{flag}")
        assert error.value.place == "x.yaml:lora_target_modules"

    def test_rank_zero_is_refused(self):
        with pytest.raises(ConfigError, match="rank of 0"):
            lora_config(model_args(use_peft=True, lora_r=0), None)


def four_bit(**kwargs):
    return model_args(load_in_4bit=True, use_bnb_nested_quant=kwargs.pop("double", True), **kwargs)


def quantised_layers(model):
    import bitsandbytes as bnb

    return {name: module for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}


class TestQlora:
    def test_block_linears_are_quantised_and_nothing_else(self, folder):
        model = load(folder, four_bit())
        assert {name.rsplit(".", 1)[-1] for name in quantised_layers(model)} == set(BLOCK_SHAPES)
        assert len(quantised_layers(model)) == NUM_LAYERS * len(BLOCK_SHAPES)
        assert type(model.lm_head) is torch.nn.Linear
        assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.bfloat16

    @pytest.mark.parametrize(("double", "expected"), [(True, 4.127), (False, 4.5)])
    def test_measured_bits_per_parameter(self, folder, double, expected):
        """Bytes of every layer's codes and constants, without the 16-entry code books and 4-byte offsets."""
        layers = quantised_layers(load(folder, four_bit(double=double)))
        num_bytes = 0
        for layer in layers.values():
            state = layer.weight.quant_state
            tensors = [layer.weight, state.absmax, *([state.state2.absmax] if state.nested else [])]
            num_bytes += sum(t.numel() * t.element_size() for t in tensors)
            assert state.nested == double
            assert state.quant_type == "nf4"
        measured = 8 * num_bytes / (NUM_LAYERS * BLOCK_WEIGHTS)
        assert measured == pytest.approx(
            4 + (8 / 64 + 32 / (64 * 256) if double else 32 / 64), abs=1e-9
        )  # arXiv:2305.14314
        assert measured == pytest.approx(expected, abs=5e-4)

    def test_dequantised_weights_are_near_the_original(self, folder):
        import bitsandbytes.functional as F

        exact, model = load(folder, precision="fp32"), load(folder, four_bit())
        for name, layer in quantised_layers(model).items():
            original = exact.get_submodule(name).weight
            restored = F.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
            error = (restored - original).norm() / original.norm()
            # NF4 on a normal distribution: about 9 % error (16 levels); a wrong code book or scale gives 50 % or more.
            assert 0.05 < error < 0.12
        assert loss_of(model).item() == pytest.approx(loss_of(exact).item(), rel=0.02)

    @pytest.mark.parametrize(
        ("precision", "compute"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
    )
    def test_compute_dtype_is_the_runs(self, folder, precision, compute):
        layer = next(iter(quantised_layers(load(folder, four_bit(), precision)).values()))
        assert layer.compute_dtype == compute

    @pytest.mark.parametrize(
        ("precision", "strategy", "storage"),
        [
            ("bf16", "single", torch.uint8),
            ("bf16", "ddp", torch.uint8),
            ("bf16", "zero2", torch.uint8),
            ("bf16", "fsdp2", torch.bfloat16),
            ("bf16", "zero3", torch.bfloat16),
            ("fp16", "fsdp2", torch.float16),
            ("fp32", "fsdp2", torch.float32),
            ("bf16_true", "fsdp2", torch.bfloat16),
        ],
    )
    def test_storage_fits_the_sharding(self, folder, precision, strategy, storage):
        model = load(folder, four_bit(), precision, strategy)
        weights = [layer.weight for layer in quantised_layers(model).values()]
        assert {weight.dtype for weight in weights} == {storage}
        assert sum(w.numel() * w.element_size() for w in weights) == NUM_LAYERS * BLOCK_WEIGHTS // 2
        # The storage dtype is the dtype that sharding casts to, so the packed bits survive.
        if strategy in ("fsdp2", "zero3"):
            assert storage == precision_named(precision).compute_dtype

    def test_storage_does_not_change_the_result(self, folder):
        losses = [loss_of(load(folder, four_bit(), strategy=s)).item() for s in ("single", "fsdp2")]
        assert losses[0] == pytest.approx(losses[1], rel=0.01)

    def test_casting_packed_weights_destroys_them(self, folder):
        """The reason why the storage dtype must equal the dtype that sharding casts to."""
        model = load(folder, four_bit(), "fp32", "fsdp2")
        weight = quantised_layers(model)["model.layers.0.mlp.up_proj"].weight
        packed = weight.data.view(torch.uint8)
        cast = weight.data.to(torch.bfloat16).to(torch.float32).view(torch.uint8)
        assert (packed != cast).float().mean() > 0.25

    @pytest.mark.parametrize(
        ("storage", "strategy", "why"),
        [
            ("uint8", "fsdp2", "unsharded"),
            ("uint8", "zero3", "unsharded"),
            ("float32", "fsdp2", "cast"),
            ("float32", "zero2", "cast"),
        ],
    )
    def test_storage_that_sharding_would_corrupt_is_refused(self, storage, strategy, why):
        args = four_bit(bnb_4bit_quant_storage=storage)
        with pytest.raises(ConfigError, match=why) as error:
            quantization_config(args, precision=precision_named("bf16"), strategy=strategy)
        assert error.value.place == "--bnb_4bit_quant_storage"
        config = quantization_config(args, precision=precision_named("bf16"), strategy="single")
        assert config.bnb_4bit_quant_storage == getattr(torch, storage)

    def test_deepspeed_leaves_a_storage_that_already_has_the_compute_dtype(self):
        args = four_bit(bnb_4bit_quant_storage="bfloat16")
        config = quantization_config(args, precision=precision_named("bf16"), strategy="zero2")
        assert config.bnb_4bit_quant_storage == torch.bfloat16

    def test_preparation_upcasts_nothing(self, folder):
        """PEFT's own preparation casts embedding, head and norms to fp32."""
        from peft import prepare_model_for_kbit_training

        def num_bytes(model):
            return sum(p.numel() * p.element_size() for p in model.parameters())

        model, theirs = load(folder, four_bit()), load(folder, four_bit())
        before = num_bytes(model)
        prepare_quantized_base(model)
        assert num_bytes(model) == before
        assert not any(p.requires_grad for p in model.parameters())
        prepare_model_for_kbit_training(theirs, use_gradient_checkpointing=False)
        not_quantised = 2 * VOCABULARY * HIDDEN + (2 * NUM_LAYERS + 1) * HIDDEN
        assert num_bytes(theirs) - before == 2 * not_quantised

    def test_reentrant_checkpointing_gets_inputs_that_require_gradients(self, folder):
        model = prepare_quantized_base(load(folder, four_bit()), use_reentrant=True)
        assert model.get_input_embeddings()(torch.tensor([[1]])).requires_grad

    @pytest.mark.parametrize("use_dora", [False, True])
    def test_adapters_on_a_quantised_base_learn_and_leave_it_alone(self, folder, use_dora):
        model = adapted(prepare_quantized_base(load(folder, four_bit())), lora_r=8, use_dora=use_dora)
        packed = quantised_layers(model)
        before = {name: layer.weight.data.clone() for name, layer in packed.items()}
        losses = losses_of_steps(model, 5)
        assert losses[-1] < losses[0] - 0.1
        assert all(torch.equal(before[name], layer.weight.data) for name, layer in packed.items())

    def test_an_evaluation_before_training_does_not_cut_the_gradients(self, folder):
        def gradients(evaluate_first):
            model = adapted(prepare_quantized_base(load(folder, four_bit())), lora_r=8, lora_dropout=0.0)
            for module in model.modules():
                if hasattr(module, "lora_B"):
                    torch.nn.init.constant_(module.lora_B["default"].weight, 0.01)
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                if "lora_A" in name:
                    torch.nn.init.normal_(parameter, std=0.02)
            if evaluate_first:
                with torch.no_grad():
                    loss_of(model.eval())
            loss_of(model.train()).backward()
            return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

        before, after = gradients(False), gradients(True)
        assert len(before) == 2 * NUM_LAYERS * len(BLOCK_SHAPES)
        for name, gradient in before.items():
            torch.testing.assert_close(after[name], gradient, rtol=1e-5, atol=1e-7)


class TestEightBit:
    def test_bytes_and_result(self, folder):
        import bitsandbytes as bnb

        exact = load(folder, precision="bf16")
        model = load(folder, model_args(load_in_8bit=True))
        layers = [m for m in model.modules() if isinstance(m, bnb.nn.Linear8bitLt)]
        assert len(layers) == NUM_LAYERS * len(BLOCK_SHAPES)
        assert sum(m.weight.numel() * m.weight.element_size() for m in layers) == NUM_LAYERS * BLOCK_WEIGHTS
        assert loss_of(model).item() == pytest.approx(loss_of(exact).item(), rel=0.01)

    def test_refused_under_fsdp_only(self):
        args, precision = model_args(load_in_8bit=True), precision_named("bf16")
        with pytest.raises(ConfigError, match="Int8Params") as error:
            quantization_config(args, precision=precision, strategy="fsdp2")
        assert error.value.place == "--load_in_8bit"
        assert quantization_config(args, precision=precision, strategy="zero3").load_in_8bit


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_base_is_quantised_tensor_by_tensor(tmp_path, strategy):
    """There is never a whole full-precision copy beside the quantised model; each rank of a node would hold one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from accel_scale.modeling.loading import load_model

    thin = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, vocab_size=64, **thin))
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    precision, kept = precision_named("bf16"), []

    def load():
        settings = quantization_config(four_bit(), precision=precision, strategy=strategy)
        dtype = precision.frozen_dtype
        kept.append(load_model(str(tmp_path), dtype=dtype, quantization_config=settings))

    peak = peak_tensor_bytes(load)
    stays = sum(parameter.numel() * parameter.element_size() for parameter in kept[0].parameters())
    assert stays < peak < stays + whole / 12
    assert stays < whole / 6


def test_weights_that_a_model_clamps_as_it_trains_stay_as_they_are(tmp_path):
    """Gemma 3n clamps its prediction coefficients in place, which packed 4-bit weights do not allow."""
    from transformers import AutoModelForCausalLM, Gemma3nTextConfig

    from accel_scale.modeling.loading import load_model

    config = Gemma3nTextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=64,
        laurel_rank=64, num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0, 0.0], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    precision = precision_named("bf16")
    settings = quantization_config(four_bit(), precision=precision)
    base = load_model(str(tmp_path), dtype=precision.frozen_dtype, quantization_config=settings)
    leaves = {name.rpartition(".")[2] for name in quantised_layers(base)}
    assert set(BLOCK_SHAPES) <= leaves
    assert not leaves & {"prediction_coefs", "correction_coefs", "lm_head"}
    model = adapted(prepare_quantized_base(base), lora_r=4).train()
    losses = losses_of_steps(model, 4)
    assert losses[-1] < losses[0] - 0.1


def test_no_quantisation_unless_asked_for():
    assert quantization_config(model_args(), precision=precision_named("bf16")) is None


def test_fp8_does_not_go_with_a_quantised_base():
    with pytest.raises(ConfigError, match="fp8"):
        quantization_config(four_bit(), precision=precision_named("fp8"))


def test_any_object_with_the_fields_will_do():
    args = types.SimpleNamespace(**vars(four_bit()))
    assert quantization_config(args, precision=precision_named("bf16")).bnb_4bit_use_double_quant


@pytest.mark.parametrize(
    ("method", "optim", "device_type", "advised"),
    [
        ("qlora", "adamw_torch_fused", "cuda", True),
        ("qlora", "paged_adamw_8bit", "cuda", False),
        ("lora", "adamw_torch_fused", "cuda", False),
        ("qlora", "adamw_torch_fused", "cpu", False),
    ],
)
def test_paged_optimizer_advice(method, optim, device_type, advised):
    advice = paged_optimizer_advice(method=method, optim=optim, device_type=device_type)
    assert (advice is not None) == advised
