"""The stages of `benchmarks/gpu_check.py`, most informative first, with a module for each subject."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: Name on the command line.
        title: Its heading on the page.
        function: Its function as ``module:function`` of this package, which takes a `box.Cases`.
        seconds: Time limit.
        num_gpus: Number of GPUs it needs, or of processes on the CPU.
    """

    name: str
    title: str
    function: str
    seconds: float
    num_gpus: int = 1

    def load(self) -> Callable[[Any], None]:
        """Load the stage's function; this imports torch."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"gpu_stages.{module}"), name)


STAGES = (
    Stage("kernels", "What is chosen here", "machine:kernels", 60.0),
    Stage("numerics", "Attention and loss beside fp32 and each document alone", "numerics:numerics", 90.0),
    Stage("main_job", "The main job beside the CPU's", "training:main_job", 150.0),
    Stage("methods", "Methods × checkpointing, predicted and measured", "training:methods", 180.0),
    Stage("speed", "Speed beside TRL's script", "speed:speed", 150.0),
    Stage("planner", "Planner beside whole steps", "planner:planner", 150.0),
    Stage("out_of_memory", "Memory that runs out", "recovery:out_of_memory", 150.0),
    Stage("resume", "Saved, killed, resumed", "recovery:resume", 210.0),
    Stage("recipes", "Every recipe's command", "commands:recipes", 210.0),
    Stage("launches", "Every launch file with one process", "commands:alone", 240.0),
    Stage("cards", "QLoRA of an 8B model in the memory of smaller cards", "commands:cards", 240.0),
    Stage("precisions", "Precisions beside fp32", "variants:precisions", 210.0),
    Stage("optimizers", "Optimizers beside AdamW", "variants:optimizers", 120.0),
    Stage("merge", "Adapters merged", "merging:merge", 120.0),
    Stage("hang", "A rank that hangs or dies", "many:hang", 180.0, num_gpus=2),
    Stage("parity", "Every launch file trains the same model", "many:parity", 540.0, num_gpus=2),
)
