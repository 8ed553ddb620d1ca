"""Fits L(N, D) = E + A/N^α + B/D^β to a user's own runs, with bootstrap confidence intervals and a plot."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.planning.laws.scaling_laws import FLOPS_PER_PARAM_TOKEN, LossLaw, parse_count

if TYPE_CHECKING:
    import numpy as np

HUBER_DELTA = 1e-3  # Hoffmann et al. 2022, on logarithms of losses
MIN_RUNS = 6  # one more than there are constants
_FIELDS = ("irreducible", "param_coefficient", "param_exponent", "token_coefficient", "token_exponent")
# Starts for (log A, log B, log E, α, β), around published values.
_STARTS = tuple(itertools.product((2.0, 6.0, 12.0), (2.0, 6.0, 12.0), (-1.0, 0.5), (0.2, 0.5), (0.2, 0.5)))


@dataclass(frozen=True)
class FittedRun:
    """One finished run: parameters, tokens and final loss in nats per token."""

    params: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Fit:
    """A fitted law.

    Attributes:
        law: The best fit.
        intervals: Constant (a field of `LossLaw`) → 2.5% and 97.5% quantiles over resampled runs.
        num_runs: Runs used.
        residual: Median of |fitted / measured − 1|.
        confidence: Share of resamples inside an interval.
    """

    law: LossLaw
    intervals: dict[str, tuple[float, float]]
    num_runs: int
    residual: float
    confidence: float = 0.95


def read_runs(path: str | Path) -> tuple[FittedRun, ...]:
    """Runs of a CSV file with the columns ``params, tokens, loss``; ``flops`` (C = 6ND) may replace ``tokens``.

    Raises:
        ConfigError: naming the file and line of a missing or invalid value, or if there are too few runs.
    """
    file = Path(path)
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True)
            columns = [(name or "").strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            _check_columns(columns, f"{file}:1")
            runs = tuple(_run(row, f"{file}:{reader.line_num}") for row in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot be read: {reason}.", place=str(file), fix="give a CSV file of runs.") from None
    return _enough(runs, str(file))


def fit_runs(runs: Iterable[FittedRun], *, resamples: int = 200, seed: int = 0) -> Fit:
    """Fit a law by Huber loss on log L (δ = 10⁻³), from many starts; intervals come from `resamples` resampled sets.

    Uses Levenberg-Marquardt on reweighted residuals of log L, seeded: the same runs give the same fit.

    Raises:
        ConfigError: if there are fewer than `MIN_RUNS` runs, or fewer than three sizes of model or data.
    """
    import numpy as np

    runs = _enough(tuple(runs), "runs")
    data = np.log(np.array([(run.params, run.tokens, run.loss) for run in runs]))
    candidates = [_minimise(np.array(start), data, 60) for start in _STARTS]
    best = _minimise(min(candidates, key=lambda found: _huber(found, data)), data, 500)
    generator = np.random.default_rng(seed)
    samples: list[tuple[float, ...]] = []
    while len(samples) < resamples:
        chosen = data[generator.integers(0, len(data), len(data))]
        if min(len(set(chosen[:, 0])), len(set(chosen[:, 1]))) >= 2:
            samples.append(_constants(_minimise(best, chosen, 100)))
    low, high = np.quantile(np.array(samples), (0.025, 0.975), axis=0) if samples else (np.full(5, np.nan),) * 2
    law = LossLaw(*_constants(best))
    intervals = {name: (float(low[i]), float(high[i])) for i, name in enumerate(_FIELDS)}
    residual = float(np.median([abs(law.loss(run.params, run.tokens) / run.loss - 1) for run in runs]))
    return Fit(law, intervals, len(runs), residual)


def draw_fit(fit: Fit, runs: Iterable[FittedRun], *, width: int = 720, height: int = 480) -> str:
    """An SVG drawing: measured losses over tokens (logarithmic), a fitted curve for each model size."""
    runs = tuple(runs)
    tokens = [run.tokens for run in runs]
    span = math.log10(min(tokens) / 2), math.log10(max(tokens) * 2)
    sizes = sorted({run.params for run in runs})
    curves = [[(x, fit.law.loss(size, 10**x)) for x in _steps(*span, 60)] for size in sizes]
    losses = [loss for curve in curves for _, loss in curve] + [run.loss for run in runs]
    bottom, top = min(losses) * 0.99, max(losses) * 1.01
    left, right, above, below = 60, width - 130, 40, height - 50

    def place(x: float, loss: float) -> str:
        across = left + (x - span[0]) / (span[1] - span[0]) * (right - left)
        return f"{across:.1f},{below - (loss - bottom) / (top - bottom) * (below - above):.1f}"

    parts = [_axes(span, (bottom, top), (left, right, above, below), place)]
    for index, (size, curve) in enumerate(zip(sizes, curves, strict=True)):
        colour = f"hsl({round(360 * index / len(sizes))},65%,42%)"
        points = " ".join(place(*point) for point in curve)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
        for run in (run for run in runs if run.params == size):
            x, y = place(math.log10(run.tokens), run.loss).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{right + 12}" y="{above + 16 * index}" fill="{colour}">{size:.3g} params</text>')
    law = fit.law
    title = (
        f"L = {law.irreducible:.3g} + {law.param_coefficient:.4g}/N^{law.param_exponent:.3g}"
        f" + {law.token_coefficient:.4g}/D^{law.token_exponent:.3g}"
    )
    parts.append(f'<text x="{left}" y="20">{title}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    return f'{head} font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'


def _axes(span: tuple[float, float], losses: tuple[float, float], box: tuple[int, int, int, int], place: Any) -> str:
    left, right, above, below = box
    parts = [f'<path d="M{left},{above}V{below}H{right}" fill="none" stroke="black"/>']
    for exponent in range(math.ceil(span[0]), math.floor(span[1]) + 1):
        x = place(exponent, losses[0]).split(",")[0]
        parts.append(f'<text x="{x}" y="{below + 18}" text-anchor="middle">1e{exponent}</text>')
    for loss in _steps(*losses, 5):
        y = place(span[0], loss).split(",")[1]
        parts.append(f'<text x="{left - 8}" y="{y}" text-anchor="end">{loss:.2f}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{below + 38}" text-anchor="middle">tokens</text>')
    return "".join(parts)


def _steps(low: float, high: float, count: int) -> list[float]:
    return [low + (high - low) * index / (count - 1) for index in range(count)]


def _check_columns(columns: list[str], place: str) -> None:
    needed = ["params", "loss"] + ([] if "flops" in columns else ["tokens"])
    missing = [name for name in needed if name not in columns]
    if missing:
        fix = "write the header params,tokens,loss (flops may stand for tokens)."
        raise ConfigError(f"no column {', '.join(missing)}.", place=place, fix=fix)


def _run(row: dict[str, Any], place: str) -> FittedRun:
    """Parse a line as a run; missing cells and words are errors at `place`."""
    if None in row:
        raise ConfigError("more cells than the header has.", place=place, fix="quote or remove the extra cell.")

    def number(column: str) -> float:
        return parse_count((row.get(column) or "").strip(), place=f"{place}, column {column}")

    params, loss = number("params"), number("loss")
    if (row.get("tokens") or "").strip():
        return FittedRun(params, number("tokens"), loss)
    return FittedRun(params, number("flops" if "flops" in row else "tokens") / FLOPS_PER_PARAM_TOKEN / params, loss)


def _enough(runs: tuple[FittedRun, ...], place: str) -> tuple[FittedRun, ...]:
    sizes, lengths = {run.params for run in runs}, {run.tokens for run in runs}
    if len(runs) < MIN_RUNS or len(sizes) < 3 or len(lengths) < 3:
        found = f"{len(runs)} runs of {len(sizes)} model sizes and {len(lengths)} token counts"
        fix = f"give {MIN_RUNS} runs or more with three sizes of each."
        raise ConfigError(f"{found} do not determine five constants.", place=place, fix=fix)
    return runs


def _constants(theta: np.ndarray) -> tuple[float, float, float, float, float]:
    """(log A, log B, log E, α, β) in the order of `LossLaw`."""
    a, b, e, alpha, beta = (float(value) for value in theta)
    return math.exp(e), math.exp(a), alpha, math.exp(b), beta


def _residuals(theta: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log L(N, D) − log loss of every run, and its derivatives by theta: shapes (runs,) and (runs, 5)."""
    import numpy as np

    a, b, e, alpha, beta = theta
    terms = np.stack([a - alpha * data[:, 0], b - beta * data[:, 1], np.full(len(data), e)])
    total = np.logaddexp.reduce(terms, axis=0)
    share = np.exp(terms - total)
    jacobian = np.stack([*share, -share[0] * data[:, 0], -share[1] * data[:, 1]], axis=1)
    return total - data[:, 2], jacobian


def _huber(theta: np.ndarray, data: np.ndarray) -> float:
    import numpy as np

    size = np.abs(_residuals(theta, data)[0])
    quadratic = np.minimum(size, HUBER_DELTA)
    return float(np.sum(0.5 * quadratic**2 + HUBER_DELTA * (size - quadratic)))


def _minimise(theta: np.ndarray, data: np.ndarray, iterations: int) -> np.ndarray:
    """Levenberg-Marquardt with Huber weights from `theta`."""
    import numpy as np

    damping, cost = 1e-2, _huber(theta, data)
    for _ in range(iterations):
        residuals, jacobian = _residuals(theta, data)
        weights = np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-12))
        normal = jacobian.T @ (weights[:, None] * jacobian)
        scaled = normal + damping * np.diag(np.diag(normal) + 1e-12)
        step = np.linalg.lstsq(scaled, -jacobian.T @ (weights * residuals), rcond=None)[0]
        moved = theta + np.clip(step, -2, 2)
        lower = _huber(moved, data)
        if lower < cost:
            done = cost - lower < 1e-8 * cost
            theta, cost, damping = moved, lower, max(damping / 5, 1e-12)
            if done:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return theta
