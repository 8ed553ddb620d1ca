"""Rules on the recipe's settings: optimizer, attention, packing, data, batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.checks.case import Case, Finding, Rule, error, warning
from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import refuse_compiled_segments
from accel_scale.facts.device import ATTENTION_NAMES
from accel_scale.facts.vllm import why_no_vllm, why_no_weights
from accel_scale.launching.machine import FLASH_PACKAGES, PACKAGES
from accel_scale.modeling.fused.liger import why_no_kernels

if TYPE_CHECKING:
    from accel_scale.facts.optimizer_specs import OptimizerSpec

# Measured with TRL 1.16 on GSM8K's training file (4.2 MB), from reading to packed rows, one server core.
TOKENISED_BYTES_PER_SECOND = 1.0e6
# Up to this size, the mask (16 MiB) and the masked part of the products cost less than the compiler gains.
COMPILED_MASK_POSITIONS = 4096


def optimizer_package(case: Case) -> Finding | None:
    """An optimizer whose package is not installed."""
    package = optimizer_of(case).package
    # Packages that only one of transformers' many optimizers needs are checked when it is built.
    if package not in PACKAGES or case.machine.has(package):
        return None
    fix = optimizer_of(case).install or f"pip install {package}"
    return error(case.run.place("optim"), f"{case.run.optim} needs {package}.", f"{fix}.")


def fused_kernels(case: Case) -> Finding | None:
    """Fused kernels that are requested but cannot run here."""
    flag = "use_liger_kernel" if case.run.use_liger_kernel else "fused_kernels"
    if case.run.fused_kernels != "on" and not case.run.use_liger_kernel:
        return None
    reason = why_no_kernels(
        device_type=case.device.type,
        is_installed=case.machine.has("liger-kernel"),
        of_liger=flag == "use_liger_kernel",
        compiles=case.run.torch_compile,
        in_tiles=case.run.long_rows,
        divides_tensors=case.parallel.tensor_parallel_size > 1 or (case.run.tp_size or 1) > 1,
    )
    if reason is None:
        return None
    fix = "pip install liger-kernel." if "not installed" in reason else "use --fused_kernels auto."
    return error(case.run.place(flag), f"fused kernels cannot be used: {reason}.", fix)


def optimizer_and_launch(case: Case) -> Finding | None:
    """An optimizer ruled out by device, strategy or precision, such as bitsandbytes' under FSDP2."""
    p = case.parallel
    refusal = optimizer_of(case).refusal(
        device_type=case.device.type,
        strategy=p.name,
        zero_offload=p.is_deepspeed and p.offloads_optimizer,
        precision=case.precision,
    )
    if refusal is None:
        return None
    reason, fix = refusal[1]
    return error(case.run.place("optim"), f"{case.run.optim} does not work here: {reason}.", fix)


def optimizer_of(case: Case) -> OptimizerSpec:
    """The specification of the run's optimizer."""
    from accel_scale.facts.optimizer_specs import optimizer_spec

    return optimizer_spec(case.run.optim)


def paged_without_cuda(case: Case) -> Finding | None:
    """Paged optimizer states are CUDA unified memory."""
    if not optimizer_of(case).is_paged or case.device.type == "cuda":
        return None
    return warning(
        case.run.place("optim"),
        f"paging needs CUDA; here {case.run.optim} keeps its states in plain memory.",
        "nothing for a rehearsal; to train here, use the optimizer of that name without paging.",
    )


def flash_attention(case: Case) -> Finding | None:
    """FlashAttention where it is not installed, not supported or in the wrong dtype."""
    name, machine = case.run.attn_implementation or "", case.machine
    if not name.startswith("flash_attention"):
        return None
    place = case.run.place("attn_implementation")
    if name in FLASH_PACKAGES and (refusal := case.device.flash_refusal(name)) is not None:
        return error(place, f"{refusal}.", "use --attn_implementation sdpa.")
    if case.precision == "fp32":
        return error(place, f"{name} computes in fp16 and bf16 only.", "use --precision bf16, or sdpa.")
    if not machine.has(FLASH_PACKAGES.get(name, "flash-attn")) and not machine.has("kernels"):
        return error(place, f"{name} is not installed.", "pip install --no-build-isolation 'accel-scale[flash]'.")
    return None


