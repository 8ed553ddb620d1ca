"""`techniques.py`: searches, scaling laws and loaders: number of trials, importances, fits and waiting times."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from technique_rows import Stage, Values, Work

STUDIES, MAX_TRIALS = 24, 120
TOP = 0.01
# For the tiny model that shows importances: learning rates 10 × apart, batches 4 × apart at equal tokens, decays.
RATES, BATCHES, DECAYS = (1e-3, 1e-2, 1e-1), (2, 8, 32), (0.0, 0.01, 0.1)
NUM_SEQUENCES = 256


def fit() -> dict[str, Values]:
    """Fit twenty runs drawn from a known law without noise."""
    from accel_scale.planning.laws.scaling_fit import FittedRun, fit_runs
    from accel_scale.planning.laws.scaling_laws import LAWS

    law = LAWS["chinchilla"].law
    sizes, tokens = (1e8, 3e8, 1e9, 3e9, 1e10), (2e9, 8e9, 3e10, 1e11)
    runs = [FittedRun(n, d, law.loss(n, d)) for n, d in itertools.product(sizes, tokens)]
    found = fit_runs(runs, resamples=2).law
    return {"laws/fit": {"alpha": found.param_exponent, "beta": found.token_exponent}}


def bowl(values: Mapping[str, float]) -> float:
    """A loss with its minimum 0 at one point, which depends most on the learning rate."""
    rate = math.log10(values["learning_rate"]) + 3.3
    warm_up, decay, batch = (
        values["warmup_ratio"] - 0.05,
        values["weight_decay"] - 0.05,
        math.log2(values["batch"]) - 5,
    )
    return rate**2 + 8 * warm_up**2 + 4 * decay**2 + 0.02 * batch**2


def draw(trial: Any) -> dict[str, float]:
    """Draw one point of the space."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True),
        "warmup_ratio": trial.suggest_float("warmup_ratio", 0.0, 0.3),
        "weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
        "batch": trial.suggest_float("batch", 4, 512, log=True),
    }


def trials() -> dict[str, Values]:
    """Number of trials until one is in the top 1 %, with the samplers of `recipes/tune.py`."""
    import optuna

    from accel_scale.tuning.space import SearchSpace
    from accel_scale.tuning.study import make_sampler

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = SearchSpace(Path("none.yaml"), {})

    def losses(sampler: str, seed: int, count: int) -> list[float]:
        study = optuna.create_study(sampler=make_sampler(sampler, space, seed)[0])
        study.optimize(lambda trial: bowl(draw(trial)), n_trials=count)
        return [trial.value for trial in study.trials]

    everywhere = sorted(losses("random", 10**6, 2000))
    top_1, top_5 = everywhere[int(TOP * len(everywhere))], everywhere[int(0.05 * len(everywhere))]

    def needed(found: list[float]) -> int:
        return next((number for number, loss in enumerate(found, 1) if loss <= top_1), MAX_TRIALS)

    random = [losses("random", seed, MAX_TRIALS) for seed in range(4 * STUDIES)]
    tpe = [losses("tpe", seed, MAX_TRIALS // 2) for seed in range(STUDIES)]
    by_random, by_tpe = (statistics.median(map(needed, found)) for found in (random, tpe))
    hits = statistics.mean(min(found[:60]) <= top_5 for found in random)
    figures = {"random": by_random, "tpe": by_tpe, "ratio": by_random / by_tpe}
    return {"search/trials": {**figures, "hits": hits, "studies": len(random)}}


def importance() -> dict[str, Values]:
    """Main effects on the loss of a tiny model trained for one pass over the same rows, as shares of the variance."""
    import torch
    from technique_cpu import embedded_rows
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    rows = embedded_rows(NUM_SEQUENCES, 32)
    config = LlamaConfig(
        vocab_size=int(rows.max()) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )

    def loss(rate: float, batch: int, decay: float) -> float:
        set_seed(0)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
        found = []
        for ids in rows.split(batch):
            value = model(input_ids=ids, labels=ids).loss
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
        return statistics.mean(found[-max(1, len(found) // 4) :])

    torch.set_num_threads(1)
    found = {key: loss(*key) for key in itertools.product(RATES, BATCHES, DECAYS)}
    total = statistics.pvariance(found.values())

    def share(position: int, values: tuple[float, ...]) -> float:
        means = [statistics.mean(v for key, v in found.items() if key[position] == value) for value in values]
        return statistics.pvariance(means) / total

    shares = (share(0, RATES), share(1, BATCHES), share(2, DECAYS))
    return {"search/importance": dict(zip(("learning_rate", "batch", "weight_decay"), shares, strict=True))}


def loading() -> dict[str, Values]:
    """Measure real loaders: the first batch of the next epoch, and a loader slower than the model."""
    import torch

    from accel_scale.measuring.meters import ThroughputMeter

    def seconds(run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    def next_epoch(persistent: bool) -> float:
        loader = torch.utils.data.DataLoader(
            torch.arange(64), num_workers=2, prefetch_factor=2, persistent_workers=persistent
        )
        list(loader)
        return statistics.median(seconds(lambda: next(iter(loader))) for _ in range(5))

    fresh, kept = next_epoch(False), next_epoch(True)
    model_seconds, loader_seconds = 0.02, 0.04
    meter = ThroughputMeter()
    for _ in range(20):
        meter.start_step()
        time.sleep(loader_seconds)
        meter.fetched()
        time.sleep(model_seconds)
        meter.add_tokens(1)
        meter.end_step()
    waiting = meter.data_wait_ratio or 0.0
    return {
        "loading/workers": {"fresh_ms": 1e3 * fresh, "persistent_ms": 1e3 * kept, "persistent": fresh / kept},
        "loading/bound": {"waiting": waiting},
    }


STAGE = Stage(
    "search",
    "measured",
    f"{4 * STUDIES} random and {STUDIES} TPE searches of a smooth bowl in four settings; 27 runs of a model of one "
    "layer; runs drawn from a known law; loaders with two workers.",
    (
        Work(("laws/fit",), fit),
        Work(("search/trials",), trials),
        Work(("search/importance",), importance),
        Work(("loading/workers", "loading/bound"), loading),
    ),
)
