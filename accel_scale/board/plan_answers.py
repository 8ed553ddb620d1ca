"""Content of the "Plan" tab: the planner's answers as parts of the page and as files."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from accel_scale.board import bars
from accel_scale.board.plan_controls import command_of, wish_of
from accel_scale.board.rendering import filled
from accel_scale.errors import ConfigError
from accel_scale.planning.search import questions
from accel_scale.planning.search.branches import branch_of
from accel_scale.planning.search.plan import Candidate, Plan
from accel_scale.planning.search.requests import build_request, flag_places, model_for_recipe
from accel_scale.planning.search.search import search
from accel_scale.planning.search.wish import BUDGET, MODEL, Wish
from accel_scale.planning.search.writing import RecipeChoices, WrittenPlan, plan_files
from accel_scale.reporting.plan_tables import (
    Budgeted,
    describe_request,
    nothing_fits,
    ranked_rows,
    request_notes,
    time_notes,
)
from accel_scale.reporting.question_tables import difference_cells

Settings = Mapping[str, str | bool]
SHOWN = 6  # settings listed in the table
# Where the commands expect the downloaded files.
FOLDER = Path("plans")


@dataclass(frozen=True)
class Answered:
    """A plan, with what the page needs to show it.

    Attributes:
        settings: The settings that were asked for.
        plan: The answer.
        budget: Tokens and price, if given.
    """

    settings: Settings
    plan: Plan
    budget: Budgeted

    @property
    def shown(self) -> Sequence[Candidate]:
        """The settings listed in the table."""
        return self.plan.candidates[:SHOWN]

    @property
    def labels(self) -> list[str]:
        """Names of `shown`, for the dropdown."""
        return [f"{at}: {label_of(candidate)}" for at, candidate in enumerate(self.shown, 1)]


def label_of(candidate: Candidate) -> str:
    """Strategy, method, micro-batch and checkpointing."""
    setup = candidate.setup
    batch = f"{setup.micro_batch_size} × {setup.accumulation}"
    return f"{candidate.choice.label}, {setup.method}, {batch}, {setup.checkpointing}"


def answer(settings: Settings) -> Answered:
    """The plan for the given settings.

    Raises:
        ConfigError: if the request cannot be planned.
    """
    budget = Budgeted.of_flags(*(_text(settings, flag.name) for flag in BUDGET))
    return Answered(settings, planned(wish_of(settings)), budget)


@lru_cache(maxsize=64)
def planned(wish: Wish) -> Plan:
    """The plan for a wish, cached.

    Raises:
        ConfigError: if the request cannot be planned.
    """
    with flag_places():
        return search(build_request(wish))


def overview(answered: Answered) -> str:
    """The table, the assumptions, and why the other settings do not fit."""
    plan = answered.plan
    return filled(
        "plan",
        title=describe_request(plan),
        rows=ranked_rows(answered.shown, answered.budget),
        bars=_bars_of(answered) if plan.best else "",
        num_more=len(plan.candidates) - len(answered.shown),
        branch=branch_of(plan.best.setup).line if plan.best else "",
        notes=[*request_notes(plan.request), *(time_notes(plan) if plan.best else [])],
        rejections=plan.rejections,
        remedies=[] if plan.best else nothing_fits(plan),
    )


def _bars_of(answered: Answered) -> str:
    gpu = answered.plan.request.machine.gpu
    each = [bars.on_card(candidate, label) for candidate, label in zip(answered.shown, answered.labels, strict=True)]
    return bars.drawn(each, title="Memory of each GPU at its peak", limit=gpu.memory_bytes)


def terms(candidate: Candidate) -> str:
    """The phases of one setting's step as stacked bars."""
    return bars.drawn(bars.phases(candidate), title=f"A step of {label_of(candidate)}, phase by phase")


