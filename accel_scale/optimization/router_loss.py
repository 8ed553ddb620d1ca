"""The auxiliary loss of a mixture of experts, as computed by the model for a micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


def router_coefficient(config: PretrainedConfig) -> float:
    """The weight of the auxiliary loss requested by a configuration's ``output_router_logits``; 0 if there is none."""
    text = config.get_text_config()
    if not getattr(text, "output_router_logits", False):
        return 0.0
    names = ("router_aux_loss_coef", "aux_loss_coef")
    held = [getattr(text, name, None) for name in names]
    held.append(getattr(getattr(text, "ffn_config", None), "moe_loss_weight", None))  # DBRX
    return float(next((value for value in held if value is not None), 0.0))


def forward_with_router(forward: Any, backbone: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Run one `forward` of a model; returns (final hidden states, auxiliary loss), the latter computed by the model.

    The model decides which experts, how many, and with which mask: the names differ from family to family. Its logits
    are those of the last token only, and are not used.
    """
    hidden: list[torch.Tensor] = []
    handle = backbone.register_forward_hook(lambda module, inputs, output: hidden.append(output.last_hidden_state))
    try:
        outputs = forward(*args, output_router_logits=True, logits_to_keep=1, **kwargs)
    finally:
        handle.remove()
    return hidden[0], outputs.aux_loss


class RouterLoss:
    """Adds the auxiliary loss to a step's micro-batch losses: its mean over them and over ranks, × coefficient.

    For one micro-batch on one rank that is ``model(labels=…).loss``. Accumulation does not increase its weight.
    """

    def __init__(self, accelerator: Any, coefficient: float) -> None:
        self._accelerator, self.coefficient = accelerator, coefficient
        self._sum: Any = 0.0
        self._count = 0

    @classmethod
    def of(cls, accelerator: Any, config: PretrainedConfig) -> RouterLoss | None:
        """Create from a configuration; None if `config` does not ask for it."""
        coefficient = router_coefficient(config)
        return cls(accelerator, coefficient) if coefficient else None

    def weighted(self, aux_loss: torch.Tensor, num_micro_batches: int) -> torch.Tensor:
        """The term to add to a micro-batch's share of the global loss, summed over micro-batches and ranks."""
        self._sum, self._count = self._sum + aux_loss.detach(), self._count + 1
        return aux_loss * (self.coefficient / (num_micro_batches * self._accelerator.num_processes))

    def mean(self) -> float:
        """Mean auxiliary loss, without its coefficient, since the last call; every rank must call it."""
        import torch

        of_this_rank = torch.as_tensor(self._sum / max(1, self._count), device=self._accelerator.device)
        self._sum, self._count = 0.0, 0
        return float(self._accelerator.reduce(of_this_rank, "mean"))


def refuse_shared_model(config: PretrainedConfig, *, is_plain: bool) -> None:
    """Refuse the auxiliary loss if ranks share a row's computation: its means are not sums over parts of a row.

    Raises:
        ConfigError: naming the setting that disables it.
    """
    if not is_plain and router_coefficient(config):
        raise ConfigError(
            f"{config.model_type}'s auxiliary loss, which its config.json asks for, is not divided among ranks.",
            place="--tp_size, --pp_size and --sp_size",
            fix="leave them out, or set output_router_logits to false in config.json.",
        )
