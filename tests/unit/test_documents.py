"""README and docs: short enough, all links lead somewhere, every page is listed, and quoted outputs are current."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

import accel_scale
from accel_scale.cli.main import main
from accel_scale.launching.machine import detect_machine
from accel_scale.planning.cost import overheads

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "accel_scale" / "assets" / "README.md"])
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short_and_begins_with_what_a_reader_needs():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    first_screen = "\n".join(lines[:40])
    for needed in ("For training LLMs", "pip install", "accel-scale plan", "memory per GPU"):
        assert needed in first_screen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not fragment or fragment in anchors(linked), target


def test_the_parity_page_names_every_launch_file():
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^(?:\| (\w+) \||- `(\w+)`: .*)", text, re.MULTILINE))
    files = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert {a or b for a, b in named} - {"half_batch"} == files
    results = (ROOT / "benchmarks" / "results" / "model_parallel_parity.md").read_text(encoding="utf-8")
    layouts = re.findall(r"^- .*: rows ([^[]+) of \[", text, re.MULTILINE)
    assert len(layouts) == 4
    for layout in layouts:
        assert f"| llama | {layout} |" in results


def test_commands_before_a_launch_can_be_typed_as_they_are():
    """The embedded model and data are used where none are named, so nothing is left to fill in."""
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "docs" / "rehearsal.md").read_text(
        encoding="utf-8"
    )
    blocks = [block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "accel-scale doctor" in block]
    assert len(blocks) == 2
    for block in blocks:
        assert "…" not in block


def shell_lines(page: Path) -> list[str]:
    """Lines of a page's shell blocks, with continuation lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_files_of_the_readmes_commands_exist_or_are_said_to_be_the_readers_own():
    prose = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    stand_in = [
        name
        for names in re.findall(r"((?:`[^`]+`(?:, | and )?)+) stand for your own", prose)
        for name in re.findall(r"`([^`]+)`", names)
    ]
    seen = []
    for line in shell_lines(ROOT / "README.md"):
        words, comment = shlex.split(line, comments=True), line.partition(" #")[2]
        for name in (word for word in words if re.search(r"\.(jsonl|json|yaml|txt|py)$", word)):
            seen.append(name)
            assert (ROOT / name).exists() or name.startswith(tuple(stand_in)) or "your " in comment, line
    assert {"web/*.jsonl", "my_run.yaml", "data/pairs.jsonl", "recipes/sft.py"} <= set(seen)


@pytest.mark.parametrize("page", ["README.md", "docs/start.md", "docs/rehearsal.md", "docs/adding.md"])
def test_the_doctor_finds_nothing_in_a_pages_command_but_what_the_page_says(page, capsys, monkeypatch):
    if detect_machine().num_devices:
        pytest.skip("the pages' launches are for machines that have as many devices or none")
    monkeypatch.chdir(ROOT)
    prose = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    (line,) = (line for line in shell_lines(ROOT / page) if line.startswith("accel-scale doctor"))
    status = main(shlex.split(line, comments=True)[1:])
    errors = re.findall(r"^error: [^:]+: (.*)\. Fix: ", capsys.readouterr().out, re.MULTILINE)
    assert [error for error in errors if f"`{error}`" not in prose] == []
    assert status == bool(errors)
    assert not errors or re.search(r"exits with (status )?1\b", prose)
    assert bool(errors) == (page in ("README.md", "docs/rehearsal.md"))


def test_the_index_lists_every_page():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\((\S+\.md)\): \S", text, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")


def test_figures_of_readme_and_measured_name_a_committed_file():
    for page, marker in ((ROOT / "README.md", "## Measured"), (ROOT / "docs" / "measured.md", "# Measured")):
        text = page.read_text(encoding="utf-8")
        tables = re.split(r"^## (?!Measured)", text[text.index(marker) :], flags=re.MULTILINE)
        rows = [line for part in (tables[:1] if page.name == "README.md" else tables) for line in part.splitlines()]
        figures = [row for row in rows if row.startswith("| ") and not row.startswith("| what")]
        assert len(figures) > 4
        for row in figures:
            where = row.rstrip(" |").rpartition(" | ")[2]
            named = [*re.findall(r"`([\w/.]+\.\w+)`", where), *(t.removeprefix("../") for t in _LINK.findall(where))]
            assert any((ROOT / name).exists() or (page.parent / name.partition("#")[0]).exists() for name in named), (
                row
            )
            assert all((ROOT / name).exists() for name in named if "/" in name and "#" not in name), row


