"""Rules on DeepSpeed: stages, offload, and settings that its configuration fixes against the recipe."""

from __future__ import annotations

from typing import Any

from accel_scale.checks.case import Case, Finding, Rule, error, warning
from accel_scale.checks.recipe_rules import optimizer_of
from accel_scale.facts.checkpointing import NOT_REENTRANT, kind_of
from accel_scale.launching.strategy import is_true

# Keys that Accelerate refuses beside a deepspeed_config_file (`DeepSpeedPlugin._deepspeed_config_checks`, 1.15.0).
KEYS_OF_DEEPSPEED_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
DEBIAN_PACKAGES = {"a C++ compiler": "g++", "ninja": "ninja-build", "libaio's headers": "libaio-dev"}


def deepspeed_package(case: Case) -> Finding | None:
    """A DeepSpeed launch without DeepSpeed."""
    if not case.parallel.is_deepspeed or case.machine.has("deepspeed"):
        return None
    return error(
        case.launch.place("distributed_type"), "DeepSpeed is not installed.", "pip install 'accel-scale[deepspeed]'."
    )


def deepspeed_arithmetic(case: Case) -> Finding | None:
    """Precisions that the strategy's engine does not support, such as bf16_true in DeepSpeed."""
    refusal = case.parallel.kind.refused_precisions.get(case.precision)
    return error(case.precision_place, f"{refusal.reason}.", refusal.fix) if refusal is not None else None


def compilers(case: Case) -> Finding | None:
    """CPU Adam and asynchronous I/O are compiled at the first run; on a CPU, the collectives too."""
    machine = case.machine
    if not case.parallel.is_deepspeed or not (_offloads(case) or machine.device == "cpu"):
        return None
    present = {
        "a C++ compiler": machine.has_compiler,
        "ninja": machine.has_ninja,
        "libaio's headers": machine.has_libaio or not _uses_nvme(case),
    }
    missing = [name for name, there in present.items() if not there]
    if not missing:
        return None
    packages = " ".join(DEBIAN_PACKAGES[name] for name in missing)
    return error(
        _offload_place(case),
        f"DeepSpeed compiles some of its code at the first run, and {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} missing.",
        f"install them, on Debian and Ubuntu: apt install {packages}.",
    )


def killed_build(case: Case) -> Finding | None:
    """The lock of a killed build: the next run that compiles would wait for it forever."""
    if not (case.parallel.is_deepspeed or optimizer_of(case).compilers):
        return None
    if case.machine.stale_locks:
        lock = case.machine.stale_locks[0]
        return error(
            lock, "a build that was killed left this lock, and DeepSpeed would wait for it forever.", f"rm {lock}"
        )
    if not case.machine.unheld_locks:
        return None
    lock = case.machine.unheld_locks[0]
    return warning(
        lock,
        "no process of this machine holds this lock of a build, and DeepSpeed waits for as long as it is there.",
        f"rm {lock}, unless another machine that shares this folder is compiling now.",
    )


def offload_stage(case: Case) -> Finding | None:
    """Offload that the ZeRO stage does not support."""
    p = case.parallel
    if not p.is_deepspeed:
        return None
    stage = p.kind.zero_stage or 0
    too_early = (p.offloads_params or _uses_nvme(case)) and stage < 3
    if not too_early and (not p.offloads_optimizer or stage >= 1):
        return None
    return error(
        _offload_place(case),
        f"ZeRO-{stage} cannot offload to {'NVMe' if _uses_nvme(case) else 'the CPU'} what is asked for.",
        "use stage 3.",
    )


def nvme_keys(case: Case) -> Finding | None:
    """NVMe in the launch file's own keys: `accelerate launch` does not pass the path on (1.15.0)."""
    section = case.launch.file_values.get("deepspeed_config") or {}
    key = next(
        (k for k, v in section.items() if k.endswith("_nvme_path") or (k.startswith("offload_") and v == "nvme")), None
    )
    if key is None:
        return None
    return error(
        case.launch.place(f"deepspeed_config.{key}"),
        "accelerate launch does not pass NVMe paths on to DeepSpeed.",
        "put them in a deepspeed_config_file, as accelerate_configs/zero_infinity.yaml does.",
    )


def nvme_folder(case: Case) -> Finding | None:
    """NVMe offload without a writable folder."""
    p = case.parallel
    if not _uses_nvme(case):
        return None
    place = case.launch.place(f"zero_optimization.{_nvme_section(case)}.nvme_path")
    if not p.nvme_paths:
        return error(place, "NVMe offload has no nvme_path.", "add the folder to write to.")
    for path in p.nvme_paths:
        if not case.machine.folders.get(path, True):
            return error(place, f"{path} cannot be written.", "write a folder of yours on a local NVMe.")
    return None


def offload_replaces_optimizer(case: Case) -> Finding | None:
    """Accelerate replaces any optimizer with DeepSpeed's CPU Adam when states are offloaded."""
    p, name = case.parallel, case.run.optim
    forced = p.deepspeed.get("zero_force_ds_cpu_optimizer", True)
    if not p.is_deepspeed or not p.offloads_optimizer or not forced:
        return None
    # The spec names the replacement if Accelerate's `map_pytorch_optim_to_deepspeed` maps the optimizer correctly.
    if optimizer_of(case).zero_offload is not None:
        return None
    return error(
        case.run.place("optim"),
        f"with {p.label}, Accelerate would silently replace {name} by DeepSpeed's CPU Adam.",
        "use --optim adamw_torch_fused (it becomes CPU Adam), or a launch file without offload.",
    )


