"""Runs a real training step of a model with random weights as in a `TrainingSetup`, and measures memory and time."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_scale.errors import ConfigError
from accel_scale.modeling.precision import precision_named
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.start_check.steps import recipe_loss
from accel_scale.verifying.measured_memory import StorageTracker, resident_tensors
from accel_scale.verifying.nf4_weights import moved_from_meta, quantise_linears

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SEED = 0


@dataclass(frozen=True)
class StepMeasurement:
    """Bytes of one process by kind, and the peak.

    Attributes:
        weight_bytes: Weights and buffers.
        gradient_bytes: Gradients after the backward pass.
        optimizer_bytes: Optimizer states after the first step.
        pass_bytes: Peak during the forward and backward pass, without weights and states.
        peak_bytes: Overall peak, with everything included.
        reserved_bytes: Peak reserved by CUDA's allocator; None elsewhere.
        step_seconds: Median over the steps after the first; None if traced.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    pass_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None
    step_seconds: float | None = None


def one_process(setup: TrainingSetup) -> TrainingSetup:
    """`setup` reduced to what one process without padding can run: no ranks, offload, packing or compilation."""
    return replace(setup, parallel=ParallelSetup(), packing=False, mean_length=None, compile=False)


def measure_step(
    config: PreTrainedConfig, setup: TrainingSetup, *, device: str = "cpu", is_fake: bool = False, num_steps: int = 2
) -> StepMeasurement:
    """Train a model with random weights for some steps and measure the last.

    Args:
        config: The model's `PreTrainedConfig`.
        setup: A setup as returned by `one_process`; others are refused.
        device: ``cuda``, measured by the allocator, or ``cpu``, where every operation is traced.
        is_fake: Compute nothing, with tensors that have shapes but no values. On the CPU only, and without experts,
            whose shares depend on values.
        num_steps: Number of steps. The first creates the optimizer states; timing starts with the second.

    Raises:
        ConfigError: for a setup that one process cannot run in this way.
    """
    if setup != one_process(setup):
        raise ConfigError("a trial step runs plain rows in one process.", place="setup", fix="use one_process(setup).")
    torch.manual_seed(_SEED)
    model = build_trial(config, setup, "meta" if is_fake else device)
    with _without_values() if is_fake else contextlib.nullcontext():
        if is_fake:
            _move_from_meta(model)
        run = TrialRun(model, setup, device)
        return _on_cuda(run, num_steps) if device == "cuda" else _traced(run, num_steps)


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Use tensors without values, and treat each row as one document.

    transformers looks for packed documents in position ids and, if these have no values, creates a mask that a real
    run does not have (`masking_utils.find_packed_sequence_indices`, 5.23; a test compares the two).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import masking_utils

    kept = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        with FakeTensorMode():
            yield
    finally:
        masking_utils.find_packed_sequence_indices = kept


class TrialRun:
    """Model, optimizer and the two halves of a step."""

    def __init__(self, model: Any, setup: TrainingSetup, device: str) -> None:
        from accel_scale.optimization.optimizers import create_optimizer, keep_embeddings_wide

        self.model, self.setup, self.device = model, setup, device
        self.precision = precision_named(setup.precision)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        keep_embeddings_wide(setup.optimizer, self.model)
        self.optimizer = create_optimizer(setup.optimizer, trained, lr=1e-5, device_type=device)
        shape = (setup.micro_batch_size, setup.sequence_length)
        self.ids = torch.randint(0, model.config.get_text_config().vocab_size, shape, device=device)

    def passes(self) -> None:
        """Forward and backward of all micro-batches."""
        for _ in range(self.setup.accumulation):
            with self.precision.autocast(self.device):
                loss = self.loss()
            loss.backward()

    def loss(self) -> torch.Tensor:
        """Loss of a micro-batch, as a run of `setup` computes it."""
        if self.setup.loss == "full":
            return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        return recipe_loss(self.model, {"input_ids": self.ids, "labels": self.ids})

    def update(self) -> None:
        """Clip gradients and take the optimizer step."""
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 1.0)
        self.optimizer.step()


