"""Training methods: which weights are trained, and how the base model is stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodFacts:
    """One value of ``--method``.

    Attributes:
        trains_adapters: Whether LoRA adapters are trained on a frozen base; otherwise every weight is trained.
        quantises_base: Whether the frozen base is stored in 4 bits (NF4).
    """

    trains_adapters: bool
    quantises_base: bool

    @property
    def trl_flags(self) -> dict[str, bool]:
        """The equivalent flags of TRL's `ModelConfig`."""
        return {"use_peft": self.trains_adapters, **({"load_in_4bit": True} if self.quantises_base else {})}


METHOD_FACTS: dict[str, MethodFacts] = {
    "full": MethodFacts(trains_adapters=False, quantises_base=False),
    "lora": MethodFacts(trains_adapters=True, quantises_base=False),
    "qlora": MethodFacts(trains_adapters=True, quantises_base=True),
}
