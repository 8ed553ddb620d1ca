"""Every file in recipes/configs parses strictly, resolves, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig
from trl import ScriptArguments

from accel_scale import predict_memory
from accel_scale.facts.device import Device
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.parsing import parse_flags
from accel_scale.modeling.adapters import lora_config, quantization_config
from accel_scale.modeling.loading import skeleton_of
from accel_scale.optimization.optimizers import check_optimizer
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.trl import DPO, GRPO
from accel_scale.settings.resolve import resolve
from accel_scale.settings.resolved import LaunchFacts
from accel_scale.settings.trl_config import RecipeModelConfig, RecipeSFTConfig

quiet_imports()
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "configs"
CLASSES = (ScriptArguments, RecipeSFTConfig, RecipeModelConfig, ScaleArguments)
# tune_*.yaml files contain a search space: see tests/unit/test_tune_space.py.
OTHERS = {"dpo": DPO, "grpo": GRPO}
FILES = sorted(
    path
    for path in FOLDER.glob("*.yaml")
    if not path.stem.startswith(("tune_", "pretrain_", *(f"{n}_" for n in OTHERS)))
)
OF_OTHERS = sorted(path for name in OTHERS for path in FOLDER.glob(f"{name}_*.yaml"))
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
        assert values.get("max_grad_norm", RecipeSFTConfig.max_grad_norm) > 0  # gradients are clipped
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


@pytest.mark.parametrize("path", OF_OTHERS, ids=lambda path: path.stem)
def test_files_of_preferences_and_rewards_parse_strictly_and_resolve(path):
    spec = OTHERS[path.stem.split("_")[0]]
    parsed = parse_flags(spec.flags, ["--config_file", str(path)], program=spec.program)
    spec.refuse(parsed)
    for launch in (one_gpu(), LaunchFacts()):
        settings = resolve(parsed, launch)
        assert settings.global_batch_size == parsed.explicit["global_batch_size"]
        assert settings.precision.name == "bf16"
        assert settings.trains_adapters


# The published runs: alignment-handbook's configuration, and verl's table of baselines with its script.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        (
            "dpo_zephyr_7b",
            {"beta": 0.01, "learning_rate": 5e-6, "lora_r": 16, "max_length": 1024, "warmup_ratio": 0.1},
        ),
        ("grpo_gsm8k_0.5b", {"beta": 0.001, "learning_rate": 3e-6, "lora_r": 32, "max_completion_length": 1024}),
    ],
)
def test_they_have_the_published_settings(name, published):
    spec = OTHERS[name.split("_")[0]]
    values = parse_flags(spec.flags, ["--config_file", str(FOLDER / f"{name}.yaml")], program=spec.program).explicit
    assert {key: values[key] for key in published} == published
    if "num_generations" in values:
        assert values["global_batch_size"] == 64 * values["num_generations"]


@pytest.mark.parametrize("path", [*FILES, *OF_OTHERS], ids=lambda path: path.stem)
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
    assert values["packing"] is False  # packing would leave nothing to group


@pytest.mark.parametrize("size", ["13b", "33b", "65b"])
def test_guanaco_files_differ_in_what_they_declare_only(size):
    seven, other = (parse(FOLDER / f"qlora_guanaco_{s}.yaml").explicit for s in ("7b", size))
    differing = {name for name in seven.keys() | other.keys() if seven.get(name) != other.get(name)}
    assert differing <= {"model_name_or_path", "output_dir", "learning_rate", "lora_dropout", "save_steps"}


def test_the_two_defaults_differ_in_the_method_only():
    lora, qlora = (parse(FOLDER / f"sft_default_{method}.yaml").explicit for method in ("lora", "qlora"))
    assert {name for name in lora if lora[name] != qlora[name]} == {"method", "output_dir"}
    assert lora.keys() == qlora.keys()


PLANNED = [path for path in FILES if not path.stem.startswith("sft_default")]
# Flags that `accel-scale plan` has too, under the same names.
PLAN_FLAGS = (
    "method", "optim", "max_length", "packing", "per_device_train_batch_size", "global_batch_size",
    "checkpointing_policy", "lora_r", "lora_dropout", "lora_target_modules",
)  # fmt: skip


@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_stated_memory_is_what_plan_predicts(path):
    values = parse(path).explicit
    stated = re.search(
        r"^# Predicted peak memory: ([\d.]+) GiB( per GPU)?.*batches of (\d+) × (\d+)", path.read_text(), re.M
    )
    assert stated is not None, "every ready recipe of a real model says what it needs"
    assert (int(stated[3]), int(stated[4])) == (values["per_device_train_batch_size"], values["max_length"])
    settings = {name: values[name] for name in PLAN_FLAGS if name in values}
    ranks = {"num_gpus": 8, "strategy": "DDP"} if stated[2] else {}
    memory = predict_memory(values["model_name_or_path"], gpu="80GiB", **ranks, **settings)
    assert float(stated[1]) == pytest.approx(memory.device_bytes / GIB, abs=0.051)


@pytest.mark.parametrize(
    ("name", "model", "more"),
    [
        ("dpo_zephyr_7b", "mistralai/Mistral-7B-v0.1", {}),
        ("grpo_gsm8k_0.5b", "Qwen/Qwen2.5-0.5B", {"max_prompt_length": 512}),
    ],
)
def test_stated_memory_of_pairs_and_answers_is_what_plan_predicts(name, model, more):
    kind = name.split("_")[0]
    spec, text = OTHERS[kind], (FOLDER / f"{name}.yaml").read_text()
    values = parse_flags(spec.flags, ["--config_file", str(FOLDER / f"{name}.yaml")], program=spec.program).explicit
    stated = re.search(r"^# Predicted peak memory: ([\d.]+) GiB", text, re.M)
    taken = {"max_completion_length", "num_generations", "beta"} if kind == "grpo" else set()
    settings = {flag: values[flag] for flag in (*PLAN_FLAGS, *taken) if flag in values}
    memory = predict_memory(model, gpu="80GiB", recipe=kind, **settings, **more)
    assert float(stated[1]) == pytest.approx(memory.device_bytes / GIB, abs=0.051)
