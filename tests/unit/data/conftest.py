"""Fixtures of the data tests: a private cache, and files written row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`datasets`' cache in the test's folder, so that no test reads what another one wrote."""
    import datasets

    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    return cache


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """``write_jsonl("a.jsonl", rows)``: objects become JSON, text and bytes stay as they are; returns the path."""

    def write(name: str, rows: Iterable[Any]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()
            for row in rows
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return str(path)

    return write
