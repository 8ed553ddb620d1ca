"""What recipes/grpo.py rewards, as flags."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.flags.common import _flag


@dataclass
class RewardArguments:
    """Verifiable rewards; TRL's ``--reward_weights`` weighs them."""

    rewards: list[str] = _flag(
        ["exact_match"],
        "What a completion is rewarded for, one or several. exact_match: it is the row's answer; number: its last "
        "number is the last of the answer; format=REGEX: all of it matches; FILE.py:FUNCTION or MODULE:FUNCTION: your "
        "own, called as TRL calls reward functions.",
    )
