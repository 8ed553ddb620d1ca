"""A release is refused unless the tag, both versions and the changelog agree; the forge's files are valid."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

_SPEC = importlib.util.spec_from_file_location("release", Path(__file__).parents[2] / "tools" / "release.py")
assert _SPEC is not None
assert _SPEC.loader is not None
release = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(release)


def test_both_files_state_the_same_version(repository: Path) -> None:
    stated = release.versions(repository)
    assert stated["pyproject.toml"] == stated["accel_scale/version.py"] is not None


@pytest.mark.parametrize(
    ("changelog", "tag", "differs"),
    [
        ("## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n## [0.1.0]\n", "v0.2.0", []),
        ("## [Unreleased]\n\n## [0.1.0]\n", "v0.2.0", ["CHANGELOG.md"]),
        ("## [Unreleased]\n", "v0.2.0", ["CHANGELOG.md"]),
        ("## [0.3.0]\n", "v0.3.0", ["pyproject.toml", "accel_scale/version.py"]),
    ],
)
def test_a_place_that_differs_is_named(tmp_path: Path, changelog: str, tag: str, differs: list[str]) -> None:
    (tmp_path / "accel_scale").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.2.0"\n')
    (tmp_path / "accel_scale/version.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    found = release.problems(tag, release.versions(tmp_path))
    assert [line.split(" says ")[0] for line in found] == differs


def test_workflows_run_commands_that_exist(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    seen = set()
    for path in (repository / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for job in jobs.values():
            assert job.get("timeout-minutes") or "needs" in job
            for command in (step["run"] for step in job["steps"] if "run" in step):
                words = command.split()
                if words[0] == "make" and not words[1].startswith(".venv"):
                    assert f"\n{words[1]}:" in makefile, command
                    seen.add(words[1])
                if "tools/" in command or ".ci/" in command:
                    assert (repository / words[1]).exists(), command
    assert seen >= {"lint", "test-fast"}


def test_python_versions_of_the_forge_begin_where_the_package_does(repository: Path) -> None:
    jobs = yaml.safe_load((repository / ".github/workflows/test.yml").read_text())["jobs"]
    oldest = jobs["fast"]["strategy"]["matrix"]["python"][0]
    assert f'requires-python = ">={oldest}"' in (repository / "pyproject.toml").read_text()
