"""DDP's bucket size: times steps of a model of a given size for several bucket sizes and recommends a flag.

    python benchmarks/ddp_buckets.py --num_params 30M --processes 2
    python benchmarks/ddp_buckets.py --num_params 30M --processes 2 --zero 2    # DeepSpeed's, in zero_buckets.py
    torchrun --nproc_per_node 8 benchmarks/ddp_buckets.py --model meta-llama/Llama-3.2-1B

A bucket is reduced as soon as all its gradients are ready. Small buckets start early but each pays a latency; large
ones wait. If backward is long compared to communication, small buckets hide it; if messages are expensive, large ones
save time (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 5).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from bucket_steps import ROUNDS, SweepSettings, low, made_model, noise, slowest_times

from accel_scale.cli.comm_measure import num_processes, on_processes
from accel_scale.errors import ConfigError
from accel_scale.launching.local_processes import progress_bar
from accel_scale.planning.search.request_words import whole
from accel_scale.planning.search.requests import amount
from accel_scale.reporting.comm_tables import format_short

DEFAULT_CAP_MB = 25.0
# A flag is recommended if it saves more than this.
WORTH = 0.03


def sweep_buckets(place: Any, settings: SweepSettings) -> dict[str, Any]:
    """Seconds of forward and backward under DDP for each bucket size; collective.

    Args:
        place: A `launching.local_processes.Place`.

    Returns:
        ``rows`` with ``bucket_cap_mb``, ``num_buckets``, ``seconds`` (a low quantile, the slowest rank of each step),
        ``median_seconds``, ``exposed_seconds`` (extra time of a step compared to one without communication) and
        ``noise`` (relative difference between rounds of one size), and ``compute_seconds``, ``model``, ``backend``.
    """
    import torch

    model = made_model(settings).to(place.device)
    torch.manual_seed(place.rank)
    batch = torch.randint(0, 256, (settings.rows, settings.length), device=place.device)
    times: dict[float, list[float]] = {cap: [] for cap in settings.caps}
    buckets: dict[float, int] = {}
    alone: list[float] = []
    steps = -(-settings.repeats // ROUNDS)
    with progress_bar(place, ROUNDS * (1 + len(settings.caps)), "measuring") as bar:
        for _ in range(ROUNDS):
            alone += _step_times(model, batch, steps, place.device)
            bar.update()
            for cap in settings.caps:
                ddp = _wrapped(model, cap, place)
                times[cap] += _step_times(ddp, batch, steps, place.device)
                buckets[cap] = _num_buckets(ddp)
                del ddp
                bar.update()
    compute = low(alone)
    rows = [
        {
            "bucket_cap_mb": cap,
            "num_buckets": buckets[cap],
            "seconds": low(found),
            "median_seconds": sorted(found)[len(found) // 2],
            "exposed_seconds": max(0.0, low(found) - compute),
            "noise": noise(found, steps),
        }
        for cap, found in times.items()
    ]
    count = sum(p.numel() for p in model.parameters())
    name = settings.model or "Llama-like"
    about = f"{name}, {count / 1e6:.1f}M parameters"
    return {"rows": rows, "compute_seconds": compute, "model": about, "backend": place.backend}


def noise_of(rows: Sequence[dict[str, Any]]) -> float:
    """Relative difference between rounds of one size; smaller differences between sizes are not significant."""
    return max(row["noise"] for row in rows)


def best_cap(rows: Sequence[dict[str, Any]]) -> float:
    """The fastest size, or torch's default if it was measured and is slower by no more than `WORTH` or the noise."""
    fastest = min(rows, key=lambda row: row["seconds"])
    default = next((row for row in rows if row["bucket_cap_mb"] == DEFAULT_CAP_MB), None)
    if default is not None and default["seconds"] <= fastest["seconds"] * (1 + max(WORTH, noise_of(rows))):
        return DEFAULT_CAP_MB
    return float(fastest["bucket_cap_mb"])


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """One line: the flag to use, if any, and whether the differences are more than noise."""
    seconds = {row["bucket_cap_mb"]: row["seconds"] for row in rows}
    best, fastest, noise = best_cap(rows), min(seconds, key=lambda cap: seconds[cap]), noise_of(rows)
    apart = max(seconds.values()) / seconds[fastest] - 1
    if len(seconds) > 1 and apart <= noise:
        return (
            f"noise: the sizes differ by {apart:.1%} at most, rounds of one size by up to {noise:.1%}. "
            "Leave the flag out, or measure on a quiet machine with more --repeats."
        )
    default = seconds.get(DEFAULT_CAP_MB)
    if best == DEFAULT_CAP_MB and len(seconds) > 1 and default is not None:
        gain = default / seconds[fastest] - 1
        if gain > WORTH:
            within = f"within the noise of {noise:.1%}: leave the flag out."
            return f"{fastest:g} MB is {gain:.1%} faster than torch's own 25, {within}"
        return f"no other size is faster than torch's own 25 MB by more than {WORTH:.0%}: leave the flag out."
    faster = f", {default / seconds[best] - 1:.0%} faster than torch's own 25 (noise {noise:.1%})" if default else ""
    return f"use --ddp_bucket_cap_mb {best:g}{faster}"


