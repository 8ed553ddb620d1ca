"""DeepSpeed's bucket size: times steps of ZeRO-2 or ZeRO-3 for several sizes, for `ddp_buckets.py --zero`.

python benchmarks/ddp_buckets.py --zero 2 --num_params 30M --processes 2
python benchmarks/ddp_buckets.py --zero 3 --num_params 30M --processes 2 --write    # results/zero_buckets.md
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucket_steps import ROUNDS, SweepSettings, low, made_model, noise, slowest_times

from accel_scale.facts.zero_buffers import DEEPSPEED_BUFFERS, TUNED_BUFFERS, ZeroBuffers
from accel_scale.reporting.comm_tables import format_short

DATA, PAGE = (Path(__file__).parent / "results" / f"zero_buckets.{kind}" for kind in ("json", "md"))
DEFAULT_SIZES = ("100K", "1M", "10M", "100M", "500M")


@dataclass(frozen=True)
class Timed:
    """Measurements of one bucket size.

    Attributes:
        size: Value of ``reduce_bucket_size``, in elements.
        overlap: Value of ``overlap_comm``.
        seconds: Step time: a low quantile, on the slowest rank.
        noise: Relative difference between rounds of this size.
    """

    size: int
    overlap: bool
    seconds: float
    noise: float

    @property
    def label(self) -> str:
        """Label for tables."""
        return f"{self.size:,}{', overlapped' if self.overlap else ''}"


def sweep_zero(place: Any, settings: SweepSettings, stage: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Time whole steps for each bucket size, with and without overlap; collective.

    Args:
        place: A `launching.local_processes.Place`.
    """
    import logging

    import torch

    os.environ.setdefault("DS_ACCELERATOR", place.device.type)
    logging.disable(logging.WARNING)
    torch.manual_seed(place.rank)
    batch = torch.randint(0, 256, (settings.rows, settings.length), device=place.device)
    asked = [(size, overlap) for size in sizes for overlap in (False, True)]
    times: dict[tuple[int, bool], list[float]] = {key: [] for key in asked}
    steps = -(-settings.repeats // ROUNDS)
    for _ in range(ROUNDS):
        for size, overlap in asked:
            engine = _engine(settings, stage, size, overlap)
            times[size, overlap] += slowest_times(lambda e=engine: _step(e, batch), steps, place.device)
            engine.destroy()
            del engine
    return [
        {"size": size, "overlap": overlap, "seconds": low(found), "noise": noise(found, steps)}
        for (size, overlap), found in times.items()
    ]


def _engine(settings: SweepSettings, stage: int, size: int, overlap: bool) -> Any:
    import deepspeed
    import torch

    model = made_model(settings)
    keys = {"stage": stage, "reduce_bucket_size": size, "overlap_comm": overlap}
    config = {"train_micro_batch_size_per_gpu": settings.rows, "zero_optimization": keys}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine: Any, batch: Any) -> None:
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()


def conclusion(stage: int, rows: Sequence[Timed]) -> str:
    """One line: the size to use, if any, and whether the differences are more than noise."""
    usual = ZeroBuffers(overlap=stage == 3)
    fastest, slowest = (pick(rows, key=lambda row: row.seconds) for pick in (min, max))
    noise, apart = max(row.noise for row in rows), slowest.seconds / fastest.seconds - 1
    if apart <= noise:
        return f"noise: the sizes differ by {apart:.1%} at most, rounds of one size by up to {noise:.1%}."
    default = next(
        (row for row in rows if (row.size, row.overlap) == (usual.reduce_bucket, bool(usual.overlap))), None
    )
    if default is None:
        return f"{fastest.label} is the fastest, {slowest.label} {apart:.0%} slower (noise {noise:.1%})."
    gain = default.seconds / fastest.seconds - 1
    if gain <= max(noise, 0.03):
        worst = f"; {slowest.label} is {slowest.seconds / default.seconds - 1:.0%} slower"
        return f"no size is faster than DeepSpeed's own by more than the noise of {noise:.1%}{worst}."
    return f"{fastest.label} is {gain:.0%} faster than DeepSpeed's own (noise {noise:.1%})."


def report(found: Sequence[dict[str, Any]], stage: int, about: str, *, write: bool) -> None:
    """Print the table; with `write`, save it among the results."""
    rows = [Timed(**row) for row in found]
    print(f"ZeRO-{stage} on {about}")
    print("\n".join(_lines(rows)))
    print(conclusion(stage, rows))
    if write:
        kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {}
        kept[f"zero{stage}"] = {"about": about, "rows": list(found)}
        DATA.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(kept), encoding="utf-8")


def _lines(rows: Sequence[Timed]) -> list[str]:
    return [
        f"{row.label:>24} {format_short(row.seconds):>10} {1 / row.seconds:>8.2f}/s ±{row.noise:.1%}" for row in rows
    ]


def page(kept: dict[str, Any]) -> str:
    """Text of benchmarks/results/zero_buckets.md."""
    sections = [
        "# DeepSpeed's bucket sizes\n",
        "Whole steps of a model in fp32 by `reduce_bucket_size` (elements) and `overlap_comm`. Times are the lowest "
        "fifth's of three rounds over all sizes, on the slower rank; noise is how far the rounds of a size are apart. "
        f"DeepSpeed's own size is {DEEPSPEED_BUFFERS.reduce_bucket:,.0f}, with overlap under ZeRO-3 only; "
        f"`accelerate_configs/zero2_tuned.yaml` and `zero3_tuned.yaml` have {TUNED_BUFFERS.reduce_bucket:,.0f}, with "
        "overlap.\n",
    ]
    for name, measured in kept.items():
        stage, rows = int(name[-1]), [Timed(**row) for row in measured["rows"]]
        sections += [
            f"## ZeRO-{stage}\n",
            f"{measured['about']}.\n",
            "| reduce_bucket_size | step | steps/s | noise |\n|---|---|---|---|",
            *(
                f"| {row.label} | {format_short(row.seconds)} | {1 / row.seconds:.2f} | {row.noise:.1%} |"
                for row in rows
            ),
            f"\n{conclusion(stage, rows)}\n",
        ]
    sections.append(
        "Written by `python benchmarks/ddp_buckets.py --zero 2 --num_params 10M --processes 2 --write`, and the same "
        "with `--zero 3`.\n"
    )
    return "\n".join(sections)