def packing_mixes_documents(case: Case) -> Finding | None:
    """TRL's ``wrapped`` packing cuts and joins documents in one attention window."""
    if not (case.run.packing and case.run.packing_strategy == "wrapped"):
        return None
    return error(
        case.run.place("packing_strategy"),
        "wrapped packing lets documents attend to each other.",
        "use --packing_strategy bfd.",
    )


def packing_attention(case: Case) -> Finding | None:
    """Packing with an attention that is not known to keep documents apart."""
    name = case.run.attn_implementation
    if not case.run.packing or name is None or name in ATTENTION_NAMES or "flash" in name:
        return None
    return error(
        case.run.place("attn_implementation"),
        f"{name} is not known to keep packed documents apart.",
        "use sdpa or flash_attention_2, or --packing false.",
    )


def compiled_packing(case: Case) -> Finding | None:
    """A compiled model materialises SDPA's mask over all rows of a micro-batch, which packing joins into one."""
    run, device = case.run, case.device
    is_packed = (run.packing or run.padding_free) and not run.shares_model
    if not (run.torch_compile and is_packed) or device.type == "cpu":
        return None
    name = run.attn_implementation
    if name is None and case.precision != "fp32" and not device.flash_refusal("flash_attention_2"):
        name = next(iter(device.flash), None)
    positions = run.per_device_train_batch_size * (run.max_length or 0)
    if (name is not None and ("flash" in name or name == "flex_attention")) or positions <= COMPILED_MASK_POSITIONS:
        return None
    return error(
        run.place("torch_compile"),
        f"compiled, attention over packed rows would compute a mask of {positions:,} × {positions:,} positions, "
        "most of it zero.",
        "leave --torch_compile out, or use --attn_implementation flash_attention_2 or flex_attention.",
    )


def compiled_segments(case: Case) -> Finding | None:
    """`refuse_compiled_segments`, wherever the settings come from."""
    run = case.run
    asked = {"torch_compile": run.torch_compile, "checkpointing_policy": run.checkpointing_policy}
    try:
        refuse_compiled_segments(asked, run.place)
    except ConfigError as refusal:
        return error(refusal.place or "", refusal.problem, refusal.fix or "")
    return None


def packing_context_parallel(case: Case) -> Finding | None:
    """Ring context parallelism drops the mask that keeps packed documents apart; Ulysses keeps it."""
    if not case.run.packing or case.parallel.context_parallel_size == case.parallel.sequence_parallel_size:
        return None
    return error(
        case.run.place("packing"),
        "context parallelism drops the mask that keeps packed documents apart.",
        "use --packing false, or another launch file.",
    )


def streaming_needs_steps(case: Case) -> Finding | None:
    """A stream has no length, so epochs mean nothing and the schedule has no end."""
    if not case.run.dataset_streaming or case.run.max_steps > 0:
        return None
    return error(
        case.run.place("dataset_streaming"),
        "a streamed data set has no length to plan steps from.",
        "add --max_steps N.",
    )


def slow_tokenisation(case: Case) -> Finding | None:
    """The other ranks wait in a collective while rank 0 tokenises, and time out after ``--ddp_timeout``."""
    run = case.run
    if run.dataset_streaming or run.dataset_bytes is None or (case.launch.num_processes or 1) == 1:
        return None
    seconds = run.dataset_bytes / (TOKENISED_BYTES_PER_SECOND * (run.dataset_num_proc or 1))
    if seconds < run.ddp_timeout:
        return None
    return warning(
        run.place("ddp_timeout"),
        f"tokenising {run.dataset_bytes / 1e9:.1f} GB may take {seconds / 60:.0f} min, but the waiting ranks give up "
        f"after {run.ddp_timeout / 60:.0f} min.",
        f"add --ddp_timeout {int(2 * seconds)} and --dataset_num_proc {case.machine.num_cores}.",
    )


