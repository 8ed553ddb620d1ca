"""The "Plan" tab: controls, the planner's answer, what-if sliders, and files to download."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_scale.board import plan_answers
from accel_scale.board.environment import served_folder
from accel_scale.board.events import listen
from accel_scale.board.plan_controls import CONTROLS, command_of, name_of, settings_of, start_of
from accel_scale.board.rendering import refused
from accel_scale.errors import ConfigError
from accel_scale.planning.search.wish import MODEL, PlanFlag, Value

if TYPE_CHECKING:
    from gradio import Blocks
    from gradio.components import Component, Textbox

    from accel_scale.board.plan_answers import Answered, Settings

# Flag → label, first and last position, step.
SLIDERS: dict[str, tuple[str, int, int, int]] = {
    "max_length": ("Row length, tokens", 256, 131_072, 256),
    "num_gpus": ("GPUs", 1, 64, 1),
    "global_batch_size": ("Batch per step, sequences", 1, 1024, 1),
    "lora_r": ("LoRA rank", 1, 256, 1),
}
# A dropdown's entry for a choice that is left to the planner.
_OPEN = "open"


def add_plan_tab(page: Blocks) -> None:
    """Lay out the tab in `page`, which is being built; it is filled when the page loads."""
    import gradio as gr

    with gr.Row(elem_classes="b-controls"):
        basic = {control.name: _component(control) for control in CONTROLS if control.is_basic}
    with gr.Accordion("More settings", open=False), gr.Row(elem_classes="b-controls"):
        more = {control.name: _component(control) for control in CONTROLS if not control.is_basic}
    components = {**basic, **more}
    asked = [components[control.name] for control in CONTROLS]
    button = gr.Button("Plan", variant="primary", elem_id="plan-button")
    settings = gr.State({})
    overview = gr.HTML(elem_id="plan-overview")
    command = _text("The same in a terminal", "plan-command", lines=1)
    gr.HTML("<h2>What if</h2>")
    with gr.Row(elem_classes="b-controls"):
        sliders = [
            gr.Slider(low, high, value=low, step=step, label=label, elem_id=f"what-if-{name}", min_width=250)
            for name, (label, low, high, step) in SLIDERS.items()
        ]
    what_if = gr.HTML(elem_id="plan-what-if")
    with gr.Row():
        longest = gr.Button("Longest row that fits", elem_id="longest-button")
        largest = gr.Button("Largest micro-batch that fits", elem_id="largest-button")
    extreme = gr.HTML(elem_id="plan-extreme")
    gr.HTML("<h2>Take it away</h2>")
    chosen = gr.Dropdown([], label="Setting", elem_id="plan-chosen", interactive=True)
    terms = gr.HTML(elem_id="plan-terms")
    with gr.Row():
        launch = _text("launch.yaml", "plan-launch", lines=12)
        recipe = _text("recipe.yaml", "plan-recipe", lines=12)
    run = _text("Rehearse it, then run it", "plan-run", lines=2)
    archive = gr.DownloadButton("Download the files", elem_id="plan-files", interactive=False)
    files = [terms, launch, recipe, run, archive]

    typed = [component.submit for component in asked if isinstance(component, (gr.Number, gr.Textbox))]
    outputs = [settings, overview, command, *sliders, what_if, extreme, chosen, *files]
    # One search at a time, because a search keeps a core busy.
    listen([page.load, button.click, *typed], _plan, asked, outputs, queue="plan")
    listen([slider.release for slider in sliders], _what_if, [settings, *sliders], [what_if], queue="plan")
    listen([longest.click], _sentence(plan_answers.longest), [settings], [extreme], queue="plan")
    listen([largest.click], _sentence(plan_answers.largest), [settings], [extreme], queue="plan")
    listen([chosen.input], _files_of_chosen, [settings, chosen], files, queue="plan")


def _component(control: PlanFlag) -> Component:
    import gradio as gr

    name, value = f"plan-{name_of(control)}", start_of(control)
    label, info = control.label, control.info or None
    if isinstance(value, bool):
        return gr.Checkbox(value, label=label, elem_id=name, min_width=250)
    if control.choices:
        choices = control.choices() if callable(control.choices) else control.choices
        return gr.Dropdown(
            choices if value is not None else (_OPEN, *choices),
            value=value or _OPEN,
            allow_custom_value=control.takes_others,
            label=label,
            info=info,
            elem_id=name,
            min_width=320 if control is MODEL else 180,
            scale=2 if control is MODEL else 1,
        )
    if control.most and value is not None:  # an empty number would be shown as 0
        return gr.Number(int(value), precision=0, label=label, info=info, elem_id=name, min_width=180)
    return gr.Textbox("", max_lines=1, label=label, info=info, elem_id=name, min_width=180)


def _text(label: str, name: str, *, lines: int) -> Textbox:
    """Text to copy; unlike Gradio's code editor, it can be reached and scrolled by keyboard."""
    import gradio as gr

    return gr.Textbox(
        label=label,
        lines=lines,
        max_lines=40,
        interactive=False,
        buttons=["copy"],
        elem_id=name,
        elem_classes="b-code",
    )


# ── Handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan(*values: Value) -> list[object]:
    import gradio as gr

    try:
        settings = settings_of([None if value == _OPEN else value for value in values])
        answered = plan_answers.answer(settings)
    except ConfigError as error:
        sliders: list[object] = [gr.update()] * len(SLIDERS)
        chosen = gr.update(choices=[], value=None)
        return [{}, refused(error), "", *sliders, "", "", chosen, *_nothing(), _no_archive()]
    positions = plan_answers.sliders_of(answered.plan)
    sliders = [_position(name, positions[name]) for name in SLIDERS]
    labels = answered.labels
    chosen = gr.update(choices=labels, value=labels[0] if labels else None)
    parts = [settings, plan_answers.overview(answered), command_of(settings), *sliders]
    return [*parts, plan_answers.compared(settings, {}), "", chosen, *_files(answered, 0)]


def _what_if(settings: Settings, *positions: float) -> str:
    if not settings:
        return ""
    try:
        changes = {name: str(int(position)) for name, position in zip(SLIDERS, positions, strict=True)}
        return plan_answers.compared(settings, changes)
    except ConfigError as error:
        return refused(error)


def _sentence(question: Callable[[Settings], str]) -> Callable[[Settings], str]:
    def asked(settings: Settings) -> str:
        from accel_scale.board.rendering import filled

        try:
            return filled("sentence", text=question(settings)) if settings else ""
        except ConfigError as error:
            return refused(error)

    return asked


def _files_of_chosen(settings: Settings, chosen: str | None) -> list[object]:
    answered = plan_answers.answer(settings) if settings else None
    at = answered.labels.index(chosen) if answered and chosen in answered.labels else 0
    if answered is None:
        return [*_nothing(), _no_archive()]
    return _files(answered, at)


def _files(answered: Answered, at: int) -> list[object]:
    """The parts below "Take it away" for the setting at index `at`."""
    import gradio as gr

    if not answered.shown:
        return [*_nothing(), _no_archive()]
    candidate = answered.shown[at]
    terms = plan_answers.terms(candidate)
    try:
        files = plan_answers.written(answered, candidate)
    except ConfigError as error:
        return [terms + refused(error), *_nothing()[1:], _no_archive()]
    text = {path.name: content for path, content in files.files.items()}
    archive = gr.update(value=str(plan_answers.packed(files, served_folder())), interactive=True)
    return [terms, text["launch.yaml"], text["recipe.yaml"], f"{files.rehearsal}\n{files.command}", archive]


def _position(name: str, position: int) -> object:
    """A slider at `position`, with its range extended if the position lies outside."""
    import gradio as gr

    _, low, high, step = SLIDERS[name]
    return gr.update(value=position, minimum=min(low, position), maximum=max(high, position), step=step)


def _nothing() -> list[object]:
    return ["", "", "", ""]


def _no_archive() -> object:
    import gradio as gr

    return gr.update(value=None, interactive=False)
