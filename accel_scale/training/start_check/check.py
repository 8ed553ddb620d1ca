"""The questions that the start check asks of the twin, in order, and what it says where one is answered with no."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.training.checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.training.fast_loss import add_fast_lm_head

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from transformers import PreTrainedConfig

    from accel_scale.training.start_check.isolation import Leak
    from accel_scale.training.start_check.rows import RowKind, TinyBatch
    from accel_scale.training.start_check.steps import Step

_SHOWN = 3


@dataclass(frozen=True)
class PlannedRun:
    """What will be trained, and how.

    Args:
        config: Of the model that will be loaded.
        attention: What `resolve_attention` chose.
        attention_given: Whether the user named it; otherwise another one may take its place.
        rows: How the recipe's rows come.
        policy: Of activation checkpointing.
        use_reentrant: Whether checkpointing is of the reentrant kind.
        adapter: PEFT's configuration; None where the weights themselves are trained.
        trust_remote_code: Whether code of the model's own may run.
        packing_flag: What switches packing off in this recipe.
        targets_given: Whether the user named the modules that get adapters.
    """

    config: PreTrainedConfig
    attention: str
    rows: RowKind
    policy: CheckpointingPolicy
    attention_given: bool = False
    use_reentrant: bool = False
    adapter: PeftConfig | None = None
    trust_remote_code: bool = False
    packing_flag: str = "--packing false"
    targets_given: bool = False


@dataclass(frozen=True)
class Verdict:
    """What the run must do differently, and what the user should know.

    Attributes:
        attention: The implementation to load the model with.
        loss_from_logits: The loss must be computed from the model's own logits: its head is more than a product.
        untrained: Trainable weights that no gradient reaches, by their names in the twin.
        exclude_modules: Names of modules whose adapters would never train.
        notes: One line each.
        use_reentrant: Whether activation checkpointing must be of the reentrant kind.
        adapter: What is trained, without modules whose adapters would not; None where it is the weights themselves.
    """

    attention: str
    loss_from_logits: bool = False
    untrained: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    use_reentrant: bool = False
    adapter: PeftConfig | None = None


def check_start(run: PlannedRun) -> Verdict:
    """Train a small model of `run` for one step in every way that must agree, before anything large is loaded.

    In fp32 on the CPU, by this process alone, whatever the strategy: every rank comes to the same answer. It finds a
    factor on the logits of 0.98, a cap of 50, a document that sees another one through a mask, a state, a convolution
    or the rows of its micro-batch, a token that sees the next one, gradients that recomputation changes by 0.2%, and
    weights that no gradient reaches.

    Raises:
        ConfigError: where the run would train something else than it says, with what to switch.
    """
    from accel_scale.training.start_check.twin import NoTwin, undisturbed

    with undisturbed():
        try:
            return _verdict(run)
        except NoTwin as reason:
            note = f"start check: skipped, {run.config.model_type} cannot be shrunk ({reason})."
            return Verdict(run.attention, notes=(note,))
        except _AttentionRefused as refusal:
            return _with_other_attention(run, refusal)


class _AttentionRefused(ConfigError):
    """The model cannot be trained with this attention; another one may do. `fix` is for where none does."""


class _Crashed(_AttentionRefused):
    """The twin does not run with this attention. Where it runs with none, that may be the shrinking's fault."""


def _verdict(run: PlannedRun) -> Verdict:
    from accel_scale.training.start_check.flash_on_cpu import attention_on_cpu

    with attention_on_cpu(run.attention) as attention:
        return TwinCheck(run, attention).verdict()


def _with_other_attention(run: PlannedRun, refusal: _AttentionRefused) -> Verdict:
    """The verdict with transformers' own attention, unless the user has named one; else the refusal and a way out."""
    from accel_scale.training.start_check.twin import NoTwin

    fix = refusal.fix
    for other, flag in _alternatives(run):
        is_for_us = other.rows == run.rows and not run.attention_given
        try:
            verdict = _verdict(other)
        except (_AttentionRefused, NoTwin):
            continue
        except ConfigError:
            if is_for_us:
                raise
            verdict = None
        if is_for_us and verdict is not None:
            note = f"attention is {other.attention}: {str(refusal.problem).rstrip('.')}."
            return dataclasses.replace(verdict, notes=(note, *verdict.notes))
        fix = f"use {flag}."
        break
    if fix is None and isinstance(refusal, _Crashed):
        return _without_running(run, refusal)
    raise ConfigError(refusal.problem, place=refusal.place, fix=fix or "train another model.") from refusal


