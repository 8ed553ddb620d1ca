"""The documentation site: its navigation, generated pages, links that leave docs/, and the build."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import accel_scale
from accel_scale.importing import axolotl_keys, llama_factory

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return module("site_hooks")


def test_the_navigation_is_the_index():
    """Same pages in the same groups and order: mkdocs.yml and docs/index.md change together."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    groups = re.split(r"^  - ", navigation, flags=re.MULTILINE)[1:]
    on_site = {group.partition(":")[0]: re.findall(r"[\w-]+\.md", group) for group in groups}
    on_site["Start"].remove("index.md")
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    parts = re.findall(r"^\*\*(.+)\*\*\n((?:- .*\n?)+)", index, re.MULTILINE)
    assert on_site == {name: re.findall(r"^- \[([\w-]+\.md)\]", pages, re.MULTILINE) for name, pages in parts}
    assert sum(map(len, on_site.values())) == len(list(DOCS.glob("*.md"))) - 1


def test_pages_made_from_the_code_are_current():
    """Run `python docs/refresh.py` to rewrite them."""
    pages = module("reference_pages")
    assert (DOCS / "flags.md").read_text(encoding="utf-8") == pages.flags_page()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == pages.api_page()


def test_the_flags_page_has_every_flag_with_its_default_once_for_each_recipe():
    text = (DOCS / "flags.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    names = {title: re.findall(r"^\| `--(\w+)` \|", part, re.MULTILINE) for title, part in sections.items()}
    assert len(names) == 11
    for title, found in names.items():
        assert len(found) == len(set(found)) > 3, title
    assert "| `--packing` | `true` |" in sections["sft.py"]
    assert "| `--learning_rate` | `0.0006` |" in sections["pretrain.py"]
    for recipe in ("sft.py", "dpo.py", "kto.py", "grpo.py", "rloo.py", "reward.py", "vision.py"):
        assert not set(names[recipe]) & set(names["Fine-tuning recipes"])
    assert {"method", "max_steps", "guard", "seed"} <= set(names["Fine-tuning recipes"])
    assert [
        line for line in text.splitlines() if line.startswith("|") and len(re.findall(r"(?<!\\)\|", line)) != 4
    ] == []


@pytest.mark.parametrize(
    ("target", "source", "with_repository", "without"),
    [
        ("../CHANGELOG.md", "docs/a.md", "https://x.org/p/blob/main/CHANGELOG.md", "repository/CHANGELOG.md"),
        ("../README.md#more", "docs/a.md", "https://x.org/p/blob/main/README.md#more", "repository/README.md#more"),
        ("../recipes", "docs/a.md", "https://x.org/p/tree/main/recipes", "repository/recipes"),
        ("guard.md#limits", "docs/a.md", "guard.md#limits", "guard.md#limits"),
        ("#limits", "docs/a.md", "#limits", "#limits"),
        ("https://y.org/z.md", "docs/a.md", "https://y.org/z.md", "https://y.org/z.md"),
        ("docs/guard.md", "README.md", "../guard.md", "../guard.md"),
        ("other.md", "benchmarks/results/a.md", "https://x.org/p/blob/main/benchmarks/results/other.md", "other.md"),
        ("../../docs/a.md", "benchmarks/results/a.md", "../../../a.md", "../../../a.md"),
    ],
)
def test_links_that_leave_docs_lead_to_the_repository_or_a_copy(hooks, target, source, with_repository, without):
    assert hooks.site_link(target, source, "https://x.org/p/") == with_repository
    assert hooks.site_link(target, source, None) == without


def test_what_a_forge_reads_as_a_list_or_table_is_one_on_the_site(hooks):
    page = (
        "Bad is\n- NaN, [here](../CHANGELOG.md)\n  or\n  - a spike\n\nNext:\n| a |\n|---|\n"
        "```text\nx\n- [y](../z.md)\n```\n"
    )
    assert hooks.for_site(page, "docs/a.md", None) == (
        "Bad is\n\n- NaN, [here](repository/CHANGELOG.md)\n  or\n    - a spike\n\nNext:\n\n| a |\n|---|\n"
        "```text\nx\n- [y](../z.md)\n```\n"
    )
    folder = "[a](../recipes) and [b](../CHANGELOG.md)\n"
    assert hooks.for_site(folder, "docs/a.md", None) == "a and [b](repository/CHANGELOG.md)\n"


def test_copies_are_followed_to_what_they_link_to(hooks):
    found = set(hooks.linked_outside({"docs/a.md": "[x](../README.md) [y](b.md)"}))
    assert {"README.md", "CHANGELOG.md", "accel_scale/assets/README.md"} <= found
    assert [path for path in found if path.startswith("docs/") or not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(
    ("tool", "rows"), [("axolotl", axolotl_keys.ROWS), ("LLaMA-Factory", llama_factory.ROWS)], ids=["axolotl", "llama"]
)
def test_settings_of_other_tools_stand_beside_the_flags_that_the_import_gives(tool, rows):
    text = (
        (DOCS / "coming-from.md").read_text(encoding="utf-8").partition(f"## From {tool}\n")[2].partition("\n## ")[0]
    )
    flags = {row.key: row.flag for row in rows}
    table = re.findall(r"^\| (`.+?) \| (.+) \|$", text, re.MULTILINE)
    assert len(table) > 15
    for theirs, ours in table:
        keys = re.findall(r"`(\w+)`", theirs)
        assert set(keys) <= flags.keys(), theirs
        assert all(flags[key] is None or f"`--{flags[key]}" in ours for key in keys), (theirs, ours)


def test_flags_that_the_guides_name_exist():
    known = set(re.findall(r"`--(\w+)`", (DOCS / "flags.md").read_text(encoding="utf-8")))
    commands = {"strategy", "longest", "method", "explain", "host_memory", "stack", "config_file", "mixed_precision"}
    for name in ("start", "one-gpu", "out-of-memory", "nan", "coming-from", "faq"):
        named = set(re.findall(r"--(?:no_)?([a-z]\w+)", (DOCS / f"{name}.md").read_text(encoding="utf-8")))
        assert named - known - commands - {"gpu", "tasks"} == set(), name


@pytest.mark.parametrize("row", [0, 1, 2, 3, 4])
def test_the_longest_rows_of_one_gpu_are_about_what_the_planner_says(row):
    text = (DOCS / "one-gpu.md").read_text(encoding="utf-8")
    head, _, *cards = re.findall(
        r"^\|(.+)\|$", text.partition("## How much fits")[2].partition("\n## ")[0], re.MULTILINE
    )
    models = [cell.strip() for cell in head.split("|")[1:]]
    card, *longest = (cell.strip() for cell in cards[row].split("|"))
    assert len(cards) == 5
    assert len(models) == len(longest) == 3
    for model, tokens in zip(models, longest, strict=True):
        if tokens == "–":
            with pytest.raises(accel_scale.ConfigError, match="not even a row of 256 tokens"):
                accel_scale.longest_row(f"Qwen/{model}", gpu=card, method="qlora", strategy="one GPU")
        else:
            found = accel_scale.longest_row(f"Qwen/{model}", gpu=card, method="qlora", strategy="one GPU")
            said = int(tokens.replace(",", ""))
            assert found.request.sequence_length == pytest.approx(said, rel=0.1), (card, model)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="the site's tools are not installed: pip install -e '.[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "site").glob("*.html")}
    assert {f"{path.stem}.html" for path in DOCS.glob("*.md")} <= pages.keys()
    loaded = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^>]+>"
    assert [(name, re.findall(loaded, text)) for name, text in pages.items() if re.search(loaded, text)] == []
    for name in accel_scale.__all__:
        assert name == "__version__" or re.search(rf'id="accel_scale(\.\w+)*\.{name}"', pages["api.html"]), name
