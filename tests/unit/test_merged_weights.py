"""A merge tensor by tensor: equal to PEFT's merge of the whole model, by hand in 4 bits, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from test_merge import IDS, KINDS, NF4, QV, gpt2, llama, train
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.merging.adapter import merge_adapter
from accel_scale.merging.files import NF4RoundTrip, ShardWriter
from accel_scale.merging.weights import AdapterMerger
from accel_scale.modeling.quantization_record import record_quantization
from accel_scale.modeling.stored_weights import SafetensorsReader, local_folder, read_header

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=3, num_experts_per_tok=2))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    llama().save_pretrained(folder / "llama", max_shard_size="60KB")
    llama(tie_word_embeddings=True).save_pretrained(folder / "tied")
    gpt2().save_pretrained(folder / "gpt2")
    mixtral().save_pretrained(folder / "mixtral")
    return folder


def loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ALL_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **KINDS,
    "one head that is tied": ("tied", {"target_modules": [*QV, "lm_head"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "one weight of experts": ("mixtral", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_merge_is_what_peft_makes_of_the_whole_model(bases: Path, tmp_path: Path, kind: str) -> None:
    base_name, settings = ALL_KINDS[kind]
    model = train(loaded(bases / base_name), **settings)
    model.save_pretrained(tmp_path / "adapter")
    result = merge_adapter(
        tmp_path / "adapter",
        tmp_path / "merged",
        base_model=str(bases / base_name),
        max_shard_size="40KB",
        check=False,
    )
    logits, merged, plain = model.eval()(IDS).logits, loaded(tmp_path / "merged"), loaded(bases / base_name)
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    assert (plain(IDS).logits - logits).abs().max() > 1e-2
    if base_name != "tied":  # PEFT adds twice to a tensor that two modules share
        expected = model.merge_and_unload().state_dict()
        assert merged.state_dict().keys() == expected.keys()
        for name, tensor in merged.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert result.num_shards == len(list((tmp_path / "merged").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("base_name", "embedding"), [("llama", "model.embed"), ("tied", "model.embed"), ("gpt2", "wte")]
)
def test_tokens_that_were_added_come_along(bases: Path, tmp_path: Path, base_name: str, embedding: str) -> None:
    base = loaded(bases / base_name)
    base.resize_token_embeddings(70)
    targets = {"target_modules": ["c_attn"], "fan_in_fan_out": True} if base_name == "gpt2" else {"target_modules": QV}
    model = train(base, **targets)
    model.save_pretrained(tmp_path / "adapter")
    result = merge_adapter(tmp_path / "adapter", tmp_path / "merged", base_model=str(bases / base_name))
    assert result.max_logit_diff is not None
    assert result.max_logit_diff < 1e-5
    merged = loaded(tmp_path / "merged")
    assert merged.config.vocab_size == 70
    assert merged.config.tie_word_embeddings is (base_name != "llama")
    expected = model.merge_and_unload().state_dict()
    assert any(embedding in name and tensor.shape[0] == 70 for name, tensor in expected.items())
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_each_stored_tensor_is_read_once_and_merged_modules_leave_memory(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two shards are in memory: a tied embedding that nothing changes is not read twice."""
    train(loaded(bases / "tied"), target_modules=QV).save_pretrained(tmp_path / "adapter")
    merger = AdapterMerger(bases / "tied", tmp_path / "adapter", read_config(tmp_path / "adapter"), None, None)
    read: list[str] = []
    usual = SafetensorsReader.read
    monkeypatch.setattr(SafetensorsReader, "read", lambda reader, name: read.append(name) or usual(reader, name))
    writer = ShardWriter(tmp_path, 10**9)
    merger.write(writer)
    assert sorted(read) == sorted([*merger.base.file_of, *merger.adapter.file_of])
    assert all(parameter.is_meta for layer in merger.modules.values() for parameter in layer.parameters())


def read_config(adapter: Path) -> LoraConfig:
    return LoraConfig.from_pretrained(str(adapter))  # type: ignore[return-value]


def in_four_bits(weight: torch.Tensor, *, double: bool) -> torch.Tensor:
    """`weight` after a 4-bit round trip in bitsandbytes' own layer."""
    import bitsandbytes as bnb

    layer = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=double).to(
        "cpu"
    )
    return bnb.functional.dequantize_4bit(layer.data, layer.quant_state)


