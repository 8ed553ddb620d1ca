"""Validation loss of a language model, token-weighted over all ranks, and a sample of generated text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_scale.modeling.evaluation_mode import evaluating
from accel_scale.modeling.packing.row_facts import RowFacts
from accel_scale.optimization.fast_loss import language_model_loss

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedTokenizerBase


# Perplexity beyond this overflows a float; such a model has learned nothing anyway.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per labelled token, and the number of these tokens."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, _LARGEST_EXPONENT)) if not math.isnan(self.loss) else math.nan


def evaluate_loss(accelerator: Accelerator, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> Evaluation:
    """Loss over every rank's `batches`; every rank must have the same number (sharded weights are gathered together).

    Batches hold ``input_ids``, ``labels`` (-100: not counted) and optionally ``position_ids``; parts of rows hold
    ``shift_labels`` instead of ``labels``.
    """
    import torch

    from accel_scale.optimization.loss import count_loss_tokens
    from accel_scale.parallel.model_parallel import model_parallel_of

    shared = model_parallel_of(accelerator)
    total = torch.zeros(2, dtype=torch.float64)
    with evaluating(model):
        for batch in batches:
            moved = {name: t.to(accelerator.device) for name, t in batch.items() if isinstance(t, torch.Tensor)}
            moved = dict(shared.local(moved)) if shared else moved
            facts = RowFacts(batch)
            shift = "shift_labels" not in moved
            count = count_loss_tokens(moved["labels" if shift else "shift_labels"], shift=shift)
            with accelerator.autocast():
                summed = shared.evaluate(model, moved) if shared else language_model_loss(model, moved, 1, facts=facts)
            # Without labels the sum is empty; only a pipeline's last stage has the loss.
            if summed is not None:
                total += torch.tensor([summed.item() if count else 0.0, count.item()], dtype=torch.float64)
    loss, tokens = reduce_sum(accelerator, total).tolist()
    if shared:
        loss, tokens = loss / shared.layout.tp, tokens / shared.layout.tp  # ranks of one product count the same rows
    return Evaluation(loss / tokens if tokens else math.nan, int(tokens))


def total_over_ranks(accelerator: Accelerator, count: int) -> torch.Tensor:
    """Sum `count`, of a rank's rows, over the ranks that have their own rows; an integer scalar on the device."""
    from accel_scale.optimization.loss import on_device
    from accel_scale.parallel.model_parallel import model_parallel_of

    total = on_device(count, accelerator.device)
    if accelerator.num_processes > 1:
        total = accelerator.reduce(total, "sum")
    shared = model_parallel_of(accelerator)
    return total // shared.layout.model_ranks if shared else total


def reduce_sum(accelerator: Accelerator, values: torch.Tensor) -> torch.Tensor:
    """Host `values` summed over all ranks, back on the host."""
    if accelerator.num_processes == 1:
        return values
    reduced: torch.Tensor = accelerator.reduce(values.to(accelerator.device), "sum").cpu()
    return reduced


def beginning_of(
    batches: Iterable[Mapping[str, Any]] | None, tokenizer: PreTrainedTokenizerBase, *, num_tokens: int = 12
) -> str:
    """The first tokens of rank 0's first row, as text, on every rank; an empty string if there is none."""
    from accel_scale.modeling.gathering import broadcast_from_main

    batch = next(iter(batches), None) if batches is not None else None
    text = "" if batch is None else tokenizer.decode(batch["input_ids"][0, :num_tokens], skip_special_tokens=True)
    return str(broadcast_from_main(text))


def sample_text(
    accelerator: Any, model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int, seed: int = 0
) -> str:
    """Generate text after `prompt`, sampled at temperature 0.8 from the 50 likeliest tokens; on every rank.

    Sharded weights are gathered layer by layer by their own hooks, so all ranks generate the same text in step.
    """
    import torch

    from accel_scale.modeling.gathering import is_partitioned

    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        ids = torch.tensor([[tokenizer.eos_token_id or 0]])
    generator = model if hasattr(model, "generate") else model.module
    in_step = accelerator.num_processes > 1 and any(
        is_partitioned(p) or hasattr(p, "device_mesh") for p in generator.parameters()
    )
    cuda = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), evaluating(model), accelerator.autocast(), _root_gathered(generator):
        torch.manual_seed(seed)
        out = generator.generate(
            input_ids=ids.to(accelerator.device),
            attention_mask=torch.ones_like(ids).to(accelerator.device),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            use_cache=True,
            synced_gpus=in_step,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@contextlib.contextmanager
def _root_gathered(model: Any) -> Iterator[None]:
    """Gather the weights outside of FSDP2's blocks while a PEFT model generates.

    Its ``generate`` calls the inner base model, bypassing the hooks of the module that is FSDP2's root.
    """
    from torch.distributed.fsdp import FSDPModule

    is_passed_by = isinstance(model, FSDPModule) and hasattr(model, "peft_config")
    if is_passed_by:
        model.unshard()
    try:
        yield
    finally:
        if is_passed_by:
            model.reshard()
