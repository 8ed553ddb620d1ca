"""Rules on precision and quantisation."""

from __future__ import annotations

from accel_scale.checks.case import Case, Finding, Rule, error
from accel_scale.facts.precisions import PRECISION_FACTS

# The recipe's precisions → values of a launch file's `mixed_precision` that go with them.
LAUNCH_PRECISIONS = {name: {facts.launch} for name, facts in PRECISION_FACTS.items()}


def both_half_precisions(case: Case) -> Finding | None:
    """``--fp16`` and ``--bf16`` together."""
    if not (case.run.fp16 and case.run.bf16):
        return None
    return error(case.run.place("fp16"), "fp16 and bf16 are both asked for.", "keep one of them.")


def precision_and_flags(case: Case) -> Finding | None:
    """``--precision`` against ``--fp16`` and ``--bf16``."""
    run = case.run
    for flag, value, goes_with in (("fp16", run.fp16, {"fp16"}), ("bf16", run.bf16, {"bf16", "fp8"})):
        if run.precision and value and run.precision not in goes_with:
            return error(
                run.place(flag),
                f"{flag} contradicts --precision {run.precision} ({run.place('precision')}).",
                f"remove {flag}.",
            )
    return None


def launch_precision(case: Case) -> Finding | None:
    """The launch file's precision against the recipe's, which would silently win or lose."""
    launch = case.launch.mixed_precision
    if launch is None or launch in LAUNCH_PRECISIONS.get(case.precision, {launch}):
        return None
    wanted = min(LAUNCH_PRECISIONS[case.precision])
    written = f"'{wanted}'" if wanted == "no" else wanted
    return error(
        case.launch.place("mixed_precision"),
        f"says mixed_precision: {launch}, but {case.precision_place} asks for {case.precision}.",
        f"write mixed_precision: {written} there, or drop {case.precision_place}.",
    )


def deepspeed_precision(case: Case) -> Finding | None:
    """A DeepSpeed file that fixes a different precision."""
    wanted = {"bf16": PRECISION_FACTS[case.precision].needs_bf16, "fp16": case.precision == "fp16"}
    for name, expected in wanted.items():
        enabled = (case.parallel.deepspeed.get(name) or {}).get("enabled", "auto")
        if enabled != "auto" and bool(enabled) != expected:
            return error(
                case.launch.place(f"{name}.enabled"),
                f"says {name} enabled: {str(enabled).lower()}, but the run is in {case.precision}.",
                'write "enabled": "auto", so that --precision rules.',
            )
    return None


def bf16_support(case: Case) -> Finding | None:
    """bf16 on a device without it (before NVIDIA's Ampere)."""
    if case.precision not in ("bf16", "bf16_true") or case.device.supports_bf16:
        return None
    return error(
        case.precision_place,
        f"{case.machine.device_name} does not compute in bf16.",
        _without_bf16(case),
    )


def _without_bf16(case: Case) -> str:
    """The fix for a device without bf16, whoever asked for bf16."""
    name = case.device.default_precision
    launched = "no" if name == "fp32" else name
    if case.launch.mixed_precision is None:
        return f"use --precision {name}."
    return f"use --precision {name}, and accelerate launch --mixed_precision {launched} or the same in its file."


def kernels_of_this_build(case: Case) -> Finding | None:
    """A build of torch without code for the card: the first kernel would fail."""
    device = case.device
    if device.has_kernels or device.capability is None:
        return None
    oldest = min(built for built in device.built_for if built.startswith("sm_"))
    return error(
        "torch",
        f"this build has no kernels for {device.name} (compute capability {device.capability[0]}."
        f"{device.capability[1]}; the oldest are {oldest}).",
        "install a build for an older CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu126.",
    )


def fp8_support(case: Case) -> Finding | None:
    """fp8 on a device without fp8 matrix products, where it would fall back."""
    if case.precision != "fp8" or case.device.supports_fp8 or case.run.fp8_emulate:
        return None
    return error(
        case.precision_place,
        f"{case.machine.device_name} has no fp8 matrix products (NVIDIA Ada, Hopper and newer and AMD MI300 have).",
        "use --precision bf16, or --fp8_emulate to try the arithmetic slowly.",
    )


def fp8_package(case: Case) -> Finding | None:
    """fp8 without torchao."""
    if case.precision != "fp8" or case.machine.has("torchao"):
        return None
    return error(case.precision_place, "fp8 needs torchao.", "pip install 'accel-scale[fp8]'.")


def fp16_weights(case: Case) -> Finding | None:
    """fp16 weights under dynamic loss scaling: the scaler cannot unscale fp16 gradients."""
    run = case.run
    if case.precision != "fp16" or run.dtype != "float16" or run.trains_adapters:
        return None
    return error(
        run.place("dtype"),
        "weights in fp16 have fp16 gradients, which loss scaling cannot unscale.",
        "remove dtype: --precision fp16 keeps fp32 master weights.",
    )


def two_quantisations(case: Case) -> Finding | None:
    """4-bit and 8-bit base at once."""
    if not (case.run.load_in_4bit and case.run.load_in_8bit):
        return None
    return error(case.run.place("load_in_8bit"), "the base is asked for in 4 and in 8 bits.", "keep one of the two.")


def quantised_without_adapters(case: Case) -> Finding | None:
    """A quantised base without adapters: its weights have no gradient."""
    run = case.run
    if not (run.load_in_4bit or run.load_in_8bit) or run.trains_adapters:
        return None
    flag, method = ("load_in_4bit", "qlora") if run.load_in_4bit else ("load_in_8bit", "lora")
    asked = " --method full asks to train it." if run.method == "full" else ""
    return error(run.place(flag), f"a quantised base cannot be trained itself.{asked}", f"use --method {method}.")


def quantisation_package(case: Case) -> Finding | None:
    """A quantised base without bitsandbytes."""
    run = case.run
    if not (run.is_4bit or run.load_in_8bit) or case.machine.has("bitsandbytes"):
        return None
    flag = "method" if run.method == "qlora" else "load_in_8bit" if run.load_in_8bit else "load_in_4bit"
    return error(run.place(flag), "a quantised base needs bitsandbytes.", "pip install bitsandbytes.")


def quant_storage(case: Case) -> Finding | None:
    """FSDP2 leaves integer tensors whole on every rank, so uint8 storage is not sharded."""
    run = case.run
    if not (run.is_4bit and case.parallel.is_fsdp and run.bnb_4bit_quant_storage == "uint8"):
        return None
    return error(
        run.place("bnb_4bit_quant_storage"),
        "FSDP cannot shard 4-bit weights stored as uint8: every rank would keep all of them.",
        "remove it, so that the storage follows --precision (bfloat16).",
    )


def eight_bit_base_sharded(case: Case) -> Finding | None:
    """FSDP2 cannot create parameters from bitsandbytes' `Int8Params` (0.50.2): it fails at the first shard."""
    if not (case.run.load_in_8bit and case.parallel.is_fsdp):
        return None
    return error(
        case.run.place("load_in_8bit"),
        f"an 8-bit base cannot be sharded by {case.parallel.label}.",
        "use --method qlora (4-bit), or launch with accelerate_configs/ddp.yaml.",
    )


PRECISION_RULES: tuple[Rule, ...] = (
    both_half_precisions,
    precision_and_flags,
    launch_precision,
    deepspeed_precision,
    kernels_of_this_build,
    bf16_support,
    fp8_support,
    fp8_package,
    fp16_weights,
    two_quantisations,
    quantised_without_adapters,
    quantisation_package,
    quant_storage,
    eight_bit_base_sharded,
)