def build_trial(config: PreTrainedConfig, setup: TrainingSetup, device: str) -> nn.Module:
    """Build a model of `config` with random weights, prepared as in a run of `setup`."""
    from transformers import AutoModelForCausalLM

    from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
    from accel_scale.modeling.precision import cast_parameters
    from accel_scale.optimization.fast_loss import add_fast_lm_head

    precision = precision_named(setup.precision)
    dtype = precision.model_dtype if not setup.trains_adapters else precision.frozen_dtype
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=setup.attention)
        if setup.quantises_base:
            quantise_linears(
                model, double=setup.double_quantisation, compute_dtype=precision.compute_dtype, device=device
            )
        if setup.trains_adapters:
            model = _adapted(model, setup)
    cast_parameters(model, precision)
    if setup.loss != "full":
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        add_fast_lm_head(base, from_logits=_takes_own_logits(config, setup))
    policy = CheckpointingPolicy.parse(setup.checkpointing)
    apply_checkpointing(model, replace(policy, in_tiles=setup.long_rows))
    return model.train()


def _takes_own_logits(config: PreTrainedConfig, setup: TrainingSetup) -> bool:
    """True if training would compute the loss from the model's own logits, as decided by the start check."""
    from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
    from accel_scale.start_check import PlannedRun, check_start

    run = PlannedRun(config=config, attention=setup.attention, rows="stream", policy=CheckpointingPolicy("none"))
    return check_start(run).loss_from_logits


def _move_from_meta(model: nn.Module) -> None:
    """Replace tensors on the meta device by tensors on the CPU; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _on_cpu(tensor)
                tensors[name] = made[id(tensor)]


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "quant_state"):
        return moved_from_meta(tensor)
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _adapted(model: Any, setup: TrainingSetup) -> nn.Module:
    from peft import get_peft_model

    from accel_scale.modeling.adapters import lora_config
    from accel_scale.modeling.loading import skeleton_of

    lora = setup.lora
    flags = SimpleNamespace(
        lora_r=lora.rank,
        lora_alpha=8,  # does not affect memory
        lora_dropout=lora.dropout,
        lora_target_modules=list(lora.targets),
        lora_modules_to_save=list(lora.full_modules) or None,
        use_dora=lora.dora,
    )
    config = lora_config(flags, skeleton_of(model.config), dropout_is_set=False)
    with warnings.catch_warnings():
        # PEFT 0.21 uses an attribute that transformers 5 deprecates.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return get_peft_model(model, config)


def _traced(run: TrialRun, num_steps: int) -> StepMeasurement:
    """Measure by counting every storage as it is created and freed."""
    tracker = _FakeAwareTracker()
    weights = tracker.adopt(resident_tensors(run.model))
    gradients = states = pass_bytes = 0
    for _ in range(num_steps):
        tracker.reset_peak()
        peak = 0
        with tracker:
            run.passes()
            pass_bytes = tracker.peak_bytes - weights - states
            gradients = tracker.live_bytes - weights - states
            run.update()
            peak = tracker.peak_bytes
        run.optimizer.zero_grad()
        states = tracker.live_bytes - weights
    return StepMeasurement(weights, gradients, states, pass_bytes, peak)


class _FakeAwareTracker(StorageTracker):
    """Also handles the search for labelled tokens on fake tensors: it finds all tokens."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        from torch._subclasses.fake_tensor import FakeTensor

        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            result = args[0].new_empty((math.prod(args[0].shape), args[0].dim()), dtype=torch.long)
            self._count(result.untyped_storage())
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)


def _on_cuda(run: TrialRun, num_steps: int) -> StepMeasurement:
    """Measure with the allocator's own statistics, without anything from before the model was built."""
    cuda = torch.cuda
    cuda.empty_cache()  # memory left reserved by building and quantising is not part of a step
    weights = cuda.memory_allocated()
    gradients = states = pass_bytes = peak = 0
    seconds = []
    for _ in range(max(2, num_steps)):
        cuda.synchronize()
        started = time.perf_counter()
        cuda.reset_peak_memory_stats()
        run.passes()
        pass_bytes = cuda.max_memory_allocated() - weights - states
        gradients = cuda.memory_allocated() - weights - states
        run.update()
        cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        peak = cuda.max_memory_allocated()
        run.optimizer.zero_grad()
        states = cuda.memory_allocated() - weights
    ordered = sorted(seconds[1:])
    middle = ordered[len(ordered) // 2]
    return StepMeasurement(weights, gradients, states, pass_bytes, peak, cuda.max_memory_reserved(), middle)