def changing_batch(case: Case) -> Finding | None:
    """``--auto_find_batch_size`` halves the micro-batch without raising accumulation."""
    if not (case.run.auto_find_batch_size and case.run.global_batch_size):
        return None
    return error(
        case.run.place("auto_find_batch_size"),
        "auto_find_batch_size changes the micro-batch and with it the global batch that was asked for.",
        "remove it and lower --per_device_train_batch_size; accumulation follows --global_batch_size.",
    )


def global_batch(case: Case) -> Finding | None:
    """A global batch that micro-batches do not add up to."""
    run, world = case.run, max(1, (case.launch.num_processes or 1) // case.model_ranks)
    step = run.per_device_train_batch_size * world
    if run.global_batch_size is None or run.global_batch_size % step == 0:
        return None
    return error(
        run.place("global_batch_size"),
        f"{run.global_batch_size} is not a multiple of {run.per_device_train_batch_size} sequences × {world} "
        "processes.",
        f"use a multiple of {step}, or a smaller --per_device_train_batch_size.",
    )


def dropout_with_flex(case: Case) -> Finding | None:
    """Flex attention has no dropout: transformers fails at the first step."""
    if not (case.run.model_dropout and case.run.attn_implementation == "flex_attention"):
        return None
    return error(
        case.run.place("model_dropout"),
        "flex_attention drops nothing.",
        "use --attn_implementation sdpa, or remove it.",
    )


def dropout_in_shared_layers(case: Case) -> Finding | None:
    """Tensor-parallel ranks hold the same hidden states, and each would drop different ones."""
    if not (case.run.model_dropout and max(case.parallel.tensor_parallel_size, case.run.tp_size or 1) > 1):
        return None
    return error(
        case.run.place("model_dropout"),
        "ranks that share a layer (tensor parallelism) would each drop something else.",
        "remove it, or use FSDP2.",
    )


def vllm_generation(case: Case) -> Finding | None:
    """vLLM where it cannot run, or where TRL (1.16) cannot pass it the trained weights."""
    run, num_ranks = case.run, case.launch.num_processes or 1
    if not run.use_vllm:
        return None
    shared = run.vllm_tensor_parallel_size
    if run.vllm_mode == "colocate" and num_ranks % shared:
        why = f"{num_ranks} processes are not groups of {shared}."
        return error(run.place("vllm_tensor_parallel_size"), why, f"use a number that divides {num_ranks}.")
    weights = why_no_weights(
        is_quantised=run.is_4bit or run.load_in_8bit,
        trains_adapters=run.trains_adapters,
        is_fsdp=case.parallel.kind.is_fsdp,
    )
    reason = weights or why_no_vllm(is_installed=case.machine.has("vllm"), device_type=case.device.type)
    return error(run.place("use_vllm"), *reason) if reason else None


def output_folder(case: Case) -> Finding | None:
    """An output folder that is not writable."""
    if case.machine.folders.get(case.run.output_dir, True):
        return None
    return error(case.run.place("output_dir"), f"{case.run.output_dir} cannot be written.", "choose another folder.")


RECIPE_RULES: tuple[Rule, ...] = (
    optimizer_package,
    fused_kernels,
    optimizer_and_launch,
    paged_without_cuda,
    flash_attention,
    packing_mixes_documents,
    packing_attention,
    compiled_packing,
    compiled_segments,
    packing_context_parallel,
    streaming_needs_steps,
    slow_tokenisation,
    changing_batch,
    global_batch,
    dropout_with_flex,
    dropout_in_shared_layers,
    vllm_generation,
    output_folder,
)