def _wrapped(model: Any, cap: float, place: Any) -> Any:
    import torch

    devices = [place.device.index] if place.device.type == "cuda" else None
    return torch.nn.parallel.DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=cap)


def _num_buckets(ddp: Any) -> int:
    """Number of buckets logged by DDP after it rebuilt them in the order of the first backward pass (torch 2.13)."""
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    return len([size for size in str(sizes).split(",") if size.strip()])


def _step_times(model: Any, batch: Any, steps: int, device: Any) -> list[float]:
    """Seconds of `steps` forward and backward passes, each on the slowest rank."""

    def passes() -> None:
        model(input_ids=batch, labels=batch).loss.backward()

    return slowest_times(passes, steps, device, before=lambda: model.zero_grad(set_to_none=True))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the catalogue, a folder or a config.json")
    parser.add_argument("--num_params", metavar="N", help="a Llama of about this size, e.g. 30M")
    parser.add_argument("--bucket_caps", nargs="+", metavar="MB", default=["1", "5", "10", "25", "50", "100"])
    parser.add_argument("--per_device_train_batch_size", metavar="N", default="1", help="rows of a step")
    parser.add_argument("--max_length", metavar="TOKENS", default="128", help="of a row (default: 128)")
    parser.add_argument("--processes", metavar="N", help="to start here (default: one for each GPU, or 2 on the CPU)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where each process has a GPU")
    parser.add_argument("--repeats", metavar="N", default="40", help="steps of each size (default: 40)")
    parser.add_argument("--zero", choices=("2", "3"), help="time whole steps of this ZeRO stage instead of DDP's")
    parser.add_argument("--buckets", nargs="+", metavar="ELEMENTS", help="with --zero: sizes (default: 100K to 500M)")
    parser.add_argument("--write", action="store_true", help="with --zero: keep the table in benchmarks/results")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args(words)


def run(args: argparse.Namespace) -> None:
    """Time DDP's steps by bucket size and print which flag to use."""
    if (args.model is None) == (args.num_params is None):
        problem = "nothing says" if args.model is None else "--model and --num_params both say"
        fix = "give --model or --num_params, one of them."
        raise ConfigError(f"{problem} which model.", place="command line", fix=fix)
    alone = next((name for name in ("buckets", "write") if getattr(args, name)), None)
    if alone is not None and not args.zero:
        raise ConfigError("does nothing for DDP.", place=f"--{alone}", fix="add --zero 2 or 3, or remove it.")
    caps = [amount(text, "--bucket_caps") for text in args.bucket_caps]
    settings = SweepSettings(
        model=args.model,
        num_params=amount(args.num_params, "--num_params"),
        caps=tuple(float(cap) for cap in caps if cap is not None),
        rows=whole(args.per_device_train_batch_size, "--per_device_train_batch_size"),
        length=whole(args.max_length, "--max_length"),
        repeats=whole(args.repeats, "--repeats"),
    )
    processes = num_processes(args)
    settings.check(processes)
    if args.zero:
        _run_zero(args, settings, processes)
        return
    found = on_processes(args, sweep_buckets, processes, settings)
    if found is None:
        return  # another rank prints
    best = best_cap(found["rows"])
    rows = [{**row, "best": row["bucket_cap_mb"] == best} for row in found["rows"]]
    if args.json:
        print(json.dumps({**found, "rows": rows, "best": best}, indent=2))
        return
    print(f"DDP on {processes} processes ({found['backend']}), {found['model']}, {settings.rows} × {settings.length}")
    print(f"forward and backward without communication: {format_short(found['compute_seconds'])}")
    print(f"{'--ddp_bucket_cap_mb':>19} {'buckets':>8} {'step':>10} {'median':>10} {'exposed':>10}")
    for row in rows:
        times = (format_short(row[f"{name}seconds"]) for name in ("", "median_", "exposed_"))
        print(f"{row['bucket_cap_mb']:>19g} {row['num_buckets']:>8} {' '.join(f'{text:>10}' for text in times)}")
    print(conclusion(rows))


def _run_zero(args: argparse.Namespace, settings: SweepSettings, processes: int) -> None:
    import zero_buckets

    sizes = [round(amount(text, "--buckets") or 0) for text in args.buckets or zero_buckets.DEFAULT_SIZES]
    found = on_processes(args, zero_buckets.sweep_zero, processes, settings, int(args.zero), sizes)
    if found is None:
        return  # another rank prints
    model = settings.model or f"a Llama-like model of {settings.count / 1e6:.0f}M parameters"
    about = f"{processes} processes: {model}, {settings.rows} × {settings.length} tokens each"
    zero_buckets.report(found, int(args.zero), about, write=args.write)


if __name__ == "__main__":
    try:
        run(parse())
    except ConfigError as error:
        sys.exit(f"ddp_buckets.py: error: {error}")
