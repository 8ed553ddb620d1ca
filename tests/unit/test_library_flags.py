"""Mistakes in flags are reported before the libraries are imported, in the same words as with their real classes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from said_early import said_with_imports
from transformers.training_args import DebugOption

from accel_scale.errors import ConfigError
from accel_scale.facts.device import ATTENTION_NAMES
from accel_scale.flags import library as library_flags
from accel_scale.flags import parsing as flags
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.library import SHIPPED, load_classes, make_table
from accel_scale.flags.parsing import build_parser, parse_flags
from accel_scale.flags.sft import DPO_LIBRARY_CLASSES, LIBRARY_CLASSES, SHIPPED_CLASSES
from accel_scale.launching import machine
from accel_scale.settings.trl_refused import refuse_contradictions
from accel_scale.starting.early_checks import check_command_line

FLAGS = (*LIBRARY_CLASSES, ScaleArguments)
DPO_FLAGS = (*DPO_LIBRARY_CLASSES, ScaleArguments)
SFT_FLAGS = (*FLAGS, TrainerGuardArguments)
SLOW = {"torch", "transformers", "trl", "accelerate", "datasets", "peft"}


def answer(argv: list[str], classes: tuple) -> str | dict:
    try:
        return parse_flags(classes, argv, program="sft.py").explicit
    except ConfigError as error:
        return error.one_line()


def as_told(parser: argparse.ArgumentParser) -> dict[str, tuple]:
    """Maps each flag to everything that argparse uses."""
    return {
        " ".join(action.option_strings): (
            action.dest,
            type(action),
            action.nargs,
            action.const,
            action.choices and [str(choice) for choice in action.choices],
            str(getattr(action.default, "value", action.default)),
            action.help,
        )
        for action in parser._actions
    }


def test_the_shipped_table_is_that_of_the_installed_libraries() -> None:
    made = make_table(SHIPPED_CLASSES, lambda classes: build_parser(classes, program=""))
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert shipped == json.loads(json.dumps(made)), "run: python -m accel_scale.flags.sft"


def test_the_recipes_parser_has_the_flags_of_its_classes() -> None:
    known = build_parser(FLAGS, program="sft.py", table=library_flags.known_table())
    real = build_parser(FLAGS, program="sft.py")
    assert as_told(known) == as_told(real)
    assert known.get_default("_nullable") == real.get_default("_nullable")
    assert len(as_told(real)) >= 200


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ("sft.py", ["--global_batch_size", "The initial learning rate", "SFTConfig", "Fine-tune a causal language"]),
        ("pretrain.py", ["--global_batch_size", "--tp_size"]),
    ],
)
def test_help_says_what_every_flag_is_for_without_importing_a_library(recipe: str, wanted: list[str]) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['{recipe}', '--help']\n"
        f"try: runpy.run_path('recipes/{recipe}', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "sys.stdout.flush(); print('IMPORTED', *({'torch', 'transformers', 'trl'} & set(sys.modules)))"
    )
    root = Path(library_flags.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    text, _, imported = done.stdout.rpartition("IMPORTED")
    assert imported.split() == []
    assert [part for part in wanted if part not in text] == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--learning_rat", "1"],
        ["--learning-rate", "fast"],
        ["--learning_rate", "-1"],
        ["--lr_scheduler_type", "cosin"],
        ["--eval_strategy", "sometimes"],
        ["--bf16", "maybe"],
        ["--num_train_epochs"],
        ["--no_packing", "7"],
        ["--max_steps", "1.5"],
        ["--report_to"],
        ["--datasets", "a"],
        ["--dtype", "fp17"],
        ["--liger_kernel_config", "x"],
        ["--debug", "everything"],
        ["--parallelism_config", "x"],
        ["word"],
        ["--yaml", "learning_rte: 1"],
        ["--yaml", "seed: many"],
        ["--yaml", "seed:"],
        ["--yaml", "seed: [1, 2]"],
        ["--yaml", "bf16: maybe"],
        ["--yaml", "save_strategy: never"],
        ["--yaml", "no_packing: true"],
        ["--yaml", "distributed_type: FSDP"],
        ["--yaml", "debug: everything"],
        ["--yaml", "max_grad_norm: .nan"],
        # valid ones
        ["--yaml", "max_length: null\nbf16: yes\nmodel_init_kwargs: {a: 1}\nreport_to: [a, b]"],
        ["--no_packing", "--bf16", "--eval_strategy", "no", "--learning_rate", "-0.0001e0"],
        ["--gradient_checkpointing", "--optim", "adamw_8bit", "--lora_target_modules", "a", "b"],
    ],
    ids=" ".join,
)
def test_the_table_and_the_classes_give_the_same_answer(argv: list[str], tmp_path: Path) -> None:
    if argv[0] == "--yaml":
        path = tmp_path / "flags.yaml"
        path.write_text(argv[1])
        argv = ["--config_file", str(path)]
    assert answer(argv, FLAGS) == answer(argv, load_classes(FLAGS))


def test_a_value_of_a_librarys_own_type_is_read_by_the_library() -> None:
    assert answer(["--debug", "underflow_overflow"], FLAGS) == {"debug": [DebugOption.UNDERFLOW_OVERFLOW]}


def test_under_other_versions_the_classes_are_asked_once_and_then_a_table_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library_flags, "_versions", lambda: {"trl": "1.99", "transformers": "5.99"})
    mistake = ["--learning_rat", "1"]
    assert library_flags.known_table() is None
    first = answer(mistake, FLAGS)
    assert library_flags.known_table(FLAGS) is not None
    assert library_flags.known_table(DPO_FLAGS) is None  # another recipe's classes are added once it asks
    answer(mistake, DPO_FLAGS)
    kept = library_flags.known_table(FLAGS)
    assert kept is not None
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))["classes"]
    others = {f"trl:{name}Config" for name in ("KTO", "GRPO", "RLOO", "Reward")}
    assert kept["classes"] == {name: flags for name, flags in shipped.items() if name not in others}
    monkeypatch.setattr(flags, "load_classes", None)  # not loaded again
    assert answer(mistake, FLAGS) == first


def test_a_checkout_of_a_library_has_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library_flags.remember({"versions": {"trl": "1.17.0.dev0"}, "classes": {}})
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize(
    "words",
    [
        ["recipes/sft.py", "--learning_rat", "1"],
        ["recipes/sft.py", "--config_file", "{yaml}"],
        ["recipes/sft.py", "--global_batch_size", "3", "--per_device_train_batch_size", "2"],
        ["recipes/sft.py", "--activation_offloading", "true", "--use_cpu", "true"],
        ["recipes/pretrain.py", "--max_length", "long"],
        ["recipes/pretrain.py", "--attn_implementation", "flash"],
        ["recipes/pretrain.py", "--collective_timeout", "soon"],
        ["recipes/tune.py", "recipes/sft.py", "--num_trials", "few"],
        ["recipes/tune.py", "recipes/sft.py", "--", "--learning_rat", "1"],
        ["-m", "accel_scale.cli.main", "rehearse", "--config_file", "{ddp}", "recipes/sft.py", "--optim", "adm"],
        [
            "-m",
            "accel_scale.cli.main",
            "rehearse",
            "--config_file",
            "{ddp}",
            "recipes/sft.py",
            "--attn_implementation=sdpa_paked",
        ],
        ["-m", "accel_scale.cli.main", "merge", "{adapter}", "--output_dir", "merged", "--max_shard_size", "big"],
        ["-m", "accel_scale.cli.main", "merge", "{adapter}", "--output_dir", "/proc/merged"],
    ],
    ids=" ".join,
)
def test_commands_say_so_before_a_library_is_imported(repository: Path, tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("seed: 1\nlearning_rte: 3\n")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    named = {"yaml": path, "ddp": repository / "accelerate_configs/ddp.yaml", "adapter": adapter}
    words = [word.format(**named) for word in words]
    said, imports = said_with_imports(repository, words)
    assert " Fix: " in said
    assert not imports & SLOW


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--checkpointing_policy every_0", "did you mean every_4?"),
        ("--collective_timeout soon", "write it like 90m"),
        ("--optim_args momentum=3", "adamw_torch_fused has no option 'momentum'"),
        ("--optim sgd --optim_args momentum=much", "--optim_args"),
        ("--guard_min_steps 500", "500 steps never fit into a window of 128"),
        ("--fp16 true --bf16 true", "fp16 and bf16 are both on"),
        ("--precision fp32 --bf16 true", "contradict each other"),
        ('--model_init_kwargs {"attn_implementation":"eager"}', "use --attn_implementation"),
        ("--lr_scheduler_kwargs notjson", "not a JSON object"),
        ("--dataset_text_field question", "use --columns text=question"),
        ("--attn_implementation flash_atention_2", "did you mean flash_attention_2?"),
        ("--activation_offloading true --use_cpu true", "activations on a CPU"),
    ],
)
def test_values_are_read_before_the_libraries(flags: str, says: str) -> None:
    """At a recipe's start; mistakes that it reports later are in the table of bad inputs."""
    with pytest.raises(ConfigError) as refused:
        check_command_line("sft.py", __file__, flags.split(), SFT_FLAGS, refuse_contradictions)
    assert says in refused.value.one_line()
    assert refused.value.place
    assert refused.value.fix


