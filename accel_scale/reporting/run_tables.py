"""Rows of a run's tables, from plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_scale.reporting.tables import format_count, format_seconds
from accel_scale.units import format_bytes

# Share of the time above which waiting for the loader is reported.
_WAITING_SHARE = 0.1


def data_text(num_rows: int | None, layout: str, sources: Sequence[str]) -> str:
    """``6,240 rows (messages) from train.jsonl``; `num_rows` is None for a stream."""
    rows = "a stream" if num_rows is None else f"{format_count(num_rows)} rows"
    return f"{rows} ({layout}) from {', '.join(sources)}"


def end_rows(summary: Mapping[str, Any]) -> dict[str, str | None]:
    """Results of a run from the content of its ``run_summary.json``; `None` where a value was not measured."""
    losses, speed, waiting = summary["losses"], summary["tokens_per_second"], summary["data_wait_ratio"]
    device, verified = summary["peak_device_bytes"], summary["verified"]
    memory = f"host {format_bytes(summary['peak_host_bytes'])}"
    if device:
        memory += f", device {format_bytes(device['allocated_bytes'])}"
    return {
        "loss": f"{losses[0]:.4f} → {losses[-1]:.4f} in {summary['steps']} steps" if losses else None,
        "evaluation loss": f"{summary['eval_loss']:.4f}" if summary["eval_loss"] is not None else None,
        "preferred": f"{pairs[0]:.1%} → {pairs[-1]:.1%} of pairs" if (pairs := summary.get("preferred")) else None,
        "good over bad": f"{margins[0]:+.3f} → {margins[-1]:+.3f} in reward"
        if (margins := summary.get("margins"))
        else None,
        "held-out pairs": _ranked_text(summary.get("ranked") or {}),
        "reward": f"{rewards[0]:.3f} → {rewards[-1]:.3f}" if (rewards := summary.get("rewards")) else None,
        "exact match": _match_text(summary.get("exact_match") or {}),
        "speed": f"{speed:,.0f} tokens/s without padding" if speed else None,
        "waiting for data": f"{waiting:.1%} of the time" if waiting is not None else None,
        "peak memory": memory,
        "time": format_seconds(summary["seconds"]),
        "checked": f"{verified['tensors']} tensors read back, largest difference {verified['max_diff']:g}"
        if verified
        else None,
    }


def data_bound_advice(waiting: float | None, *, or_else: str = "a --dataset_name on a local disk") -> str | None:
    """A warning for a run that spent much of its time `waiting` for data; None for others.

    Args:
        waiting: Share of the steps' time; None if it was not measured.
        or_else: What else helps besides more reader processes.
    """
    if waiting is None or waiting <= _WAITING_SHARE:
        return None
    return (
        f"warning: {waiting:.0%} of the time went on waiting for data. Fix: more --dataloader_num_workers, or "
        f"{or_else}."
    )


def _ranked_text(ranked: Mapping[str, float | None]) -> str | None:
    if ranked.get("after") is None:
        return None
    start = f"{ranked['before']:.1%} → " if ranked.get("before") is not None else ""
    return f"{start}{ranked['after']:.1%} ranked right after step {ranked['step']}"


def _match_text(match: Mapping[str, Any]) -> str | None:
    if not match.get("after"):
        return None
    before, after = match.get("before"), match["after"]
    start = f"{before['accuracy']:.1%} → " if before else ""
    return f"{start}{after['accuracy']:.1%} of {after['num_questions']} held-out questions"
