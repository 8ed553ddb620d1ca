"""How ranks share a run's work."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.errors import ConfigError
from accel_scale.facts.strategies import Offloading, Strategy, strategy_named
from accel_scale.facts.zero_buffers import DEEPSPEED_BUFFERS, ZeroBuffers


@dataclass(frozen=True)
class ParallelSetup(Offloading):
    """How the ranks share the work.

    Attributes:
        strategy: A name in `facts.strategies` that can be planned.
        num_gpus: Number of ranks.
        gpus_per_node: Ranks that share a node's links.
        num_replicas: Groups that each hold all shards (hybrid sharding); 1: shards over all data-parallel ranks.
        reshard_after_forward: Whether FSDP frees gathered weights after the forward pass (FULL_SHARD).
        offload_optimizer: Where optimizer states live when not on the card.
        offload_params: Where weights live when not on the card.
        tensor_parallel: Ranks that share each matrix product.
        stream_ranks: Ranks that share the tokens of hidden states between these products: 1, as here, or as many
            (Megatron-LM's sequence parallelism, torchtitan; Korthikanti et al. 2022, section 4.2.2).
        pipeline_parallel: Ranks that the layers are split over.
        sequence_parallel: Ranks that share each sequence (Ulysses).
        pipeline_schedule: One of `PIPELINE_SCHEDULES`.
        stages_per_rank: Stages that each rank of a pipeline holds.
        in_engine: Whether the engine has the whole model and treats the ranks of a sequence as data-parallel, as in
            the fine-tuning recipe; otherwise the recipe divides the model itself.
        zero: Sizes of DeepSpeed's buffers.
    """

    strategy: str = "single"
    num_gpus: int = 1
    gpus_per_node: int = 8
    num_replicas: int = 1
    reshard_after_forward: bool = True
    offload_optimizer: str = "none"
    offload_params: str = "none"
    tensor_parallel: int = 1
    stream_ranks: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: int = 1
    pipeline_schedule: str = "1f1b"
    stages_per_rank: int = 1
    in_engine: bool = False
    zero: ZeroBuffers = DEEPSPEED_BUFFERS

    def check_degrees(self) -> None:
        """Refuse degrees that do not go together; all of them are positive.

        Raises:
            ConfigError: if the GPUs cannot be divided, or other ranks share hidden states than compute them.
        """
        if self.num_gpus % (self.model_parallel * self.num_replicas):
            raise ConfigError(
                f"{self.num_gpus} GPUs do not divide into {self.model_parallel} model-parallel ranks × "
                f"{self.num_replicas} replicas.",
                fix="choose degrees whose product divides the number of GPUs.",
            )
        # A walk through the layers, which are divided already, has a degree of 1.
        if self.stream_ranks > 1 and self.tensor_parallel not in (1, self.stream_ranks):
            raise ConfigError(
                f"{self.stream_ranks} ranks cannot share hidden states that {self.tensor_parallel} compute.",
                place="stream_ranks",
                fix="set it to 1 or to tensor_parallel.",
            )

    @property
    def is_divided(self) -> bool:
        """True if the recipe itself divides the model among ranks."""
        return self.model_parallel > 1 and not self.in_engine

    @property
    def model_parallel(self) -> int:
        """Ranks that see the same sequences, or parts of them."""
        return self.tensor_parallel * self.pipeline_parallel * self.sequence_parallel

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Degrees of tensor, pipeline and sequence parallelism."""
        return self.tensor_parallel, self.pipeline_parallel, self.sequence_parallel

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.num_gpus // self.model_parallel

    @property
    def num_shards(self) -> int:
        """Ranks that one copy of sharded states is distributed over, including the ranks of one sequence."""
        return self.data_parallel * self.sequence_parallel // self.num_replicas

    @property
    def kind(self) -> Strategy:
        """The properties of the strategy."""
        return strategy_named(self.strategy)

    @property
    def can_sync_each_batch(self) -> bool:
        """True if gradients can be reduced and sharded after every micro-batch, which saves memory."""
        return self.kind.reduces_each_batch and not self.is_divided

    @property
    def shards_states(self) -> bool:
        """True if optimizer states are sharded."""
        return self.kind.shards_states

    @property
    def shards_gradients(self) -> bool:
        """True if gradients are sharded."""
        return self.kind.shards_gradients

    @property
    def shards_weights(self) -> bool:
        """True if weights are sharded."""
        return self.kind.shards_weights

    @property
    def is_deepspeed(self) -> bool:
        """True if DeepSpeed runs the step."""
        return self.kind.is_deepspeed
