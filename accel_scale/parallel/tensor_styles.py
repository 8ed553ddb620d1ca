"""How one module becomes tensor-parallel, under the names used in transformers' plans.

transformers 5.23 has a class for each name (`transformers.distributed.tensor_parallel`). Those compute in DTensors and
sum the input gradient of every column-parallel layer separately: seven all-reduces in a Llama layer's forward and
backward pass, where four suffice. Here parameters are the same DTensors, and forward passes run on this rank's parts
with the operations of `tensor_collectives` around them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import TensorParallelLayer
from transformers.pytorch_utils import Conv1D

from accel_scale.parallel.tensor_collectives import SharedInput, sum_gradients, sum_values

Change = Callable[[str, torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def local_parameters(module: nn.Module, change: Change | None = None) -> Iterator[None]:
    """Replace `module`'s own DTensor parameters by this rank's parts; `change` is called with each name and part."""
    whole: dict[str, Any] = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    for name, parameter in whole.items():
        part = parameter.to_local()
        module._parameters[name] = change(name, part) if change else part  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(whole)


class TensorStyle(TensorParallelLayer):
    """A module whose parameters are whole on all ranks and used in the same way on the same inputs."""

    def placement(self, module: nn.Module, name: str) -> Placement:
        """Placement of the parameter called `name` in `module`."""
        return Replicate()

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Turn one parameter into a DTensor without communication: all ranks hold the same whole one."""
        whole = module._parameters[param]
        if whole is None:
            return
        parts = distribute_tensor(whole.detach(), mesh, [self.placement(module, param)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(parts, requires_grad=whole.requires_grad)

    def change(self, module: nn.Module, mesh: DeviceMesh) -> Change | None:
        """A function applied to this rank's parts before `module` sees them; None for no change."""
        return None

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Run the module's own forward on its parts."""
        return local_parameters(module, self.change(module, mesh))


class PartialGradients(TensorStyle):
    """Whole parameters that each rank applies to a part of the activations, such as a norm on its heads."""

    def change(self, module: nn.Module, mesh: DeviceMesh) -> Change | None:
        """Sum the parts' gradients in every backward pass: accumulated gradients are already summed."""
        return lambda _, part: sum_gradients(part, mesh.get_group())


class Colwise(TensorStyle):
    """A linear layer in which each rank computes some of the outputs.

    Args:
        shared: The parent's `SharedInput`, for all of its column-parallel layers.
        gather_output: True if all ranks get all outputs.
    """

    def __init__(self, shared: SharedInput, *, gather_output: bool = False) -> None:
        self.shared, self.gather_output = shared, gather_output

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(1 if isinstance(module, Conv1D) and name == "weight" else 0)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _check_linear(module)
        _use_local_width(module, mesh)
        installed: nn.Module = super().install_forward(module, mesh)
        return installed

    def transform_inputs_pre_forward(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        return (self.shared(args[0]), *args[1:]), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> Any:
        if not self.gather_output:
            return output
        whole = self._from_local_last_dim_shard(output, mesh, cast(nn.Linear, module).out_features)
        return whole.full_tensor()


class FusedHeads(Colwise):
    """GPT-2's combined layer for queries, keys and values, treated as three matrices; a rank has some heads of each.

    The weight (inputs, 3 · outputs) becomes (inputs, 3, outputs) and the bias (3, outputs), sharded on the last
    dimension. The numbers keep their order, so that `full_tensor()` reshaped is the plain parameter for any number of
    ranks, and a rank's part is one block, which `torch.distributed.checkpoint` can write (it writes strided shards,
    the alternative, to wrong places). The module keeps the plain shapes in ``plain_shapes``.
    """

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(2 if name == "weight" else 1)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        whole = module._parameters[param]
        if whole is None:
            return
        plain_shapes: Any = module.__dict__.setdefault("plain_shapes", {})
        plain_shapes[param] = tuple(whole.shape)
        seen = whole.detach().unflatten(-1, (3, -1))
        module._parameters[param] = nn.Parameter(seen, requires_grad=whole.requires_grad)
        super().shard_param(module, param, mesh)

    def change(self, module: nn.Module, mesh: DeviceMesh) -> Change | None:
        return lambda _, part: part.flatten(-2)


class Rowwise(TensorStyle):
    """A linear layer in which each rank computes a term of the sum over inputs.

    Args:
        split_input: True if ranks get all inputs, and take their own.
    """

    def __init__(self, *, split_input: bool = False) -> None:
        self.split_input = split_input

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Replicate() if name == "bias" else Shard(0 if isinstance(module, Conv1D) else 1)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _check_linear(module)
        installed: nn.Module = super().install_forward(module, mesh)
        return installed

    def transform_inputs_pre_forward(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        if not self.split_input:
            return args, kwargs
        whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(-1)]).to_local(), *args[1:]), kwargs

    @contextlib.contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Run without the bias, which is added once, after the sum."""
        with local_parameters(module):
            module._parameters["bias"] = _no_bias(module)
            yield

    def transform_output_post_forward(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> Any:
        output = sum_values(output, mesh.get_group())
        bias: Any = module._parameters["bias"]
        return output if bias is None else output + bias.to_local().to(output.dtype)


class EmbeddingRowwise(TensorStyle):
    """An embedding in which each rank holds some tokens; vectors of other tokens are zero before the sum."""

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(0)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        embedding: Any = module
        first, size = local_range(embedding.num_embeddings, mesh)
        padding = embedding.padding_idx
        if padding is not None:  # the row without a gradient, counted from this rank's first row
            embedding.padding_idx = padding - first if first <= padding < first + size else None
        installed: nn.Module = super().install_forward(module, mesh)
        local_forward = module.forward

        def forward(input_ids: torch.Tensor) -> torch.Tensor:
            is_elsewhere = (input_ids < first) | (input_ids >= first + size)
            vectors = local_forward((input_ids - first).masked_fill(is_elsewhere, 0))
            return sum_values(vectors.masked_fill(is_elsewhere[..., None], 0.0), mesh.get_group())

        module.forward = forward
        return installed


def local_range(num_rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """(first row, number of rows) that this rank holds of `num_rows`, as `torch.chunk` divides them."""
    chunk = -(-num_rows // mesh.size())
    first = min(num_rows, chunk * mesh.get_local_rank())
    return first, min(num_rows, first + chunk) - first


def _check_linear(module: nn.Module) -> None:
    if not isinstance(module, nn.Linear | Conv1D):
        raise TypeError(f"tensor parallelism divides linear layers; {type(module).__name__} is none")


def _use_local_width(module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, Conv1D):  # its forward derives the output's shape from it
        module.nf //= mesh.size()


def _no_bias(module: nn.Module) -> Any:
    """The equivalent of no bias for a layer: `Conv1D` always adds one."""
    if not isinstance(module, Conv1D):
        return None
    weight: Any = module._parameters["weight"]
    return weight.new_zeros(module.nf)