# ── Questions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def compared(settings: Settings, changes: Mapping[str, str]) -> str:
    """The best setting, and what it becomes with each single change.

    Args:
        changes: New value of each flag; values that change nothing are left out.

    Raises:
        ConfigError: if the base cannot be planned.
    """
    wish = wish_of(settings)
    base = planned(wish)
    words = [f"{name}={value}" for name, value in changes.items() if value != _now(name, base)]
    rows = [difference_cells(questions.difference("", base, base))]
    for change in words:
        try:
            changed = planned(questions.changed(wish, base, change))
            rows.append(difference_cells(questions.difference(change, changed, base)))
        except ConfigError as error:
            rows.append([change, "cannot be planned", error.one_line(), *[""] * 6])
    return filled("what_if", rows=rows, command=command_of(settings, "--what_if", *words) if words else "")


def sliders_of(plan: Plan) -> dict[str, int]:
    """Slider positions for a plan."""
    return {name: int(_now(name, plan)) for name in ("max_length", "num_gpus", "global_batch_size", "lora_r")}


def _now(name: str, plan: Plan) -> str:
    request = plan.request
    values = {
        "max_length": request.sequence_length,
        "num_gpus": request.machine.num_gpus,
        "global_batch_size": request.global_batch_size // request.recipe.rows_per_example,
        "lora_r": request.fixed["lora"].rank,
    }
    return str(values[name])


def longest(settings: Settings) -> str:
    """A sentence that states the longest row that fits.

    Raises:
        ConfigError: if none fits.
    """
    words = {name: value for name, value in settings.items() if name != "per_device_train_batch_size"}
    wish = wish_of({name: value for name, value in words.items() if name != "max_length"})
    with flag_places():
        plan = questions.longest_row(build_request(wish))
    assert plan.best is not None
    length = plan.request.sequence_length
    text = f"The longest row that fits: {length:,} tokens, with {label_of(plan.best)}."
    most = plan.request.model.max_positions
    return text + (f" {plan.request.model.name} was made for {most:,} tokens." if most and length > most else "")


def largest(settings: Settings) -> str:
    """A sentence that states the largest micro-batch that fits.

    Raises:
        ConfigError: if none fits.
    """
    kept = {name: value for name, value in settings.items() if name != "per_device_train_batch_size"}
    with flag_places():
        plan = questions.largest_batch(build_request(wish_of({**kept, "global_batch_size": str(2**20)})))
    assert plan.best is not None
    examples = plan.best.setup.micro_batch_size // plan.request.recipe.rows_per_example
    rows = f"{examples:,} of {plan.request.sequence_length:,} tokens"
    return f"The largest micro-batch that fits: {rows}, with {label_of(plan.best)}."


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(answered: Answered, candidate: Candidate) -> WrittenPlan:
    """The files that run a setting, as written by `accel-scale plan --write`.

    Raises:
        ConfigError: if the recipe cannot run the setting.
    """
    settings = answered.settings
    model = str(settings[MODEL.name])
    length = int(settings["max_length"]) if "max_length" in settings else None
    choices = RecipeChoices(model_for_recipe(model), tokens=answered.budget.tokens, max_length=length)
    folder = FOLDER / model.rpartition("/")[2].lower()
    return plan_files(answered.plan.request, candidate, choices, folder)


def packed(files: WrittenPlan, folder: Path) -> Path:
    """Pack the files into one archive below `folder`, under the paths that the commands name; deterministic."""
    about = f"Unpack this where you run:\n\n{files.rehearsal}\n{files.command}\n"
    texts = {**{path.as_posix(): text for path, text in files.files.items()}, "README.txt": about}
    name = f"{next(iter(files.files)).parent.name}.zip"
    target = folder / hashlib.sha256(repr(texts).encode()).hexdigest()[:16] / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{name}.{threading.get_ident()}")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in texts.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    partial.replace(target)
    return target


def _text(settings: Settings, name: str) -> str | None:
    value = settings.get(name)
    return value if isinstance(value, str) else None
