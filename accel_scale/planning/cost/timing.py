"""Step time, tokens per second, MFU and HFU of a training setup on a machine, and the cost of a token budget."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import ASSUMED_HOST_BANDWIDTH, Machine
from accel_scale.facts.optimizer_specs import modelled_optimizer
from accel_scale.planning.cost.communication import collective_seconds, gathered_weight_bytes, step_collectives
from accel_scale.planning.cost.efficiency import EFFICIENCY, Efficiency, generation_seconds, micro_batch_time
from accel_scale.planning.cost.flops import (
    hardware_flops_per_token,
    model_flops_per_token,
    trained_params,
)
from accel_scale.planning.cost.generation import cache_bytes
from accel_scale.planning.cost.pipeline import bubble_fraction
from accel_scale.planning.cost.rank_share import stage_imbalance
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup

# Adam on the host reads weights, gradients and two moments and writes all but the gradients: 7 values per parameter.
CPU_ADAM_VALUES = 7
# GPUs under training load draw about this share of their board limit; 1.5 × for host, network and cooling.
POWER_FRACTION = 0.9
FACILITY_FACTOR = 1.5


@dataclass(frozen=True)
class Budget:
    """The cost of training on a number of tokens.

    Attributes:
        tokens: Tokens without padding.
        hours, gpu_hours: Wall-clock time, and that times the number of GPUs.
        energy_kwh: Energy with host and cooling; `None` if the card's power is unknown.
        price: Price in the currency of ``price_per_gpu_hour``; `None` without it.
    """

    tokens: float
    hours: float
    gpu_hours: float
    energy_kwh: float | None
    price: float | None


@dataclass(frozen=True)
class TimeEstimate:
    """One optimizer step.

    Attributes:
        matmul_seconds: Matrix products and attention of all micro-batches.
        memory_seconds: Elementwise kernels, loss, weight traffic and dequantisation.
        launch_wait_seconds: Extra time because the host launches kernels too slowly.
        bubble_seconds: Pipeline stages waiting for the first and last micro-batches and for slower stages.
        communication_seconds: All collectives, as if nothing overlapped.
        exposed_communication_seconds: The part of them that computation does not hide.
        optimizer_seconds: Clipping and update on the GPU.
        offload_seconds: PCIe, CPU Adam and NVMe.
        data_seconds: Waiting for the loader, if its speed was given.
        generation_seconds: Writing the answers that a step is trained on.
        step_seconds: Sum of the above, without `communication_seconds`.
        low_seconds, high_seconds: Range around the estimate that held four of five published measurements.
        tokens_per_second: Tokens of all ranks, without padding.
        mfu: 6N + attention FLOPs per position over the peak of the compute dtype, whatever the method.
        hfu: The FLOPs actually executed (recomputation, frozen weights) over the same peak.
        num_gpus: Number of ranks.
        watts: Power of one card; `None` if unknown.
        assumptions: Unknown figures and their assumed values, one sentence each.
    """

    matmul_seconds: float
    memory_seconds: float
    launch_wait_seconds: float
    bubble_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    optimizer_seconds: float
    offload_seconds: float
    data_seconds: float
    step_seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_second: float
    mfu: float
    hfu: float
    num_gpus: int
    watts: float | None
    assumptions: tuple[str, ...] = ()
    generation_seconds: float = 0.0

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """One rank's share."""
        return self.tokens_per_second / self.num_gpus

    def budget(self, tokens: float, price_per_gpu_hour: float | None = None) -> Budget:
        """Hours, GPU-hours, energy and cost of `tokens` tokens, not counting padding.

        Raises:
            ConfigError: if `tokens` or the price is not positive.
        """
        for name, value in (("tokens", tokens), ("price_per_gpu_hour", price_per_gpu_hour)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}.", place=f"--{name}", fix="give a positive number.")
        return token_budget(tokens, self.tokens_per_second, self.num_gpus, self.watts, price_per_gpu_hour)


def token_budget(
    tokens: float, tokens_per_second: float, num_gpus: int, watts: float | None, price_per_gpu_hour: float | None
) -> Budget:
    """The cost of `tokens`, given the speed of all GPUs together."""
    hours = tokens / tokens_per_second / 3600
    gpu_hours = hours * num_gpus
    energy = None if watts is None else gpu_hours * watts / 1000 * POWER_FRACTION * FACILITY_FACTOR
    return Budget(tokens, hours, gpu_hours, energy, price_per_gpu_hour and gpu_hours * price_per_gpu_hour)


