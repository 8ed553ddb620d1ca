"""The "Doctor" tab: checks a launch file and a recipe's flags for contradictions."""

from __future__ import annotations

from accel_scale.board.doctor_answers import RECIPES, diagnosis
from accel_scale.board.events import listen
from accel_scale.board.rendering import refused
from accel_scale.errors import ConfigError
from accel_scale.shipped import launch_names

_NONE, _DROPPED = "none", "the file dropped below"
_KINDS = [".yaml", ".yml"]


def add_doctor_tab() -> None:
    """Lay out the tab in the `gradio.Blocks` being built."""
    import gradio as gr

    with gr.Row(elem_classes="b-controls"):
        with gr.Column(min_width=300):
            name = gr.Dropdown(
                [_DROPPED, *launch_names()], value=_DROPPED, label="Launch file", elem_id="doctor-launch-name"
            )
            launch = gr.File(
                label="Launch file, with DeepSpeed's JSON",
                file_count="multiple",
                file_types=[*_KINDS, ".json"],
                elem_id="doctor-launch",
                height=170,
            )
        with gr.Column(min_width=300):
            recipe = gr.Dropdown([_NONE, *RECIPES], value="sft", label="Recipe", elem_id="doctor-recipe")
            flags = gr.File(label="Its flags", file_types=_KINDS, elem_id="doctor-flags", height=170)
    button = gr.Button("Check", variant="primary", elem_id="doctor-button")
    findings = gr.HTML(elem_id="doctor-findings")
    listen([button.click], _check, [name, launch, recipe, flags], [findings], queue="doctor")


def _check(name: str, launch: list[str] | None, recipe: str, flags: str | None) -> str:
    try:
        return diagnosis(
            None if name == _DROPPED else name,
            launch or [],
            None if recipe == _NONE else recipe,
            [flags] if flags else [],
        )
    except ConfigError as error:
        return refused(error)
