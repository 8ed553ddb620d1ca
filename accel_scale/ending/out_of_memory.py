"""Recognise out-of-memory errors of every library that allocates, and say what helps."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

# Allocations outside of torch's own allocator, which raises `torch.OutOfMemoryError`. The libraries behind matrix
# products and collectives allocate when first used, from what torch has left them by then.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|MPS backend out of memory"
    r"|(CUDA|HIP) error: out of memory"
    r"|Cuda failure.{0,40}out of memory"  # NCCL
    r"|HIP failure.{0,40}out of memory"  # RCCL
    r"|Triton Error \[\w+\]: out of memory"
    # cuBLAS cannot create its handle if its workspace does not fit.
    r"|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    r"|HIPBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    r"|CUSOLVER_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_(ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)"
    r"|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)",
    re.DOTALL,
)
REMEDIES = (
    "use --checkpointing_policy full, a shorter --max_length, --method lora or qlora, "
    "or a launch file that shards more (accelerate_configs/fsdp2.yaml)"
)
STATE_REMEDIES = (
    "use --optim adamw_torch_8bit or paged_adamw_8bit, --method lora or qlora, "
    "or a launch file that shards the states (accelerate_configs/fsdp2.yaml, zero2_offload.yaml)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` says that a device or the host has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def is_in_collective(error: BaseException) -> bool:
    """True if `error` comes from a collective, after which its group cannot be used."""
    return isinstance(error, dist.DistBackendError)


def reason_in(error: BaseException) -> str:
    """The line of an error's text with the reason: NCCL has it at the end, other libraries at the beginning."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if _OUT_OF_MEMORY.search(line)), lines[0] if lines else type(error).__name__)
    return said.rstrip(".")


def smaller_batch_advice(micro_batch_size: int, accumulation: int | None) -> str:
    """The flags that divide the micro-batch at the same global batch, or other ways to save memory.

    Args:
        accumulation: Micro-batches of a step; None if it follows from the flag for the global batch.
    """
    divisor = next((d for d in range(2, micro_batch_size + 1) if micro_batch_size % d == 0), None)
    if divisor is None:
        return REMEDIES
    steps = "" if accumulation is None else f"--gradient_accumulation_steps {accumulation * divisor} "
    smaller = micro_batch_size // divisor
    return f"run again with --per_device_train_batch_size {smaller} {steps}(the same global batch)"