@pytest.mark.parametrize("base_name", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["recorded", "asked for"])
def test_what_was_trained_on_4_bits_is_merged_into_what_it_was_trained_on(
    bases: Path, tmp_path: Path, base_name: str, how: str
) -> None:
    """Every linear layer as 4 bits hold it, plus the adapter where there is one; everything else unchanged."""
    is_gpt2, double = base_name == "gpt2", how == "asked for"
    targets = {"target_modules": ["c_attn"], "fan_in_fan_out": True} if is_gpt2 else {"target_modules": QV}
    train(loaded(bases / base_name), lora_alpha=4, **targets).save_pretrained(tmp_path / "a")
    settings: dict[str, Any] = {"base_model": str(bases / base_name), "dtype": "float32"}
    if how == "recorded":
        record = {**NF4.to_dict(), "bnb_4bit_use_double_quant": False, "base_dtype": "float32"}
        record_quantization(tmp_path / "a", record)
    else:
        settings["base_weights"] = "dequantized"
    result = merge_adapter(tmp_path / "a", tmp_path / "m", **settings)
    assert (result.base_weights, result.num_merged_modules) == ("dequantized", 2 if is_gpt2 else 4)
    assert ("as in training" in result.base_weights_reason) == (how == "recorded")
    assert result.max_logit_diff is not None
    assert result.max_logit_diff < 1e-4, "base and adapter, loaded in 4 bits, say the same"
    plain, merged = loaded(bases / base_name).state_dict(), load_file(tmp_path / "m" / "model.safetensors")
    adapter = load_file(tmp_path / "a" / "adapter_model.safetensors")
    for name, tensor in merged.items():
        kind = name.split(".")[-2]
        is_linear = tensor.dim() == 2 and ("proj" in kind or kind in ("c_attn", "c_fc"))
        expected = plain[name]
        if is_linear:
            turned = expected.T.contiguous() if is_gpt2 else expected
            expected = in_four_bits(turned, double=double)
            lora = f"base_model.model.{name.removesuffix('weight')}lora_"
            if f"{lora}A.weight" in adapter:
                expected = expected + adapter[f"{lora}B.weight"] @ adapter[f"{lora}A.weight"]  # α/r is 1
            expected = expected.T if is_gpt2 else expected
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6, msg=name)
        assert is_linear == (not torch.allclose(tensor, plain[name], rtol=1e-5, atol=1e-6)), name


def test_layers_that_stay_as_they_are_in_4_bits_are_those_of_the_record_and_of_the_model() -> None:
    def quantised(skipped: list[str] | None, kept: list[str] | None) -> set[str]:
        with torch.device("meta"):
            model = llama()
        model._keep_in_fp32_modules = kept  # type: ignore[assignment]
        record = {**NF4.to_dict(), "llm_int8_skip_modules": skipped, "base_dtype": "float32"}
        return {name.split(".")[-2] for name in NF4RoundTrip(model, record).transposed}

    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert quantised(None, None) == every
    assert quantised(["o_proj", "lm_head"], None) == every - {"o_proj"}
    assert quantised(None, ["down_proj"]) == every - {"down_proj"}


def test_what_lies_beside_the_adapter_comes_before_what_lies_beside_the_base(bases: Path, tmp_path: Path) -> None:
    base, adapter = shutil.copytree(bases / "llama", tmp_path / "base"), tmp_path / "a"
    train(loaded(base), target_modules=QV).save_pretrained(adapter)
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    tokenizer.save_pretrained(base)
    merge_adapter(adapter, tmp_path / "m1", check=False)
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(adapter)
    for folder in (base, adapter):
        (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": len(folder.name)}))
    merge_adapter(adapter, tmp_path / "m2", check=False)
    sizes = [len(AutoTokenizer.from_pretrained(tmp_path / name)) for name in ("m1", "m2")]
    assert sizes == [len(tokenizer) - 1, len(tokenizer)]
    assert json.loads((tmp_path / "m2" / "generation_config.json").read_text()) == {"max_new_tokens": 1}


def test_a_folder_with_another_adapters_result_is_refused_and_its_own_is_replaced(bases: Path, tmp_path: Path) -> None:
    for name, rank in (("a", 2), ("b", 4)):
        train(loaded(bases / "llama"), target_modules=QV, r=rank).save_pretrained(tmp_path / name)
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "a", "link"):
        merge_adapter(tmp_path / name, tmp_path / "m", check=False)
    with pytest.raises(ConfigError, match=f"a run of accel-scale merge on {tmp_path / 'a'}") as refused:
        merge_adapter(tmp_path / "b", tmp_path / "m", check=False)
    assert refused.value.place == "--output_dir"
    with pytest.raises(ConfigError, match="neither a folder nor a model") as refused:
        merge_adapter(tmp_path / "no such folder!", tmp_path / "n")
    assert refused.value.place == "ADAPTER"
    for base_weights in ("auto", "original"):
        assert (
            merge_adapter(tmp_path / "a", tmp_path / base_weights, base_weights=base_weights).base_weights
            == "original"
        )


