"""Whole tensors out of a replicated, FSDP2-sharded or ZeRO-3-partitioned model, one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

CHUNK_BYTES = 256 * 2**20


def unwrap(model: nn.Module) -> nn.Module:
    """The module with the user's parameter names, without DDP, DeepSpeed or `torch.compile` around it."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_torch_compile=False)


def process_index() -> int:
    """Rank of this process, 0 without `torch.distributed`."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def wait_for_everyone() -> None:
    """Barrier over all processes; does nothing without `torch.distributed`."""
    import torch.distributed as dist
    from accelerate import PartialState

    if not (dist.is_available() and dist.is_initialized()):
        return
    state = PartialState()
    if state.use_distributed:
        state.wait_for_everyone()
    else:  # Accelerate does not know about CPU processes started by another launcher
        dist.barrier()


def broadcast_from_main(value: object) -> Any:
    """Broadcast rank 0's picklable `value` to every process."""
    import torch.distributed as dist
    from accelerate.utils import broadcast_object_list

    if not (dist.is_available() and dist.is_initialized()):
        return value
    return broadcast_object_list([value])[0]


def gather_values(value: object) -> list[Any]:
    """Gather every process's picklable `value`, in order of rank."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by state-dict name, as held here: whole, sharded or partitioned.

    The values are the live tensors, so two names of one tied weight share one object.
    """
    import torch

    state = unwrap(model).state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def adapter_tensors(model: nn.Module, adapter_name: str = "default") -> dict[str, torch.Tensor]:
    """The tensors that PEFT writes to `adapter_model.safetensors`, by their names there, as held here."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(unwrap(model), state_dict=named_tensors(model), adapter_name=adapter_name)


def is_partitioned(tensor: torch.Tensor) -> bool:
    """True if ZeRO-3 holds `tensor`: the parameter itself is empty and `ds_shape` is its whole shape."""
    return hasattr(tensor, "ds_id")


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole tensor, independent of the part held here."""
    return tuple(tensor.ds_shape if is_partitioned(tensor) else tensor.shape)  # type: ignore[attr-defined]


def _whole_bytes(tensor: torch.Tensor) -> int:
    numel = tensor.ds_numel if is_partitioned(tensor) else tensor.numel()  # type: ignore[attr-defined]
    return numel * tensor.element_size()


def _chunks(tensors: dict[str, torch.Tensor], chunk_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    chunk: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if chunk and size + _whole_bytes(tensor) > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += _whole_bytes(tensor)
    if chunk:
        yield chunk


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != tensor.device_mesh.device_type:  # parameters offloaded to the host
        tensor = tensor.to(tensor.device_mesh.device_type)
    return tensor.full_tensor()  # type: ignore[attr-defined]


def gather_whole(
    tensors: dict[str, torch.Tensor], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor whole, on every process, in order; all processes must iterate to the end.

    At most `chunk_bytes` (or one tensor, if larger) are whole at a time. A yielded tensor may be freed when the next
    one is requested: copy what you keep.
    """
    for chunk in _chunks(tensors, chunk_bytes):
        partitioned = [tensor for _, tensor in chunk if is_partitioned(tensor)]
        gathered: Any = nullcontext()
        if partitioned:
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=None)
        with gathered:
            for name, tensor in chunk:
                yield name, _whole(tensor)


def gather_to_main(tensors: dict[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Whole copies in host memory on rank 0 and an empty dictionary elsewhere; tied names stay one tensor.

    Args:
        tensors: Result of `named_tensors`.
        dtype: Dtype for floating-point tensors; None keeps theirs.
    """
    first_name = {id(tensor): name for name, tensor in reversed(tensors.items())}
    unique = {name: tensors[name] for name in tensors if first_name[id(tensors[name])] == name}
    copies: dict[str, torch.Tensor] = {}
    is_main = process_index() == 0
    for name, tensor in gather_whole(unique):
        if is_main:
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            copies[name] = tensor.to(device="cpu", dtype=target, copy=True).contiguous()
    return {name: copies[first_name[id(tensor)]] for name, tensor in tensors.items()} if is_main else {}
