"""How this process was launched: from the environment and the launcher's own command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.launching.launch_file import LaunchFile, read_deepspeed_file, read_launch_file
from accel_scale.launching.launch_keys import MIXED_PRECISIONS, SWITCHES, TOP_KEYS, SourceFile
from accel_scale.launching.strategy import LaunchStrategy, deepspeed_config_of, is_true, launch_strategy, relative_to

_RENDEZVOUS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchCommand:
    """An `accelerate launch` command line.

    Attributes:
        flags: The launcher's own flags, without dashes; switches are ``true``.
        folder: Folder in which it was started.
    """

    flags: Mapping[str, str]
    folder: Path


@dataclass(frozen=True)
class LaunchEnvironment:
    """How this process was launched; the environment wins if a command line overrode the launch file.

    Attributes:
        parallel: How the run is split and what is offloaded.
        mixed_precision: As set by launch file or launcher; None if neither does and the recipe decides.
        world_size: Processes of the run.
        local_world_size: Processes on this node.
        rank, local_rank: This process among them.
        launch_file: The file given to `accelerate launch`, if its command line could be read.
        deepspeed_file: DeepSpeed's own configuration file, if one is used.
        overrides: The keys of the file that the launcher's command line overrides.
    """

    parallel: LaunchStrategy
    mixed_precision: str | None
    world_size: int
    local_world_size: int
    rank: int
    local_rank: int
    launch_file: LaunchFile | None = None
    deepspeed_file: SourceFile | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        """See `LaunchFile.strategy`."""
        return self.parallel.name

    @property
    def num_processes(self) -> int:
        """See `LaunchFile.num_processes`."""
        return self.world_size

    @property
    def file_values(self) -> dict[str, Any]:
        """The launch file's keys, as written, with the command line's overrides; empty without a file."""
        return {} if self.launch_file is None else self.launch_file.values | dict(self.overrides)

    def place(self, key: str) -> str:
        """``path:line`` of `key` in the launch file or DeepSpeed's, or the launcher's setting for it."""
        file = self.launch_file
        if key == "mixed_precision" and (file is None or file.mixed_precision != self.mixed_precision):
            return "accelerate launch --mixed_precision"
        if file is not None:
            return file.place(key)
        if self.deepspeed_file is not None and not key.startswith("deepspeed_config"):
            return self.deepspeed_file.place(key)
        return "accelerate launch"


def current_launch(environment: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """How this process was launched; `environment` stands in for the process's own.

    Raises:
        ConfigError: the launch file or DeepSpeed's configuration cannot be used.
    """
    env = os.environ if environment is None else environment
    command = find_launch_command() if _was_launched(env) else None
    path = _launch_file_path(command)
    launch_file = read_launch_file(path) if path is not None else None
    deepspeed_file = _deepspeed_file(env, command, path)
    values = values_from_environment(env)
    deepspeed = deepspeed_config_of(values.get("deepspeed_config") or {}, deepspeed_file)
    world_size = int(env.get("WORLD_SIZE", "1"))
    return LaunchEnvironment(
        parallel=launch_strategy(values, deepspeed),
        mixed_precision=_mixed_precision(env, command, launch_file),
        world_size=world_size,
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", str(world_size))),
        rank=int(env.get("RANK", "0")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        launch_file=launch_file,
        deepspeed_file=deepspeed_file,
        overrides={k: v for k, v in command.flags.items() if k in TOP_KEYS} if command is not None else {},
    )


def check_launch_variables(env: Mapping[str, str]) -> None:
    """Refuse launch variables that no launcher has set: such a process would train alone or print nothing.

    Raises:
        ConfigError: naming the variable.
    """
    given = {name: _number(env, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    world_size, rank, local_rank, _ = given.values()
    # Accelerate joins a process group where LOCAL_RANK is set; torch needs the others for it.
    asks = next(
        (
            name
            for name, is_asked in (
                ("WORLD_SIZE", (world_size or 1) > 1),
                ("RANK", (rank or 0) > 0),
                ("LOCAL_RANK", local_rank is not None and local_rank >= 0),
            )
            if is_asked
        ),
        None,
    )
    missing = [name for name in _RENDEZVOUS if not env.get(name)]
    if asks is not None and missing:
        raise ConfigError(
            f"{env[asks]} is set without {', '.join(missing)}: no launcher has started this process.",
            place=asks,
            fix=f"unset {asks}, or start the recipe with accelerate launch --num_processes N.",
        )
    if rank is not None and rank >= (world_size or 1):
        raise ConfigError(
            f"rank {rank} is not one of {world_size or 1} processes.", place="RANK", fix="use accelerate launch."
        )
    precision = env.get("ACCELERATE_MIXED_PRECISION")
    if precision and precision not in MIXED_PRECISIONS:
        raise ConfigError(
            f"{precision!r} is not a precision.",
            place="ACCELERATE_MIXED_PRECISION",
            fix=f"use one of {', '.join(MIXED_PRECISIONS)}, or unset it.",
        )


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    least = 1 if name.endswith("SIZE") else -1  # LOCAL_RANK -1 is torch's old value for "not launched"
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(
            f"{text!r} is not a number of processes." if name.endswith("SIZE") else f"{text!r} is not a rank.",
            place=name,
            fix=f"unset {name}: launchers set it.",
        )
    return number


def values_from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """The variables that `accelerate launch` sets, in the layout of a launch file.

    Names: `prepare_multi_gpu_env`, `prepare_deepspeed_cmd_env` and `prepare_extend_env_parallelism_config` in
    accelerate/utils/launch.py (1.15.0).
    """
    world_size = int(env.get("WORLD_SIZE", "1"))
    values: dict[str, Any] = {"num_processes": world_size, "use_cpu": is_true(env.get("ACCELERATE_USE_CPU", "false"))}
    if is_true(env.get("ACCELERATE_USE_DEEPSPEED", "false")):
        values["distributed_type"] = "DEEPSPEED"
        names = {
            "zero_stage": "DEEPSPEED_ZERO_STAGE",
            "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
            "gradient_clipping": "GRADIENT_CLIPPING",
            "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
            "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
            "offload_optimizer_nvme_path": "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
            "offload_param_nvme_path": "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
            "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
            "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
            "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
        }
        section = {key: env.get(f"ACCELERATE_{name}") for key, name in names.items()}
        # An empty section would mean "no DeepSpeed"; Accelerate's plugin defaults to stage 2.
        values["deepspeed_config"] = {"zero_stage": 2} | {k: v for k, v in section.items() if v is not None}
    elif is_true(env.get("ACCELERATE_USE_FSDP", "false")):
        values["distributed_type"] = "FSDP"
        values["fsdp_config"] = {k.lower(): v for k, v in env.items() if k.startswith("FSDP_")}
        values["fsdp_config"].setdefault("fsdp_version", "1")
    elif is_true(env.get("ACCELERATE_USE_MEGATRON_LM", "false")):
        values["distributed_type"] = "MEGATRON_LM"
    else:
        values["distributed_type"] = "MULTI_GPU" if world_size > 1 else "NO"
    if is_true(env.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false")):
        values["parallelism_config"] = {k.lower(): v for k, v in env.items() if k.startswith("PARALLELISM_CONFIG_")}
    return values


def _was_launched(env: Mapping[str, str]) -> bool:
    return "ACCELERATE_MIXED_PRECISION" in env


def find_launch_command() -> LaunchCommand | None:
    """The `accelerate launch` among this process's ancestors; None if there is none or it cannot be read."""
    import psutil

    try:
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            start = _launch_arguments_start(words)
            if start is not None:
                return LaunchCommand(parse_launch_arguments(words[start:]), Path(parent.cwd()))
    except psutil.Error:
        # Another user's launcher (containers, schedulers): messages then name variables instead of the file.
        return None
    return None


