"""How the ranks of a run divide rows, weights, layers, sequences and matrix products among themselves."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Outermost first: neighbouring ranks, which share a server, form a tensor-parallel group; stages are far apart.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "sp", "tp")


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the five dimensions; their product is the number of ranks.

    Attributes:
        pp: Groups of pipeline stages: ranks that each hold some of the layers.
        dp_replicate: Copies of everything below, each with its own rows.
        dp_shard: Ranks that share weights, gradients and optimizer states (FSDP2), each with its own rows.
        sp: Ranks that share each sequence (Ulysses), and the weights with `dp_shard`.
        tp: Ranks that share each matrix product.
        fsdp: True if the launch shards weights: the ranks of `sp` then share them even if `dp_shard` is 1.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    tp: int = 1
    fsdp: bool = False

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}.", place=f"--{name}_size", fix="use 1 or more.")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `DIMENSIONS`."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def world_size(self) -> int:
        """Number of ranks in the run."""
        return math.prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def model_ranks(self) -> int:
        """Number of ranks that read the same rows."""
        return self.pp * self.sp * self.tp

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients of a weight are averaged: they have different rows or parts of a sequence."""
        return self.data_ranks * self.sp

    @property
    def shards_weights(self) -> bool:
        """True if each of several ranks holds a part of every weight (FSDP2) rather than a replica."""
        return self.dp_shard > 1 or (self.fsdp and self.sp > 1)

    @property
    def is_plain(self) -> bool:
        """True if there is only data parallelism, which Accelerate handles itself."""
        return self.model_ranks == 1

    @property
    def can_generate(self) -> bool:
        """True if text can be generated during training: every rank sees whole rows and all layers."""
        return self.pp == 1 and self.sp == 1

    @property
    def label(self) -> str:
        """Label for tables: ``PP 2 × DP 2 × TP 2``."""
        names = {"pp": "PP", "dp_replicate": "DP", "dp_shard": "FSDP2", "sp": "SP", "tp": "TP"}
        return (
            " × ".join(f"{names[d]} {n}" for d, n in zip(DIMENSIONS, self.sizes, strict=True) if n > 1) or "one rank"
        )

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of `rank` in each dimension."""
        place = {}
        for name, size in reversed(list(zip(DIMENSIONS, self.sizes, strict=True))):
            rank, place[name] = divmod(rank, size)
        return place

    def data_rank(self, rank: int) -> int:
        """Index of the share of rows, out of `data_ranks`, that `rank` reads."""
        place = self.coordinate(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]


def build_mesh(layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """Create a device mesh with every dimension of `layout`, including those of size 1, so that all can be requested.

    ``mesh["dp"]`` (rows), ``mesh["grad"]`` (gradients of one weight; rows and parts of sequences) and
    ``mesh["shard"]`` (weights of FSDP2) are joint dimensions. Collective; needs a process group.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # torch 2.13 wants flattened dimensions to be kept apart, but these would no longer combine to a mesh of two.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
    mesh: Any = init_device_mesh(device_type, layout.sizes, mesh_dim_names=DIMENSIONS)
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    mesh["dp_shard", "sp"]._flatten("shard")
    mesh["dp_replicate", "dp_shard", "sp"]._flatten("grad")
    return mesh
