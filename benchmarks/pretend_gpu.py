"""A pretend GPU: its tensors hold their values on the CPU, and everything that would block the host is counted.

A GPU works asynchronously: the host queues kernels and runs ahead. It waits wherever it reads a value back (`item`,
`nonzero`, a copy to the host) and wherever it copies from unpinned memory. Inside `PretendGpu` the recipes take their
CUDA paths, with ``cuda`` as the device that torch, Accelerate and this package find, and each such wait is recorded
with the line that caused it. Kernels run on the CPU. Mixing tensors on the device and on the host is an error, as on
a real GPU.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from accel_scale.facts.device import Device
from accel_scale.modeling import packed_attention
from benchmarks.varlen_reference import VARLEN_KERNELS

DEVICE = torch.device("cuda", 0)
H100 = Device("cuda", "NVIDIA H100 80GB HBM3", capability=(9, 0), memory_bytes=80 * 2**30)
# Operators whose output size depends on values, so that the host must wait before it can allocate.
_SIZED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::equal",
                    "aten::unique_consecutive"}  # fmt: skip
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}

# Products, which autocast runs in its dtype; torch's own casts only exist for the devices it was built for.
_AUTOCAST = {"linear", "matmul", "__matmul__", "bmm", "baddbmm", "mm", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class Wait:
    """A point where the host would wait: ``readback`` or ``blocking upload``, with its operator and place."""

    kind: str
    operator: str
    place: str


class PretendTensor(torch.Tensor):
    """A tensor that claims to be on the GPU. torch's code below Python treats it as a meta tensor."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendTensor:
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device("meta"),
        )
        tensor.held = held
        return tensor  # type: ignore[no-any-return]

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **kwargs: Any) -> str:
        return f"on the pretended GPU: {self.held!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of the pretended GPU, outside of it.")


class PretendGpu:
    """A context in which ``cuda`` is available.

    Args:
        device: The device to pretend, which affects the package's choice of kernels.
    """

    def __init__(self, device: Device = H100) -> None:
        self.device = replace(device, built_for=())
        self.waits: list[Wait] = []
        self.uploads = 0  # uploads that do not block
        self.operators: Counter[str] = Counter()  # operators that ran on the device
        self._pinned: set[int] = set()
        self._kept: list[torch.Tensor] = []  # pinned memory is kept alive so that its addresses are not reused

    def counts(self) -> Counter[tuple[str, str, str]]:
        """Number of occurrences of each wait."""
        return Counter((wait.kind, wait.operator, wait.place) for wait in self.waits)

    def clear(self) -> None:
        """Reset all counts."""
        self.waits.clear()
        self.operators.clear()
        self.uploads = 0

    def __enter__(self) -> PretendGpu:
        import torch._dynamo  # it inspects torch's functions once, when they must still be unpatched

        self._stack = contextlib.ExitStack()
        for target, value in self._patches():
            self._stack.enter_context(mock.patch(target, value))
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
        self._stack.callback(torch.__future__.set_swap_module_params_on_conversion, before)
        packed_attention._device.cache_clear()  # the device is queried once per process
        self._stack.callback(packed_attention._device.cache_clear)
        self._stack.enter_context(_Kernels(self))
        self._stack.enter_context(_Names(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _patches(self) -> Iterator[tuple[str, Any]]:
        major, minor = self.device.capability or (9, 0)
        memory = self.device.memory_bytes
        properties = mock.Mock(total_memory=memory, major=major, minor=minor, multi_processor_count=132)
        properties.name = self.device.name
        yield "torch.accelerator.current_accelerator", lambda check_available=False: torch.device("cuda")
        yield "torch.accelerator.is_available", lambda: True
        yield "torch.accelerator.device_count", lambda: 1
        yield "torch.accelerator.current_device_index", lambda: 0
        yield "torch.accelerator.synchronize", lambda *args: self.record("readback", "synchronize")
        yield "torch.accelerator.current_stream", lambda *args: mock.Mock(is_capturing=lambda: False)
        yield "torch.cuda.is_current_stream_capturing", lambda: False
        yield "torch.cuda.is_available", lambda: True
        yield "torch.cuda.device_count", lambda: 1
        yield "torch.cuda.current_device", lambda: 0
        yield "torch.cuda.is_bf16_supported", lambda *args, **kwargs: True
        yield "torch.cuda.get_device_properties", lambda *args: properties
        yield "torch.cuda.get_per_process_memory_fraction", lambda *args: 1.0
        yield "torch.cuda.get_device_capability", lambda *args: self.device.capability
        yield "torch.cuda.get_device_name", lambda *args: self.device.name
        yield "torch.cuda.get_arch_list", list
        for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "_lazy_init", "manual_seed_all"):
            yield f"torch.cuda.{name}", lambda *args: None
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            yield f"torch.cuda.{name}", lambda *args: 0
        yield "torch.cuda.memory_stats", lambda *args: Counter()
        yield "torch.cuda.mem_get_info", lambda *args: (self.device.memory_bytes, self.device.memory_bytes)
        yield "torch.cuda.get_rng_state", lambda *args: torch.get_rng_state()
        yield "torch.cuda.get_rng_state_all", lambda *args: [torch.get_rng_state()]
        yield "torch.cuda.set_rng_state_all", lambda *args: None
        yield "torch.cuda.set_rng_state", lambda *args: None
        yield "torch.cuda.synchronize", lambda *args: self.record("readback", "synchronize")
        yield "torch.cuda.Event", _Event
        yield "torch.Event", _Event

    def record(self, kind: str, operator: str) -> None:
        """Record a wait at the running line."""
        self.waits.append(Wait(kind, operator, _place()))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in pretend pinned memory, from which uploads do not block."""
        copy = tensor.detach().clone()
        self._kept.append(copy)
        self._pinned.add(copy.untyped_storage().data_ptr())
        return copy

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is in pretend pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned


class _Event:
    """`torch.cuda.Event` for a device whose kernels finish when they are queued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, *args: Any) -> None:
        import time

        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, other: _Event) -> float:
        return (other._at - self._at) * 1000