def _launch_arguments_start(words: Sequence[str]) -> int | None:
    """Index of the first argument of `accelerate launch`, in any of the ways it can be started."""
    for index, word in enumerate(words):
        name = Path(word).name
        if name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
            return index + 2
        is_module = index > 0 and words[index - 1] == "-m"
        if name == "accelerate-launch" or (is_module and word == "accelerate.commands.launch"):
            return index + 1
        if word.endswith("accelerate/commands/launch.py"):
            return index + 1
        if is_module and word == "accelerate.commands.accelerate_cli" and words[index + 1 : index + 2] == ["launch"]:
            return index + 2
    return None


def parse_launch_arguments(words: Sequence[str]) -> dict[str, str]:
    """The launcher's own flags, up to the training script, whose ``--config_file`` does not belong to the launcher."""
    flags: dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith("-"):
        name, has_value, value = words[index].partition("=")
        name = name if not name.startswith("--") else "--" + name[2:].replace("-", "_")
        index += 1
        if has_value:
            flags[name.lstrip("-")] = value
        elif name in SWITCHES:
            flags[name.lstrip("-")] = "true"
        elif index < len(words):
            flags[name.lstrip("-")] = words[index]
            index += 1
    return flags


def _launch_file_path(command: LaunchCommand | None) -> Path | None:
    if command is None:
        return None
    if "config_file" in command.flags:
        return _shown(relative_to(command.folder, command.flags["config_file"]))
    # Without --config_file, `accelerate launch` takes the file that `accelerate config` wrote, unless told --cpu.
    hf_home = (
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    default = Path(hf_home).expanduser() / "accelerate" / "default_config.yaml"
    return default if default.is_file() and "cpu" not in command.flags else None


def _shown(path: Path) -> Path:
    """`path` relative to the current folder, as the user typed it, if it is below that."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path


def _deepspeed_file(
    env: Mapping[str, str], command: LaunchCommand | None, launch_file: Path | None
) -> SourceFile | None:
    name = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if not name or name == "none" or not is_true(env.get("ACCELERATE_USE_DEEPSPEED", "false")):
        return None
    folders = [Path.cwd(), *([command.folder] if command else [])]
    return read_deepspeed_file(name, folders, launch_file, place="ACCELERATE_DEEPSPEED_CONFIG_FILE")


def tell_deepspeed_file(launch: LaunchEnvironment) -> None:
    """Point Accelerate, which opens the launch file's name for it from this process's folder, to the file found."""
    if launch.deepspeed_file is not None:
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(launch.deepspeed_file.path.resolve())


def _mixed_precision(env: Mapping[str, str], command: LaunchCommand | None, file: LaunchFile | None) -> str | None:
    """The chosen precision. `accelerate launch` also exports ``no`` without a choice; only a written ``no`` is one."""
    value = env.get("ACCELERATE_MIXED_PRECISION")
    if value != "no":
        return value
    asked = command is not None and command.flags.get("mixed_precision") == "no"
    return "no" if asked or (file is not None and file.mixed_precision == "no") else None
