"""The model catalogue: published totals, names, folders, and the answer to a wrong name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_scale.errors import ConfigError
from accel_scale.planning.models.catalogue import catalogue_names, load_model_facts

# Parameter counts as published in model cards and safetensors indices, with tied heads counted once.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen/Qwen-7B": 7_721_324_544,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    # Without the router's correction biases, which are buffers, and the multi-token prediction module.
    "deepseek-ai/DeepSeek-R1": 671_026_404_352,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-6.7b": 6_658_473_984,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-7b1": 7_069_016_064,
    "bigscience/bloom": 176_247_271_424,
    "tiiuae/falcon-7b": 6_921_720_704,
    "stabilityai/stablelm-3b-4e1t": 2_795_443_200,
    "bigcode/starcoder2-3b": 3_030_371_328,
    "bigcode/starcoder2-7b": 7_173_923_840,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "google-bert/bert-large-uncased": 335_174_458,
}


@pytest.mark.parametrize(("model", "total"), PUBLISHED.items())
def test_totals_are_the_published_ones(model: str, total: int) -> None:
    assert load_model_facts(model, allow_download=False).num_params == total


def test_a_mixture_counts_what_a_token_passes_through() -> None:
    facts = load_model_facts("mistralai/Mixtral-8x7B-v0.1", allow_download=False)
    # The card says 12.9B of 46.7B are active, including the embedding's 0.13B.
    assert facts.num_active_params + facts.embedding_params == pytest.approx(12.9e9, rel=0.005)


def test_every_entry_is_modelled_under_every_name() -> None:
    for entry in catalogue_names():
        facts = load_model_facts(entry, allow_download=False)
        assert load_model_facts(entry.rpartition("/")[2].upper(), allow_download=False).num_params == facts.num_params


@pytest.mark.parametrize("name", ["llama-3.1-8b", "META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"])
def test_names_are_found_in_any_case_and_without_their_owner(name: str) -> None:
    facts = load_model_facts(name, allow_download=False)
    assert (facts.name, facts.num_params) == (name, 8_030_261_248)


def test_measured_models_have_the_measured_shapes(shared_data: Path) -> None:
    rows = json.loads((shared_data / "memory_measurements.json").read_text())
    for model in {row["model"]["name"]: row["model"] for row in rows}.values():
        facts = load_model_facts(model["name"], allow_download=False)
        ours = (facts.hidden_size, facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim)
        assert ours == tuple(model[key] for key in ("hidden", "layers", "heads", "kv_heads", "head_dim"))
        theirs = (model["vocab"], model["intermediate"], model["tied_embeddings"])
        assert (facts.vocab_size, facts.intermediate_size, facts.tied_embeddings) == theirs


def test_a_folder_and_its_config_are_read(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = load_model_facts(str(tmp_path))
    assert folder.num_params == load_model_facts(str(tmp_path / "config.json")).num_params == 108_544


def test_a_real_small_model_is_counted(shared_data: Path) -> None:
    from safetensors import safe_open

    folder = shared_data / "stories260k"
    with safe_open(folder / "model.safetensors", "np") as tensors:
        stored = {name: tensors.get_tensor(name).size for name in tensors.keys()}  # noqa: SIM118
    assert load_model_facts(str(folder)).num_params == sum(stored.values())


def test_a_cached_config_is_used_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda model, name: str(config))
    assert load_model_facts("someone/their-model", allow_download=False).num_layers == 1


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("lama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen3-9B", "switched off. Fix: use one of Qwen/Qwen3-8B"),
        ("owner/na me", "no model 'owner/na me'"),
        ("./not-a-folder", "no catalogue name and no folder"),
        ("", "no model is named"),
    ],
)
def test_a_wrong_name_gets_one_clear_line(model: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_facts(model, allow_download=False)
    assert says in str(caught.value)
    assert "Fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "says"), [("{", "cannot read it"), ("[1]", "not a JSON object")])
def test_a_broken_file_is_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_model_facts(str(tmp_path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model_facts(str(tmp_path))


def test_a_hub_out_of_reach_is_said_at_once() -> None:
    """The hub's client would retry the download for half a minute."""
    code = (
        "import time\nfrom accel_scale.planning.models.catalogue import load_model_facts\n"
        "begin = time.perf_counter()\ntry:\n    load_model_facts('someone/their-model')\n"
        "except Exception as error:\n    print(type(error).__name__, error, time.perf_counter() - begin < 5)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.startswith("ConfigError model: no model 'someone/their-model': not in the catalogue, and the ")
    assert "cannot be reached" in done.stdout
    assert done.stdout.endswith("True\n")


def test_models_whose_layers_are_traced_are_known_without_torch() -> None:
    """Their facts are shipped; each entry names the source of its config.json, and its sizes match its name."""
    code = (
        "import json, sys; from accel_scale.planning.models.catalogue import _catalogue, load_model_facts as load; "
        "found = {n: load(n, allow_download=False) for n, item in _catalogue().items() if 'source' in item}; "
        "assert 'torch' not in sys.modules; "
        "print(json.dumps({n: [f.num_params, f.num_active_params, bool(f.traced_config)] for n, f in found.items()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) >= 20
    assert sum(is_traced for *_, is_traced in found.values()) >= 19
    for name, (total, active, _) in found.items():
        if (said := re.search(r"-(\d+)B(?:-A(\d+)B)?(?=-|$)", name)) and "E-" not in name:
            assert total == pytest.approx(int(said[1]) * 1e9, rel=0.06), name
            assert said[2] is None or active == pytest.approx(int(said[2]) * 1e9, rel=0.11), name
