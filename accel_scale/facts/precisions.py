"""Every precision: dtypes of weights and products, and its name in a launch file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrecisionFacts:
    """One precision of ``--precision``.

    Attributes:
        weights: Dtype of weights that are trained, hence of their gradients and optimizer states.
        autocast: Dtype of products under autocast; None: without autocast.
        launch: `mixed_precision` of a launch file; bf16_true is no mixed precision at all, and under a launcher's bf16
            FSDP2 would raise its weights to fp32 again.
        scales_loss: Whether the loss is scaled dynamically.
        is_fp8: Whether linear layers multiply in fp8.
    """

    weights: str
    autocast: str | None
    launch: str
    scales_loss: bool = False
    is_fp8: bool = False

    @property
    def compute(self) -> str:
        """Dtype of products, but for those in fp8."""
        return self.autocast or self.weights

    @property
    def needs_bf16(self) -> bool:
        """Whether the device must compute in bf16."""
        return self.compute == "bfloat16"


PRECISION_FACTS: dict[str, PrecisionFacts] = {
    "fp32": PrecisionFacts("float32", None, "no"),
    "fp16": PrecisionFacts("float32", "float16", "fp16", scales_loss=True),
    "bf16": PrecisionFacts("float32", "bfloat16", "bf16"),
    "bf16_true": PrecisionFacts("bfloat16", None, "no"),
    "fp8": PrecisionFacts("float32", "bfloat16", "fp8", is_fp8=True),
}
# What other programs have and this one refuses, with the reason.
REFUSED_PRECISIONS = {
    "fp16_true": "weights in fp16 lose updates below 1/2048 of them and overflow at 65,504, and loss scaling cannot "
    "unscale their gradients. Use fp16 (mixed), or bf16_true for 16-bit weights",
    "transformer_engine": "fp8 is computed by torchao, whose products go through torch.compile, FSDP2 and every "
    "checkpoint here. Use fp8",
}
# Dtypes that gradients can be reduced in, by the names of ``--reduce_dtype``.
REDUCE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
