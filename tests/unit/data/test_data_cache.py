"""A cache that cannot be written gives one line that names the setting; a full disk is reported as a full disk."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import datasets
import pytest

from accel_scale.data.cache import complete_folder
from accel_scale.errors import ConfigError


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "datasets")
    with pytest.raises(ConfigError, match="cache of data sets cannot be written") as refused:
        complete_folder("rows", "key", lambda folder: None)
    assert refused.value.place == "HF_DATASETS_CACHE"
    assert "HF_HOME" in refused.value.fix


def test_a_full_disk_is_not_taken_for_a_wrong_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match="No space left"):
        complete_folder("rows", "key", lambda folder: None)


def test_a_folder_is_written_once_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        (folder / "rows").write_text("1")

    made = [complete_folder("rows", "key", write) for _ in range(2)]
    assert made[0] == made[1] == tmp_path / "rows" / "key"
    assert len(written) == 1
    assert {path.name for path in (tmp_path / "rows").iterdir()} <= {"key", "key.lock"}
