"""Fits links to measured collectives: latency and bandwidth, error on held-out sizes, and the file that keeps them."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.network.collectives import USUAL, Link, bus_factor, steps

FORMAT = 1
# A knee must justify its two extra parameters.
_KNEE_IMPROVEMENT, _SMALL_ERROR = 0.7, 0.01
_SIZES_FOR_A_KNEE = 5


@dataclass(frozen=True)
class Sample:
    """One measured collective of one size.

    Attributes:
        op, num_bytes, workers: The operation, its size (K as in `collectives`) and number of workers.
        seconds: Mean of the fastest quarter of the repeats, by the slowest rank of each. Other work on a machine only
            ever adds time, so this mean is reproducible where a mean or median of all repeats is not.
        median_seconds: Median of the same repeats.
    """

    op: str
    num_bytes: int
    workers: int
    seconds: float
    median_seconds: float

    @property
    def algorithm_bandwidth(self) -> float:
        """K ÷ seconds, bytes per second."""
        return self.num_bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Algorithm bandwidth times nccl-tests' factor."""
        return self.algorithm_bandwidth * bus_factor(self.op, self.workers)


@dataclass(frozen=True)
class FittedLink:
    """The link fitted to the times of one operation.

    Attributes:
        op, algorithm, workers: What ran, and the formula of `collectives` whose messages and bytes were fitted.
        link: The fitted link.
        fitted_bytes: Sizes used in the fit.
        samples: All measurements, including those held out.
    """

    op: str
    algorithm: str
    workers: int
    link: Link
    fitted_bytes: tuple[int, ...]
    samples: tuple[Sample, ...]

    def predicted_seconds(self, num_bytes: float) -> float:
        """Time predicted by the link, for the number of workers that was measured."""
        path = steps(self.op, self.algorithm, num_bytes, self.workers)
        return self.link.seconds(path.messages, path.num_bytes)

    @property
    def held_out(self) -> tuple[Sample, ...]:
        """Measurements not used in the fit."""
        return tuple(s for s in self.samples if s.num_bytes not in self.fitted_bytes)

    def errors(self, samples: Iterable[Sample] | None = None) -> list[float]:
        """Absolute value of predicted ÷ measured − 1 for each sample, by default for those held out."""
        chosen = self.held_out if samples is None else samples
        return [abs(self.predicted_seconds(s.num_bytes) / s.seconds - 1) for s in chosen]


def fit_op(samples: Sequence[Sample]) -> FittedLink:
    """Fit a link to every other size of one operation, from the smallest on (to the largest, if their number is odd).

    With fewer than four sizes, all are fitted and none is held out.

    Raises:
        ConfigError: if times do not grow with sizes.
    """
    ordered = sorted(samples, key=lambda s: s.num_bytes)
    chosen = ordered[::2] if len(ordered) >= 4 else ordered
    op, workers = ordered[0].op, ordered[0].workers
    algorithm = USUAL[op]
    link = fit_link(algorithm, chosen)
    return FittedLink(op, algorithm, workers, link, tuple(s.num_bytes for s in chosen), tuple(ordered))


def fit_link(algorithm: str, samples: Sequence[Sample]) -> Link:
    """Fit a non-negative latency and bandwidth by least squares of the relative error.

    With five sizes or more, a knee is tried at each but the first and last, and kept if it cuts the error by at least
    30 %.

    Raises:
        ConfigError: if times do not grow with sizes.
    """
    paths = [steps(s.op, algorithm, s.num_bytes, s.workers) for s in samples]
    times = [s.seconds for s in samples]
    plain = _solve([(p.messages, p.num_bytes) for p in paths], times)
    by_size = sorted(samples, key=lambda s: s.num_bytes)
    if plain is None or by_size[-1].seconds <= by_size[0].seconds:
        raise ConfigError(
            f"the times of {samples[0].op} do not grow with its size, so there is no bandwidth to see.",
            place="--size",
            fix="measure larger sizes, like 64KiB..64MiB.",
        )
    (latency, per_byte), error = plain
    best = Link(1 / per_byte, latency)
    if len(samples) < _SIZES_FOR_A_KNEE or error < _SMALL_ERROR:
        return best
    limit = _KNEE_IMPROVEMENT * error
    for knee in sorted(p.num_bytes for p in paths)[1:-1]:
        rows = [(p.messages, min(p.num_bytes, knee), max(0.0, p.num_bytes - knee)) for p in paths]
        found = _solve(rows, times)
        if found is not None and found[1] < limit:
            (latency, before, beyond), limit = found
            best = Link(1 / before, latency, knee, 1 / beyond)
    return best


def fit_pairs(rows: Sequence[tuple[float, float]], times: Sequence[float]) -> Link:
    """One latency and bandwidth for collectives of any operations, given as `rows` (messages, bytes).

    Raises:
        ConfigError: if times do not grow with bytes.
    """
    found = _solve(rows, times)
    if found is None:
        raise ConfigError("times do not grow with bytes.", place="links", fix="measure larger sizes.")
    latency, per_byte = found[0]
    return Link(1 / per_byte, latency)


