"""DDP's bucket size: times steps of a model of the wanted size for several sizes, and says which flag to use.

    python benchmarks/ddp_buckets.py --num_params 30M --processes 2
    python benchmarks/ddp_buckets.py --num_params 30M --processes 2 --zero 2    # DeepSpeed's, in zero_buckets.py
    torchrun --nproc_per_node 8 benchmarks/ddp_buckets.py --model meta-llama/Llama-3.2-1B

A bucket is reduced as soon as all of its gradients are there. Small buckets begin early and pay a latency each; large
ones wait: where backward is long beside communication small ones hide it, where messages are expensive large ones
save it (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 5).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accel_scale.cli.comm_measure import num_processes, on_processes
from accel_scale.errors import ConfigError
from accel_scale.launching.local_processes import progress_bar
from accel_scale.planning.search.request_words import whole
from accel_scale.planning.search.requests import amount
from accel_scale.reporting.comm_tables import format_short

DEFAULT_CAP_MB = 25.0
# A flag is worth giving if it saves more than this.
WORTH = 0.03
# Of models by size; small ones would be nothing but embedding.
_VOCABULARY, _SMALL_VOCABULARY, _SMALL = 32768, 2048, 20e6
# Weights, gradients and DDP's buckets in fp32; activations and the rest.
_BYTES_PER_PARAM = 12
_SHARE_OF_MEMORY = 0.8
# Times are taken in rounds over all sizes, so that what else the machine does falls on all of them.
ROUNDS = 3
_WARM_UP = 2


@dataclass(frozen=True)
class SweepSettings:
    """What to time.

    Attributes:
        model: A name of the catalogue, a folder or a config.json; None: by size.
        num_params: Of a Llama-like model; None: `model`.
        caps: Values of ``bucket_cap_mb``.
        rows, length: Of the batch on each process.
        repeats: Steps that are timed for each size.
    """

    model: str | None
    num_params: float | None
    caps: tuple[float, ...]
    rows: int = 1
    length: int = 128
    repeats: int = 15

    def check(self, processes: int) -> None:
        """Refuse a model that this machine cannot hold once for each process.

        Raises:
            ConfigError: naming the largest that it can; for a size that no sensible model has.
        """
        import torch

        from accel_scale.facts.hardware import host_memory_bytes
        from accel_scale.modeling.scratch import choose_shape

        count = self.count
        if torch.cuda.is_available():
            limit, sharing = torch.cuda.get_device_properties(0).total_memory, 1
        else:
            limit, sharing = host_memory_bytes() or 2**62, processes
        largest = limit * _SHARE_OF_MEMORY / sharing / _BYTES_PER_PARAM
        if count > largest:
            raise ConfigError(
                f"{count / 1e9:.3g}B parameters do not fit here {processes} times over, with gradients and buckets.",
                place="--model" if self.model else "--num_params",
                fix=f"use --num_params {largest / 1e6:.0f}M or less: what counts is how long backward takes.",
            )
        if self.num_params is not None:
            choose_shape(round(self.num_params), self.vocabulary)

    @property
    def count(self) -> float:
        """Parameters."""
        if self.num_params is not None:
            return self.num_params
        from accel_scale.planning.models.catalogue import load_model_facts

        assert self.model is not None
        return float(load_model_facts(self.model).num_params)

    @property
    def vocabulary(self) -> int:
        """Tokens of a model by size."""
        return _SMALL_VOCABULARY if (self.num_params or _SMALL) < _SMALL else _VOCABULARY


def sweep_buckets(place: Any, settings: SweepSettings) -> dict[str, Any]:
    """Seconds of forward and backward under DDP for each bucket size; collective.

    Args:
        place: A `launching.local_processes.Place`.

    Returns:
        ``rows`` with ``bucket_cap_mb``, ``num_buckets``, ``seconds`` (a low quantile, the slowest rank of each step),
        ``median_seconds``, ``exposed_seconds`` (what a step takes longer than without communication) and ``noise``
        (how far the same size's rounds are apart, relative), and ``compute_seconds``, ``model``, ``backend``.
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
    """How far apart the rounds of one size were, relative: a smaller difference between two sizes says nothing."""
    return max(row["noise"] for row in rows)


def best_cap(rows: Sequence[dict[str, Any]]) -> float:
    """The fastest size; torch's own where it is among them and slower by no more than is worth a flag, or noise."""
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


def made_model(settings: SweepSettings) -> Any:
    """With random weights, in fp32."""
    import torch
    from transformers import AutoConfig, LlamaConfig

    from accel_scale.modeling.scratch import choose_shape, model_from_nothing
    from accel_scale.planning.models.catalogue import catalogue_config

    if settings.num_params is not None:
        shape = choose_shape(round(settings.num_params), settings.vocabulary)
        config: Any = LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads,
            tie_word_embeddings=shape.tied,
        )
    else:
        known = catalogue_config(str(settings.model))
        if known is not None:
            config = AutoConfig.for_model(known.pop("model_type"), **known)
        else:
            config = AutoConfig.from_pretrained(str(settings.model))
    return model_from_nothing(config, dtype=torch.float32, attention=None, seed=0).train()


def _wrapped(model: Any, cap: float, place: Any) -> Any:
    import torch

    devices = [place.device.index] if place.device.type == "cuda" else None
    return torch.nn.parallel.DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=cap)


def _num_buckets(ddp: Any) -> int:
    """As DDP logs it, after it has built its buckets again in the order of the first backward pass (torch 2.13)."""
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    return len([size for size in str(sizes).split(",") if size.strip()])


def _step_times(model: Any, batch: Any, steps: int, device: Any) -> list[float]:
    """Seconds of `steps` forward and backward passes, each on the slowest rank."""

    def passes() -> None:
        model(input_ids=batch, labels=batch).loss.backward()

    return slowest_times(passes, steps, device, before=lambda: model.zero_grad(set_to_none=True))


def slowest_times(
    step: Callable[[], None], steps: int, device: Any, *, before: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds that `step` takes, `steps` times after a warm-up, each on the slowest rank; collective."""
    import torch
    import torch.distributed as dist

    found = []
    for index in range(_WARM_UP + steps):
        before()
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= _WARM_UP:
            found.append(time.perf_counter() - started)
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def noise(seconds: Sequence[float], steps_per_round: int) -> float:
    """By how much a round of the same work took longer than another one."""
    rounds = [low(seconds[at : at + steps_per_round]) for at in range(0, len(seconds), steps_per_round)]
    return max(rounds) / min(rounds) - 1


def low(seconds: Sequence[float]) -> float:
    """The lowest fifth's largest: what else the machine does only ever adds time."""
    ordered = sorted(seconds)
    return ordered[max(0, -(-len(ordered) // 5) - 1)]


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
    """Time DDP's steps by bucket size, and say which flag to use."""
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
        return  # another rank speaks
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
        return  # another rank speaks
    model = settings.model or f"a Llama-like model of {settings.count / 1e6:.0f}M parameters"
    about = f"{processes} processes: {model}, {settings.rows} × {settings.length} tokens each"
    zero_buckets.report(found, int(args.zero), about, write=args.write)


if __name__ == "__main__":
    try:
        run(parse())
    except ConfigError as error:
        sys.exit(f"ddp_buckets.py: error: {error}")