def changed(folder: Path, to: Path, change: Any) -> Path:
    """A single-file copy of a model with its tensors changed by `change`."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    change(tensors)
    to.mkdir()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "config.json", to)
    return to


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
BAD_BASES = {
    "missing": (lambda t: t.pop(NORM), r"not in it \(model\.norm\.weight\)", "base"),
    "extra": (lambda t: t.update(stray=torch.ones(1)), r"not in the model \(stray\)", "base"),
    "not finite": (lambda t: t[QUERY][0, 0].fill_(float("nan")), rf"{QUERY} holds values that are not finite", "base"),
    "infinite": (lambda t: t[QUERY][0, 0].fill_(float("-inf")), rf"{QUERY} holds values that are not", "base"),
    "shape": (
        lambda t: t.update({QUERY: torch.ones(32, 64)}),
        rf"{QUERY} of the base has shape \[32, 64\] in its file and \[64, 64\] by its config\.json",
        "adapter",
    ),
}


@pytest.mark.parametrize("case", BAD_BASES)
def test_a_base_that_is_not_whole_is_refused_before_anything_is_written(
    bases: Path, tmp_path: Path, case: str
) -> None:
    change, message, place = BAD_BASES[case]
    train(loaded(bases / "llama"), target_modules=QV).save_pretrained(tmp_path / "adapter")
    base = changed(bases / "llama", tmp_path / "base", change)
    with pytest.raises(ConfigError, match=message) as refused:
        merge_adapter(tmp_path / "adapter", tmp_path / "m", base_model=str(base), check=False)
    assert refused.value.place == str(tmp_path / place)
    assert not (tmp_path / "m" / "config.json").exists()


def test_an_update_that_overflows_is_refused_in_one_line(bases: Path, tmp_path: Path) -> None:
    """Both factors are finite, but their product is not."""
    model = train(loaded(bases / "llama"), target_modules=["q_proj"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.fill_(1e30)
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"q_proj\.weight holds values that are not finite") as refused:
        merge_adapter(tmp_path / "a", tmp_path / "m", check=False)
    assert refused.value.place == str(tmp_path / "a")


def test_a_wrong_base_is_said_of_the_adapter(bases: Path, tmp_path: Path) -> None:
    train(loaded(bases / "llama"), target_modules=QV).save_pretrained(tmp_path / "a")
    for base in (bases / "gpt2", bases / "mixtral"):
        with pytest.raises(ConfigError, match="adapter and base do not belong together: ") as refused:
            merge_adapter(tmp_path / "a", tmp_path / "m", base_model=str(base))
        assert (refused.value.place, "--base_model" in refused.value.fix) == (str(tmp_path / "a"), True)
    merger = AdapterMerger(bases / "llama", tmp_path / "a", read_config(tmp_path / "a"), None, None)
    with pytest.raises(ConfigError, match=r"nothing\.weight is not in the base's files"):
        merger.final("nothing.weight")


# --- headers ---


def header(text: bytes, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


ONE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
HEADERS = {
    "seven bytes": (b"1234567", "no safetensors file"),
    "no header": (b"\x00" * 7 + b"\x01", "no safetensors file"),  # it would have 2^56 bytes
    "cut header": (header(ONE)[:-3], r"cut off after \d+ bytes: its header cannot be read"),
    "cut by one": (header(ONE, b"\x00" * 3), r"cut off: it has 65 of 66 bytes"),
    "no text": (header(b"\xff\xfe{}"), "no safetensors file: its header cannot be read"),
    "no offsets": (header(b'{"a":{"dtype":"F32"}}'), "no safetensors file: its header cannot be read"),
    "one offset": (header(b'{"a":{"data_offsets":[0]}}'), "no safetensors file: its header cannot be read"),
    "a list": (header(b"[1, 2]"), "no safetensors file: its header cannot be read"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, case: str) -> None:
    content, message = HEADERS[case]
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^.*{message}") as refused:
        read_header(tmp_path / "f")
    assert refused.value.place == str(tmp_path / "f")


def test_files_that_are_whole_are_read(tmp_path: Path) -> None:
    for content, names in ((header(ONE, b"\x00" * 4), ["a"]), (header(b"{}"), []), (header(ONE, b"\x00" * 9), ["a"])):
        (tmp_path / "f").write_bytes(content)
        assert list(read_header(tmp_path / "f")) == names
    (tmp_path / "f").write_bytes(header(b'{"__metadata__":{"format":"pt"}}'))
    assert read_header(tmp_path / "f") == {}


def test_of_the_hub_only_what_is_read_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fnmatch

    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot(name: str, *, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert local_folder("org/model", place="here") == tmp_path
    wanted = {
        name
        for name in ("model.safetensors", "config.json", "tokenizer.model", "chat_template.jinja", "merges.txt",
                     "pytorch_model.bin", "model.onnx", "a/model.gguf")
        if any(fnmatch.fnmatch(name, pattern) for pattern in asked["patterns"])
    }  # fmt: skip
    assert asked["name"] == "org/model"
    assert wanted == {"model.safetensors", "config.json", "tokenizer.model", "chat_template.jinja", "merges.txt"}