def _solve(rows: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[tuple[float, ...], float] | None:
    """Factors of the columns that fit `times` by least squares of the relative error, and its root mean square.

    The first is at least 0 and the others are above 0; None if there are no such factors. They are found by trying
    with and without the first column: a problem of three unknowns needs no solver.
    """
    import numpy as np

    matrix = np.array(rows, dtype=float) / np.array(times)[:, None]
    scale = np.abs(matrix).max(axis=0)
    if not np.all(scale > 0):
        return None
    best = None
    for first in (0, 1):
        part = (matrix / scale)[:, first:]
        solution = np.linalg.lstsq(part, np.ones(len(times)), rcond=None)[0]
        if np.any(solution < 0) or np.any(solution[1 - first :] <= 0):
            continue
        residual = math.sqrt(float(np.mean((part @ solution - 1) ** 2)))
        if best is None or residual < best[1]:
            factors = np.concatenate([np.zeros(first), solution]) / scale
            best = tuple(map(float, factors)), residual
    return best


@dataclass(frozen=True)
class MeasuredLinks:
    """Results of `accel-scale comm --measure`.

    Attributes:
        backend: ``nccl`` or ``gloo``.
        device: The GPU's name, or the processor's.
        inside: A GPU's link to the others of its server, by operation; empty if only one GPU per server was measured.
        between: A GPU's share of the network, by operation, while `sharing` GPUs of its server sent at once.
        sharing: See `between`.
        versions: Versions of torch and other packages.
        measured_at: Date and time.
        source: File that the results were read from.
    """

    backend: str
    device: str
    inside: Mapping[str, FittedLink]
    between: Mapping[str, FittedLink]
    sharing: int = 1
    versions: Mapping[str, str] | None = None
    measured_at: str = ""
    source: str = ""

    def inside_link(self, op: str) -> Link | None:
        """A GPU's link for `op` inside a server; None if nothing was measured there."""
        return _for(self.inside, op)

    def between_link(self, op: str) -> Link | None:
        """A server's link for `op`, all its GPUs together; None if nothing was measured there."""
        found = _for(self.between, op)
        return None if found is None else found.shared_by(1 / self.sharing)

    @property
    def line(self) -> str:
        """One line for tables: source, backend, workers and date."""
        fits = self.inside or self.between
        workers = next(iter(fits.values())).workers
        kind = "processes on a CPU" if self.backend == "gloo" else f"× {self.device}"
        return f"links of {self.source or 'this machine'}: {self.backend}, {workers} {kind}, {self.measured_at[:10]}"


def _for(fits: Mapping[str, FittedLink], op: str) -> Link | None:
    """The operation's own link, else all-reduce's, else any: a measured link says more than a data sheet."""
    if not fits:
        return None
    found = fits.get(op) or fits.get("all_reduce") or next(iter(fits.values()))
    return found.link


# ── The file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def default_path() -> Path:
    """``accel_scale/links.json`` in the user's cache (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "accel_scale" / "links.json"


def save_links(links: MeasuredLinks, path: Path) -> None:
    """Write `links` as JSON, completely or not at all.

    Raises:
        ConfigError: if the file cannot be written.
    """
    document = {"format": FORMAT, **asdict(links)}
    del document["source"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(
            f"cannot be written ({error.strerror}).", place=str(path), fix="name another file."
        ) from None


def load_links(name: str | Path, *, place: str = "--links") -> MeasuredLinks:
    """Links from a file written by `save_links`; ``measured`` stands for the default file.

    Raises:
        ConfigError: if there is no such file, or it is something else.
    """
    path = default_path() if str(name) == "measured" else Path(name).expanduser()
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fix = "run accel-scale comm --measure first."
        raise ConfigError(f"{path} cannot be read ({error.strerror}).", place=place, fix=fix) from None
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        fix = "name a file that accel-scale comm --measure wrote."
        raise ConfigError(f"{path} holds no measured links.", place=place, fix=fix)
    try:
        inside, between = (
            {op: _fitted(entry) for op, entry in document[level].items()} for level in ("inside", "between")
        )
        if not inside and not between:
            raise KeyError("inside")
        plain = {key: document[key] for key in ("backend", "device", "sharing", "versions", "measured_at")}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not complete ({type(error).__name__}: {error}).", place=place, fix="measure again."
        ) from None
    return MeasuredLinks(**plain, inside=inside, between=between, source=str(path))


def _fitted(entry: Mapping[str, Any]) -> FittedLink:
    return FittedLink(
        entry["op"],
        entry["algorithm"],
        int(entry["workers"]),
        Link(**entry["link"]),
        tuple(entry["fitted_bytes"]),
        tuple(Sample(**sample) for sample in entry["samples"]),
    )


def worst_and_median(fits: Iterable[FittedLink]) -> tuple[float, float] | None:
    """Median and worst error over the held-out sizes of all fits; None if none was held out."""
    errors = sorted(itertools.chain.from_iterable(fit.errors() for fit in fits))
    if not errors:
        return None
    middle = len(errors) // 2
    median = errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
    return median, errors[-1]
