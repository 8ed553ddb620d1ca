"""The parts of a merge: shards, stored names, the 4-bit round trip, and refused adapters and bases."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, safe_open, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from accel_scale.errors import ConfigError
from accel_scale.merging.adapter import QLORA_DEFAULTS, _quantization, merge_adapter
from accel_scale.merging.check import compare_logits
from accel_scale.merging.files import NF4RoundTrip, ShardWriter
from accel_scale.modeling.checkpoint_names import StoredWeights, as_saved, stored_names
from accel_scale.modeling.quantization_record import record_quantization
from accel_scale.modeling.stored_weights import SafetensorsReader, stored_shapes
from accel_scale.training.saving.tensor_difference import difference, tied_names

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 32,
}  # fmt: skip
NAN = float("nan")
NUM_EXPERTS = 11  # so that order by name and order by number differ


def made(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    kinds = {LlamaConfig: LlamaForCausalLM, GPT2Config: GPT2LMHeadModel, MixtralConfig: MixtralForCausalLM}
    return kinds[type(config)](config)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "llama"
    made(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def adapter_on(model: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    peft_model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    peft_model.save_pretrained(folder)
    return folder


# --- files ---


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ([10, 10, 10, 10, 10], [2, 2, 1]),  # two fill a shard exactly
        ([10, 11, 9], [1, 2]),
        ([50, 1], [1, 1]),  # a tensor larger than a shard gets its own file
        ([1, 50, 1], [1, 1, 1]),
    ],
)
def test_shards_are_as_large_as_was_asked_and_no_larger(tmp_path: Path, sizes: list[int], shards: list[int]) -> None:
    writer = ShardWriter(tmp_path, max_shard_bytes=80)
    tensors = {f"t{index}": torch.arange(size, dtype=torch.float32) for index, size in enumerate(sizes)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    assert writer.finish() == len(shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": sum(sizes), "total_size": 4 * sum(sizes)}
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    assert [list(index["weight_map"].values()).count(file) for file in files] == shards
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, "model.safetensors.index.json"]
    reader = SafetensorsReader(tmp_path)
    assert reader.names() == list(tensors), "file by file"
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
    assert stored_shapes(tmp_path) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_names_are_read_file_by_file(tmp_path: Path) -> None:
    for file, names in (("model-1.safetensors", "dab"), ("model-2.safetensors", "c")):
        save_file({name: torch.zeros(1) for name in names}, tmp_path / file)
    files = {
        "a": "model-1.safetensors",
        "c": "model-2.safetensors",
        "d": "model-1.safetensors",
        "b": "model-1.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert SafetensorsReader(tmp_path).names() == ["a", "b", "d", "c"]


def test_what_fits_one_shard_is_one_file_without_an_index(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_shard_bytes=100)
    matrix = torch.arange(6.0).view(2, 3).T
    writer.add("transposed", matrix)
    writer.add("half", torch.ones(4, dtype=torch.float16))
    assert (writer.finish(), writer.total_bytes, writer.num_parameters) == (1, 32, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["transposed"].equal(matrix)
    assert stored["half"].dtype == torch.float16
    with safe_open(tmp_path / "model.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_a_folder_is_read_by_its_stem_and_refused_without_whole_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsReader(tmp_path)
    assert stored_shapes(tmp_path) == {}
    save_file({"b": torch.zeros(2, 3), "a": torch.ones(4)}, tmp_path / "adapter_model.safetensors")
    reader = SafetensorsReader(tmp_path, "adapter_model")
    assert (reader.names(), reader.shape("b")) == (["a", "b"], (2, 3))
    read = reader.read("a")
    read.zero_()
    assert reader.read("a").tolist() == [1, 1, 1, 1], "what is read is a copy"
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="cut off"):
        SafetensorsReader(tmp_path, "adapter_model")


# --- names ---


def test_experts_that_are_stored_one_by_one_make_one_tensor_and_are_written_as_they_were(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2)
    model = made(config)
    model.save_pretrained(tmp_path)
    reader = SafetensorsReader(tmp_path)
    with torch.device("meta"):
        skeleton = MixtralForCausalLM(config)
    weights = StoredWeights(skeleton, [*reader.file_of, "model.layers.9.of.another.model"])
    own = model.state_dict()
    for name, tensor in own.items():
        assert torch.equal(weights.read(name, reader.read), tensor), name
    fused = next(name for name in own if name.endswith("experts.gate_up_proj"))
    assert len(weights.names_for(fused)) == 2 * NUM_EXPERTS
    assert weights.names_for("model.norm.weight") == ["model.norm.weight"]
    assert weights.names_for("model.layers.9.of.another.model") == weights.names_for("nothing") == []
    assert set(weights.group_of) == set(reader.file_of)
    written: dict[str, torch.Tensor] = {}
    for group in set(weights.group_of.values()):
        written |= weights.write(group, {name: own[name] for name in weights.made_by(group)})
    assert written.keys() == reader.file_of.keys()
    assert all(tensor.is_contiguous() and tensor.equal(reader.read(name)) for name, tensor in written.items())


def test_a_stored_tensor_may_make_several_and_keep_its_name_where_it_is_turned(tmp_path: Path) -> None:
    """Gates, queries, keys and values in one matrix; experts whose matrices are stored transposed."""
    sizes = {**SIZES, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    pictures = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "deepstack_visual_indexes": [],
    }  # fmt: skip
    several = CONFIG_MAPPING["hrm_text"](**sizes)
    turned = CONFIG_MAPPING["qwen3_vl_moe"](text_config={**sizes, **experts}, vision_config=pictures)
    for kind, config in ((AutoModelForCausalLM, several), (AutoModelForImageTextToText, turned)):
        torch.manual_seed(0)
        model, folder = kind.from_config(config), tmp_path / config.model_type
        model.save_pretrained(folder)
        reader = SafetensorsReader(folder)
        with torch.device("meta"):
            skeleton = kind.from_config(config)
        weights, own = StoredWeights(skeleton, reader.file_of), model.state_dict()
        for name, tensor in own.items():
            assert weights.read(name, reader.read).equal(tensor), name
        written: dict[str, torch.Tensor] = {}
        for group in set(weights.group_of.values()):
            written |= weights.write(group, {name: own[name] for name in weights.made_by(group)})
        assert written.keys() == reader.file_of.keys()
        assert all(tensor.equal(reader.read(name)) for name, tensor in written.items())
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if ".experts." in name]:
        stored[name] = stored[name].transpose(1, 2).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    reader = SafetensorsReader(folder)
    assert all(weights.read(name, reader.read).equal(tensor) for name, tensor in own.items())


def test_a_save_reverts_the_conversions_that_the_checkpoint_needed_and_no_others(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    model = made(config)
    model.save_pretrained(tmp_path)
    apart, fused = set(SafetensorsReader(tmp_path).file_of), set(model.state_dict())
    assert apart != fused
    for stored in (apart, fused):
        with torch.device("meta"):
            skeleton = MixtralForCausalLM(config)
        StoredWeights(skeleton, stored)
        assert set(as_saved(skeleton, dict(skeleton.state_dict()))) == stored
        assert stored_names(skeleton, ["model.norm.weight"]) == {"model.norm.weight": "model.norm.weight"}


# --- 4 bits ---


def bits(*, double: bool) -> dict[str, Any]:
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        llm_int8_skip_modules=None,
    )
    return {**settings.to_dict(), "base_dtype": "float32"}


@pytest.mark.parametrize("double", [True, False])
def test_linear_layers_go_through_4_bits_and_nothing_else_does(double: bool) -> None:
    import bitsandbytes as bnb

    with torch.device("meta"):
        trip = NF4RoundTrip(LlamaForCausalLM(LlamaConfig(**SIZES)), bits(double=double))
        turned = NF4RoundTrip(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2)), bits(double=double))
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-2] for name in trip.transposed} == names
    assert not any(trip.transposed.values())
    assert set(turned.transposed.values()) == {True}, "Conv1D stores the transposed matrix"
    torch.manual_seed(0)
    weight = torch.randn(128, 64)
    layer = bnb.nn.Linear4bit(64, 128, bias=False, quant_type="nf4", compress_statistics=double)
    layer.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=double)
    layer = layer.to("cpu")
    expected = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert not expected.equal(weight)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert trip(name, weight).equal(expected)
    assert turned("transformer.h.0.attn.c_attn.weight", weight.T).equal(expected.T)
    assert trip("lm_head.weight", weight).equal(weight)
    trip.dtype = torch.bfloat16  # the base's: unquantised tensors are rounded to it, integers are not
    assert trip("model.norm.weight", weight).equal(weight.bfloat16())
    assert trip("model.counter", torch.tensor([257])).dtype == torch.int64


NF4_RECORD = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "base_dtype": "float16"}


@pytest.mark.parametrize(
    ("recorded", "asked", "settings", "reason"),
    [
        (False, "auto", None, "weights as published; no "),
        (False, "original", None, "weights as published, as asked"),
        (False, "dequantized", {**QLORA_DEFAULTS, "base_dtype": "float32"}, "from nf4, with double quantisation, as"),
        (True, "auto", NF4_RECORD, "dequantised from fp4, as in training"),
        (True, "dequantized", NF4_RECORD, "dequantised from fp4, as in training"),
        (True, "original", None, "as asked; the adapter was trained on 4 bits"),
    ],
)
def test_weights_are_those_of_training_unless_others_are_asked_for(
    base: Path, tmp_path: Path, recorded: bool, asked: str, settings: dict[str, Any] | None, reason: str
) -> None:
    if recorded:
        record_quantization(tmp_path, NF4_RECORD)
    found, why = _quantization(tmp_path, base, asked)
    assert found == settings
    assert reason in why
    assert ("trained on 4 bits" in why) == (recorded and asked == "original")


def test_what_is_assumed_of_a_4_bit_base_is_what_qlora_trains_on() -> None:
    config = BitsAndBytesConfig.from_dict(dict(QLORA_DEFAULTS))
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"init_lora_weights": init}, f"{init} initialisation") for init in ("pissa", "pissa_niter_4", "olora")),
        ({"layer_replication": [[0, 1], [0, 1]]}, "with layer_replication cannot"),
        ({"alora_invocation_tokens": [1, 2]}, "with alora_invocation_tokens cannot"),
        ({"base_model_name_or_path": None}, "does not name its base"),
        ({"base_model_name_or_path": "no such folder!"}, "neither a folder nor a model"),
    ],
    ids=str,
)
def test_adapters_that_cannot_be_merged_are_refused_in_one_line(
    base: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    values = {"base_model_name_or_path": str(base), "target_modules": ["q_proj"], **settings}
    LoraConfig(**values).save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match=message) as refused:
        merge_adapter(tmp_path / "a", tmp_path / "m")
    assert refused.value.place == str(tmp_path / "a" / "adapter_config.json")
    assert not (tmp_path / "m").exists()


def test_other_kinds_dtypes_and_bases_are_refused(base: Path, tmp_path: Path) -> None:
    IA3Config(base_model_name_or_path=str(base)).save_pretrained(tmp_path / "ia3")
    (tmp_path / "none").mkdir()
    for folder, message in (("ia3", "IA3 adapters"), ("none", r"no adapter_config\.json")):
        with pytest.raises(ConfigError, match=message):
            merge_adapter(tmp_path / folder, tmp_path / "m")
    good = adapter_on(LlamaForCausalLM.from_pretrained(base), tmp_path / "good")
    for flags, place, message in (
        ({"dtype": "float"}, None, None),
        ({"dtype": "nn"}, "--dtype", "'nn' is not a dtype"),
        ({"dtype": "float99"}, "--dtype", "'float99' is not a dtype"),
        ({"base_weights": "published"}, "--base_weights", "'published' is unknown"),
        ({"max_shard_size": "many"}, "--max_shard_size", "many"),
        ({"base_model": str(tmp_path / "gone")}, "--base_model", "neither a folder nor"),
    ):
        if message is None:
            assert merge_adapter(good, tmp_path / "m", check=False, **flags).check == "not asked for"
            continue
        with pytest.raises(ConfigError, match=message) as refused:
            merge_adapter(good, tmp_path / "refused", **flags)
        assert refused.value.place == place
    quantised = shutil.copytree(base, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="stored quantised") as refused:
        merge_adapter(good, tmp_path / "refused", base_model=str(quantised))
    assert refused.value.place == str(quantised)
    wrong = shutil.copytree(good, tmp_path / "nan")
    tensors = load_file(wrong / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, wrong / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="not finite") as refused:
        merge_adapter(wrong, tmp_path / "refused")
    assert refused.value.place == str(wrong)
    assert not (tmp_path / "refused").exists()


def test_the_result_says_what_was_done_and_keeps_what_lies_beside_the_base(base: Path, tmp_path: Path) -> None:
    source = shutil.copytree(base, tmp_path / "base")
    (source / "generation_config.json").write_text('{"max_new_tokens": 7}')
    good = adapter_on(LlamaForCausalLM.from_pretrained(source), tmp_path / "a", modules_to_save=["norm"])
    result = merge_adapter(good, tmp_path / "m", dtype="bfloat16", max_shard_size="20KB")
    assert (result.num_merged_modules, result.num_replaced_tensors, result.dtype) == (1, 3, "bfloat16")
    assert (result.base_model, result.base_weights) == (str(source), "original")
    assert result.num_shards == len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    numbers = sum(parameter.numel() for parameter in LlamaForCausalLM.from_pretrained(source).parameters())
    assert result.total_bytes == 2 * numbers
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text()) == {"max_new_tokens": 7}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    assert result.check.startswith("logits differ by at most")
    assert 0 < result.max_logit_diff < 0.1
    (good / "generation_config.json").write_text('{"max_new_tokens": 9}')
    merge_adapter(good, tmp_path / "other", check=False)
    assert json.loads((tmp_path / "other" / "generation_config.json").read_text()) == {"max_new_tokens": 9}


def test_logits_may_differ_by_rounding_to_their_dtype_alone(base: Path, tmp_path: Path) -> None:
    good = adapter_on(LlamaForCausalLM.from_pretrained(base), tmp_path / "a")
    merge_adapter(good, tmp_path / "m", check=False)
    difference_, sentence = compare_logits(base, good, tmp_path / "m", None)
    assert difference_ is not None
    assert difference_ < 1e-5
    assert "their spread is" in sentence
    for factor, dtype, is_refused in (
        (1.01, torch.float32, True), (1.3, torch.bfloat16, True), (1.005, torch.float16, False),
        (NAN, torch.float32, True),
    ):  # fmt: skip
        other = LlamaForCausalLM.from_pretrained(tmp_path / "m")
        other.lm_head.weight.data.mul_(factor)
        folder = tmp_path / f"{factor} {dtype}"
        other.to(dtype).save_pretrained(folder)
        if is_refused:
            with pytest.raises(ConfigError, match=f"rounding to {dtype}"):
                compare_logits(base, good, folder, None)
        else:
            compare_logits(base, good, folder, None)
    other = LlamaForCausalLM.from_pretrained(tmp_path / "m")
    other.lm_head.weight.data[-1] += 1.0
    other.save_pretrained(tmp_path / "last token")
    with pytest.raises(ConfigError, match="logits differ"):
        compare_logits(base, good, tmp_path / "last token", None)


# --- what was saved, against memory ---


@pytest.mark.parametrize(
    ("held", "stored", "said", "gap"),
    [
        (torch.ones(2), torch.ones(2), None, 0.0),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), None, 0.0),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), "differs by up to inf", float("inf")),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")]), None, 0.0),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.5, 5.0]), "differs by up to 3", 3.0),
        (torch.tensor([1.0 + 2**-20]), torch.tensor([1.0], dtype=torch.bfloat16), None, 0.0),
        (torch.ones(2), torch.ones(3), r"shape \[3\] instead of \[2\]", 0.0),
        (torch.ones(0), torch.ones(0), "is empty", 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), None, 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "w differs", float("inf")),
    ],
)
def test_two_tensors_are_compared_exactly(
    held: torch.Tensor, stored: torch.Tensor, said: str | None, gap: float
) -> None:
    words, largest = difference("w", held.requires_grad_(held.is_floating_point()), stored)
    assert largest == gap
    assert words is None if said is None else re.search(f"^w {said}$|^w has {said}$|^{said}$", words)


def test_names_of_one_tensor_are_found_together() -> None:
    one, other = torch.ones(1), torch.ones(1)
    assert tied_names({"a": one, "b": other, "c": one}) == {"a": ["a", "c"], "c": ["a", "c"]}
