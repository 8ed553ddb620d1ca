"""Every file in recipes/configs parses strictly, resolves, and says what it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig
from trl import ScriptArguments

from accel_scale.facts.device import Device
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.parsing import parse_flags
from accel_scale.modeling.adapters import lora_config, quantization_config
from accel_scale.modeling.loading import skeleton_of
from accel_scale.optimization.optimizers import check_optimizer
from accel_scale.planning.cost.communication import NF4_BYTES_PER_PARAM
from accel_scale.quiet import quiet_imports
from accel_scale.settings.resolve import resolve
from accel_scale.settings.resolved import LaunchFacts
from accel_scale.settings.trl_config import RecipeModelConfig, RecipeSFTConfig

quiet_imports()
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "configs"
CLASSES = (ScriptArguments, RecipeSFTConfig, RecipeModelConfig, ScaleArguments)
# What tune_*.yaml holds is a search space: tests/unit/test_tune_space.py.
FILES = sorted(path for path in FOLDER.glob("*.yaml") if not path.stem.startswith(("tune_", "pretrain_")))
PRETRAINING = sorted(FOLDER.glob("pretrain_*.yaml"))
GUANACO = {"7b": (2e-4, 0.1), "13b": (2e-4, 0.1), "33b": (1e-4, 0.05), "65b": (1e-4, 0.05)}
GIB = 1024**3


def parse(path: Path, *argv: str):
    return parse_flags(CLASSES, ["--config_file", str(path), *argv], program="sft.py")


def one_gpu(**kwargs) -> LaunchFacts:
    return LaunchFacts(device=Device("cuda"), **kwargs)


def test_the_promised_files_are_there():
    names = {path.stem for path in FILES}
    assert {f"qlora_guanaco_{size}" for size in GUANACO} <= names
    assert {"full_smollm2_135m", "lora_llama3_8b", "sft_default_lora", "sft_default_qlora"} <= names


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda path: path.stem)
def test_pretraining_files_parse_strictly_and_contradict_nothing(path):
    from accel_scale.flags.guard import GuardArguments
    from accel_scale.flags.pretraining import (
        PretrainArguments,
        PretrainDataArguments,
        PretrainModelArguments,
    )
    from accel_scale.pretraining.resolve import refuse_contradictions

    classes = (PretrainModelArguments, PretrainDataArguments, PretrainArguments, GuardArguments)
    argv = ["--config_file", str(path), "--data", "input.txt"]
    parsed = parse_flags(classes, argv, program="pretrain.py")
    refuse_contradictions(parsed)
    assert resolve(parsed, LaunchFacts()).global_batch_size == parsed.explicit["global_batch_size"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_resolves_on_one_gpu_and_on_a_cpu(path):
    for launch in (one_gpu(), LaunchFacts()):
        settings = resolve(parse(path), launch)
        values = settings.values
        assert settings.method == path.stem.split("_")[0] or path.stem.startswith("sft_default")
        assert settings.precision.name == "bf16"
        assert values.get("max_grad_norm", RecipeSFTConfig.max_grad_norm) > 0  # clipped
        check_optimizer(
            values.get("optim", "adamw_torch_fused"),
            device_type=launch.device_type,
            max_grad_norm=values.get("max_grad_norm"),
            optim_args=values.get("optim_args"),
        )
        model_args = settings.build(RecipeModelConfig)
        quantization = quantization_config(model_args, precision=settings.precision)
        assert (quantization is not None) == (settings.method == "qlora")
        if settings.method != "full":
            assert lora_config(model_args, skeleton_of(LlamaConfig(num_hidden_layers=1))).r == values["lora_r"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_says_how_to_run_it_and_nothing_else_is_mistaken(path):
    comment = "\n".join(line[2:] for line in path.read_text().splitlines() if line.startswith("#"))
    command = re.search(r"accelerate launch((?:.*\\\n)*.*)", comment).group(1).split()
    mentioned = [word for word in command if word.endswith((".yaml", ".py"))]
    assert str(path.relative_to(ROOT)) in mentioned
    assert all((ROOT / name).exists() for name in mentioned)
    assert all(len(line) <= 120 for line in path.read_text().splitlines())


@pytest.mark.parametrize("size", GUANACO)
def test_guanaco_is_the_papers(size):
    """Dettmers et al. 2023, table 9 and appendix B.2."""
    settings = resolve(parse(FOLDER / f"qlora_guanaco_{size}.yaml"), one_gpu())
    values = settings.values
    learning_rate, dropout = GUANACO[size]
    expected = {
        "learning_rate": learning_rate,
        "lora_dropout": dropout,
        "lora_r": 64,
        "lora_alpha": 16,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": True,
        "optim": "paged_adamw_32bit",
        "adam_beta2": 0.999,
        "max_grad_norm": 0.3,
        "max_steps": 1875,
        "max_length": 512,
        "gradient_accumulation_steps": 4,  # 16 = 4 × 4 on one GPU
    }
    assert {name: values[name] for name in expected} == expected
    assert str(getattr(values["lr_scheduler_type"], "value", values["lr_scheduler_type"])) == "constant"
    assert str(values["train_sampling_strategy"]) == "group_by_length"
    assert values["packing"] is False  # which would leave nothing to group


@pytest.mark.parametrize("size", ["13b", "33b", "65b"])
def test_guanaco_files_differ_in_what_they_declare_only(size):
    seven, other = (parse(FOLDER / f"qlora_guanaco_{s}.yaml").explicit for s in ("7b", size))
    differing = {name for name in seven.keys() | other.keys() if seven.get(name) != other.get(name)}
    assert differing <= {"model_name_or_path", "output_dir", "learning_rate", "lora_dropout", "save_steps"}


def test_the_two_defaults_differ_in_the_method_only():
    lora, qlora = (parse(FOLDER / f"sft_default_{method}.yaml").explicit for method in ("lora", "qlora"))
    assert {name for name in lora if lora[name] != qlora[name]} == {"method", "output_dir"}
    assert lora.keys() == qlora.keys()


# hidden, intermediate, layers, vocabulary, key and value width, tied embeddings: from each model's config.json.
SHAPES = {
    "qlora_guanaco_7b": (4096, 11008, 32, 32000, 4096, False),
    "qlora_guanaco_13b": (5120, 13824, 40, 32000, 5120, False),
    "qlora_guanaco_33b": (6656, 17920, 60, 32000, 6656, False),
    "qlora_guanaco_65b": (8192, 22016, 80, 32000, 8192, False),
    "lora_llama3_8b": (4096, 14336, 32, 128256, 1024, False),
    "full_smollm2_135m": (576, 1536, 30, 49152, 192, True),
}
# Published sizes, in billions of weights.
PUBLISHED = {"7b": 6.74, "13b": 13.02, "33b": 32.53, "65b": 65.29, "8b": 8.03, "135m": 0.1345}


def shapes_of(stem: str) -> tuple[dict[str, tuple[int, int]], int]:
    hidden, intermediate, _, vocabulary, kv, tied = SHAPES[stem]
    layer = {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (hidden, hidden),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }
    return layer, (1 if tied else 2) * vocabulary * hidden


def predicted_peak_bytes(stem: str) -> float:
    """The sum that the file's comment states, from its own flags."""
    values = parse(FOLDER / f"{stem}.yaml").explicit
    hidden, intermediate, num_layers, *_ = SHAPES[stem]
    layer, embeddings = shapes_of(stem)
    linear = num_layers * sum(a * b for a, b in layer.values())
    tokens = values["per_device_train_batch_size"] * values["max_length"]
    activations = 2 * tokens * (num_layers * hidden + 16 * hidden + 5 * intermediate)
    if values["method"] == "full":
        return 18 * (linear + embeddings) + activations
    targets = values["lora_target_modules"]
    adapted = [shape for name, shape in layer.items() if targets == ["all-linear"] or name in targets]
    adapters = 16 * num_layers * values["lora_r"] * sum(a + b for a, b in adapted)
    if values["method"] == "lora":
        return 2 * (linear + embeddings) + adapters + activations
    weights = linear * NF4_BYTES_PER_PARAM + 2 * embeddings
    return weights + adapters + activations + 2 * hidden * intermediate


@pytest.mark.parametrize("stem", SHAPES)
def test_predicted_memory_is_what_its_formula_gives(stem):
    stated = re.search(r"Predicted peak memory: ([\d.]+) GiB.*\(?estimate", (FOLDER / f"{stem}.yaml").read_text())
    assert float(stated.group(1)) == pytest.approx(predicted_peak_bytes(stem) / GIB, abs=0.051)
    layer, embeddings = shapes_of(stem)
    num_weights = SHAPES[stem][2] * sum(a * b for a, b in layer.values()) + embeddings
    assert num_weights / 1e9 == pytest.approx(PUBLISHED[stem.split("_")[-1]], rel=2e-3)
