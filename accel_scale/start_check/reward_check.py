"""The checks of a reward model's twin: its scores of padded rows, its loss, and its trainable head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.start_check.plan import AttentionRefused
from accel_scale.start_check.twin_check import TwinCheck

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from accel_scale.start_check.plan import Head
    from accel_scale.start_check.steps import LossOf, Step


class RewardTwinCheck(TwinCheck):
    """`TwinCheck` for a model that gives each row one score; two rows are a pair, the better one first."""

    def take_own_step(self) -> Step:
        """Take a step with the scores of padded rows, after checking that they equal those of each row alone.

        This finds typical errors of reward models: a score read at a padding token, or rows that see each other.
        """
        from accel_scale.start_check.steps import difference, take_step

        inputs = self.batch.inputs
        alone = take_step(self.model, inputs, loss_of_rows_alone)
        padded = take_step(self.model, inputs, lambda model, batch: reward_loss(model.eval(), batch))
        gap = difference(padded, alone)
        if not gap.is_small:
            raise AttentionRefused(
                f"{self.name} scores padded rows otherwise than each row by itself, with {self.run.attention} "
                f"attention: {gap}.",
                place="--attn_implementation",
            )
        return take_step(self.model, inputs, reward_loss)

    def refuse_leak(self) -> None:
        """Nothing to check: rows that see each other are already refused, and a score may depend on its whole row."""

    @property
    def heads(self) -> tuple[Head, ...]:
        return ("all",)

    def add_head(self, head: Head) -> None:
        """Nothing to add: TRL's loss uses the model's own scores."""

    @property
    def loss(self) -> LossOf:
        return reward_loss

    def not_its_own(self, what: str) -> ConfigError:
        return ConfigError(
            f"the same step of {self.name} comes out differently each time: {what}.",
            place="start check",
            fix="train another model.",
        )

    def untrained(self, step: Step) -> list[str]:
        """Untrained weights, after checking that the score head is not among them."""
        found = super().untrained(step)
        heads = [name for name in step.gradients if ".score." in f".{name}" or ".classifier." in f".{name}"]
        if not set(heads) - set(found):
            raise ConfigError(
                f"no gradient reaches {self.name}'s head of scores, which begins with random weights.",
                place="--lora_modules_to_save" if self.run.adapter is not None else "--model_name_or_path",
                fix="train another model.",
            )
        return found


def reward_loss(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """TRL's loss: mean negative log-probability that the first half of the rows scores higher than the second."""
    rows = {name: value for name, value in inputs.items() if name != "labels"}
    return _of_scores(model(**rows, use_cache=False).logits.squeeze(-1))


def loss_of_rows_alone(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The reward loss, with each row in its own forward pass without padding."""
    import torch

    model.eval()
    rows = [ids[mask.bool()][None] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    scores = [
        model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits.view(1) for row in rows
    ]
    return _of_scores(torch.cat(scores))


def _of_scores(scores: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import logsigmoid

    better, worse = scores.chunk(2)
    return -logsigmoid(better - worse).mean()
