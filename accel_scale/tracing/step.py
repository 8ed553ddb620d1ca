"""One fake forward and backward pass of a real model, with bytes by segment."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_scale.facts.checkpointing import SUBLAYERS
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.adapter_targets import freeze_other_parts
from accel_scale.optimization.head_loss import head_transform
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup, period_of
from accel_scale.tracing.adapted import DTYPES, adapted
from accel_scale.tracing.blanks import blank
from accel_scale.tracing.cuda_kernels import CudaKernels, recomputing_in_kernels
from accel_scale.tracing.facts import expert_count
from accel_scale.tracing.head_operations import HeadOperations
from accel_scale.tracing.recording import Recorder, Segments, TooManyAllocationsError, watched
from accel_scale.tracing.skeletons import Skeleton, build, plain_masks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Number of tokens for finding out which operations there are.
_FEW = 8
# Which layers are run: representative ones, whose number the configuration gives unless inputs are made for all.
Layers = Literal["few", "few, counted as all", "all"]


class FakeStep:
    """A model set up for training as in `setup`, with a few representative layers or with all of them.

    Attributes:
        chosen: Indices of its layers in the whole model.
        stands_for: For every layer of the whole model, which of `chosen` represents it.
        kinds: For every layer of the whole model, the number of its kind.
        hidden_bytes: Bytes per value of the last hidden states, known after a run.
        given_bytes: Bytes per value of the loss's input: those states, or the model's own logits.
        takes_logits: Whether the loss is computed from the model's own logits, for a head that is more than a product
            with a factor and a cap. The trace then ends at the logits, else at the last hidden states.
    """

    def __init__(
        self, facts: ModelFacts, setup: TrainingSetup, *, is_cuda: bool, is_tracked: bool, layers: Layers = "few"
    ) -> None:
        self.setup, self.is_cuda, self.is_tracked = setup, is_cuda, is_tracked
        self._runs: dict[tuple[int, int], dict[str, list[int]]] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        dtype = DTYPES[setup.trained_bytes if setup.trains_all else setup.frozen_bytes]
        attention = "eager" if setup.attention == "eager" else None
        with torch.device("meta"):
            self.skeleton = build(json.loads(facts.traced_config), dtype=dtype, attention=attention, place=facts.name)
        self.hidden_bytes = self.given_bytes = dtype.itemsize
        self.is_tied = facts.tied_embeddings
        self.num_experts = max(1, expert_count(self.skeleton.model.config))
        period = period_of(setup)
        self.chosen, self.stands_for, self.kinds = representatives(self.skeleton, period)
        counts_all = layers == "few, counted as all"
        if layers == "all" or self.skeleton.layers is None:
            self.chosen = self.stands_for = list(range(len(self.kinds)))
            self._prepare(setup)
        elif period > 1:
            # Which layers are checkpointed depends on all of them.
            self._prepare(setup)
            self.skeleton.keep(self.chosen, counts_all=counts_all)
        else:
            self.skeleton.keep(self.chosen, counts_all=counts_all)
            self._prepare(setup)
        make_fake(self.skeleton.model, self.mode)
        self.takes_logits = not facts.num_scores and self._computes_own_logits()

    def _computes_own_logits(self) -> bool:
        """True if the path from the last hidden states to the logits is more than this project's loss reproduces."""
        model = self.skeleton.model
        if model.base_model is model:
            return False
        head = HeadOperations(head_transform(model.config))

        def begin(module: nn.Module, args: object, output: Sequence[torch.Tensor]) -> None:
            self.hidden_bytes = output[0].dtype.itemsize
            head.begin()

        handle = model.base_model.register_forward_hook(begin)
        with plain_masks(), self.mode, torch.no_grad(), self._recorder(), head, self._kernels():
            model(input_ids=blank(self.mode, (1, _FEW), None, torch.long), use_cache=False)
        handle.remove()
        return head.is_own

    def _recorder(self) -> Recorder:
        return Recorder(
            self.mode, adds_in_place=not self.is_tracked, is_padded=self.setup.is_padded, num_experts=self.num_experts
        )

    def _prepare(self, setup: TrainingSetup) -> None:
        model: nn.Module = self.skeleton.model
        with torch.device("meta"):
            freeze_other_parts(self.skeleton.model)
            if setup.trains_adapters:
                model = adapted(self.skeleton, setup, is_cuda=self.is_cuda)
            policy = "full" if setup.checkpointing == "offload" else setup.checkpointing
            if policy != "none":
                apply_checkpointing(model, CheckpointingPolicy.parse(policy))
                if setup.trains_adapters and policy not in SUBLAYERS:
                    self.skeleton.model.enable_input_require_grads()

    def run(self, rows: int, length: int) -> dict[str, list[int]]:
        """Bytes allocated and freed by a pass over `rows` × `length` positions, by segment.

        What a layer left in autocast's cache is freed when autocast ends, for all layers that it represents. Runs of
        the same size are run once.
        """
        if (rows, length) not in self._runs:
            self._runs[rows, length] = self._run(rows, length)
        return self._runs[rows, length]

    def forward_allocations(self, rows: int, length: int, at_most: int = sys.maxsize) -> int:
        """Number of allocations in a forward pass over `rows` × `length` positions; it ends after `at_most`."""
        try:
            segments = self._record(rows, length, forward_allocations=at_most)
        except TooManyAllocationsError:
            return at_most + 1
        return sum(size > 0 for events in segments.values() for size, _ in events)

    def _run(self, rows: int, length: int) -> dict[str, list[int]]:
        segments = self._record(rows, length)
        self.skeleton.model.zero_grad()
        copies = Counter(self.stands_for)

        def counted(segment: str, size: int, origin: str) -> int:
            _, _, number = origin.partition(" ")
            return size * copies[int(number)] if number and segment == "leave" else size

        return {name: [counted(name, *event) for event in events] for name, events in segments.items()}

    def _record(self, rows: int, length: int, *, forward_allocations: int | None = None) -> Segments:
        """Events by segment; with a limit of allocations, those of the forward pass alone."""
        setup, model = self.setup, self.skeleton.model
        layers: Sequence[nn.Module] = list(self.skeleton.layers or [])
        recorder = self._recorder()
        if forward_allocations is not None:
            recorder.allocations_left = forward_allocations
        with ExitStack() as stack:
            stack.enter_context(plain_masks())
            stack.enter_context(self.mode)
            inputs: dict[str, torch.Tensor] = {"input_ids": blank(self.mode, (rows, length), None, torch.long)}
            if setup.is_padded:
                inputs["attention_mask"] = blank(self.mode, (rows, length), None, torch.long)
            stack.enter_context(watched(recorder, layers))
            if self.is_cuda:
                stack.enter_context(recomputing_in_kernels(model))
            stack.enter_context(recorder)
            with self._kernels():
                given = (model if self.takes_logits else body_of(model))(**inputs, use_cache=False)[0]
                recorder.mark("head")
                if forward_allocations is not None:
                    return recorder.segments
                self.given_bytes = given.dtype.itemsize
                if not self.takes_logits:
                    self.hidden_bytes = self.given_bytes
                tied: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
                if tied.requires_grad and self.is_tied and not self.takes_logits:
                    tied.grad = torch.zeros_like(tied)
                loss = _Loss.apply(given, recorder)
                del given
                recorder.mark("leave")
            recorder.mark("head")
            recorder.is_backward = True
            if loss.requires_grad:
                loss.backward()
            del loss
        return {name: list(events) for name, events in recorder.segments.items()}

    def _kernels(self):  # type: ignore[no-untyped-def]
        stack = ExitStack()
        if self.setup.autocast:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        if self.is_cuda:
            stack.enter_context(CudaKernels())
        return stack


