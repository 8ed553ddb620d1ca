"""After an exception on one process: the collectives of its micro-batch that the other processes still wait for.

What is reduced here is thrown away: every process discards the optimizer step afterwards. What counts is that the
calls are made, in the order and of the sizes in which the others make theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from accel_scale.training.ddp_hooks import hook_of

# Where an exception leaves a collective half done: FSDP2's own, and the gathering of a head that is sharded alone.
_COLLECTIVE_SOURCES = ("torch/distributed/fsdp/_fully_shard", "torch/distributed/tensor/")
_HEAD_SOURCE = "accel_scale/training/loss.py"


class CannotFinish(RuntimeError):
    """The remaining collectives are not known well enough to be made; the message says why."""


class Collectives:
    """Of a model that is not wrapped: none."""

    def before_pass(self) -> None:
        """Call before each forward and backward pass."""

    def finish(self, source_files: Sequence[str]) -> None:
        """Make the calls that are missing.

        Args:
            source_files: Those of the exception's traceback, see `source_files_of`.

        Raises:
            CannotFinish: the processes can no longer be brought into step.
        """

    def discard(self, model: nn.Module) -> None:
        """Forget every gradient of this optimizer step."""
        model.zero_grad(set_to_none=True)


class DdpCollectives(Collectives):
    """DDP all-reduces buckets while the last micro-batch of a step runs backward; nothing otherwise.

    The parameters that have no gradient of this pass yet are given one of zeros, and the reducer goes on as usual.
    """

    def __init__(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        self._ddp = ddp
        self._marks: list[tuple[nn.Parameter, int | None]] = []
        self._was_called = False
        ddp.register_forward_pre_hook(self._note_call)
        is_plain = not (ddp.static_graph or ddp.parameters_to_ignore)
        self.problem = None if is_plain else "DDP has a static graph or ignores parameters"
        self._hook = hook_of(ddp)
        if self._hook is not None and self._hook.is_stateful:
            self.problem = "PowerSGD has begun to take up the gradients of the step"

    def _note_call(self, module: nn.Module, inputs: Any) -> None:
        self._was_called = True

    def before_pass(self) -> None:
        self._was_called = False
        if self._ddp.require_backward_grad_sync:
            self._marks = [(p, _version(p)) for p in self._ddp.parameters() if p.requires_grad]

    def finish(self, source_files: Sequence[str]) -> None:
        if self.problem:
            raise CannotFinish(self.problem)
        if self._hook is not None and self._hook.failed:
            raise CannotFinish("memory ran out in the hook that compresses gradients")
        ddp = self._ddp
        if not self._was_called:
            ddp._pre_forward()  # may broadcast buffers and, once, the order of the buckets
        # As the end of DDP's forward does; it decides whether the next one broadcasts buffers.
        ddp.require_forward_param_sync = ddp.require_backward_grad_sync
        if not ddp.require_backward_grad_sync:
            return
        pending = [parameter for parameter, version in self._marks if _version(parameter) == version]
        if not pending:
            return
        zero = _ZeroGradients.apply(*pending)
        if len(pending) == len(self._marks):
            ddp.reducer.prepare_for_backward([zero])  # as DDP's forward does at its end; again is harmless
        zero.backward()


class Fsdp2Collectives(Collectives):
    """FSDP2 gathers the weights of a block before its forward and backward and reduce-scatters its gradients after.

    Its own hooks are called in the order in which a whole pass calls them. They are private: checked on torch 2.13
    with Accelerate 1.15's blocks, and tests/distributed/test_memory_recovery_sharded.py fails when they move.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_before = 0

    def before_pass(self) -> None:
        # Evaluation leaves its blocks in this list; before the first pass there is none.
        self._num_before = len(getattr(self._root._get_fsdp_state()._comm_ctx, "post_forward_order", ()))

    def finish(self, source_files: Sequence[str]) -> None:
        if any(source in name for name in source_files for source in _COLLECTIVE_SOURCES):
            raise CannotFinish("memory ran out in the buffers of a collective")
        root = self._root._get_fsdp_state()
        root._lazy_init()
        head = _head_gathered_by_loss(self._root)
        states = [s for s in root._state_ctx.all_states if s is not root and s._modules != (head,)]
        _check_layout(root, states)
        if head is not None and head.weight.requires_grad:
            raise CannotFinish("the trained head is a block of its own")
        is_running = root._state_ctx.iter_forward_root is not None
        if is_running or len(root._comm_ctx.post_forward_order) == self._num_before:
            is_gathered = head is None or any(_HEAD_SOURCE in name for name in source_files)
            self._finish_forward(root, states, None if is_gathered else head)
        self._finish_backward(root)

    def _finish_forward(self, root: Any, states: list[Any], head: Any) -> None:
        """`states` are in the order in which their first modules run."""
        if root._state_ctx.iter_forward_root is None:  # the exception came before the model was called
            root._pre_forward(root._modules[0], (), {})
        done = {id(group) for group in root._comm_ctx.post_forward_order[self._num_before :]}
        for state in states:
            if id(_group(state)) in done:
                continue
            if len(state._modules) == 1:
                state._pre_forward(state._modules[0], (), {})
                state._post_forward(state._modules[0], (), None)
            elif not state._modules_to_run_forward:  # completed by the root's hook
                state._modules_to_run_forward.update(state._modules)
                state._pre_forward(state._modules[0], (), {})
        if head is not None:
            head.weight.full_tensor()
        root._post_forward(root._modules[0], (), None)

    def _finish_backward(self, root: Any) -> None:
        root._state_ctx.post_backward_final_callback_queued = True  # it is called here, not by autograd
        states = {id(group): state for state in root._state_ctx.all_states for group in state._fsdp_param_groups}
        unused = torch.empty(0)
        root._pre_backward(unused)
        for group in reversed(root._comm_ctx.post_forward_order[self._num_before :]):
            if group._training_state.name == "POST_BACKWARD":
                continue
            state = states[id(group)]
            state._pre_backward(unused)
            _fill_with_zeros(group)
            # Autograd tells of a block's end by the gradient of its input; the final callback serves the others.
            if state is not root and not _begins_with_token_ids(state):
                group.post_backward()
        root._root_post_backward_final_callback()

    def discard(self, model: nn.Module) -> None:
        root = self._root._get_fsdp_state()
        self._root.reset_iter_state()
        for state in root._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                for parameter in group.fsdp_params:  # kept whole between micro-batches that do not reduce
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
        model.zero_grad(set_to_none=True)