def measured(pattern: str, result: str) -> list[float]:
    """Numbers that `pattern` finds in a committed table."""
    found = re.search(pattern, (ROOT / "benchmarks" / "results" / result).read_text(encoding="utf-8"))
    assert found, (pattern, result)
    return [float(number.replace(",", "")) for number in found.groups()]


def test_figures_are_those_of_the_committed_results():
    """README and docs/measured.md quote benchmarks/results: a new measurement changes all three."""
    results = ROOT / "benchmarks" / "results"
    steps = json.loads((results / "planner_cpu.json").read_text())["rows"]
    errors = [abs(row["error"]) for row in steps]
    published = json.loads((results / "planner_accuracy.json").read_text())["all_hf"]
    (compiled,) = measured(r"ours, --torch_compile \| [\d,]+ \| ([\d.]+)", "pretrain_side_by_side_fp32.md")
    (plain,) = measured(r"\| ours \| [\d,]+ \| ([\d.]+)", "pretrain_side_by_side_fp32.md")
    (tuned,) = measured(r"TRL tuned[^|]*\| [\d,]+ \| ([\d.]+)", "sft_side_by_side.md")
    (ours,) = measured(r"accel-scale defaults \| [\d,]+ \| ([\d.]+)", "sft_side_by_side.md")
    kills = re.findall(r"^\| \w+ \| (\d+) \|", (results / "sft_soak.md").read_text(encoding="utf-8"), re.MULTILINE)
    for page in (ROOT / "README.md", ROOT / "docs" / "measured.md"):
        text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
        for quoted in (
            f"{len(steps)} random models of {len({row['architecture'] for row in steps})} architectures",
            f"median error {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %",
            f"median error {100 * published['median_error']:.1f} %",
            f"`accelerate estimate-memory`: {100 * published['accelerate_median_error']:.0f} %",
            f"{ours:.1f} ×",
            f"{ours / tuned:.1f} ×",
            f"{plain:.2f} ×",
            f"{compiled:.2f} ×",
            f"{sum(map(int, kills))}",
        ):
            assert quoted in text, (page.name, quoted)


def test_what_is_said_of_intervals_and_reserved_memory_is_what_is_computed():
    board = json.loads((ROOT / "benchmarks/results/planner_accuracy.json").read_text())
    inside = f"{100 * board['all_hf']['inside']:.0f} %"
    planning, figures = (
        re.sub(r"\s+", " ", (ROOT / "docs" / name).read_text(encoding="utf-8"))
        for name in ("planning.md", "measured.md")
    )
    assert f"{inside} of the published measurements of Hugging Face stacks lie inside" in planning
    assert f"{inside} inside the interval" in figures
    every = board["all"]
    assert (
        f"{every['rows']} in all | median error {100 * every['median_error']:.1f} %, {100 * every['inside']:.0f} %"
    ) in figures
    assert every["dangerous"] == 0
    speeds = json.loads((ROOT / "benchmarks/results/published_speeds.json").read_text())["all"]
    error, held = f"{100 * speeds['median_error']:.1f} %", f"{100 * speeds['inside']:.0f} %"
    assert f"{speeds['rows']} published speeds, 83 of them used in fitting | median error {error}, {held}" in figures
    assert f"the median error is {error}, and {held} lie in the interval" in planning
    for share, part in (
        (overheads.STATES_MARGIN, "weights, gradients and states"),
        (overheads.ACTIVATIONS_MARGIN, "activations and buffers"),
        (overheads.ALLOCATOR_MARGIN, "what the allocator holds back"),
        (overheads.CONTEXT_MARGIN, "CUDA's and NCCL's own"),
    ):
        assert f"{100 * share:.0f} % of {part}" in planning
    pattern = r"(\d+) measurements, GiB reserved: median error (\d+)%, planned as rows of one length (\d+)%"
    count, error, alone = (round(value) for value in measured(pattern, "allocator_lengths.md"))
    assert (
        f"{count} measurements of ms-swift | median error {error} %; planned as rows of one length {alone} %"
        in figures
    )


