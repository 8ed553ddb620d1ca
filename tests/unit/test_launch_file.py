"""Launch files: parsed strictly, with line numbers; every shipped one is accepted here and by Accelerate."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from accel_scale.checks.registry import check_run
from accel_scale.checks.run_settings import RunSettings
from accel_scale.errors import ConfigError
from accel_scale.launching.launch_file import (
    looks_like_launch_file,
    read_deepspeed_file,
    read_launch_file,
    read_source_file,
)
from accel_scale.launching.launch_keys import SECTION_KEYS, TOP_KEYS
from accel_scale.launching.machine import PACKAGES, LocalMachine

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
STRATEGIES = {
    "cpu": ("single", "one CPU process", None, 1),
    "single_gpu": ("single", "one process", "bf16", 1),
    "ddp": ("ddp", "DDP", "bf16", 2),
    "fsdp2": ("fsdp2", "FSDP2", "bf16", 2),
    "fsdp2_grad_op": ("fsdp2", "FSDP2", "bf16", 2),
    "fsdp2_hybrid": ("fsdp2", "FSDP2 hybrid, 2 replicas × 2 shards", "bf16", 4),
    "fsdp2_tp": ("fsdp2", "FSDP2 × TP 2", "bf16", 4),
    "fsdp2_sp": ("fsdp2", "FSDP2 × SP 2", "bf16", 4),
    "tp": ("fsdp2", "TP 2", "bf16", 2),
    "pp": ("ddp", "DDP", "bf16", 2),
    "3d": ("fsdp2", "FSDP2 × TP 2", "bf16", 8),
    "fsdp2_offload": ("fsdp2", "FSDP2, CPU offload", "bf16", 2),
    "zero1": ("zero1", "ZeRO-1", "bf16", 2),
    "zero2": ("zero2", "ZeRO-2", "bf16", 2),
    "zero3": ("zero3", "ZeRO-3", "bf16", 2),
    "zero2_offload": ("zero2", "ZeRO-2, CPU offload", "bf16", 2),
    "zero3_offload": ("zero3", "ZeRO-3, CPU offload", "bf16", 2),
    "zero2_tuned": ("zero2", "ZeRO-2", None, 2),
    "zero3_tuned": ("zero3", "ZeRO-3", None, 2),
    "zero_infinity": ("zero3", "ZeRO-3, NVMe offload", None, 2),
    "ddp_multinode": ("ddp", "DDP", "bf16", 16),
    "fsdp2_multinode": ("fsdp2", "FSDP2", "bf16", 16),
    "zero3_multinode": ("zero3", "ZeRO-3", "bf16", 16),
}
# For recipes that share a model between ranks. Value: the --pp_size that goes with the file.
SHARING = {"tp": 1, "fsdp2_tp": 1, "fsdp2_sp": 1, "3d": 2}
FULL_MACHINE = LocalMachine(
    packages=dict.fromkeys(PACKAGES, "1"), has_compiler=True, has_ninja=True, has_libaio=True, num_cores=2
)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def write(folder: Path, text: str, name: str = "launch.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_all_promised_files_are_shipped():
    assert {path.stem for path in SHIPPED} == set(STRATEGIES)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_says_its_strategy(path):
    file = read_launch_file(path)
    assert (file.strategy, file.parallel.label, file.mixed_precision, file.num_processes) == STRATEGIES[path.stem]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_passes_the_checks_with_default_settings(path):
    file = read_launch_file(path)
    findings = check_run(RunSettings(pp_size=SHARING.get(path.stem)), file, FULL_MACHINE)
    # Only the placeholder address of node 0 is left for the user to fill in.
    expected = ["main_process_ip"] if path.stem.endswith("multinode") else []
    assert [finding.place for finding in findings] == [file.place(key) for key in expected]
    assert all(finding.level == "warning" for finding in findings)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_accelerate_loads_the_shipped_file(path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    config = load_config_from_file(str(path))
    assert config.distributed_type.value == read_launch_file(path).values["distributed_type"]
    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.use_fsdp is ("fsdp" in path.stem or path.stem in SHARING)
    assert args.use_deepspeed is ("zero" in path.stem)
    assert args.multi_gpu is path.stem.startswith(("ddp", "pp"))


@pytest.mark.parametrize("path", [path for path in SHIPPED if "zero" in path.stem], ids=lambda path: path.stem)
def test_recipe_rules_over_accumulation_and_clipping(path):
    config = read_launch_file(path).parallel.deepspeed
    assert config["gradient_accumulation_steps"] == config["gradient_clipping"] == "auto"


def test_zero_infinity_keeps_everything_on_disk():
    file = read_launch_file("accelerate_configs/zero_infinity.yaml")
    assert (file.parallel.offload_optimizer, file.parallel.offload_params) == ("nvme", "nvme")
    assert file.parallel.nvme_paths == ("nvme_offload",)
    assert file.deepspeed_file is not None
    text = Path("accelerate_configs/deepspeed/zero_infinity.json").read_text().splitlines()
    path, line = file.place("zero_optimization.offload_param.nvme_path").split(":")
    assert path == "accelerate_configs/deepspeed/zero_infinity.json"
    assert '"nvme_path"' in text[int(line) - 1]


def test_keys_are_those_of_the_installed_accelerate():
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    # `fp16` and `dynamo_backend` are older names that `BaseConfig.process_config` still translates.
    assert {f.name for f in dataclasses.fields(ClusterConfig)} | {"fp16", "dynamo_backend"} == TOP_KEYS
    flags = {action.dest for action in launch_command_parser()._actions}
    # Read by `prepare_multi_gpu_env` with getattr, so it can only come from the file.
    assert SECTION_KEYS["fsdp_config"] - flags == {"fsdp_ignored_modules"}
    assert {flag for flag in flags if flag.startswith("fsdp_")} <= SECTION_KEYS["fsdp_config"]
    assert SECTION_KEYS["deepspeed_config"] <= flags
    assert {flag for flag in flags if flag.startswith("parallelism_config_")} == SECTION_KEYS["parallelism_config"]


def test_lines_of_nested_keys(tmp_path):
    path = write(tmp_path, "# comment\ndistributed_type: FSDP\nfsdp_config:\n\n  fsdp_version: 2\nnum_processes: 2\n")
    file = read_launch_file(path)
    assert file.lines == {"distributed_type": 2, "fsdp_config": 3, "fsdp_config.fsdp_version": 5, "num_processes": 6}
    assert file.place("fsdp_config.fsdp_version") == f"{path}:5"
    assert file.place("fsdp_config.absent") == f"{path}:3"
    assert file.place("absent") == str(path)


@pytest.mark.parametrize(
    ("text", "line", "problem", "fix"),
    [
        ("distributed_type: FSDP\nnum_proceses: 2\n", 2, "num_proceses", "did you mean 'num_processes'?"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_verson: 2\n", 3, "fsdp_verson", "'fsdp_version'"),
        ("distributed_type: FSDP\nfsdp_version: 2\n", 2, "fsdp_version", "move it under fsdp_config."),
        ("distributed_type: FSDP\nfsdp_config:\n  mixed_precision: bf16\n", 3, "mixed_precision", "left margin"),
        ("distributed_type: 'NO'\nmixed_precision: no\n", 2, "false", "mixed_precision: 'no'"),
        ("distributed_type: NO\n", 1, "false", "distributed_type: 'NO'"),
        ("distributed_type: FDSP\n", 1, "FDSP", "did you mean FSDP?"),
        ("distributed_type: FSDP\nmixed_precision: bf61\n", 2, "bf61", "did you mean bf16?"),
        ("distributed_type: FSDP\nnum_processes: two\n", 2, "num_processes", "num_processes: 2"),
        ("distributed_type: FSDP\ndistributed_type: FSDP\n", 2, "twice", "keep one"),
        ("distributed_type: [\n", 2, "YAML", "syntax"),
        ("distributed_type: FSDP\nfsdp_config: 2\n", 2, "fsdp_config", "indent"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: none.json\n",
            3,
            "exist",
            "absolute",
        ),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n", 1, "SAGEMAKER", "LOCAL_MACHINE"),
        ("distributed_type: FSDP\nqqqqqq: 2\n", 2, "'qqqqqq' has no meaning in a launch file.", "remove it."),
        ("distributed_type: FSDP\nfsdp_config:\n  qqq: 2\n", 3, "in fsdp_config of a launch file.", "remove it."),
        ("distributed_type: FSDP\nfsdp_config:\n  verson: 2\n", 3, "'verson'", "did you mean 'fsdp_version'?"),
        ("distributed_type: FSDP\ndeepspeed_config:\n  fsdp_version: 2\n", 3, "fsdp_version", "under fsdp_config."),
        ("distributed_type: QQQQ\n", 1, "'QQQQ' is unknown", "use one of NO, MULTI_CPU"),
        ("distributed_type: FSDP\nmixed_precision: 16\n", 2, "16", "fp16"),
        ("distributed_type: FSDP\nnum_processes: true\n", 2, "not True", "num_processes: 2"),
        ("distributed_type: FSDP\nnum_machines: 1.5\n", 2, "num_machines must be", "num_machines: 2"),
        ("distributed_type: FSDP\nmachine_rank: '0'\n", 2, "machine_rank must be", "machine_rank: 2"),
        ("distributed_type: FSDP\nmain_process_port: x\n", 2, "main_process_port", "main_process_port: 2"),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_version: 1\n",
            4,
            "'fsdp_config.fsdp_version' is given twice (the other: line 3)",
            "keep one",
        ),
    ],
)
def test_bad_file_names_line_and_fix(tmp_path, text, line, problem, fix):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_launch_file(path)
    assert caught.value.place == f"{path}:{line}"
    assert problem in caught.value.problem
    assert fix in str(caught.value.fix)


def test_missing_strategy_and_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="distributed_type is missing"):
        read_launch_file(write(tmp_path, "num_processes: 2\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_launch_file(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="holds no settings"):
        read_launch_file(write(tmp_path, "just text\n"))


def test_recipe_file_is_recognised(tmp_path):
    path = write(tmp_path, "# QLoRA\nmodel_name_or_path: a/b\nmethod: qlora\n", "qlora.yaml")
    with pytest.raises(ConfigError) as caught:
        read_launch_file(path)
    assert caught.value.place == f"{path}:2"
    assert f"accelerate launch recipes/sft.py --config_file {path}" in str(caught.value.fix)


def test_what_is_neither_names_its_key_and_a_launch_file_with_a_recipes_key_is_one(tmp_path):
    for text, says in (
        ("method: lora\n", "this is a recipe's file"),
        ("debug: true\nmethod: lora\n", "this is a recipe's file"),
        ("distributed_type: FSDP\nmethod: lora\n", "'method' has no meaning in a launch file"),
        ("unknown: 1\n", "'unknown' has no meaning in a launch file"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_launch_file(write(tmp_path, text))


def test_json_is_read_as_json_with_its_lines(tmp_path):
    path = write(tmp_path, '{\n\t"zero_optimization": {\n\t\t"stage": 3,\n\t\t"bucket": 1e8\n\t}\n}\n', "ds.json")
    file = read_source_file(path)
    assert file.values == {"zero_optimization": {"stage": 3, "bucket": 1e8}}
    assert file.place("zero_optimization.bucket") == f"{path}:4"
    for text, line, says in (('{\n"a": 1,\n}', 3, "not valid JSON"), ("[1]", None, "holds no settings")):
        with pytest.raises(ConfigError, match=says) as refused:
            read_source_file(write(tmp_path, text, "bad.json"))
        assert refused.value.place == f"{tmp_path / 'bad.json'}" + (f":{line}" if line else "")


def test_a_deepspeed_file_of_the_given_folders_comes_before_one_above_the_launch_file(tmp_path):
    for name in ("near", "far", "launches/deep"):
        (tmp_path / name).mkdir(parents=True)
    launch = tmp_path / "launches" / "deep" / "launch.yaml"
    write(tmp_path, '{"a": 1}', "ds.json")
    assert read_deepspeed_file("ds.json", [], launch, place="x").path == tmp_path / "ds.json"
    write(tmp_path / "launches", '{"a": 2}', "ds.json")
    assert read_deepspeed_file("ds.json", [tmp_path / "far"], launch, place="x").values == {"a": 2}
    write(tmp_path / "far", '{"a": 3}', "ds.json")
    assert read_deepspeed_file("ds.json", [tmp_path / "near", tmp_path / "far"], launch, place="x").values == {"a": 3}
    for where in (launch, None):
        with pytest.raises(ConfigError, match="does not exist") as refused:
            read_deepspeed_file("other.json", [tmp_path], where, place="launch.yaml:3")
        assert refused.value.place == "launch.yaml:3"


def test_places_of_deepspeeds_keys_are_in_the_file_that_has_them(tmp_path):
    write(tmp_path, '{\n"zero_optimization": {"stage": 3},\n"mixed_precision": 1\n}', "ds.json")
    text = (
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
        f"deepspeed_config:\n  deepspeed_config_file: {tmp_path}/ds.json\n"
    )
    file = read_launch_file(write(tmp_path, text))
    assert file.place("zero_optimization.stage") == f"{tmp_path}/ds.json:2"
    assert file.place("mixed_precision") == f"{tmp_path}/launch.yaml:2"
    assert file.place("deepspeed_config.absent") == f"{tmp_path}/launch.yaml:3"
    assert file.place("num_processes") == f"{tmp_path}/launch.yaml"


def test_launch_file_is_recognised():
    assert looks_like_launch_file({"distributed_type": "FSDP", "num_processes": 2})
    assert not looks_like_launch_file({"method": "lora", "output_dir": "out"})


def test_deepspeed_defaults_are_those_of_accelerates_plugin(tmp_path, monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    for name in [name for name in __import__("os").environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    file = read_launch_file(
        write(tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero3_init_flag: false\n")
    )
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    theirs = DeepSpeedPlugin().deepspeed_config
    ours = file.parallel.deepspeed
    assert file.strategy == f"zero{theirs['zero_optimization']['stage']}" == "zero2"
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        assert ours[key] == theirs[key]
    for key in ("offload_optimizer", "offload_param"):
        assert ours["zero_optimization"][key]["device"] == theirs["zero_optimization"][key]["device"]


def test_fsdp_without_version_is_version_1(tmp_path):
    """The default of Accelerate's plugin, so that the doctor can point it out."""
    from accelerate.commands.launch import launch_command_parser

    assert read_launch_file(write(tmp_path, "distributed_type: FSDP\nnum_processes: 2\n")).strategy == "fsdp1"
    defaults: argparse.Namespace = launch_command_parser().parse_args(["script.py"])
    assert str(defaults.fsdp_version) == "1"


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 1\n", "single"),
        ("distributed_type: MULTI_CPU\nnum_processes: 2\n", "single"),
        ("distributed_type: MULTI_CPU\nnum_processes: 2\nmpirun_config:\n  mpirun_hostfile: h\n", "ddp"),
        ("distributed_type: MEGATRON_LM\nnum_processes: 2\n", "megatron"),
        ("distributed_type: FSDP\nfsdp_config:\n  version: 2\n", "fsdp2"),
    ],
)
def test_other_strategies(tmp_path, text, strategy):
    assert read_launch_file(write(tmp_path, text)).strategy == strategy


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("fp16: true", "fp16"),  # as Accelerate wrote it before mixed_precision existed
        ("fp16: false", None),
        ("fp16: true\nmixed_precision: bf16", "bf16"),
        ("mixed_precision: 'no'", "no"),
    ],
)
def test_the_precision_that_a_file_asks_for(tmp_path, text, precision):
    file = read_launch_file(write(tmp_path, f"distributed_type: MULTI_GPU\nnum_processes: 2\n{text}\n"))
    assert file.mixed_precision == precision