def predict_time(
    facts: ModelFacts,
    setup: TrainingSetup,
    machine: Machine,
    *,
    document_length: float | None = None,
    loader_tokens_per_second: float | None = None,
    efficiency: Efficiency = EFFICIENCY,
) -> TimeEstimate:
    """Seconds of one optimizer step: computation, exposed communication, optimizer, offload and data, added up.

    Args:
        document_length: Average tokens per document, if packed rows isolate documents; `None`: the row.
        loader_tokens_per_second: Speed of a rank's data loader, padding included; `None`: fast enough.

    Raises:
        ConfigError: if a speed is unknown: of an unnamed card, of a link, or of the network between servers.
    """
    _check_machine(setup, machine)
    gpu, parallel = machine.gpu, setup.parallel
    micro = micro_batch_time(facts, setup, gpu, efficiency=efficiency, document_length=document_length)
    times = setup.accumulation
    computing = times * micro.seconds
    busy = times * (micro.matmul_seconds + micro.memory_seconds)
    stages, schedule = parallel.pipeline_parallel, parallel.pipeline_schedule
    bubble = bubble_fraction(schedule, stages, times, parallel.stages_per_rank)
    # Every rank of a pipeline is as slow as the slowest one.
    bubble_seconds = computing * (stage_imbalance(facts, setup) / (1 - bubble) - 1)
    overlap = efficiency.overlap_fraction if parallel.kind.overlaps else 0.0
    communication, exposed = _communication(facts, setup, machine, overlap * computing)
    optimizer = optimizer_seconds(facts, setup, machine, efficiency)
    offload, assumptions = _offload(facts, setup, machine)
    writing = 0.0
    if (generation := setup.generation) is not None:
        cache = cache_bytes(facts, setup, generation.rows, generation.total_length)
        writing = generation_seconds(facts, setup, gpu, cache_bytes=cache, efficiency=efficiency)
        assumptions = (*assumptions, "generation's time is a bound by bandwidth and launches, not a measured one.")
    step = computing + bubble_seconds + exposed + optimizer + offload + writing
    waiting = 0.0
    if loader_tokens_per_second:
        waiting = max(0.0, times * setup.micro_batch_size * setup.sequence_length / loader_tokens_per_second - step)
    step += waiting
    positions = setup.tokens_per_step
    peak = gpu.flops({"fp32": "fp32", "fp16": "fp16"}.get(setup.precision, "bf16")) * parallel.num_gpus * step
    useful = (setup.mean_length or setup.sequence_length) / setup.sequence_length
    done = hardware_flops_per_token(facts, setup, document_length=document_length).total
    return TimeEstimate(
        matmul_seconds=times * micro.matmul_seconds,
        memory_seconds=times * micro.memory_seconds,
        launch_wait_seconds=computing - busy,
        bubble_seconds=bubble_seconds,
        communication_seconds=communication,
        exposed_communication_seconds=exposed,
        optimizer_seconds=optimizer,
        offload_seconds=offload,
        data_seconds=waiting,
        step_seconds=step,
        low_seconds=step * efficiency.low_factor,
        high_seconds=step * efficiency.high_factor,
        tokens_per_second=positions * useful / step,
        mfu=positions * model_flops_per_token(facts, setup, document_length=document_length) / peak,
        hfu=positions * done / peak,
        num_gpus=parallel.num_gpus,
        watts=gpu.watts,
        assumptions=assumptions,
        generation_seconds=writing,
    )


def known_time(
    facts: ModelFacts, setup: TrainingSetup, machine: Machine, *, document_length: float | None = None
) -> TimeEstimate | None:
    """As `predict_time`; None if the speed of the card, a link, the network or a drive is not known."""
    if machine.gpu.peak_flops is None:
        return None
    try:
        return predict_time(facts, setup, machine, document_length=document_length)
    except ConfigError:
        return None


def optimizer_seconds(
    facts: ModelFacts, setup: TrainingSetup, machine: Machine, efficiency: Efficiency = EFFICIENCY
) -> float:
    """Time of clipping and update on the GPU, memory traffic over bandwidth; 0 if the optimizer is offloaded."""
    parallel = setup.parallel
    if parallel.offloads_optimizer:
        return 0.0
    shards = parallel.num_shards if parallel.shards_states else 1
    shards *= parallel.tensor_parallel * parallel.pipeline_parallel
    num_bytes = trained_params(facts, setup) / shards * optimizer_traffic_bytes(setup)
    return num_bytes / (machine.gpu.bandwidth() * efficiency.bandwidth_share(machine.gpu))


