"""Training precisions: dtypes of weights and matrix products, and the name in a launch file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrecisionFacts:
    """One precision of ``--precision``.

    Attributes:
        weights: Dtype of trained weights, and so of their gradients and optimizer states.
        autocast: Dtype of matrix products under autocast; None without autocast.
        launch: `mixed_precision` in a launch file. bf16_true is not mixed precision, and if the launch file said bf16,
            FSDP2 would cast its weights back to fp32.
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
        """Dtype of matrix products, except those in fp8."""
        return self.autocast or self.weights

    @property
    def needs_bf16(self) -> bool:
        """True if the device must compute in bf16."""
        return self.compute == "bfloat16"


PRECISION_FACTS: dict[str, PrecisionFacts] = {
    "fp32": PrecisionFacts("float32", None, "no"),
    "fp16": PrecisionFacts("float32", "float16", "fp16", scales_loss=True),
    "bf16": PrecisionFacts("float32", "bfloat16", "bf16"),
    "bf16_true": PrecisionFacts("bfloat16", None, "no"),
    "fp8": PrecisionFacts("float32", "bfloat16", "fp8", is_fp8=True),
}
# Precisions that other programs offer and this project refuses, with the reason.
REFUSED_PRECISIONS = {
    "fp16_true": "weights in fp16 lose updates below 1/2048 of them and overflow at 65,504, and loss scaling cannot "
    "unscale their gradients. Use fp16 (mixed), or bf16_true for 16-bit weights",
    "transformer_engine": "fp8 is computed by torchao, whose products go through torch.compile, FSDP2 and every "
    "checkpoint here. Use fp8",
}
# Dtypes for reducing gradients, by the values of ``--reduce_dtype``.
REDUCE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
