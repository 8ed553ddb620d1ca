"""Time of one micro-batch on a GPU: matrix products, memory traffic, kernel launches, and the fitted constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from accel_scale.facts.hardware import Gpu
from accel_scale.planning.cost.flops import (
    FlopsPerToken,
    adapted_linears,
    hardware_flops_per_token,
    recomputed_fraction,
)
from accel_scale.planning.cost.traffic import NF4_DEQUANTISE_BYTES, step_traffic_per_token, weight_traffic
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup

# Board power per TFLOP/s of the 16-bit peak of the card that the shares were fitted on.
_A100_WATTS_PER_TERAFLOP = 400 / 312


@dataclass(frozen=True)
class Efficiency:
    """Constants of the time model, fitted to 83 published speeds of torchtune, torchtitan, torchao, litgpt, Qwen and
    DeepSpeed, most of them on A100, some on H100, H200, RTX 4090 and MI300X.

    Median error on the fitted rows: 3–17% by source. 122 speeds of llm-foundry, FSDP-QLoRA and ms-swift guided the
    choice of `traffic_factor`, `unbound_fraction` and `softmax_factor` (median error 9%); 38 of fms-acceleration were
    not used (11%). Blackwell's share is not fitted.

    Attributes:
        ampere_fraction: Share of an A100's 16-bit peak reached by the products of a training step. Alone, a large
            product reaches 0.87; in a long run clocks fall to the power limit. Power grows as the cube of the clock,
            so other cards' shares follow from the cube root of their board power per TFLOP/s. An H100 gets 0.62.
        unbound_fraction: The largest share: for cards with power to spare at their peak (GeForce, H20, A10G).
        throttled_fraction, throttled_bandwidth_fraction: A T4's shares of peak and bandwidth. 70 W hold its clocks far
            below the boost clock of its peak: fitted to 20 speeds of fitcheck-llm. The bandwidth is Jia et al.'s
            ("Dissecting the NVidia Turing T4 GPU via Microbenchmarking", 2019).
        hopper_fraction, blackwell_fraction, cdna_fraction: For architectures whose power is unknown or does not tell.
        fp8_fraction: Share at the fp8 peak relative to bf16's: scaling and casts take part of the gain.
        attention_fraction, blackwell_attention_fraction: Share of the 16-bit peak in flash (2) or sdpa attention, if
            the card's other speeds do not tell.
        hopper_attention_flops: Speed of products in attention kernels made for Ampere, which leave Hopper mostly idle.
        softmax_factor: Time of attention's softmax, in fp32 units, over that of its products at the fp32 peak. Derived
            from the 0.43 of the peak that attention reaches on an A100.
        traffic_factor: Ratio of what layers move to the count of their elementwise kernels (`layer_traffic`).
        launch_seconds: Between two eager kernels on the host: 13 µs in Qwen's table, 14 to 19 on the host of an H200.
        base_kernels, autocast_kernels, adapter_kernels, quantised_kernels: In a layer's forward pass, for its body,
            the casts of its weights, each adapter, each dequantised matrix. Counted by benchmarks/host_passes.py.
        fused_kernels: Number of them saved by a norm, a rotation or a gate in one kernel.
        checkpointed_passes, selective_passes: What checkpointing adds to the host's three passes (forward, and two for
            backward): torch's hooks around every saved tensor and, under ``selective``, Python around every operator.
            Timed by benchmarks/host_passes.py on a CPU.
        compiled_launch_fraction: Share of the launches left under torch.compile, which also has no such hooks.
        zero3_layer_seconds: DeepSpeed's hooks around every module, per layer and micro-batch.
        bandwidth_fraction: Share of the memory bandwidth reached by elementwise kernels and optimizers.
        overlap_fraction: Share of the computation that can hide overlapping communication; 0 under ZeRO-3, whose
            measured steps are the sum of both.
        low_factor, high_factor: Multiples of the estimate between which 77% of 136 rows of the data lay, 87% of the
            122 above, and 79% of the 38.
    """

    ampere_fraction: float = 0.75
    unbound_fraction: float = 0.97
    hopper_fraction: float = 0.62
    throttled_fraction: float = 0.25
    blackwell_fraction: float = 0.50
    cdna_fraction: float = 0.28
    fp8_fraction: float = 0.70
    attention_fraction: float = 0.43
    blackwell_attention_fraction: float = 0.26
    hopper_attention_flops: float = 337e12
    softmax_factor: float = 0.062
    traffic_factor: float = 1.2
    launch_seconds: float = 14e-6
    base_kernels: float = 51.0
    autocast_kernels: float = 14.0
    adapter_kernels: float = 7.0
    quantised_kernels: float = 6.0
    fused_kernels: Mapping[str, float] = field(
        default_factory=lambda: {"RMSNorm": 14.0, "LayerNorm": 0.0, "RoPE": 11.0, "SwiGLU": 1.0, "GEGLU": 1.0}
    )
    checkpointed_passes: float = 3.7
    selective_passes: float = 8.7
    compiled_launch_fraction: float = 0.3
    zero3_layer_seconds: float = 10e-3
    bandwidth_fraction: float = 0.8
    throttled_bandwidth_fraction: float = 0.69
    overlap_fraction: float = 0.9
    low_factor: float = 0.8
    high_factor: float = 1.3

    def matmul_fraction(self, gpu: Gpu) -> float:
        """Share of the dense 16-bit peak reached in matrix products."""
        major, peak = _major(gpu.compute_capability), (gpu.peak_flops or {}).get("bf16")
        if major in (8, 9, 12) and gpu.watts and peak:
            power = gpu.watts / (peak / 1e12) / _A100_WATTS_PER_TERAFLOP
            return min(self.unbound_fraction, self.ampere_fraction * power ** (1 / 3))
        if _is_throttled(gpu):
            return self.throttled_fraction
        by_major = {0: self.cdna_fraction, 9: self.hopper_fraction, 10: self.blackwell_fraction}
        return by_major.get(major, self.ampere_fraction)

    def bandwidth_share(self, gpu: Gpu) -> float:
        """Share of the memory bandwidth reached by kernels that only move data."""
        return self.throttled_bandwidth_fraction if _is_throttled(gpu) else self.bandwidth_fraction

    def attention_share(self, gpu: Gpu) -> float:
        """Share of the dense 16-bit peak reached in attention, whose products and softmax take turns."""
        major, peaks = _major(gpu.compute_capability), gpu.peak_flops or {}
        half, single = peaks.get("bf16") or peaks.get("fp16"), peaks.get("fp32")
        if major == 10:
            return self.blackwell_attention_fraction
        if major == 0 or not half or not single:
            return self.attention_fraction
        products = self.matmul_fraction(gpu)
        if major == 9:
            products = min(products, self.hopper_attention_flops / half)
        return 1 / (1 / products + self.softmax_factor * half / single)


EFFICIENCY = Efficiency()


def _major(compute_capability: str | None) -> int:
    """CUDA's architecture number; 8 if unknown, 0 on ROCm."""
    text = compute_capability or "8.0"
    return 0 if text.startswith("gfx") else int(text.split(".")[0])


