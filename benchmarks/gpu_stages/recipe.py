"""Runs recipes/sft.py repeatedly in a stage's own process, so that imports are only needed once."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def sft_module() -> Any:
    """The recipe as a module, registered by name because dataclasses look it up."""
    name = "gpu_check_sft"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / "recipes" / "sft.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def words(flags: dict[str, object]) -> list[str]:
    """``--name value`` words for all flags."""
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def train(out: Path, **flags: object) -> dict[str, Any]:
    """Run once; returns the content of `run_summary.json`. Memory is measured from the start of this run."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    given: dict[str, object] = {
        "output_dir": out, "save_strategy": "no", "logging_steps": 1, "verify_first_checkpoint": False,
    }  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)  # left by an interrupted start
    try:
        summary = sft_module().main(words({**given, **flags}))
    finally:
        # bitsandbytes keeps a table of 32-bit parameters by id(), which would reach the next run's weights.
        if "bitsandbytes" in sys.modules:
            sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
    assert summary is not None
    return dict(summary)


def furthest(losses: list[float], expected: list[float]) -> float:
    """Largest relative difference between the losses of a step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