def _without_running(run: PlannedRun, refusal: _Crashed) -> Verdict:
    """What is left to say of a twin that takes no step: whether its adapters are why."""
    note = f"start check: skipped, {refusal.problem}"
    if run.adapter is None:
        return Verdict(run.attention, notes=(note,))
    try:
        _verdict(dataclasses.replace(run, adapter=None, policy=CheckpointingPolicy("none")))
    except ConfigError:
        return Verdict(run.attention, notes=(note,))
    raise ConfigError(
        f"these adapters do not go with the model: {refusal.problem}",
        place="--lora_target_modules",
        fix="name the attention's projections, such as q_proj k_proj v_proj o_proj.",
    ) from refusal


class TwinCheck:
    """One twin and the steps that are taken with it."""

    def __init__(self, run: PlannedRun, attention: Any) -> None:
        from accel_scale.training.start_check.rows import tiny_batch
        from accel_scale.training.start_check.twin import build_twin

        self.run, self.attention = run, attention
        base = build_twin(run.config, attention=attention.built_with, trust_remote_code=run.trust_remote_code)
        attention.switch_on(base)
        self.base: Any = base
        self.name = type(base).__name__
        self.model: Any = _with_adapter(base, run) if run.adapter is not None else base
        self.batch: TinyBatch = tiny_batch(run.rows, run.attention)
        self.logits: torch.Tensor | None = None

    def verdict(self) -> Verdict:
        own = self.own_step()
        self.refuse_leak()
        step, from_logits = self.recipe_step(own)
        untrained = self.untrained(step)
        excluded, notes = _adapters_to_leave_out(self.run, untrained, step.gradients)
        if from_logits:
            notes.append(
                f"the loss is computed from {self.name}'s own logits, which takes more memory: its head is more than "
                "one matrix product."
            )
        return Verdict(self.run.attention, from_logits, tuple(untrained), tuple(excluded), tuple(notes))

    def own_step(self) -> Step:
        """The step by the model's own loss, without checkpointing."""
        from accel_scale.training.start_check.steps import take_step
        from accel_scale.training.start_check.twin import first_line

        def own_loss(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
            output = model(**inputs, use_cache=False)
            self.logits = output.logits.detach()
            return output.loss  # type: ignore[no-any-return]

        try:
            return take_step(self.model, self.batch.inputs, own_loss)
        except Exception as error:
            raise _Crashed(
                f"{self.name} cannot take a step with {self.run.attention} attention on {_ROWS[self.run.rows]}: "
                f"{type(error).__name__}: {first_line(error)}",
                place="--attn_implementation",
            ) from error

    def refuse_leak(self) -> None:
        """Stop where a token sees the next one, or a document another one."""
        from accel_scale.training.start_check.isolation import find_leak

        assert self.logits is not None
        leak: Leak = find_leak(self.model, self.batch, self.logits)
        if leak == "ahead":
            switch = next((n for n in ("is_decoder", "causal") if getattr(self.run.config, n, None) is False), None)
            raise _AttentionRefused(
                f"{self.name} is not causal: a token sees those that follow it, which are what it should predict.",
                place="--model_name_or_path",
                fix=f'set {switch}: "{switch}": true in its config.json.' if switch else "train a causal model.",
            )
        if leak == "others" and self.run.rows in ("packed", "lanes"):
            raise _AttentionRefused(
                f"{self.name} lets packed documents see each other with {self.run.attention} attention.",
                place=self.run.packing_flag.split()[0],
            )
        if leak == "others":
            raise ConfigError(
                f"{self.name} lets the rows of a micro-batch see each other with {self.run.attention} attention.",
                place="--per_device_train_batch_size",
                fix="use 1, with gradient accumulation.",
            )

    def recipe_step(self, own: Step) -> tuple[Step, bool]:
        """The step as the recipe takes it, and whether its loss must come from the model's own logits.

        Raises:
            ConfigError: if neither way gives the model's own loss and gradients, or checkpointing changes them.
        """
        policy = _for_few_layers(self.run.policy, self.base)
        seen = []
        for from_logits in (False, True):
            add_fast_lm_head(self.base, from_logits=from_logits)
            if policy.kind != "none":
                apply_checkpointing(self.model, policy, use_reentrant=self.run.use_reentrant)
                step, why_policy = self.compared(own)
                if step is not None:
                    return step, from_logits
                apply_checkpointing(self.model, CheckpointingPolicy("none"))
            step, why = self.compared(own)
            if step is not None and policy.kind != "none":
                raise self.policy_changes_gradients(own, why_policy)
            if step is not None:
                return step, from_logits
            seen.append(why)
        raise ConfigError(
            f"the recipe's loss is not {self.name}'s own: {seen[-1]}.",
            place="start check",
            fix="train another model; this one's loss is more than cross-entropy of its logits.",
        )

    def compared(self, own: Step) -> tuple[Step | None, str]:
        """The recipe's step if it equals `own`; else None and what is different."""
        from accel_scale.training.start_check.steps import difference, take_step
        from accel_scale.training.start_check.twin import first_line

        try:
            step = take_step(self.model, self.batch.inputs, recipe_loss)
        except Exception as error:
            return None, f"{type(error).__name__}: {first_line(error)}"
        gap = difference(step, own)
        return (step, "") if gap.is_small else (None, str(gap))

    def policy_changes_gradients(self, own: Step, what: str) -> ConfigError:
        """The refusal of a checkpointing policy, naming one that leaves gradients as they are."""
        works = "none"
        for kind in ("full", "offload"):
            if kind == self.run.policy.kind or (kind == "offload" and self.run.use_reentrant):
                continue
            apply_checkpointing(self.model, CheckpointingPolicy(kind), use_reentrant=self.run.use_reentrant)
            if self.compared(own)[0] is not None:
                works = kind
                break
        return ConfigError(
            f"checkpointing policy {self.run.policy} does not leave {self.name}'s gradients as they are: {what}.",
            place="--checkpointing_policy",
            fix=f"use {works}.",
        )

    def untrained(self, step: Step) -> list[str]:
        from accel_scale.training.start_check.steps import untrained_weights

        return untrained_weights(step)


_ROWS = {"packed": "packed rows", "lanes": "packed rows", "padded": "padded rows", "stream": "rows of plain text"}


def recipe_loss(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """What both recipes call: the sum over labelled tokens ÷ their number in the global batch."""
    from accel_scale.training.loss import count_loss_tokens
    from accel_scale.training.router_loss import router_coefficient

    num_items, coefficient = count_loss_tokens(inputs["labels"]), router_coefficient(model.config)
    outputs = model(**inputs, num_items_in_batch=num_items, fast_lm_head=True, router_loss=bool(coefficient))
    return outputs.loss + coefficient * outputs.aux_loss if coefficient else outputs.loss  # type: ignore[no-any-return]


def _with_adapter(base: Any, run: PlannedRun) -> Any:
    from accel_scale.training.start_check.twin import attach_adapter, first_line

    try:
        return attach_adapter(base, run.adapter)  # type: ignore[arg-type]
    except Exception as error:
        raise ConfigError(
            f"PEFT cannot put these adapters on {type(base).__name__}: {first_line(error)}",
            place="--lora_target_modules",
            fix="name linear layers that this model has, or use --method full.",
        ) from error


def _for_few_layers(policy: CheckpointingPolicy, model: Any) -> CheckpointingPolicy:
    """`policy` with a distance that the twin's layers allow."""
    if policy.kind != "every_n":
        return policy
    from transformers.modeling_layers import GradientCheckpointingLayer

    num_layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    every = min(policy.every_n, num_layers)
    return CheckpointingPolicy("every_n", every) if every > 1 else CheckpointingPolicy("full")


def _alternatives(run: PlannedRun) -> Iterable[tuple[PlannedRun, str]]:
    for name in ("sdpa", "eager"):
        if name != run.attention:
            yield dataclasses.replace(run, attention=name), f"--attn_implementation {name}"
    if run.rows in ("packed", "lanes"):
        rows: Any = "padded" if run.rows == "packed" else "stream"
        yield dataclasses.replace(run, rows=rows), f"{run.packing_flag}, which switches packing off"


def _adapters_to_leave_out(
    run: PlannedRun, untrained: list[str], gradients: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """(module names that must get no adapter, notes)."""
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