def optimizer_traffic_bytes(setup: TrainingSetup) -> float:
    """Bytes per trained parameter that a step moves: gradient norm and clipping, weights, gradients and states.

    Weights and states are read and written; gradients are read by norm, scaling (which also writes them) and update.
    DeepSpeed adds fp32 masters. Scales of quantised states are ignored: they are below 2 % of the states.
    """
    weight = 4 if setup.parallel.is_deepspeed else setup.trained_bytes
    gradient = 2 if setup.parallel.is_deepspeed else setup.trained_bytes
    optimizer = modelled_optimizer(setup.optimizer)
    states = (optimizer.num_states or 0) * optimizer.value_bytes(weight)
    masters = 2.0 if setup.parallel.is_deepspeed else 0.0
    return 2 * weight + masters + 4 * gradient + 2 * states


def _communication(facts: ModelFacts, setup: TrainingSetup, machine: Machine, hides: float) -> tuple[float, float]:
    """All seconds of communication, and those not hidden by `hides` seconds of computation."""
    overlapping = waiting = 0.0
    for collective in step_collectives(facts, setup):
        seconds = collective_seconds(collective, machine)
        if collective.overlaps:
            overlapping += seconds
        else:
            waiting += seconds
    # The first layer's gather and the last bucket's reduction have nothing to hide behind.
    edge = overlapping / (facts.num_layers * setup.accumulation)
    return overlapping + waiting, waiting + max(edge, overlapping - hides)


def _offload(facts: ModelFacts, setup: TrainingSetup, machine: Machine) -> tuple[float, tuple[str, ...]]:
    """Seconds of PCIe, CPU Adam and NVMe, and the assumptions made for them."""
    parallel = setup.parallel
    seconds = 0.0
    assumptions: list[str] = []
    shards = parallel.num_shards if parallel.shards_states else 1
    trained = trained_params(facts, setup) / shards
    if parallel.offloads_optimizer:
        bandwidth = machine.host_bandwidth
        if bandwidth is None:
            bandwidth = ASSUMED_HOST_BANDWIDTH
            assumptions.append(f"host memory bandwidth {bandwidth / 1e9:.0f} GB/s (assumed; set --host_bandwidth)")
        ranks = min(parallel.num_gpus, machine.gpus_per_node)
        # Gradients to the host and updated weights back, 2 bytes each. ZeRO-2 and 3 fetch the sum of earlier
        # micro-batches' gradients, add the next and store it again (DeepSpeed 0.19,
        # `async_accumulate_grad_in_cpu_via_gpu`).
        returns = parallel.is_deepspeed and parallel.shards_gradients
        moves = 2 + (2 * (setup.accumulation - 1) if returns else 0)
        seconds += moves * setup.compute_bytes * trained / machine.gpu.pcie_bandwidth()
        seconds += (
            CPU_ADAM_VALUES * (4 if parallel.is_deepspeed else setup.trained_bytes) * trained * ranks / bandwidth
        )
        if parallel.offload_optimizer == "nvme":
            seconds += 24 * trained * ranks / _nvme(machine)
    if parallel.offloads_params:
        # Forward and backward each fetch a rank's shard; recomputation uses the backward pass's.
        moved = 2 * gathered_weight_bytes(facts, setup) / shards * setup.accumulation
        seconds += moved / machine.gpu.pcie_bandwidth()
        if parallel.offload_params == "nvme":
            seconds += moved * min(parallel.num_gpus, machine.gpus_per_node) / _nvme(machine)
    if setup.checkpointing == "offload":
        tokens = setup.micro_batch_size * setup.sequence_length * setup.accumulation / parallel.sequence_parallel
        saved = facts.num_layers * tokens * facts.hidden_size * setup.compute_bytes
        # Copies run beside the layers: a quarter of their time is counted as exposed.
        seconds += 0.25 * 2 * saved / machine.gpu.pcie_bandwidth()
    return seconds, tuple(assumptions)


def _nvme(machine: Machine) -> float:
    if machine.nvme_bytes_per_second is None:
        raise ConfigError(
            "the speed of the NVMe drives is not known.", place="nvme", fix="give nvme_bytes_per_second."
        )
    return machine.nvme_bytes_per_second


def _check_machine(setup: TrainingSetup, machine: Machine) -> None:
    if setup.parallel.num_gpus > machine.num_gpus:
        raise ConfigError(
            f"the plan uses {setup.parallel.num_gpus} GPUs, the machine has {machine.num_gpus}.",
            place="--num_gpus",
            fix="plan for the GPUs there are.",
        )
