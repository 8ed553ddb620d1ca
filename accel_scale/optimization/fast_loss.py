"""A faster loss for TRL's `SFTTrainer`: the same value, without metrics and synchronisation in every step.

TRL 1.16's fused head projects every position on a CPU (labelled or not), computes its gradients in fp32, and on
every micro-batch derives entropy and accuracy, gathers four scalars over the ranks and reads three of them back.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from accel_scale.errors import ConfigError
from accel_scale.modeling.attention import with_document_lengths
from accel_scale.modeling.packed_mask import known_documents
from accel_scale.modeling.packing.row_facts import ROW_FACTS, Counting, RowFacts, filled_up
from accel_scale.optimization.head_loss import head_loss, logits_loss
from accel_scale.optimization.labelled_tokens import forget_labelled, only_labelled, skip_unlabelled
from accel_scale.optimization.loss import count_loss_tokens, on_device
from accel_scale.optimization.router_loss import forward_with_router

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from accel_scale.optimization.router_loss import RouterLoss


@dataclass
class FastLossOutput(ModelOutput):
    """Loss of a forward pass with ``fast_lm_head=True``, and the number of labels that were most likely.

    `aux_loss` is the router's, if requested by ``router_loss=True``: not included in `loss`, without its coefficient.
    """

    loss: torch.Tensor | None = None
    num_correct: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def add_fast_lm_head(model: Any, *, from_logits: bool = False) -> None:
    """Make ``model(…, labels=…, fast_lm_head=True)`` return `FastLossOutput` by `chunked_cross_entropy`.

    ``shift_labels`` in place of ``labels`` are not shifted again: parts of rows need that (sequence parallelism).
    Other calls go to the previous forward. The model's own forward is replaced, so wrappers (DDP, FSDP2, DeepSpeed,
    PEFT) see an ordinary call. Calling it twice is harmless.

    Args:
        model: A `PreTrainedModel` with a causal language model head; for a `PeftModel`, its base model.
        from_logits: Use the logits computed by the model itself, all at once, for a head that is more than one product
            with a factor and a cap. The start check determines which models need that.
    """
    model._loss_from_logits = from_logits
    if getattr(model, "_has_fast_lm_head", False):
        return
    previous = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fast_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fast_lm_head:
            forget_labelled(self)
            return previous(*args, **kwargs)
        shift = "shift_labels" not in kwargs
        facts = kwargs.pop(ROW_FACTS, None) if shift else None  # parts of rows have their own attention
        if facts is not None and not kwargs.get("router_loss"):  # whose mean is over all tokens
            kwargs, facts = filled_up(kwargs, facts, _multiplied_dtype(self))
        if shift:
            kwargs = with_document_lengths(kwargs, self.config._attn_implementation or "", facts)
        labels = kwargs.pop("labels" if shift else "shift_labels")
        num_items = kwargs.pop("num_items_in_batch", None)
        with_accuracy = kwargs.pop("with_accuracy", False)
        kwargs["use_cache"] = False
        options = {"num_items": num_items, "shift": shift, "return_num_correct": with_accuracy}
        router_loss, aux_loss = kwargs.pop("router_loss", False), None
        # Llama 4's backbone has another name than its class says.
        known = {} if facts is None else {"num_labels": facts.num_labels}
        backbone = self.base_model if self.base_model is not self else self.model
        num_selected = None if self._loss_from_logits else known.get("num_labels")
        with known_documents(facts), only_labelled(self, labels, num_selected):
            if self._loss_from_logits:
                outputs = previous(*args, **kwargs, **({"output_router_logits": True} if router_loss else {}))
                hidden, aux_loss = None, outputs.aux_loss if router_loss else None
            elif router_loss:
                hidden, aux_loss = forward_with_router(previous, backbone, *args, **kwargs)
            else:
                hidden = backbone(*args, **kwargs).last_hidden_state
        if hidden is None:
            result = logits_loss(outputs.logits, labels, **options)
        else:
            result = head_loss(self, hidden, labels, **known, **options)
        loss, num_correct = result if with_accuracy else (result, None)
        return FastLossOutput(loss=loss, num_correct=num_correct, aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)
    model._has_fast_lm_head = True


def _multiplied_dtype(model: PreTrainedModel) -> torch.dtype:
    device_type = model.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else model.dtype


def tell_zero3(model: Any) -> None:
    """Tell ZeRO-3 that the model's own forward uses the head's weights, which belong to a module that is not called.

    DeepSpeed (0.19.8) detects that only if a weight is still partitioned when it is used. After a forward without
    gradients that did call the head, such as `generate`, it prefetches the weights, does not notice the use, and has
    freed them when their gradient arrives.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled

    if not is_deepspeed_zero3_enabled():
        return
    import deepspeed

    for parameter in model.get_output_embeddings().parameters():
        deepspeed.zero.register_external_parameter(model, parameter)


