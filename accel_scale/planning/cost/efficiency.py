"""What one micro-batch costs a GPU: matrix products, memory traffic and kernel launches, with the fitted constants."""

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

# The card that the shares were fitted on: board power per TFLOP/s of its 16-bit peak.
_A100_WATTS_PER_TERAFLOP = 400 / 312


@dataclass(frozen=True)
class Efficiency:
    """Constants of the time model, fitted to 83 published speeds of torchtune, torchtitan, torchao, litgpt, Qwen and
    DeepSpeed, most of them on A100, some on H100, H200, RTX 4090 and MI300X.

    Median error on the fitted rows: 3–17% by source. 122 speeds of llm-foundry, FSDP-QLoRA and ms-swift guided the
    choice of `traffic_factor`, `unbound_fraction` and `softmax_factor` (median error 9%); 38 of fms-acceleration did
    not (11%). Blackwell's share is not fitted.

    Attributes:
        ampere_fraction: Of the 16-bit peak of an A100, in the products of a training step. Alone, a large product
            reaches 0.87; in a long run clocks fall to the power limit. Power grows with the third power of the clock,
            so other cards' shares follow from the cube root of their board power per TFLOP/s. An H100 gets 0.62.
        unbound_fraction: The largest share: of cards with power to spare for their peak (GeForce, H20, A10G).
        hopper_fraction, blackwell_fraction, cdna_fraction: Of architectures whose power does not tell, or is unknown.
        fp8_fraction: Of the fp8 peak over that of bf16: scaling and casts take part of the gain.
        attention_fraction, blackwell_attention_fraction: Of the 16-bit peak, in flash (2) or sdpa attention, where the
            card's other speeds do not tell.
        hopper_attention_flops: Of products in attention's kernels made for Ampere, which leave most of Hopper idle.
        softmax_factor: Seconds of attention's softmax, in fp32 units, over its products' at the fp32 peak. From the
            0.43 of the peak that attention reaches on an A100.
        traffic_factor: What layers move over what their elementwise kernels were counted to (`layer_traffic`).
        launch_seconds: Between two eager kernels on the host: 13 µs in Qwen's table, 14 to 19 on the host of an H200.
        base_kernels, autocast_kernels, adapter_kernels, quantised_kernels: In one forward pass of a layer: its body,
            the casts of its weights, each adapter, each dequantised matrix. Counted by benchmarks/host_passes.py.
        fused_kernels: What a norm, a rotation or a gate in one kernel saves of them.
        checkpointed_passes, selective_passes: What checkpointing adds to the host's three passes (forward, and two for
            backward): torch's hooks around every saved tensor, and under ``selective`` Python around every operator.
            Timed by benchmarks/host_passes.py on a CPU.
        compiled_launch_fraction: Of the launches, under torch.compile, which has no such hooks either.
        zero3_layer_seconds: DeepSpeed's hooks around every module, per layer and micro-batch.
        bandwidth_fraction: Of the memory bandwidth, in elementwise kernels and optimizers.
        overlap_fraction: Of the computation, behind which communication that may overlap hides; 0 under ZeRO-3, whose
            measured steps are the sum of both.
        low_factor, high_factor: Of 136 rows of the data 77% took between these times the estimate, of the 122 above
            87%, of the 38 79%.
    """

    ampere_fraction: float = 0.75
    unbound_fraction: float = 0.97
    hopper_fraction: float = 0.62
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
    overlap_fraction: float = 0.9
    low_factor: float = 0.8
    high_factor: float = 1.3

    def matmul_fraction(self, gpu: Gpu) -> float:
        """Of the dense 16-bit peak, in matrix products."""
        major, peak = _major(gpu.compute_capability), (gpu.peak_flops or {}).get("bf16")
        if major in (8, 9, 12) and gpu.watts and peak:
            power = gpu.watts / (peak / 1e12) / _A100_WATTS_PER_TERAFLOP
            return min(self.unbound_fraction, self.ampere_fraction * power ** (1 / 3))
        by_major = {0: self.cdna_fraction, 9: self.hopper_fraction, 10: self.blackwell_fraction}
        return by_major.get(major, self.ampere_fraction)

    def attention_share(self, gpu: Gpu) -> float:
        """Of the dense 16-bit peak, in attention: its products and its softmax take turns."""
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
    """CUDA's architecture number, 8 where unknown, 0 on ROCm."""
    text = compute_capability or "8.0"
    return 0 if text.startswith("gfx") else int(text.split(".")[0])


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on one rank, forward and backward.

    Attributes:
        matmul_seconds: Matrix products and attention.
        memory_seconds: Everything that only moves data: elementwise kernels, loss, weights, dequantisation.
        launch_seconds: What the host needs to launch it all; it runs beside the two above.
    """

    matmul_seconds: float
    memory_seconds: float
    launch_seconds: float

    @property
    def seconds(self) -> float:
        """The slower of GPU and host; where they are close, they wait for each other (4-norm)."""
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
        ConfigError: where the GPU's speed is not known or it has no units for the precision.
    """
    parallel = setup.parallel
    ranks = parallel.tensor_parallel * parallel.pipeline_parallel
    tokens = setup.micro_batch_size * setup.sequence_length / parallel.sequence_parallel
    flops = hardware_flops_per_token(facts, setup, document_length=document_length)
    matmul = tokens * _matmul_seconds(flops, setup, gpu, efficiency) / ranks
    bandwidth = gpu.bandwidth() * efficiency.bandwidth_fraction
    traffic = tokens * step_traffic_per_token(facts, setup, efficiency.traffic_factor) + weight_traffic(facts, setup)
    # A forward pass that only scores is one more of the step's passes.
    more = 1 + setup.scoring_passes / (3 + recomputed_fraction(setup.checkpointing))
    launch = _launch_seconds(facts, setup, efficiency, _host_passes(setup, efficiency) + setup.scoring_passes)
    return MicroBatchTime(more * matmul, more * traffic / ranks / bandwidth, launch / parallel.pipeline_parallel)


