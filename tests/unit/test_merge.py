"""Merging adapters into their base: every kind against PEFT's own result, in the memory of one shard."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from accel_scale.cli import merge as merge_command
from accel_scale.errors import ConfigError
from accel_scale.merging import weights as merge_weights
from accel_scale.merging.adapter import merge_adapter
from accel_scale.modeling.quantization_record import quantization_of, record_quantization

IDS = torch.tensor([[1, 5, 9, 33, 2, 60]])
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


def llama(**overrides) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **overrides}))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=4))


def train(model, **settings) -> PeftModel:
    """An adapter with all of its weights moved away from their initial values."""
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    llama().save_pretrained(folder / "llama", max_shard_size="60KB")
    llama(tie_word_embeddings=True).save_pretrained(folder / "tied")
    gpt2().save_pretrained(folder / "gpt2")
    return folder


QV = ["q_proj", "v_proj"]
KINDS = {
    "lora": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"target_modules": QV, "use_rslora": True}),
    "dora": ("llama", {"target_modules": QV, "use_dora": True}),
    "ranks by pattern": (
        "llama",
        {"target_modules": QV, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}},
    ),
    "lora with a bias": ("llama", {"target_modules": QV, "lora_bias": False, "modules_to_save": ["norm"]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d dora": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "trained biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "lora biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True}),
    "whole head": ("llama", {"target_modules": QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "head of a tied model": ("tied", {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "embedding of a tied model": ("tied", {"target_modules": [*QV, "embed_tokens"]}),
    "tied adapters": ("tied", {"target_modules": [*QV, "embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    "tied copies": (
        "tied",
        {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "trained tokens": ("tied", {"target_modules": QV, "trainable_token_indices": [3, 5]}),
}


FAST_KINDS = ("whole head", "lora biases", "trained tokens")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "kind", [kind if kind in FAST_KINDS else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_merged_logits_are_those_of_base_and_adapter(bases, tmp_path, kind):
    base_name, settings = KINDS[kind]
    model = train(AutoModelForCausalLM.from_pretrained(bases / base_name), **settings)
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    result = merge_adapter(tmp_path / "adapter", tmp_path / "merged", max_shard_size="100KB")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert result.max_logit_diff < 1e-4
    assert result.num_shards == len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    plain = AutoModelForCausalLM.from_pretrained(bases / base_name)
    assert (plain(IDS).logits - expected).abs().max() > 1e-2  # the adapter has an effect


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tied_embeddings_stay_tied_only_where_they_are_equal(bases, tmp_path):
    tied = {}
    for kind in ("lora", "head of a tied model", "tied adapters", "tied copies"):
        _, settings = KINDS[kind]
        train(AutoModelForCausalLM.from_pretrained(bases / "tied"), **settings).save_pretrained(tmp_path / kind)
        merge_adapter(tmp_path / kind, tmp_path / "merged" / kind, check=False)
        tied[kind] = json.loads((tmp_path / "merged" / kind / "config.json").read_text())["tie_word_embeddings"]
        stored = load_file(tmp_path / "merged" / kind / "model.safetensors")
        assert ("lm_head.weight" in stored) is not tied[kind]
    assert tied == {"lora": True, "head of a tied model": False, "tied adapters": True, "tied copies": True}


@pytest.mark.slow
@pytest.mark.parametrize("base_name", ["llama", "gpt2"])
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_qlora_merges_into_what_it_was_trained_on(bases, tmp_path, base_name, base_dtype):
    """The merged weights are bit for bit the dequantised ones, not the published ones, plus the update."""
    base = AutoModelForCausalLM.from_pretrained(bases / base_name, quantization_config=NF4, dtype=base_dtype)
    targets = {"target_modules": ["c_attn"], "fan_in_fan_out": True} if base_name == "gpt2" else {"target_modules": QV}
    record_quantization(tmp_path / "adapter", quantization_of(base))
    if base_dtype == torch.bfloat16:  # bitsandbytes computes with unrounded 4-bit weights if asked for float32
        base.dequantize()
    model = train(base, **targets)
    model.enable_input_require_grads()  # as in training: the inference kernel rounds to bf16
    expected = model.float()(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    result = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    assert result.base_weights == "dequantized"
    assert "nf4, as in training" in result.base_weights_reason
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    exact = (merged(IDS).logits - expected).abs().max()
    assert exact < 2e-5
    original = merge_adapter(
        tmp_path / "adapter", tmp_path / "original", dtype="float32", base_weights="original", check=False
    )
    assert "trained on 4 bits" in original.base_weights_reason
    published = (AutoModelForCausalLM.from_pretrained(tmp_path / "original")(IDS).logits - expected).abs().max()
    assert published > 100 * exact
    assert result.max_logit_diff < 2e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("base_name", ["llama", "tied"])
def test_added_tokens_come_along(bases, tmp_path, base_name):
    base = AutoModelForCausalLM.from_pretrained(bases / base_name)
    base.resize_token_embeddings(70)
    model = train(base, target_modules=QV)
    expected = model(IDS + 5).logits
    assert expected.shape[-1] == 70
    model.save_pretrained(tmp_path / "adapter")
    result = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings is (base_name == "tied")
    torch.testing.assert_close(merged(IDS + 5).logits, expected, rtol=1e-4, atol=1e-4)
    assert result.max_logit_diff < 1e-4


@pytest.mark.slow
def test_without_a_record_the_published_weights_are_used_and_said(bases, tmp_path):
    train(AutoModelForCausalLM.from_pretrained(bases / "llama"), target_modules=QV).save_pretrained(tmp_path / "a")
    assert merge_adapter(tmp_path / "a", tmp_path / "m").base_weights == "original"
    asked = merge_adapter(tmp_path / "a", tmp_path / "m4", base_weights="dequantized")
    assert asked.base_weights == "dequantized"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "m4").state_dict()
    changed = {name for name in plain if not torch.equal(plain[name], rounded[name])}
    assert "model.layers.0.mlp.up_proj.weight" in changed  # quantised although the adapter does not touch it
    assert not changed & {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}


@pytest.mark.slow
def test_result_has_the_asked_dtype_and_the_tokenizer(shared_data, tmp_path):
    base = shared_data / "stories260k"
    model = train(AutoModelForCausalLM.from_pretrained(base), target_modules=QV)
    model.save_pretrained(tmp_path / "adapter")
    result = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert result.max_logit_diff > 0  # rounding is visible
    written = {path.name for path in (tmp_path / "merged").iterdir()}
    assert written == {
        "_run.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, r"shape \[4, 64\] in the adapter and \[4, 32\] for this base"),
        ({"num_hidden_layers": 3}, "which the adapter lacks"),
        ({"num_hidden_layers": 1}, "for which the base has no place"),
    ],
)
def test_a_wrong_base_is_refused(bases, tmp_path, change, message):
    train(AutoModelForCausalLM.from_pretrained(bases / "llama"), target_modules=QV).save_pretrained(tmp_path / "a")
    llama(**change).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=message):
        merge_adapter(tmp_path / "a", tmp_path / "merged", base_model=str(tmp_path / "other"))
    assert not (tmp_path / "merged").exists()


def test_another_architecture_is_refused(bases, tmp_path):
    train(AutoModelForCausalLM.from_pretrained(bases / "llama"), target_modules=QV).save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match="do not belong together: Target modules"):
        merge_adapter(tmp_path / "a", tmp_path / "merged", base_model=str(bases / "gpt2"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_whose_base_was_changed_by_its_initialisation_is_refused(bases, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(bases / "llama")
    train(model, target_modules=QV, init_lora_weights="pissa").save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match="pissa initialisation changed the base"):
        merge_adapter(tmp_path / "a", tmp_path / "merged")


@pytest.mark.slow
def test_a_wrong_merge_is_caught_by_its_logits(bases, tmp_path, monkeypatch):
    train(AutoModelForCausalLM.from_pretrained(bases / "llama"), target_modules=QV).save_pretrained(tmp_path / "a")
    from accel_scale.merging.weights import AdapterMerger

    honest = AdapterMerger._merged_module
    monkeypatch.setattr(
        AdapterMerger, "_merged_module", lambda self, name: {k: 1.5 * t for k, t in honest(self, name).items()}
    )
    with pytest.raises(ConfigError, match="logits differ by"):
        merge_adapter(tmp_path / "a", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_no_check_where_memory_is_short(bases, tmp_path, monkeypatch):
    import psutil

    train(AutoModelForCausalLM.from_pretrained(bases / "llama"), target_modules=QV).save_pretrained(tmp_path / "a")
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    result = merge_adapter(tmp_path / "a", tmp_path / "merged")
    assert result.max_logit_diff is None
    assert result.check.startswith("logits not compared: one model in float32 needs")
    # A float32 model and a third more: 4 bytes for each merged number.
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    needed = 4 * sum(tensor.numel() for tensor in merged.values())
    for share, is_compared in ((1.2, False), (1.45, True)):
        free = free._replace(available=int(share * needed))
        other = merge_adapter(tmp_path / "a", tmp_path / f"merged with {share}")
        assert (other.max_logit_diff is not None) == is_compared, share


@pytest.mark.slow
def test_command_prints_what_was_merged(bases, tmp_path, capsys):
    train(AutoModelForCausalLM.from_pretrained(bases / "llama"), target_modules=QV).save_pretrained(tmp_path / "a")
    parser = argparse.ArgumentParser()
    merge_command.add_arguments(parser)
    args = parser.parse_args([str(tmp_path / "a"), "--output_dir", str(tmp_path / "m"), "--dtype", "bfloat16"])
    assert merge_command.run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["base", "merged", "written", "check"]
    assert "4 modules" in lines[1]
    assert "bfloat16 in 1 file" in lines[2]


_MEASURED = """
import resource, sys, torch
from accel_scale.merging import adapter as merge, weights as merge_weights
from transformers import AutoModelForCausalLM
import bitsandbytes, peft
merge.merge_adapter({small!r}, {small_out!r}, base_weights={weights!r}, check=False)  # imports, thread pools
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = merge.merge_adapter({adapter!r}, {out!r}, max_shard_size="4MB", base_weights={weights!r}, check=False)
print(result.total_bytes, result.num_shards, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["original", "dequantized"])
def test_memory_is_bounded_by_shards_not_by_the_model(bases, big, tmp_path, weights):
    """A 150 MB model in 4 MB shards is merged in less than a quarter of its size."""
    source = _MEASURED.format(
        small=str(big / "small-adapter"),
        small_out=str(tmp_path / "small"),
        adapter=str(big / "adapter"),
        out=str(tmp_path / "out"),
        weights=weights,
    )
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True)
    total_bytes, num_shards, peak_bytes = map(int, run.stdout.splitlines()[-1].split())
    assert total_bytes > 150e6
    assert num_shards > 30
    assert peak_bytes < total_bytes / 4, f"{peak_bytes / 1e6:.0f} MB above the start"