class _Names(TorchFunctionMode):
    """Redirects calls that name the device to the meta device, which torch supports without a GPU."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("pin_memory", "is_pinned") and not isinstance(args[0], PretendTensor):
            return self._gpu.pin(args[0]) if name == "pin_memory" else self._gpu.is_pinned(args[0])
        if name == "cuda" and isinstance(args[0], torch.Tensor):
            func, args = torch.Tensor.to, (args[0], DEVICE)
        if name in ("tolist", "numpy") and isinstance(args[0], PretendTensor):
            self._gpu.record("readback", name)
            return func(args[0].held)
        if func is torch.Tensor.backward:
            return self._backward(args[0], **(kwargs or {}))
        if name in ("__get__", "__set__"):
            return func(*args, **(kwargs or {}))
        if name in _AUTOCAST and torch.is_autocast_enabled("cuda"):
            args = tree_map(_in_autocast_type, args)
        named = {key: _renamed(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        if name in ("tensor", "as_tensor", "asarray") and named.get("device") != (kwargs or {}).get("device"):
            device = named.pop("device")
            return torch.Tensor.to(func(*args, **named), device)
        return func(*(tree_map(_renamed, args) if name == "to" else args), **named)

    def _backward(
        self,
        loss: torch.Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        **named: Any,
    ) -> None:
        """Run backward directly: torch's own would recurse here, and recomputed layers name the device too."""
        first = torch.ones_like(loss) if gradient is None else gradient
        keep, inputs = create_graph if retain_graph is None else retain_graph, tuple(named.get("inputs") or ())
        with self:
            _engine_run_backward(
                (loss,), (first,), keep, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
            )


def _in_autocast_type(value: Any) -> Any:
    is_wide = isinstance(value, PretendTensor) and value.dtype == torch.float32
    return value.to(torch.get_autocast_dtype("cuda")) if is_wide else value


def _renamed(value: Any) -> Any:
    is_named = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("meta") if is_named or (isinstance(value, str) and value[:4] == "cuda") else value


class _Kernels(TorchDispatchMode):
    """Runs each operator on the CPU values, and counts what would wait."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
        asked = kwargs.get("device")
        is_there = bool(held) if asked is None else torch.device(asked).type != "cpu"
        name = func._schema.name
        if not held and is_there and torch.get_default_device().type == "meta":
            return func(*args, **kwargs)  # a model that is created before its weights are loaded
        if held or is_there:
            self._gpu.operators[name] += 1
            self._count(name, args, kwargs, tensors, held, is_there)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        kernel = VARLEN_KERNELS.get(name, func)
        result = kernel(*tree_map(_value, args), **tree_map(_value, kwargs))
        if not is_there or name == "aten::_local_scalar_dense":
            return result
        known = {id(tensor.held): tensor for tensor in held}

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if name == "aten::copy_" and not isinstance(args[0], PretendTensor):
                return args[0]
            return known.get(id(value)) if id(value) in known else PretendTensor(value)

        return tree_map(placed, result)

    def _count(self, name: str, args: Any, kwargs: Any, tensors: list[Any], held: list[Any], is_there: bool) -> None:
        gpu, operator = self._gpu, name.removeprefix("aten::")
        is_sized = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        if is_sized or name == "aten::_local_scalar_dense" or name in _SIZED_BY_VALUES:
            gpu.record("readback", operator)
        elif name in _COPIES:
            target, source = (is_there, args[0]) if name == "aten::_to_copy" else (_is_held(args[0]), args[1])
            blocks = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
            if _is_held(source) and not target and blocks:
                gpu.record("readback", operator)
            elif target and not _is_held(source):
                if blocks or not gpu.is_pinned(source):
                    gpu.record("blocking upload", operator)
                else:
                    gpu.uploads += 1
        elif name in _INDEXED:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    gpu.record("readback", operator)
                elif index is not None and not _is_held(index):
                    gpu.record("blocking upload", operator)
        elif held and any(tensor.dim() > 0 and not _is_held(tensor) for tensor in tensors):
            raise RuntimeError(f"{name} takes tensors of the GPU and of the host.")


def _is_held(tensor: Any) -> bool:
    return isinstance(tensor, PretendTensor)


def _value(value: Any) -> Any:
    return value.held if isinstance(value, PretendTensor) else value


def _place() -> str:
    """The innermost frame outside torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.endswith(("pretend_gpu.py", "<string>")):
            short = frame.filename.rpartition("site-packages/")[2].rpartition("accel_scale/")[2]
            return f"{short}:{frame.name}"
    return "?"
