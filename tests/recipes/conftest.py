"""Runs the recipe in this process on a real 260K-parameter model and returns its summary."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Recipe = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def process_as_found() -> Iterator[None]:
    """Undoes what a finished recipe leaves behind: quieter loggers, Accelerate's state, bitsandbytes' table.

    Accelerate refuses a second precision in one process. The table of 32-bit parameters is keyed by position and
    ``id()``, so it would affect optimizers of models made later.
    """
    levels = {name: logging.getLogger(name).level for name in list(logging.root.manager.loggerDict)}
    yield
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    if "bitsandbytes" in sys.modules:
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()


@pytest.fixture(scope="session")
def sft_module(repository: Path) -> Any:
    spec = importlib.util.spec_from_file_location("recipes_sft", repository / "recipes" / "sft.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pretrain_module(repository: Path) -> Any:
    spec = importlib.util.spec_from_file_location("recipes_pretrain", repository / "recipes" / "pretrain.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small_gsm8k(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 48 shortest problems: quick, but still of different lengths."""
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines()
    path = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    path.write_text("\n".join(sorted(lines, key=len)[:48]) + "\n")
    return path


@pytest.fixture
def sft(sft_module: Any, shared_data: Path, small_gsm8k: Path, tmp_path: Path) -> Recipe:
    """``sft("--method lora", …)``: runs the recipe and returns its summary, with the output folder in ``out``."""
    count = 0

    def run(
        *flags: str, data: Path | str = small_gsm8k, columns: bool = True, out: Path | None = None
    ) -> dict[str, Any]:
        nonlocal count
        count += 1
        out = out or tmp_path / f"out{count}"
        argv = ["--model_name_or_path", str(shared_data / "stories260k"), "--dataset_name", str(data)]
        argv += ["--columns", "prompt=question", "completion=answer"] if columns else []
        argv += ["--output_dir", str(out), "--max_length", "256", "--per_device_train_batch_size", "2"]
        argv += ["--logging_steps", "1", "--save_strategy", "no", "--precision", "fp32"]
        argv += [part for flag in flags for part in flag.split()]
        if not any(part.startswith(("--max_steps", "--num_train_epochs")) for part in argv):
            argv += ["--max_steps", "2"]
        summary = sft_module.main(argv)
        assert json.loads((out / "run_summary.json").read_text())["losses"] == summary["losses"]
        return {**summary, "out": out}

    return run