def representatives(skeleton: Skeleton, period: int) -> tuple[list[int], list[int], list[int]]:
    """The first and last layer and one of every kind between; which of these represents each layer; and the kinds.

    Under every-n checkpointing, a layer's position in its period is part of its kind.
    """
    kinds = [(kind, index % period == 0) for index, kind in enumerate(skeleton.kinds())]
    total = len(kinds)
    inner = range(1, total - 1)
    chosen = sorted({0, total - 1} | {next(j for j in inner if kinds[j] == kinds[i]) for i in inner}) if total else []
    place = {index: number for number, index in enumerate(chosen)}
    by_kind = {kinds[index]: place[index] for index in chosen if index in inner}
    stands_for = [place[i] if i in (0, total - 1) else by_kind[kinds[i]] for i in range(total)]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return chosen, stands_for, [numbers[kind] for kind in kinds]


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace weights and buffers on the meta device by blank ones on the CPU; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is None:
                    continue
                if id(value) not in made:
                    fake = blank(mode, value.shape, value.stride(), value.dtype)
                    if isinstance(value, nn.Parameter):
                        fake.requires_grad_(value.requires_grad)
                        fake._is_param = True
                    made[id(value)] = fake
                held[name] = made[id(value)]  # type: ignore[assignment]


def body_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head, which the planner computes itself."""
    body: nn.Module = model.base_model
    if body is not model:
        return body
    model.set_output_embeddings(nn.Identity())
    return model


class _Loss(torch.autograd.Function):
    """Stands for head and loss: its backward pass allocates the hidden states' gradient and ends the head segment."""

    @staticmethod
    def forward(ctx, hidden, recorder):  # type: ignore[no-untyped-def]
        ctx.shape, ctx.dtype, ctx.recorder = hidden.shape, hidden.dtype, recorder
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype)
        ctx.recorder.mark("top")
        return gradient, None