def deepspeed_optimizer(case: Case) -> Finding | None:
    """An optimizer or scheduler in DeepSpeed's file, which the recipe's flags could not change."""
    key = next((k for k in ("optimizer", "scheduler") if k in case.parallel.deepspeed), None)
    if key is None:
        return None
    flag = "--optim" if key == "optimizer" else "--lr_scheduler_type"
    return error(case.launch.place(key), f"DeepSpeed's {key} would overrule {flag}.", f"remove the {key} section.")


def deepspeed_fixed_batch(case: Case) -> Finding | None:
    """Batch sizes fixed in DeepSpeed's configuration."""
    run = case.run
    wanted: dict[str, Any] = {
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": run.per_device_train_batch_size,
        "train_batch_size": run.global_batch_size,
        "gradient_clipping": run.max_grad_norm,
    }
    for key, value in wanted.items():
        fixed = case.parallel.deepspeed.get(key, "auto")
        if fixed not in ("auto", value):
            return error(
                _deepspeed_place(case, key),
                f"fixes {key} at {fixed}, which the recipe's flags decide.",
                f"write {key}: auto.",
            )
    return None


def deepspeed_clipping(case: Case) -> Finding | None:
    """DeepSpeed clips gradients itself: a file that says nothing turns ``--max_grad_norm`` off."""
    p = case.parallel
    if not p.is_deepspeed or p.deepspeed.get("gradient_clipping") is not None or case.run.max_grad_norm == 0:
        return None
    return error(
        _deepspeed_place(case, "zero_optimization"),
        "without gradient_clipping DeepSpeed does not clip, whatever --max_grad_norm says.",
        'add "gradient_clipping": "auto".',
    )


def deepspeed_keys_twice(case: Case) -> Finding | None:
    """Keys in the launch file that must be in the DeepSpeed file it names."""
    section = case.launch.file_values.get("deepspeed_config") or {}
    if "deepspeed_config_file" not in section:
        return None
    key = next((k for k in KEYS_OF_DEEPSPEED_FILE if k in section), None)
    if key is not None:
        place = f"deepspeed_config.{key}"
    elif case.launch.file_values.get("mixed_precision") is not None:
        key = place = "mixed_precision"
    else:
        return None
    return error(
        case.launch.place(place),
        f"Accelerate refuses {key} beside a deepspeed_config_file.",
        f"remove it here and set it in {section['deepspeed_config_file']}.",
    )


def zero3_saving(case: Case) -> Finding | None:
    """ZeRO-3 that does not gather when saving leaves folders that `from_pretrained` cannot load."""
    zero = case.parallel.deepspeed.get("zero_optimization") or {}
    gathers = is_true(zero.get("stage3_gather_16bit_weights_on_model_save", False))
    if gathers or not case.parallel.kind.partitions_weights:
        return None
    in_file = "deepspeed_config_file" in (case.launch.file_values.get("deepspeed_config") or {})
    key = "stage3_gather_16bit_weights_on_model_save" if in_file else "zero3_save_16bit_model"
    return warning(
        _deepspeed_place(case, "zero_optimization"),
        "checkpoints will hold ZeRO shards only, which from_pretrained cannot load.",
        f"set {key}: true.",
    )


def reentrant_needed(case: Case) -> Finding | None:
    """ZeRO-3 with adapters needs reentrant checkpointing: without it, torch finds the weights partitioned again."""
    run = case.run
    if not case.parallel.kind.needs_reentrant(adapters=run.trains_adapters) or not case.checkpoints:
        return None
    if run.checkpointing_policy is not None and kind_of(run.checkpointing_policy) in NOT_REENTRANT:
        return error(
            run.place("checkpointing_policy"),
            f"{run.checkpointing_policy} checkpointing cannot recompute under ZeRO-3 with adapters.",
            "use --checkpointing_policy full, or accelerate_configs/fsdp2.yaml.",
        )
    if run.use_reentrant is False:
        return error(
            run.place("activation_checkpointing_kwargs"),
            "non-reentrant checkpointing cannot recompute under ZeRO-3 with adapters.",
            "remove use_reentrant: false.",
        )
    return None


def _offloads(case: Case) -> bool:
    return (case.parallel.offload_optimizer, case.parallel.offload_params) != ("none", "none")


def _uses_nvme(case: Case) -> bool:
    return "nvme" in (case.parallel.offload_optimizer, case.parallel.offload_params)


def _nvme_section(case: Case) -> str:
    return "offload_param" if case.parallel.offload_params == "nvme" else "offload_optimizer"


def _offload_place(case: Case) -> str:
    if not _offloads(case):
        return case.launch.place("distributed_type")
    section = "offload_optimizer" if case.parallel.offloads_optimizer else "offload_param"
    if "deepspeed_config_file" in (case.launch.file_values.get("deepspeed_config") or {}):
        return case.launch.place(f"zero_optimization.{section}.device")
    return case.launch.place(f"deepspeed_config.{section}_device")


def _deepspeed_place(case: Case, key: str) -> str:
    """The place of a DeepSpeed key, in its own file or in the launch file."""
    if "deepspeed_config_file" in (case.launch.file_values.get("deepspeed_config") or {}):
        return case.launch.place(key)
    return case.launch.place(f"deepspeed_config.{key}")


DEEPSPEED_RULES: tuple[Rule, ...] = (
    deepspeed_package,
    deepspeed_arithmetic,
    compilers,
    killed_build,
    offload_stage,
    nvme_keys,
    nvme_folder,
    offload_replaces_optimizer,
    deepspeed_optimizer,
    deepspeed_fixed_batch,
    deepspeed_clipping,
    deepspeed_keys_twice,
    zero3_saving,
    reentrant_needed,
)