@pytest.mark.parametrize("name", [*ATTENTION_NAMES, "kernels-community/flash-attn3", "kernels-community/x:flash_fn"])
def test_attention_that_the_run_knows_passes_early(name: str) -> None:
    check_command_line("sft.py", __file__, ["--attn_implementation", name], SFT_FLAGS, refuse_contradictions)


@pytest.mark.parametrize(
    ("built", "driver", "extra", "surely"),
    [
        ({"cuda": None}, False, (), True),
        ({"cuda": "13.0"}, False, (), True),
        ({"cuda": "13.0"}, True, (), False),
        ({"cuda": None, "hip": "7.1"}, False, (), False),
        ({"cuda": None, "xpu": "2026"}, False, (), False),
        ({"cuda": None}, False, ("npu",), False),
    ],
)
def test_a_device_that_torch_may_have_is_not_ruled_out(
    built: dict[str, str | None], driver: bool, extra: tuple[str, ...], surely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.runpy, "run_path", lambda path: built)
    monkeypatch.setattr(machine.importlib.metadata, "entry_points", lambda group: extra)
    monkeypatch.setattr(machine, "_has_nvidia_driver", lambda: driver)
    assert machine.is_surely_cpu() is surely
    assert machine.is_surely_cpu(use_cpu=True)
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert not machine.is_surely_cpu()


def test_what_is_known_without_torch_is_what_torch_finds() -> None:
    assert not machine.is_surely_cpu() or machine.detect_device().type == "cpu"
