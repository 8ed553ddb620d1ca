"""Request and result of the start check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig

    from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
    from accel_scale.start_check.rows import RowKind

# What the recipe's loss is computed from: last hidden states, with the last layer for labelled tokens only or for all
# tokens, or the model's own logits.
Head = Literal["labelled", "all", "logits"]


@dataclass(frozen=True)
class PlannedRun:
    """The run to be checked.

    Args:
        config: Configuration of the model that will be loaded.
        attention: Attention chosen by `resolve_attention`.
        attention_given: Whether the user chose it; otherwise it may be replaced by another one.
        rows: Kind of the recipe's rows.
        policy: Activation checkpointing policy.
        use_reentrant: Whether checkpointing is reentrant.
        adapter: PEFT's configuration; None if the weights themselves are trained.
        trust_remote_code: Whether the model's own code may run.
        router_loss: Weight of the router's auxiliary loss if set by the trainer; None keeps the configuration's.
        packing_flag: Flag that switches packing off in this recipe.
        log_probs: Whether the loss is computed from log-probabilities by TRL's head, as for preference pairs.
        rewards: Whether it is a reward model, whose loss depends on the scores of two rows.
        images: Whether rows have images; the model's vision parts are not checked.
        targets_given: Whether the user chose the modules that get adapters.
    """

    config: PreTrainedConfig
    attention: str
    rows: RowKind
    policy: CheckpointingPolicy
    attention_given: bool = False
    use_reentrant: bool = False
    adapter: PeftConfig | None = None
    trust_remote_code: bool = False
    router_loss: float | None = None
    packing_flag: str = "--packing false"
    targets_given: bool = False
    log_probs: bool = False
    rewards: bool = False
    images: bool = False

    @property
    def packs(self) -> bool:
        """True if rows hold several documents, which must not see each other."""
        return self.rows in ("packed", "lanes")


@dataclass(frozen=True)
class Verdict:
    """Result of the check: what the run must do differently, and notes for the user.

    Attributes:
        attention: The implementation to load the model with.
        loss_from_logits: Whether the loss must use the model's own logits because its head is more than a product.
        skips_unlabelled: Whether the last layer may be computed for labelled tokens only.
        untrained: Names in the twin of trainable weights that no gradient reaches.
        exclude_modules: Names of modules whose adapters would never train.
        notes: Notes for the user, one line each.
        use_reentrant: Whether activation checkpointing must be reentrant.
        adapter: PEFT's configuration without modules that would not train; None if the weights are trained.
    """

    attention: str
    loss_from_logits: bool = False
    skips_unlabelled: bool = False
    untrained: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    use_reentrant: bool = False
    adapter: PeftConfig | None = None


class PolicyRefused(ConfigError):
    """Raised if activation checkpointing with this policy changes the model's gradients."""


class AttentionRefused(ConfigError):
    """The model cannot be trained with this attention, but another may work. `fix` applies if none does."""


class Crashed(AttentionRefused):
    """The twin does not run with this attention. If it runs with none, shrinking may be the cause."""
