"""Scaling laws: parameters, tokens and compute from one another, expected loss, and the cost of over-training."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from accel_scale.errors import ConfigError

FLOPS_PER_PARAM_TOKEN = 6  # forward 2, backward 4: C = 6ND
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([KMBT]?)", re.IGNORECASE)
_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
TOKENS_PER_PARAM = 20  # Hoffmann et al. 2022, approaches 1 and 2: D* = 20N, so N* = √(C/120)


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = E + A/N^α + B/D^β, in nats per token on the law's own data.

    Attributes:
        irreducible: E, the loss of an infinite model on infinite data.
        param_coefficient, param_exponent: A and α.
        token_coefficient, token_exponent: B and β.
    """

    irreducible: float
    param_coefficient: float
    param_exponent: float
    token_coefficient: float
    token_exponent: float

    def loss(self, params: float, tokens: float) -> float:
        """Expected loss of `params` parameters after `tokens` tokens, none repeated."""
        from_params = self.param_coefficient / params**self.param_exponent
        return self.irreducible + from_params + self.token_coefficient / tokens**self.token_exponent

    def optimal_params(self, compute: float) -> float:
        """Parameters of lowest loss for `compute` FLOPs: N* = G·(C/6)^(β/(α+β)), G = (αA/βB)^(1/(α+β))."""
        total = self.param_exponent + self.token_exponent
        ratio = self.param_exponent * self.param_coefficient / (self.token_exponent * self.token_coefficient)
        return ratio ** (1 / total) * (compute / FLOPS_PER_PARAM_TOKEN) ** (self.token_exponent / total)


@dataclass(frozen=True)
class KaplanLaw:
    """Kaplan et al. 2020: L(N, D) = ((N_c/N)^(α_N/α_D) + D_c/D)^α_D, N without embeddings.

    Attributes:
        critical_params, param_exponent: N_c = 6.4e13 and α_N = 0.076, of their joint fit.
        critical_tokens, token_exponent: D_c = 1.8e13 and α_D = 0.103.
        optimal_exponent: N* grows as C^0.73.
        optimal_scale: N* at one PF-day (8.64e19 FLOPs), their table of compute-efficient training.
    """

    critical_params: float = 6.4e13
    param_exponent: float = 0.076
    critical_tokens: float = 1.8e13
    token_exponent: float = 0.103
    optimal_exponent: float = 0.73
    optimal_scale: float = 1.3e9

    def loss(self, params: float, tokens: float) -> float:
        """Expected loss of `params` parameters on a data set of `tokens` tokens, trained to convergence."""
        from_params = (self.critical_params / params) ** (self.param_exponent / self.token_exponent)
        return float((from_params + self.critical_tokens / tokens) ** self.token_exponent)

    def optimal_params(self, compute: float) -> float:
        """Parameters for `compute` FLOPs: 1.3e9 × (C in PF-days)^0.73."""
        return self.optimal_scale * (compute / 8.64e19) ** self.optimal_exponent


@dataclass(frozen=True)
class RuleOfThumb:
    """Twenty tokens per parameter, without a loss: N* = √(C/120)."""

    def optimal_params(self, compute: float) -> float:
        """Parameters for `compute` FLOPs."""
        return math.sqrt(compute / (FLOPS_PER_PARAM_TOKEN * TOKENS_PER_PARAM))


@dataclass(frozen=True)
class NamedLaw:
    """A law and where it comes from.

    Attributes:
        name: Its value for ``--law``.
        source: Paper and fit.
        law: Its formulas.
        params_range, tokens_range: Ranges covered by its runs; outside them the law extrapolates.
    """

    name: str
    source: str
    law: LossLaw | KaplanLaw | RuleOfThumb
    params_range: tuple[float, float]
    tokens_range: tuple[float, float]

    def loss(self, params: float, tokens: float) -> float | None:
        """Expected loss in nats per token; `None` for a law without one."""
        return None if isinstance(self.law, RuleOfThumb) else self.law.loss(params, tokens)


_CHINCHILLA_RANGE = ((70e6, 16e9), (5e9, 500e9))
LAWS: dict[str, NamedLaw] = {
    law.name: law
    for law in (
        NamedLaw(
            "chinchilla",
            "Hoffmann et al. 2022, approach 3 as published",
            LossLaw(1.69, 406.4, 0.34, 410.7, 0.28),
            *_CHINCHILLA_RANGE,
        ),
        NamedLaw(
            "refit",
            "Besiroglu et al. 2024, approach 3 fitted again to the same runs",
            LossLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658),
            *_CHINCHILLA_RANGE,
        ),
        NamedLaw("kaplan", "Kaplan et al. 2020 (N without embeddings)", KaplanLaw(), (768, 1.5e9), (22e6, 23e9)),
        NamedLaw("rule", "20 tokens per parameter, N = √(C/120)", RuleOfThumb(), *_CHINCHILLA_RANGE),
    )
}


@dataclass(frozen=True)
class ScalingPlan:
    """One run, and the compute-optimal one.

    Attributes:
        law: Name of the law.
        params, tokens: N and D of the run.
        compute: C = 6ND, in FLOPs.
        loss: Expected loss in nats per token; `None` for the rule of thumb.
        optimal_params, optimal_tokens: The optimum for the same compute.
        optimal_loss: Expected loss at the optimum; `None` for the rule of thumb.
        extra_compute: C over the least compute that reaches `loss`, minus 1: the cost of a model off the optimum;
            `None` for laws whose optimum does not minimise their loss (Kaplan's, the rule's).
        notes: Where the law extrapolates, one sentence each.
    """

    law: str
    params: float
    tokens: float
    compute: float
    loss: float | None
    optimal_params: float
    optimal_tokens: float
    optimal_loss: float | None
    extra_compute: float | None
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_param(self) -> float:
        """D/N."""
        return self.tokens / self.params


