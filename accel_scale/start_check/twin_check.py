"""The checks of one twin, in order, with the errors raised if one fails."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError, first_line
from accel_scale.facts.checkpointing import SEGMENTS
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.adapter_targets import freeze_other_parts
from accel_scale.modeling.tiling.layers import num_with_experts
from accel_scale.optimization.fast_loss import add_fast_lm_head
from accel_scale.optimization.labelled_tokens import skip_unlabelled
from accel_scale.optimization.router_loss import router_coefficient
from accel_scale.start_check.plan import AttentionRefused, Crashed, PlannedRun, PolicyRefused, Verdict

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig

    from accel_scale.start_check.flash_on_cpu import AttentionOnCpu
    from accel_scale.start_check.isolation import Leak
    from accel_scale.start_check.plan import Head
    from accel_scale.start_check.rows import TinyBatch
    from accel_scale.start_check.steps import LossOf, Step

_SHOWN = 3
# Tile size of MLPs if the run uses tiles: the twin's rows are too short for tiles of the run's size.
_TILE_ROWS = 7
_NO_POLICY = CheckpointingPolicy("none")
_ROWS = {"packed": "packed rows", "lanes": "packed rows", "padded": "padded rows", "stream": "rows of plain text"}


class TwinCheck:
    """One twin and the steps taken with it."""

    def __init__(self, run: PlannedRun, attention: AttentionOnCpu) -> None:
        from accel_scale.start_check.rows import tiny_batch
        from accel_scale.start_check.twin import build_twin

        self.run, self.attention = run, attention
        config = _with_router_loss(run.config, run.router_loss)
        base = build_twin(config, attention=attention.built_with, trust_remote_code=run.trust_remote_code)
        attention.switch_on(base)
        if run.images:
            freeze_other_parts(base)
        self.base: Any = base
        self.name = type(base).__name__
        self.model: Any = _with_adapter(base, run) if run.adapter is not None else base
        self.batch: TinyBatch = tiny_batch(run.rows, run.attention)
        self.logits: torch.Tensor | None = None

    def verdict(self) -> Verdict:
        own = self.own_step()
        self.refuse_leak()
        step, head = self.recipe_step(own)
        untrained = self.untrained(step)
        excluded, notes = _adapters_to_leave_out(self.run, untrained, step.gradients)
        if head == "logits":
            notes.append(
                f"the loss is computed from {self.name}'s own logits, which takes more memory: its head is more than "
                "one matrix product."
            )
        if self.run.policy.in_tiles and num_with_experts(self.model):
            notes.append("--long_rows computes experts whole: what they need still grows with the row.")
        return Verdict(
            self.run.attention,
            loss_from_logits=head == "logits",
            skips_unlabelled=head == "labelled",
            untrained=tuple(untrained),
            exclude_modules=tuple(excluded),
            notes=tuple(notes),
        )

    def own_step(self) -> Step:
        """The step with the model's own loss, without checkpointing."""
        try:
            return self.take_own_step()
        except AttentionRefused:
            raise
        except Exception as error:
            raise Crashed(
                f"{self.name} cannot take a step with {self.run.attention} attention on {_ROWS[self.run.rows]}: "
                f"{type(error).__name__}: {first_line(error)[:200]}",
                place="--attn_implementation",
            ) from error

    def take_own_step(self) -> Step:
        """`own_step`, passing on any exception of the model."""
        from accel_scale.start_check.steps import take_step

        def own_loss(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
            output = model(**inputs, use_cache=False)
            self.logits = output.logits.detach()
            return output.loss  # type: ignore[no-any-return]

        return take_step(self.model, self.batch.inputs, own_loss)

    def refuse_leak(self) -> None:
        """Raise if a token sees later ones, or a document another one."""
        from accel_scale.start_check.isolation import find_leak

        assert self.logits is not None
        leak: Leak = find_leak(self.model, self.batch, self.logits)
        if leak == "ahead":
            switch = next((n for n in ("is_decoder", "causal") if getattr(self.run.config, n, None) is False), None)
            raise AttentionRefused(
                f"{self.name} is not causal: a token sees those that follow it, which are what it should predict.",
                place="--model_name_or_path",
                fix=f'set {switch}: "{switch}": true in its config.json.' if switch else "train a causal model.",
            )
        if leak == "others" and self.run.packs:
            raise AttentionRefused(
                f"{self.name} lets packed documents see each other with {self.run.attention} attention.",
                place=self.run.packing_flag.split()[0],
            )
        if leak == "others":
            raise ConfigError(
                f"{self.name} lets the rows of a micro-batch see each other with {self.run.attention} attention.",
                place="--per_device_train_batch_size",
                fix="use 1, with gradient accumulation.",
            )

    def recipe_step(self, own: Step) -> tuple[Step, Head]:
        """The step as taken by the recipe, and the head that it needs.

        Raises:
            ConfigError: if no head gives the model's own loss and gradients, or checkpointing changes them.
        """
        policy = _for_few_layers(self.run.policy, self.base)
        seen = []
        for head in self.heads:
            self.add_head(head)
            if policy != _NO_POLICY:
                self.apply(policy)
                step, why_policy = self.compared(own)
                if step is not None:
                    return step, head
                self.apply(_NO_POLICY)
                if head == "labelled":  # another head may be right with the policy
                    continue
            step, why = self.compared(own)
            if step is not None and policy != _NO_POLICY:
                raise self.policy_changes_gradients(own, why_policy)
            if step is not None:
                return step, head
            seen.append(why)
        raise self.not_its_own(seen[-1])

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads to try, with the cheapest first."""
        if self.run.log_probs:
            return ("all",)
        has_prompts = self.run.rows in ("packed", "padded")
        return ("labelled", "all", "logits") if has_prompts else ("all", "logits")

    def not_its_own(self, what: str) -> ConfigError:
        """The error for a model whose own loss no head reproduces."""
        if self.run.log_probs:
            return ConfigError(
                f"log-probabilities by TRL's head are not {self.name}'s own: {what}.",
                place="start check",
                fix="train another model; this one's head is more than one matrix product.",
            )
        if router_coefficient(self.base.config):
            return ConfigError(
                f"the recipe's loss with the router's auxiliary loss is not {self.name}'s own: {what}.",
                place="--router_aux_loss_coef",
                fix="use 0, or set output_router_logits to false in config.json.",
            )
        return ConfigError(
            f"the recipe's loss is not {self.name}'s own: {what}.",
            place="start check",
            fix="train another model; this one's loss is more than cross-entropy of its logits.",
        )

    def add_head(self, head: Head) -> None:
        """Add the head that computes the recipe's loss."""
        if self.run.log_probs:
            from trl.trainer.utils import add_fused_lm_head

            add_fused_lm_head(self.base)
        else:
            add_fast_lm_head(self.base, from_logits=head == "logits")
            skip_unlabelled(self.base, head == "labelled")

    def apply(self, policy: CheckpointingPolicy) -> None:
        apply_checkpointing(self.model, policy, use_reentrant=self.run.use_reentrant, tile_rows=_TILE_ROWS)

    @property
    def loss(self) -> LossOf:
        """The recipe's loss function."""
        from accel_scale.start_check.steps import loader_loss, log_prob_loss

        return log_prob_loss if self.run.log_probs else loader_loss

    def compared(self, own: Step) -> tuple[Step | None, str]:
        """The recipe's step if it equals `own`, else None and the difference."""
        from accel_scale.start_check.steps import difference, take_step

        try:
            step = take_step(self.model, self.batch.inputs, self.loss)
        except Exception as error:
            return None, f"{type(error).__name__}: {first_line(error)[:200]}"
        gap = difference(step, own)
        return (step, "") if gap.is_small else (None, str(gap))

    def policy_changes_gradients(self, own: Step, what: str) -> ConfigError:
        """The error for a checkpointing policy that changes gradients, naming one that does not."""
        policy, works = self.run.policy, "none"
        if policy.in_tiles:
            self.apply(_for_few_layers(dataclasses.replace(policy, in_tiles=False), self.base))
            if self.compared(own)[0] is not None:
                return ConfigError(
                    f"computing {self.name}'s MLPs in tiles does not leave its gradients as they are: {what}.",
                    place="--long_rows",
                    fix=f"leave it out, and use --checkpointing_policy {policy}.",
                )
        for kind in ("full", "offload"):
            if kind == policy.kind:
                continue
            self.apply(CheckpointingPolicy(kind))
            if self.compared(own)[0] is not None:
                works = kind
                break
        return PolicyRefused(
            f"checkpointing policy {policy} does not leave {self.name}'s gradients as they are: {what}.",
            place="--checkpointing_policy",
            fix=f"use {works}.",
        )

    def untrained(self, step: Step) -> list[str]:
        from accel_scale.start_check.steps import untrained_weights

        return untrained_weights(step)


def _with_router_loss(config: PreTrainedConfig, weight: float | None) -> PreTrainedConfig:
    """A copy of `config` with the router loss set as TRL does for that weight."""
    if weight is None:
        return config
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = bool(weight)
        text.router_aux_loss_coef = weight
    return config


def _with_adapter(base: object, run: PlannedRun) -> object:
    from accel_scale.start_check.twin import attach_adapter

    try:
        return attach_adapter(base, run.adapter)  # type: ignore[arg-type]
    except Exception as error:
        raise ConfigError(
            f"PEFT cannot put these adapters on {type(base).__name__}: {first_line(error)[:200]}",
            place="--lora_target_modules",
            fix="name linear layers that this model has, or use --method full.",
        ) from error


def _for_few_layers(policy: CheckpointingPolicy, model: nn.Module) -> CheckpointingPolicy:
    """`policy` with a period that the twin's few layers allow."""
    if policy.kind not in ("every_n", SEGMENTS):
        return policy
    from transformers.modeling_layers import GradientCheckpointingLayer

    num_layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    fewest = 2 if policy.kind == SEGMENTS else 1
    every = min(max(policy.every_n, fewest), num_layers)
    return dataclasses.replace(policy, kind=policy.kind if every > 1 else "full", every_n=every)


def _adapters_to_leave_out(
    run: PlannedRun, untrained: list[str], gradients: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Names of modules that must not get an adapter, and notes."""
    if not untrained:
        return [], []
    shown = ", ".join(untrained[:_SHOWN]) + (", …" if len(untrained) > _SHOWN else "")
    if run.adapter is None:
        return [], [f"{len(untrained)} weights get no gradient and stay as they are: {shown}."]
    modules = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in untrained if ".lora_" in name}
    trained = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in gradients if name not in set(untrained)}
    never = sorted(modules - trained)
    if never and run.targets_given:
        raise ConfigError(
            f"adapters on {', '.join(never)} would never train: no gradient reaches them ({shown}).",
            place="--lora_target_modules",
            fix=f"leave out {', '.join(never)}.",
        )
    if never:
        return never, [f"no adapters on {', '.join(never)}: no gradient would reach them."]
    return [], [f"{len(untrained)} adapter weights get no gradient and stay as they are: {shown}."]
