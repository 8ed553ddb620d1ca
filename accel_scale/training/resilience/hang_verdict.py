"""Determine which rank keeps the others waiting, from their last beats; reported on one line. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accel_scale.training.resilience.heartbeat import Beat

_NAMED_RANKS = 4


def blamed(beats: Mapping[int, Beat | None], silent: Sequence[int]) -> list[int]:
    """The ranks that keep the others waiting.

    First the silent ones: a stopped process, or a node that is gone. Otherwise the ranks that are in no collective
    while others wait in one. Otherwise the ranks that are behind: at an earlier step, or with fewer collectives begun.
    Empty if all wait for the same thing.

    Args:
        beats: Each rank's last beat; None if it never beat.
        silent: Ranks whose beats have stopped.
    """
    gone = sorted({*silent, *(rank for rank, beat in beats.items() if beat is None)})
    if gone:
        return gone
    known = {rank: beat for rank, beat in beats.items() if beat is not None}
    waiting = {rank for rank, beat in known.items() if beat.operation is not None}
    if waiting and len(waiting) < len(known):
        return sorted(known.keys() - waiting)
    furthest = max((beat.step, beat.progress) for beat in known.values())
    return sorted(rank for rank, beat in known.items() if (beat.step, beat.progress) < furthest)


def verdict(me: Beat, beats: Mapping[int, Beat | None], silent: Sequence[int], now: float) -> str:
    """One line for the reader of the log: which rank is missing, from which operation, and where it was last seen.

    Args:
        me: The rank that has waited too long.
        now: Current time of this rank's clock, in seconds since the epoch.
    """
    others = {rank: beat for rank, beat in beats.items() if rank != me.rank}
    guilty = [rank for rank in blamed({**others, me.rank: me}, silent) if rank != me.rank]
    operation = me.operation or f"the end of {me.phase!r}"
    where = f"{operation} of step {me.step}" if me.step else f"{operation} before the first step"
    if me.operation is not None and me.phase not in ("other", "data"):
        where += f" ({me.phase})"
    waited = f"rank {me.rank} has waited {me.still_seconds:.0f} s"
    if not guilty:
        places = sorted({_place(beat) for beat in others.values() if beat is not None})
        return f"{waited} in {where}, and no rank is behind ({'; '.join(places)}): look at the network between nodes"
    if len(guilty) > 1 and len({_place(others[rank]) for rank in guilty}) == 1 and not silent:
        seen = _seen(others[guilty[0]], guilty[0] in silent, now)
        return f"{_names(guilty)} have not reached {where}: {seen}; {waited}"
    named = guilty[:_NAMED_RANKS]
    seen = "; ".join(
        f"rank {rank} has not reached {where}: {_seen(others[rank], rank in silent, now)}"
        if rank == named[0]
        else f"nor has rank {rank}: {_seen(others[rank], rank in silent, now)}"
        for rank in named
    )
    more = f"; nor have {len(guilty) - len(named)} more ranks" if len(guilty) > len(named) else ""
    return f"{seen}{more}; {waited}"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_NAMED_RANKS])
    return f"ranks {shown}" + (f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else "")


def _place(beat: Beat | None) -> str:
    if beat is None:
        return "never seen"
    inside = f"{beat.operation} of {beat.phase!r}" if beat.operation else repr(beat.phase)
    return f"{inside} at step {beat.step}"


def _seen(beat: Beat | None, is_silent: bool, now: float) -> str:
    if beat is None:
        return "it was never seen"
    if is_silent:
        ago = max(0.0, now - beat.clock)
        return f"last seen in {_place(beat)}, {ago:.0f} s ago: its process is stopped, or its node is gone"
    return f"last seen in {_place(beat)}, where it has been for {beat.still_seconds:.0f} s"
