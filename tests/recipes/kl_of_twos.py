"""recipes/kto.py with a KL term that pairs rows two by two for any micro-batch, as two ranks with two rows each do."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from trl import KTOTrainer

prepare = KTOTrainer._prepare_dataset


def in_twos(trainer: KTOTrainer, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
    size, args.per_device_train_batch_size = args.per_device_train_batch_size, 2
    try:
        return prepare(trainer, dataset, processing_class, args, dataset_name)
    finally:
        args.per_device_train_batch_size = size


KTOTrainer._prepare_dataset = in_twos  # type: ignore[method-assign]
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "kto.py"), run_name="__main__")
