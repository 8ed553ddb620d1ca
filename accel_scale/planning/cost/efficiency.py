"""What one micro-batch costs a GPU: matrix products, memory traffic and kernel launches, with the fitted constants."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.facts.hardware import Gpu
from accel_scale.planning.cost.flops import (
    FlopsPerToken,
    adapted_linears,
    hardware_flops_per_token,
    recomputed_fraction,
    trained_params,
)
from accel_scale.planning.models.model_facts import LayerFacts, ModelFacts
from accel_scale.planning.models.parameters import quantised_weights
from accel_scale.planning.models.training_setup import TrainingSetup

# Reading 4 bits and constants, writing 16-bit weights, reading them again in the product, in bytes per weight.
NF4_DEQUANTISE_BYTES = 4.6


@dataclass(frozen=True)
class Efficiency:
    """Constants of the time model, fitted to 83 published speeds of torchtune, torchtitan, torchao, litgpt, Qwen and
    DeepSpeed, most of them on A100, some on H100, H200, RTX 4090 and MI300X.

    Median error on the fitted rows: 3–17% by source. Fitted without a source, it is predicted to 6–19%, but torchtitan
    to 43%: nothing else shows fp8 and long rows on Hopper. Rows left out of the fit (GPTQ kernels, unpacked data of
    unknown length, ring attention, a power-limited B200) are predicted to 11–45%. Blackwell's share is not fitted.

    Attributes:
        ampere_fraction, hopper_fraction, blackwell_fraction, cdna_fraction: Of the dense 16-bit peak, in the products
            of a training step. Alone, a large product reaches 0.87 on an A100 and 0.80 on an H100; in a long run
            clocks fall to the power limit. Consumer Ada and Blackwell (8.9, 12.0) count as Ampere.
        fp8_fraction: Of the fp8 peak over that of bf16: scaling and casts take part of the gain.
        attention_fraction, hopper_attention_fraction: Of the 16-bit peak, in flash (2) or sdpa attention; kernels made
            for Ampere leave half of Hopper idle.
        eager_attention_bytes: Traffic of each score that eager attention writes and reads, one forward pass.
        layer_bytes_eager: Traffic of norms, rotary embeddings, activations and residuals in one forward pass, in bytes
            per token and unit of hidden + intermediate size.
        layer_bytes_compiled: The same under torch.compile.
        adapter_bytes: The same per unit of in + out features of an adapted matrix (dropout, scale, sum, casts), eager.
        loss_bytes: Traffic of logits and loss, whole step, per token and vocabulary entry.
        launch_seconds: Between two eager kernels on the host.
        base_kernels, adapter_kernels, quantised_kernels: In one forward pass of a layer: its body, each adapter, each
            dequantised matrix.
        compiled_launch_fraction: Of the launches, under torch.compile.
        zero3_layer_seconds: DeepSpeed's hooks around every module, per layer and micro-batch.
        bandwidth_fraction: Of the memory bandwidth, in elementwise kernels and optimizers.
        overlap_fraction: Of the computation, behind which communication that may overlap hides; 0 under ZeRO-3, whose
            measured steps are the sum of both.
        low_factor, high_factor: Of 83 fitted rows 98% took between these times the estimate, of 39 left out 56%.
    """

    ampere_fraction: float = 0.75
    hopper_fraction: float = 0.62
    blackwell_fraction: float = 0.50
    cdna_fraction: float = 0.28
    fp8_fraction: float = 0.70
    attention_fraction: float = 0.43
    hopper_attention_fraction: float = 0.26
    eager_attention_bytes: float = 20.0
    layer_bytes_eager: float = 50.0
    layer_bytes_compiled: float = 9.0
    adapter_bytes: float = 6.0
    loss_bytes: float = 20.0
    launch_seconds: float = 11e-6
    base_kernels: float = 45.0
    adapter_kernels: float = 14.0
    quantised_kernels: float = 6.0
    compiled_launch_fraction: float = 0.3
    zero3_layer_seconds: float = 10e-3
    bandwidth_fraction: float = 0.8
    overlap_fraction: float = 0.9
    low_factor: float = 0.8
    high_factor: float = 1.3

    def matmul_fraction(self, compute_capability: str | None) -> float:
        """Of the dense 16-bit peak, by architecture."""
        by_major = {0: self.cdna_fraction, 9: self.hopper_fraction, 10: self.blackwell_fraction}
        return by_major.get(_major(compute_capability), self.ampere_fraction)

    def attention_share(self, compute_capability: str | None) -> float:
        """Of the dense 16-bit peak in attention, by architecture."""
        return self.hopper_attention_fraction if _major(compute_capability) in (9, 10) else self.attention_fraction


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
    traffic = tokens * _bytes_per_token(facts, setup, efficiency) + _weight_traffic(facts, setup)
    launch = _launch_seconds(facts, setup, efficiency) / parallel.pipeline_parallel
    # A forward pass that only scores is one more of the step's passes.
    more = 1 + setup.scoring_passes / (3 + recomputed_fraction(setup.checkpointing))
    return MicroBatchTime(more * matmul, more * traffic / ranks / bandwidth, more * launch)


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
    launching = _launch_seconds(facts, setup, efficiency) / passes
    token = MicroBatchTime(generation.rows * product, moving, launching).seconds
    prompt = MicroBatchTime(generation.rows * generation.prompt_length * product, moving, launching).seconds
    return prompt + generation.completion_length * token


def _matmul_seconds(flops: FlopsPerToken, setup: TrainingSetup, gpu: Gpu, efficiency: Efficiency) -> float:
    """Per token, all ranks' share."""
    dtype = {"fp32": "fp32", "fp16": "fp16"}.get(setup.precision, "bf16")
    fraction = efficiency.matmul_fraction(gpu.compute_capability)
    peak = gpu.flops(dtype)
    layers = peak * fraction
    if setup.precision == "fp8":
        layers = gpu.flops("fp8") * fraction * efficiency.fp8_fraction
    passes = 3 + recomputed_fraction(setup.checkpointing)
    attention = flops.attention * passes
    head = flops.head * (3 if setup.trains_all else 2)
    products = flops.total - attention - head
    attention_speed = peak * efficiency.attention_share(gpu.compute_capability)
    return products / layers + head / (peak * fraction) + attention / attention_speed