@pytest.fixture(scope="module")
def big(bases, tmp_path_factory):
    """A 150 MB model in bf16 and an adapter for it, plus an adapter for a small model."""
    folder = tmp_path_factory.mktemp("big")
    small = train(AutoModelForCausalLM.from_pretrained(bases / "llama"), target_modules=QV)
    small.save_pretrained(folder / "small-adapter")
    with torch.device("meta"):
        model = llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=34, vocab_size=256)
    model = model.bfloat16().to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder / "base", max_shard_size="4MB")
    train(AutoModelForCausalLM.from_pretrained(folder / "base"), target_modules=QV).save_pretrained(folder / "adapter")
    return folder


def test_neither_adapter_nor_base_nor_another_model_is_overwritten(tmp_path):
    base, adapter, other = tmp_path / "base", tmp_path / "adapter", tmp_path / "other"
    for folder, name in ((base, "config.json"), (adapter, "adapter_model.safetensors"), (other, "config.json")):
        folder.mkdir()
        (folder / name).write_text("precious")
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "link").symlink_to(base)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    for output in (adapter, base, tmp_path / "link", other):
        with pytest.raises(ConfigError, match=r"overwritten|holds a model") as refused:
            merge_adapter(adapter, output)
        assert refused.value.place == "--output_dir"
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"r": 4, "lora_alpha": 8}, 2.0),
        ({"r": 3, "lora_alpha": 1, "use_rslora": True}, 3**-0.5),
    ],
)
def test_merged_weights_by_hand(bases, tmp_path, settings, scale):
    """W + α/r · BA (rank-stabilised: α/√r) where there is an adapter, and the base's own bytes elsewhere."""
    model = train(AutoModelForCausalLM.from_pretrained(bases / "llama"), target_modules=QV, **settings)
    model.save_pretrained(tmp_path / "adapter")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    base, merged = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (bases / "llama", tmp_path / "merged")
    )
    assert base.keys() == merged.keys()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if name.split(".")[-2] in QV}
    for name in changed:
        lora = {side: adapter[f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight"] for side in "AB"}
        torch.testing.assert_close(merged[name], base[name] + scale * lora["B"] @ lora["A"], rtol=1e-5, atol=1e-6)


def test_values_that_are_not_finite_are_named_and_those_of_8_bits_have_none():
    assert merge_weights._finite("w", torch.ones(2), "base").tolist() == [1, 1]
    for tensor in (torch.zeros(2, dtype=torch.float8_e4m3fn), torch.tensor([1, 2])):
        assert merge_weights._finite("w", tensor, "base") is tensor
    for value in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="w holds values that are not finite") as refused:
            merge_weights._finite("w", torch.tensor([0.0, value]), "base")
        assert refused.value.place == "base"
    assert merge_weights._some(["a", "b", "c"]) == "a, b, c"
    assert merge_weights._some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