def test_readme_quotes_what_its_command_prints(capsys, monkeypatch):
    """`python docs/refresh.py` updates the quotation."""
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    assert spec is not None
    assert spec.loader is not None
    refresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(refresh)
    monkeypatch.setenv("COLUMNS", "120")
    ((command, quoted),) = refresh.quoted_outputs((ROOT / "README.md").read_text(encoding="utf-8"))
    assert main(refresh.shlex.split(command)[1:]) == 0
    printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert quoted == printed


def test_the_readmes_pictures_are_light_load_nothing_and_show_todays_plan():
    """`python docs/pictures.py` regenerates them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = [ROOT / target for target in _LINK.findall(text) if target.endswith((".svg", ".png"))]
    assert {path.name for path in pictures} >= {"plan.svg", "rehearsal.svg", "guarded.png"}
    for path in pictures:
        assert path.stat().st_size < 300_000, path
        drawn = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "") if path.suffix == ".svg" else ""
        assert "http" not in drawn
        assert "@import" not in drawn
    plan = (ROOT / "docs" / "pictures" / "plan.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    rows = re.findall(
        r"^│(one GPU|ZeRO-2 \+ CPU offload) .*│ +([\d.]+ ± [\d.]+ GiB) │ +([\d.]+ s) │", text, re.MULTILINE
    )
    assert len(rows) == 3
    assert [cell for row in rows for cell in row if cell not in plan] == []


def defined_in(path: Path) -> set[str]:
    """Names that a module defines or imports at top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def exists(dotted: str) -> bool:
    """True if ``accel_scale.a.b`` is a public name, a module, or a name in a module."""
    parts = dotted.split(".")[1:]
    folder = ROOT / "accel_scale"
    for index, part in enumerate(parts):
        if index == 0 and len(parts) == 1 and part in accel_scale.__all__:
            return True
        if (folder / part).is_dir():
            folder /= part
            continue
        module = folder / f"{part}.py"
        module = module if module.is_file() else folder / "__init__.py"
        rest = parts[index + 1 :] if module.name != "__init__.py" else parts[index:]
        return not rest or rest[0] in defined_in(module)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_modules_and_names_exist(page):
    """Every ``accel_scale.…`` in text or code, every import in a code block, every path of a file in the project."""
    text = page.read_text(encoding="utf-8")
    dotted = set(re.findall(r"\baccel_scale(?:\.[A-Za-z_]\w*)+", text))
    for module, names in re.findall(r"^from (accel_scale[\w.]*) import \(?([\w,\s]+?)\)?$", text, re.MULTILINE):
        dotted |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    assert [name for name in sorted(dotted) if not exists(name.removesuffix(".py"))] == []
    if page.name in ("CHANGELOG.md", "comparison.md"):  # about earlier files and other projects' files
        return
    paths = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|yaml))`", text)
    below = (ROOT, page.parent, ROOT / "accel_scale")
    assert [path for path in paths if not any((folder / path).exists() for folder in below)] == []


# Pages for people who change the package.
INSIDE = {"adding.md", "architecture.md", "contributing.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in INSIDE], ids=lambda page: page.name)
def test_examples_import_public_names_only(page):
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^[+ ]?from (accel_scale[\w.]*) import (\([^)]*\)|[^\n]+)", text, re.MULTILINE)
    for module, names in found:
        assert module == "accel_scale", module
        assert {name.strip() for name in names.strip("()").split("#")[0].split(",")} - {""} <= set(accel_scale.__all__)
