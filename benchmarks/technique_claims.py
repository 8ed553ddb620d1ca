"""`techniques.py`: the claims of data/technique_claims.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

CLAIMS_FILE = Path(__file__).parent / "data" / "technique_claims.yaml"


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        topic: The heading it stands under.
        stated: What is stated.
        figures: Rows that answer it, with templates for their values.
        note: What readers need to know for the comparison, or why there is no figure.
    """

    topic: str
    stated: str
    figures: tuple[tuple[str, str], ...] = ()
    note: str = ""


def read_claims(path: Path = CLAIMS_FILE) -> tuple[Claim, ...]:
    """Read all claims, topic by topic."""
    topics = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(
        Claim(topic, entry["stated"], tuple(pair for figure in entry.get("figures", ()) for pair in figure.items()),
              entry.get("note", ""))
        for topic, entries in topics.items()
        for entry in entries
    )  # fmt: skip