class FastLossMixin:
    """Mixin before `trl.SFTTrainer`: ``class Trainer(FastLossMixin, SFTTrainer)``; used in training and evaluation.

    Logs `num_tokens` as TRL does, and `mean_token_accuracy` in evaluation; in training if `log_token_accuracy`.
    `skips_unlabelled` computes the last layer for labelled tokens only; set it if the start check allows it.
    Other cases use TRL's own loss: `loss_type` other than nll, label smoothing, a custom loss function, images,
    Accelerate's own sequence parallelism, prompt-learning adapters.
    """

    log_token_accuracy: bool = False
    loss_from_logits: bool = False
    skips_unlabelled: bool = False
    sp_size: int = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        model = trainer.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        add_fast_lm_head(base, from_logits=self.loss_from_logits)
        if not self.loss_from_logits:
            tell_zero3(base)
        self._fast_loss_covers_run = self._covers_run()
        if self.loss_from_logits and not self._fast_loss_covers_run:
            raise ConfigError(
                f"{type(base).__name__}'s loss must come from its own logits, which TRL's own losses do not take.",
                place="--loss_type, --label_smoothing_factor or the router's auxiliary loss",
                fix="use the default loss, and --router_aux_loss_coef 0 for a mixture of experts.",
            )
        self._new_tokens: Any = 0
        if self._fast_loss_covers_run and not trainer.args.torch_compile:
            trainer.data_collator = Counting(trainer.data_collator)
            skip_unlabelled(base, self.skips_unlabelled and trainer._tp_size == 1)

    def _covers_run(self) -> bool:
        trainer: Any = self
        parallelism = trainer.accelerator.parallelism_config
        peft_config = getattr(trainer.model, "active_peft_config", None)
        return not (
            trainer.args.loss_type != "nll"
            or trainer.label_smoother is not None
            or trainer.compute_loss_func is not None
            or (trainer.aux_loss_enabled and self.sp_size > 1)
            or trainer._is_vision_dataset
            or (parallelism is not None and (parallelism.sp_enabled or parallelism.cp_enabled))
            or getattr(peft_config, "is_prompt_learning", False)
        )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        trainer: Any = self
        if return_outputs or not self._fast_loss_covers_run or "shift_labels" in inputs:
            plain = {name: value for name, value in inputs.items() if name != ROW_FACTS}
            return super().compute_loss(  # type: ignore[misc]
                model, plain, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        is_training = trainer.model.training
        part = self.held_part(inputs)
        outputs = model(
            **part,
            num_items_in_batch=num_items_in_batch,
            fast_lm_head=True,
            with_accuracy=self.log_token_accuracy or not is_training,
            router_loss=trainer.aux_loss_enabled,
        )
        self._record_metrics(inputs, part, outputs, "train" if is_training else "eval")
        loss = outputs.loss
        if trainer.args.average_tokens_across_devices and num_items_in_batch is not None:
            # `num_items_in_batch` counts every rank's tokens, and gradients are averaged over ranks.
            loss = loss * (trainer.accelerator.num_processes // trainer.get_tp_size())
        if outputs.aux_loss is not None:  # weighted as in TRL: its mean over micro-batches and ranks
            steps = trainer.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + outputs.aux_loss * (trainer.router_aux_loss_coef / steps)
        return loss

    def held_part(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of a micro-batch: all of it, unless `SequenceParallelMixin` cuts its rows."""
        return inputs

    def _record_metrics(self, inputs: Any, part: Any, outputs: FastLossOutput, mode: str) -> None:
        trainer: Any = self
        trainer._metrics[mode]["num_tokens"] = [0]  # `log` fills in the count
        if outputs.num_correct is not None:
            is_cut = "shift_labels" in part
            num_labelled = (part["shift_labels"] != -100).sum() if is_cut else count_loss_tokens(part["labels"])
            counts = torch.stack([outputs.num_correct, num_labelled])
            correct, labelled = trainer.accelerator.gather(counts[None]).sum(0).tolist()
            trainer._metrics[mode]["mean_token_accuracy"].append(correct / labelled if labelled else 0.0)
        if outputs.aux_loss is not None:
            aux_loss = trainer.accelerator.gather(outputs.aux_loss.detach()[None]).mean()
            trainer._metrics[mode]["aux_loss"].append(aux_loss.item())
        if mode == "train":
            mask = inputs.get("attention_mask")
            # A tensor is only added up here; it is read when a log entry is due.
            self._new_tokens = self._new_tokens + (inputs["input_ids"].numel() if mask is None else mask.sum())
            if trainer.accelerator.sync_gradients:
                self._count_new_tokens()

    def _count_new_tokens(self) -> None:
        trainer: Any = self
        count = self._new_tokens
        if trainer.accelerator.num_processes > 1:
            count = on_device(count, trainer.accelerator.device)
            count = trainer.accelerator.reduce(count, reduction="sum")
        readers = trainer._tp_size * self.sp_size  # ranks that read the same rows
        trainer._total_train_tokens = trainer._total_train_tokens + count // readers
        self._new_tokens = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        trainer: Any = self
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        if "num_tokens" in metrics:
            trainer._total_train_tokens = int(trainer._total_train_tokens)
            metrics["num_tokens"] = [trainer._total_train_tokens]
        super().log(logs, start_time)  # type: ignore[misc]


def language_model_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    num_items: torch.Tensor | int,
    *,
    router: RouterLoss | None = None,
    num_micro_batches: int = 1,
    facts: RowFacts | None = None,
) -> torch.Tensor:
    """Sum of the labelled tokens' cross-entropies ÷ `num_items`, by the head added by `add_fast_lm_head`.

    Args:
        router: Adds the router's auxiliary loss; None leaves it out, as in validation.
        num_micro_batches: Number per optimizer step, for the mean of that loss.
        facts: Facts about the micro-batch; None asks the device.
    """
    names = ("input_ids", "labels", "shift_labels", "position_ids")
    inputs = {name: batch[name] for name in names if name in batch}
    options = {"num_items_in_batch": num_items, "fast_lm_head": True, "router_loss": router is not None}
    options |= {} if facts is None else {ROW_FACTS: facts}  # type: ignore[dict-item]
    outputs = model(**inputs, **options)
    loss: torch.Tensor = outputs.loss
    return loss if router is None else loss + router.weighted(outputs.aux_loss, num_micro_batches)