def parse_count(text: str, *, place: str) -> float:
    """A positive number as people write it: ``7B``, ``1.4T``, ``350M``, ``10K``, ``1e21``.

    Raises:
        ConfigError: for anything else.
    """
    match = _COUNT.fullmatch(text.strip())
    value = float(match.group(1)) * _SUFFIXES[(match.group(2) or "").upper()] if match else 0.0
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{text!r} is not a positive number.", place=place, fix="write it like 7B, 1.4T or 1e21.")
    return value


def find_law(name: str, *, place: str = "--law") -> NamedLaw:
    """The law called `name`.

    Raises:
        ConfigError: naming the nearest.
    """
    if name in LAWS:
        return LAWS[name]
    nearest = difflib.get_close_matches(name, LAWS, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(f"{name!r} is not a scaling law.", place=place, fix=f"{hint}use one of {', '.join(LAWS)}.")


def plan_scaling(
    law: str | NamedLaw = "chinchilla",
    *,
    params: float | None = None,
    tokens: float | None = None,
    compute: float | None = None,
) -> ScalingPlan:
    """The run for one or two of parameters, tokens and compute; the rest is compute-optimal or follows from C = 6ND.

    Raises:
        ConfigError: if none or all three are given, or one is not positive.
    """
    given = {"params": params, "tokens": tokens, "compute": compute}
    known = {name: value for name, value in given.items() if value is not None}
    for name, value in known.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} is {value}.", place=f"--{name}", fix="give a positive number like 7B.")
    if len(known) not in (1, 2):
        what = "none of them is" if not known else "all three are"
        fix = "give one (the others are optimal) or two (C = 6ND gives the third)."
        raise ConfigError(f"{what} given.", place="--params, --tokens, --compute", fix=fix)
    chosen = find_law(law) if isinstance(law, str) else law
    run_params, run_tokens = _complete(chosen, params, tokens, compute)
    return _plan(chosen, run_params, run_tokens)


def optimal_params(law: NamedLaw, compute: float) -> float:
    """Parameters of lowest loss for `compute` FLOPs."""
    return law.law.optimal_params(compute)


def compute_for_loss(law: NamedLaw, loss: float) -> float | None:
    """Least FLOPs that reach `loss`, at the optimum; `None` if no amount does or the law has no loss."""
    low, high = 1e6, 1e40
    if law.loss(1, 1) is None or loss <= _optimal_loss(law, high):
        return None
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _optimal_loss(law, middle) > loss else (low, middle)
    return high


def _complete(law: NamedLaw, params: float | None, tokens: float | None, compute: float | None) -> tuple[float, float]:
    if params is not None and tokens is not None:
        return params, tokens
    if compute is not None:
        params = params or (compute / FLOPS_PER_PARAM_TOKEN / tokens if tokens else optimal_params(law, compute))
        return params, compute / FLOPS_PER_PARAM_TOKEN / params
    if params is not None:
        compute = _invert(lambda c: optimal_params(law, c), params)
        return params, compute / FLOPS_PER_PARAM_TOKEN / params
    assert tokens is not None
    compute = _invert(lambda c: c / FLOPS_PER_PARAM_TOKEN / optimal_params(law, c), tokens)
    return compute / FLOPS_PER_PARAM_TOKEN / tokens, tokens


def _invert(function: Callable[[float], float], value: float) -> float:
    """C with function(C) = value: exact from two points, because all of these are power laws."""
    one, many = function(1e20), function(1e22)
    exponent = math.log(many / one) / math.log(100)
    return 1e20 * (value / one) ** (1 / exponent)


def _optimal_loss(law: NamedLaw, compute: float) -> float:
    params = optimal_params(law, compute)
    loss = law.loss(params, compute / FLOPS_PER_PARAM_TOKEN / params)
    return math.nan if loss is None else loss


def _plan(law: NamedLaw, params: float, tokens: float) -> ScalingPlan:
    compute = FLOPS_PER_PARAM_TOKEN * params * tokens
    best_params = optimal_params(law, compute)
    best_tokens = compute / FLOPS_PER_PARAM_TOKEN / best_params
    loss = law.loss(params, tokens)
    least = compute_for_loss(law, loss) if loss is not None and isinstance(law.law, LossLaw) else None
    return ScalingPlan(
        law=law.name,
        params=params,
        tokens=tokens,
        compute=compute,
        loss=loss,
        optimal_params=best_params,
        optimal_tokens=best_tokens,
        optimal_loss=law.loss(best_params, best_tokens),
        extra_compute=None if least is None else max(0.0, compute / least - 1),
        notes=_notes(law, params, tokens),
    )


def _notes(law: NamedLaw, params: float, tokens: float) -> tuple[str, ...]:
    notes = []
    for name, value, (low, high) in (
        ("parameters", params, law.params_range),
        ("tokens", tokens, law.tokens_range),
    ):
        if not low <= value <= high:
            notes.append(f"{value:.3g} {name}: extrapolated, the law's runs had {low:.3g} to {high:.3g}")
    return tuple(notes)
