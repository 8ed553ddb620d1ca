"""DeepSpeed's configuration keys for the sizes of its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ZeroBuffers:
    """Sizes of DeepSpeed's buffers, in elements. The defaults are DeepSpeed's.

    From the source of DeepSpeed 0.19.8: defaults and types in `runtime/zero/config.py`, buffers in `stage_1_and_2.py`
    (`setup_buckets`, `allreduce_bucket`) and `stage3.py` (`bucket.buffer`, `_create_fp16_sub_groups`), gathering in
    `partitioned_param_coordinator.py` (`fetch_sub_module`, `__params_to_release`) and `parameter_offload.py`
    (`mark_persistent_parameters`). ``allgather_bucket_size`` is left out: if torch has `all_gather_into_tensor`,
    updated weights are gathered into the weights themselves (`all_gather_dp_groups` in `runtime/utils.py`).

    Attributes:
        reduce_bucket: Size of one gradient buffer, allocated in full at the start, and of the copy that is reduced.
        overlap: Whether gradients are reduced during the backward pass; None: only under ZeRO-3. Stages 1 and 2 then
            fill a second buffer in the meantime.
        contiguous: Whether gradients are copied into such a buffer as they are computed.
        prefetch: Weights that ZeRO-3 gathers before they are used, through a separate buffer.
        persistence: Weights of at most this size stay whole on every rank.
        max_live: Gathered weights that may be held at the same time.
        max_reuse: Gathered weights are kept if they are used again within this many weights.
        sub_group: Weights that ZeRO-3 updates at a time, on an fp32 copy of their gradients.
    """

    reduce_bucket: float = 5e8
    overlap: bool | None = None
    contiguous: bool = True
    prefetch: float = 5e7
    persistence: float = 1e5
    max_live: float = 1e9
    max_reuse: float = 1e9
    sub_group: float = 1e9

    def of_hidden_size(self, hidden_size: int) -> ZeroBuffers:
        """A copy with each `auto` replaced by the number that Accelerate and transformers derive from the model."""
        square = hidden_size**2
        return replace(
            self,
            reduce_bucket=square if self.reduce_bucket == AUTO else self.reduce_bucket,
            prefetch=int(0.9 * square) if self.prefetch == AUTO else self.prefetch,
            persistence=10 * hidden_size if self.persistence == AUTO else self.persistence,
        )

    def as_keys(self, stage: int) -> dict[str, int | bool]:
        """The keys of ``zero_optimization`` that a stage reads."""
        of_all: dict[str, int | bool] = {
            "overlap_comm": self.overlap if self.overlap is not None else stage == _WEIGHTS,
            "contiguous_gradients": self.contiguous,
            "reduce_bucket_size": int(self.reduce_bucket),
        }
        of_weights: dict[str, int | bool] = {
            "stage3_prefetch_bucket_size": int(self.prefetch),
            "stage3_param_persistence_threshold": int(self.persistence),
            "sub_group_size": int(self.sub_group),
        }
        return of_all | of_weights if stage == _WEIGHTS else of_all


AUTO = -1.0
_WEIGHTS = 3  # the stage that shards weights
DEEPSPEED_BUFFERS = ZeroBuffers()
# The sizes of accelerate_configs/zero2_tuned.yaml and zero3_tuned.yaml, which explain them. In 16 bits, a bucket of
# 200 MB is sent at the speed of the link, with latency a hundredth of the time, and is a fifth of DeepSpeed's bucket;
# weights of up to 2 MB would take longer to the first byte than to transfer; a prefetch of 200 MB covers the next
# products of an 8B model; 200M weights are updated at a time, on 1.2 GB of copies.
TUNED_BUFFERS = ZeroBuffers(reduce_bucket=1e8, overlap=True, prefetch=1e8, persistence=1e6, sub_group=2e8)


def zero_buffers(keys: Mapping[str, object]) -> ZeroBuffers:
    """Buffer sizes set by `keys`, DeepSpeed's section ``zero_optimization``; the others are DeepSpeed's defaults."""
    usual, overlap = DEEPSPEED_BUFFERS, keys.get("overlap_comm")
    return ZeroBuffers(
        reduce_bucket=_size(keys, "reduce_bucket_size", usual.reduce_bucket),
        overlap=None if overlap is None else str(overlap).lower() == "true",
        contiguous=str(keys.get("contiguous_gradients", True)).lower() == "true",
        prefetch=_size(keys, "stage3_prefetch_bucket_size", usual.prefetch),
        persistence=_size(keys, "stage3_param_persistence_threshold", usual.persistence),
        max_live=_size(keys, "stage3_max_live_parameters", usual.max_live),
        max_reuse=_size(keys, "stage3_max_reuse_distance", usual.max_reuse),
        sub_group=_size(keys, "sub_group_size", usual.sub_group),
    )


def _size(keys: Mapping[str, object], key: str, usual: float) -> float:
    value = keys.get(key)
    if value is None:
        return usual
    return AUTO if value == "auto" else float(str(value))