def _bytes_per_token(facts: ModelFacts, setup: TrainingSetup, efficiency: Efficiency) -> float:
    per_unit = efficiency.layer_bytes_compiled if setup.compile else efficiency.layer_bytes_eager
    scale = setup.compute_bytes / 2
    forward = 0.0
    for layer in facts.layers:
        adapted = adapted_linears(layer, setup)
        features = sum(linear.active_copies * (linear.in_features + linear.out_features) for linear in adapted)
        width = facts.hidden_size + _active_width(facts, layer)
        forward += (
            layer.count * per_unit * (width + efficiency.adapter_bytes / efficiency.layer_bytes_eager * features)
        )
        if setup.attention == "eager":
            forward += layer.count * efficiency.eager_attention_bytes * facts.num_heads * setup.sequence_length
    # Norms and activations run again wherever anything is recomputed, matrix products kept or not.
    recomputed = 1.0 if setup.checkpointing == "selective" else recomputed_fraction(setup.checkpointing)
    loss = efficiency.loss_bytes * facts.head_width * (0.5 if setup.loss == "liger" else 1.0)
    return (forward * (3 + recomputed) + loss) * scale


def _active_width(facts: ModelFacts, layer: LayerFacts) -> int:
    """Intermediate units a token passes through."""
    mixture = layer.mixture
    if mixture is None:
        return facts.intermediate_size
    return mixture.experts_per_token * mixture.expert_intermediate_size + mixture.shared_intermediate_size


def _weight_traffic(facts: ModelFacts, setup: TrainingSetup) -> float:
    """Bytes per micro-batch that do not depend on tokens: weights read by every pass, gradients added, casts, NF4."""
    passes = 3 if setup.trains_all else 2
    passes_with_recompute = passes + recomputed_fraction(setup.checkpointing)
    traffic = facts.num_params * setup.compute_bytes * passes_with_recompute
    trained = trained_params(facts, setup)
    traffic += 3 * setup.trained_bytes * trained
    if setup.autocast and not setup.parallel.shards_weights:
        traffic += (setup.trained_bytes + setup.compute_bytes) * trained
    if setup.quantises_base:
        traffic += NF4_DEQUANTISE_BYTES * quantised_weights(facts) * (2 + recomputed_fraction(setup.checkpointing))
    return traffic


def _launch_seconds(facts: ModelFacts, setup: TrainingSetup, efficiency: Efficiency) -> float:
    kernels = 0.0
    for layer in facts.layers:
        quantised = sum(linear.quantisable for linear in layer.linears) if setup.quantises_base else 0
        in_layer = efficiency.base_kernels + efficiency.quantised_kernels * quantised
        kernels += layer.count * (in_layer + efficiency.adapter_kernels * len(adapted_linears(layer, setup)))
    recomputed = 1.0 if setup.checkpointing == "selective" else recomputed_fraction(setup.checkpointing)
    seconds = kernels * efficiency.launch_seconds * (3 + recomputed)
    if setup.compile:
        seconds *= efficiency.compiled_launch_fraction
    if setup.parallel.kind.partitions_weights:
        seconds += facts.num_layers * efficiency.zero3_layer_seconds
    return seconds
