"""The start check's request and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig

    from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
    from accel_scale.start_check.rows import RowKind


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
        router_loss: Weight of the router's auxiliary loss where the trainer sets it; None: as the configuration says.
        packing_flag: What switches packing off in this recipe.
        log_probs: Whether the loss is made of log-probabilities by TRL's head, as that of pairs is.
        rewards: Whether it is a reward model, whose loss is of the scores of two rows.
        images: Whether rows have images; the parts of the model that see are no part of the check.
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
    router_loss: float | None = None
    packing_flag: str = "--packing false"
    targets_given: bool = False
    log_probs: bool = False
    rewards: bool = False
    images: bool = False

    @property
    def packs(self) -> bool:
        """Whether rows hold several documents, which must not see each other."""
        return self.rows in ("packed", "lanes")


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


class PolicyRefused(ConfigError):
    """Activation checkpointing by this policy changes the model's gradients."""


class AttentionRefused(ConfigError):
    """The model cannot be trained with this attention; another one may do. `fix` is for where none does."""


class Crashed(AttentionRefused):
    """The twin does not run with this attention. Where it runs with none, that may be the shrinking's fault."""