def _is_throttled(gpu: Gpu) -> bool:
    """True for a Turing card with less power per TFLOP/s than an A100: the T4."""
    half = (gpu.peak_flops or {}).get("fp16")
    is_turing = gpu.compute_capability == "7.5"
    return bool(is_turing and gpu.watts and half and gpu.watts / (half / 1e12) < _A100_WATTS_PER_TERAFLOP)


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on one rank, forward and backward.

    Attributes:
        matmul_seconds: Matrix products and attention.
        memory_seconds: Everything that only moves data: elementwise kernels, loss, weights, dequantisation.
        launch_seconds: Time the host needs to launch everything; it runs in parallel with the two above.
    """

    matmul_seconds: float
    memory_seconds: float
    launch_seconds: float

    @property
    def seconds(self) -> float:
        """The slower of GPU and host; if they are close, they wait for each other (4-norm)."""
        gpu = self.matmul_seconds + self.memory_seconds
        return (gpu**4 + self.launch_seconds**4) ** 0.25


def micro_batch_time(
    facts: ModelFacts,
    setup: TrainingSetup,
    gpu: Gpu,
    *,
    efficiency: Efficiency = EFFICIENCY,
    document_length: float | None = None,
) -> MicroBatchTime:
    """Seconds of forward and backward of one micro-batch on one rank, without communication.

    Raises:
        ConfigError: if the GPU's speed is unknown or it has no units for the precision.
    """
    parallel = setup.parallel
    ranks = parallel.tensor_parallel * parallel.pipeline_parallel
    tokens = setup.micro_batch_size * setup.sequence_length / parallel.sequence_parallel
    flops = hardware_flops_per_token(facts, setup, document_length=document_length)
    matmul = tokens * _matmul_seconds(flops, setup, gpu, efficiency) / ranks
    bandwidth = gpu.bandwidth() * efficiency.bandwidth_share(gpu)
    traffic = tokens * step_traffic_per_token(facts, setup, efficiency.traffic_factor) + weight_traffic(facts, setup)
    # A scoring forward pass counts as one more of the step's passes.
    more = 1 + setup.scoring_passes / (3 + recomputed_fraction(setup.checkpointing))
    launch = _launch_seconds(facts, setup, efficiency, _host_passes(setup, efficiency) + setup.scoring_passes)
    return MicroBatchTime(more * matmul, more * traffic / ranks / bandwidth, launch / parallel.pipeline_parallel)


def generation_seconds(
    facts: ModelFacts, setup: TrainingSetup, gpu: Gpu, *, cache_bytes: float, efficiency: Efficiency = EFFICIENCY
) -> float:
    """Seconds a rank takes to write answers with transformers' ``generate``: a pass over prompts, then one per token.

    Each of those reads all weights and, on average, half of the cache, or waits for the host's launches. Not fitted,
    because no published speed of such generation was available.

    Args:
        cache_bytes: Size of the cache at the end of the longest answers.
    """
    generation = setup.generation
    if generation is None:
        return 0.0
    passes = 3 + recomputed_fraction(setup.checkpointing)
    flops = hardware_flops_per_token(facts, setup)
    product = _matmul_seconds(flops, setup, gpu, efficiency) / passes
    width = NF4_DEQUANTISE_BYTES if setup.quantises_base else setup.compute_bytes
    read = facts.num_params * width + cache_bytes / 2
    moving = read / (gpu.bandwidth() * efficiency.bandwidth_share(gpu))
    launching = _launch_seconds(facts, setup, efficiency, 1)
    token = MicroBatchTime(generation.rows * product, moving, launching).seconds
    prompt = MicroBatchTime(generation.rows * generation.prompt_length * product, moving, launching).seconds
    return prompt + generation.completion_length * token


def _matmul_seconds(flops: FlopsPerToken, setup: TrainingSetup, gpu: Gpu, efficiency: Efficiency) -> float:
    """Seconds of products per token, for all ranks together."""
    dtype = {"fp32": "fp32", "fp16": "fp16"}.get(setup.precision, "bf16")
    fraction = efficiency.matmul_fraction(gpu)
    peak = gpu.flops(dtype)
    layers = peak * fraction
    if setup.precision == "fp8":
        layers = gpu.flops("fp8") * fraction * efficiency.fp8_fraction
    passes = 3 + recomputed_fraction(setup.checkpointing)
    attention = flops.attention * passes
    head = flops.head * (3 if setup.trains_all else 2)
    products = flops.total - attention - head
    attention_speed = peak * efficiency.attention_share(gpu)
    return products / layers + head / (peak * fraction) + attention / attention_speed


def _launch_seconds(facts: ModelFacts, setup: TrainingSetup, efficiency: Efficiency, passes: float) -> float:
    """Host time for the kernels of `passes` forward passes, and for ZeRO-3's hooks in a micro-batch."""
    body = efficiency.base_kernels + (efficiency.autocast_kernels if setup.autocast else 0)
    body -= sum(efficiency.fused_kernels[part] for part in setup.fused)
    kernels = 0.0
    for layer in facts.layers:
        quantised = sum(linear.quantisable for linear in layer.linears) if setup.quantises_base else 0
        adapters = len(adapted_linears(layer, setup))
        in_layer = body + efficiency.quantised_kernels * quantised + efficiency.adapter_kernels * adapters
        kernels += layer.count * in_layer
    seconds = kernels * efficiency.launch_seconds * passes
    if setup.compile:
        seconds *= efficiency.compiled_launch_fraction
    if setup.parallel.kind.partitions_weights:
        seconds += facts.num_layers * efficiency.zero3_layer_seconds
    return seconds


def _host_passes(setup: TrainingSetup, efficiency: Efficiency) -> float:
    """Passes of the host: forward, two for backward, and what checkpointing adds."""
    recomputed = recomputed_fraction(setup.checkpointing)
    if setup.compile:
        return 3 + (1 if setup.checkpointing == "selective" else recomputed)
    added = efficiency.selective_passes if setup.checkpointing == "selective" else 0.0
    # Reentrant checkpointing has no hooks: a recomputed layer costs one forward pass.
    again = 1.0 if setup.needs_reentrant else efficiency.checkpointed_passes
    return 3 + added + recomputed * again