@pytest.mark.parametrize(
    ("text", "total", "local"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2", 8, 4),
        ("distributed_type: MULTI_GPU\nnum_processes: 8", 8, 8),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 4", 2, 1),
        ("distributed_type: MULTI_GPU\nnum_processes: -1", None, None),
        ("distributed_type: MULTI_GPU", None, None),
        ("distributed_type: 'NO'", 1, 1),
    ],
)
def test_processes_of_all_nodes_and_of_one(tmp_path, text, total, local):
    file = read_launch_file(write(tmp_path, text + "\n"))
    assert (file.num_processes, file.local_world_size) == (total, local)


def test_bytes_that_are_no_text_and_lines_that_are_no_yaml_are_told_apart(tmp_path):
    path = tmp_path / "launch.yaml"
    path.write_bytes(b"num_processes: 2\nname: \xff\xfe\n")
    with pytest.raises(ConfigError, match="not valid YAML: not text in UTF-8"):
        read_launch_file(str(path))
    path.write_text("num_processes: 2\nname: [a\n")
    with pytest.raises(ConfigError, match=r"not valid YAML: expected") as refused:
        read_launch_file(str(path))
    assert refused.value.place.startswith(f"{path}:")


def test_a_deepspeed_file_is_found_from_any_folder(tmp_path, monkeypatch):
    shipped = ROOT / "accelerate_configs"
    expected = read_launch_file(shipped / "zero_infinity.yaml").deepspeed_file.values
    monkeypatch.chdir(tmp_path)
    found = read_launch_file(shipped / "zero_infinity.yaml").deepspeed_file
    assert found.path == shipped / "deepspeed" / "zero_infinity.json"
    assert found.values == expected
    # A file of that name under the command's folder takes precedence.
    own = tmp_path / "accelerate_configs" / "deepspeed" / "zero_infinity.json"
    own.parent.mkdir(parents=True)
    own.write_text('{"zero_optimization": {"stage": 3}}')
    assert read_launch_file(shipped / "zero_infinity.yaml").deepspeed_file.values == {
        "zero_optimization": {"stage": 3}
    }