def generation_seconds(
    facts: ModelFacts, setup: TrainingSetup, gpu: Gpu, *, cache_bytes: float, efficiency: Efficiency = EFFICIENCY
) -> float:
    """Seconds that a rank writes answers, by transformers' ``generate``: a pass over the prompts, then one per token.

    Each of those reads all weights and, on average, half of the cache, or waits for the host's launches. Not fitted:
    no published speed of such generation was at hand.

    Args:
        cache_bytes: Of the longest answers, at their end.
    """
    generation = setup.generation
    if generation is None:
        return 0.0
    passes = 3 + recomputed_fraction(setup.checkpointing)
    flops = hardware_flops_per_token(facts, setup)
    product = _matmul_seconds(flops, setup, gpu, efficiency) / passes
    width = NF4_DEQUANTISE_BYTES if setup.quantises_base else setup.compute_bytes
    read = facts.num_params * width + cache_bytes / 2
    moving = read / (gpu.bandwidth() * efficiency.bandwidth_fraction)
    launching = _launch_seconds(facts, setup, efficiency, 1)
    token = MicroBatchTime(generation.rows * product, moving, launching).seconds
    prompt = MicroBatchTime(generation.rows * generation.prompt_length * product, moving, launching).seconds
    return prompt + generation.completion_length * token


def _matmul_seconds(flops: FlopsPerToken, setup: TrainingSetup, gpu: Gpu, efficiency: Efficiency) -> float:
    """Per token, all ranks' share."""
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
    """What the host takes for so many forward passes' worth of kernels, and for ZeRO-3's hooks in a micro-batch."""
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
    """Forward, twice as much backward, and what checkpointing adds."""
    recomputed = recomputed_fraction(setup.checkpointing)
    if setup.compile:
        return 3 + (1 if setup.checkpointing == "selective" else recomputed)
    added = efficiency.selective_passes if setup.checkpointing == "selective" else 0.0
    return 3 + added + recomputed * efficiency.checkpointed_passes