class UnknownCollectives(Collectives):
    """Of a strategy whose collectives cannot be finished from outside."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def finish(self, source_files: Sequence[str]) -> None:
        raise CannotFinish(self._reason)


def collectives_of(model: Any, *, strategy: str) -> Collectives:
    """Those of `model`, as prepared; `strategy` as from `strategy_of`."""
    if strategy == "single":
        return Collectives()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return DdpCollectives(model)
    if strategy == "fsdp2" and hasattr(model, "reset_iter_state"):
        return Fsdp2Collectives(model)
    return UnknownCollectives(f"{strategy} leaves the processes out of step when one of them fails")


class _ZeroGradients(torch.autograd.Function):
    """A zero whose gradients are zeros that take no memory until they are accumulated."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = [(p.shape, p.dtype, p.device) for p in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.parameters
        )


def _version(parameter: nn.Parameter) -> int | None:
    """Changes whenever a gradient is accumulated."""
    return None if parameter.grad is None else parameter.grad._version


def source_files_of(traceback: TracebackType | None) -> list[str]:
    """Source files of a traceback's frames; unlike it, they keep no tensor alive."""
    names = []
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    return names


def _group(state: Any) -> Any:
    return state._fsdp_param_groups[0]


def _head_gathered_by_loss(model: Any) -> Any:
    """The head that `fast_loss` gathers by itself, because it is a block whose forward never runs; None elsewhere."""
    for module in model.modules():
        if getattr(module, "_has_fast_lm_head", False):
            head = module.get_output_embeddings()
            is_alone = hasattr(head, "_get_fsdp_state") and head._get_fsdp_state()._modules == (head,)
            return head if is_alone else None
    return None


def _check_layout(root: Any, states: list[Any]) -> None:
    """Blocks in one flat layer below the root, each with something to train, and no prefetching by hand."""
    for state in [root, *states]:
        if len(state._fsdp_param_groups) > 1 or (state is not root and not state._fsdp_param_groups):
            raise CannotFinish("a block has several meshes")
        if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
            raise CannotFinish("prefetching is explicit")
    blocks = {module for state in states for module in state._modules}
    if any(sum(module in blocks for module in block.modules()) > 1 for block in blocks):
        raise CannotFinish("wrapped blocks contain each other")
    middle = [state for state in states if len(state._modules) == 1 and not _begins_with_token_ids(state)]
    if not all(any(p.sharded_param.requires_grad for p in _group(state).fsdp_params) for state in middle):
        raise CannotFinish("some blocks have nothing to train")


def _begins_with_token_ids(state: Any) -> bool:
    """Whether a block begins with the embedding, whose input has no gradient; tied, the head is in it too."""
    return any(isinstance(module, nn.Embedding) for module in state._modules)


def _fill_with_zeros(group: Any) -> None:
    """Give every trained parameter of a block a gradient, so that its reduce-scatter is as large as the others'."""
    if not group.reduce_grads:
        return
    for parameter in group.fsdp_params:
        whole = parameter.unsharded_param
        if whole.requires_grad and whole.grad is None and parameter.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
