"""Run torchtune's unmodified fine-tuning recipe and write a report like measured_run.py does for a `Trainer`.

    python benchmarks/measured_torchtune.py report.json full_finetune_single_device.py --config c.json key=value

A step ends when torchtune logs it; its tokens are those of the batches moved to the device since the last step.
torchtune 0.6 has no tokenizer that reads a chat template, so its configuration uses `ChatTokenizer`.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from measured_run import peak_resident_bytes, reset_peak_resident_bytes, run_script

PACKED_PADDING = 0  # the value with which torchtune pads packed rows, whatever the tokenizer


class ChatTokenizer:
    """Tokenizes messages with the embedded model's template; everything not said by the assistant is masked."""

    def __init__(self, path: str, pad_token: str, max_seq_len: int) -> None:
        from tokenizers import Tokenizer

        self.tokenizer, self.max_seq_len = Tokenizer.from_file(path), max_seq_len
        self.pad_id = self.tokenizer.token_to_id(pad_token)

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Convert torchtune's sample of `messages` to `tokens` and `mask` (True for no loss)."""
        tokens: list[int] = []
        mask: list[bool] = []
        for message in sample["messages"]:
            parts = [(f"<|im_start|>{message.role}\n", True), (f"{message.text_content}<|im_end|>", message.masked)]
            for text, masked in (*parts, ("\n", True)):
                ids = self.tokenizer.encode(text).ids
                tokens += ids
                mask += [masked] * len(ids)
        return {"tokens": tokens[: self.max_seq_len], "mask": mask[: self.max_seq_len]}


def count_tokens(batch: Mapping[str, Any], pad_id: int) -> int:
    """Number of tokens in a batch without padding."""
    tokens = batch["tokens"]
    return int(((tokens != pad_id) & (tokens != PACKED_PADDING)).sum())


def add_recorder(report: dict[str, Any], pad_id: int) -> None:
    """Make the recipe of this process write its steps, logs and memory into `report`."""
    from torchtune import utils
    from torchtune.training.metric_logging import DiskLogger

    report.update(steps=[], logs=[])
    to_device: Callable[..., None] = utils.batch_to_device
    log_dict: Callable[..., None] = DiskLogger.log_dict
    seen = 0

    @functools.wraps(to_device)
    def counted(batch: Mapping[str, Any], device: Any) -> None:
        nonlocal seen
        if not seen:
            reset_peak_resident_bytes()
            report["resident_bytes_before"] = peak_resident_bytes()
        seen += count_tokens(batch, pad_id)
        to_device(batch, device)

    @functools.wraps(log_dict)
    def logged(self: Any, payload: Mapping[str, Any], step: int) -> None:
        log_dict(self, payload, step)
        report["steps"].append([step, time.perf_counter(), time.process_time()])
        report["logs"].append([step, seen, float(payload["loss"])])
        report["peak_resident_bytes"] = peak_resident_bytes()

    utils.batch_to_device = counted
    DiskLogger.log_dict = logged


def main() -> None:
    """Entry point; all arguments after the recipe's path belong to the recipe."""
    report_path, recipe, *words = sys.argv[1:]
    report: dict[str, Any] = {}
    config = json.loads(Path(words[words.index("--config") + 1]).read_text())  # JSON is YAML
    tokenizer = ChatTokenizer(**{key: value for key, value in config["tokenizer"].items() if key != "_component_"})
    add_recorder(report, tokenizer.pad_id)
    run_script(recipe, words)
    if not report["logs"]:
        raise RuntimeError(f"{recipe} logged no step.")
    Path(report_path).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
