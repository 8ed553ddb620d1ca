"""The README.md of a run's folder: what was run, on which hardware, and the results, from `run_summary.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import yaml

from accel_scale.launching.run_folder import is_own, record_written
from accel_scale.reporting.run_tables import end_rows
from accel_scale.reporting.summary import SUMMARY_NAME
from accel_scale.reporting.tables import format_count

CARD_NAME = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# A path of this machine within a text: starts at a slash, a tilde or a drive that begins a word.
_LOCAL_PATH = re.compile(r"(?<![\w.:/~\\-])(?:~?/|~?\\|[A-Za-z]:[/\\])[^\s,'\"=\[\](){}]*")
_MARKDOWN = re.compile(r"([\\`*_\[\]|~#])")
_TASKS = {"reward.py": "text-classification", "vision.py": "image-text-to-text"}
_LEFT_OUT = ("output_dir", "hub_model_id", "run_name", "print_config", "resume_from_checkpoint", "resume")
_WHAT = {
    "sft.py": "fine-tuned", "dpo.py": "tuned to pairs of answers", "kto.py": "tuned to labelled answers",
    "grpo.py": "trained on rewards", "rloo.py": "trained on rewards", "reward.py": "trained to score answers",
    "pretrain.py": "pretrained", "vision.py": "fine-tuned on images",
}  # fmt: skip


def write_card(summary: Path) -> Path | None:
    """Write README.md next to a run's summary; returns None and leaves the file alone if it is not ours.

    Args:
        summary: Path of the summary, which holds no credentials.
    """
    path = summary.parent / CARD_NAME
    if not is_own(path):
        return None
    content = json.loads(summary.read_text(encoding="utf-8"))
    partial = path.with_suffix(".partial")
    partial.write_text(model_card(content, name=summary.absolute().parent.name), encoding="utf-8")
    partial.replace(path)
    record_written(path)
    return path


def model_card(summary: Mapping[str, object], *, name: str) -> str:
    """Text of the card: hub metadata, results, training, settings, and how to load the model.

    Args:
        summary: Content of `run_summary.json`.
        name: Name of the model if the settings name no repository on the hub.
    """
    settings = _mapping(summary.get("settings"))
    repository = str(settings.get("hub_model_id") or name)
    method = _method(settings)
    program = str(summary.get("recipe", ""))
    versions = _mapping(summary.get("versions"))
    base = public_text(settings.get("model_name_or_path") or settings.get("model_config") or "")
    made = f"{_what(program)} by `{program}` of accel-scale {versions.get('accel-scale', '')}"
    sentences = [f"This model was {made}" + (f", from {escape(base)}." if base else ", from nothing.")]
    if summary.get("rehearsal"):
        sentences.append("It comes from a rehearsal on CPU processes and is of no use.")
    if summary.get("stopped_by"):
        sentences.append(f"The run was stopped early: {escape(public_text(summary['stopped_by']))}.")
    parts = [
        _front_matter(settings, program, method),
        f"# {escape(repository.rpartition('/')[2])}",
        " ".join(sentences),
        "## Results\n\n" + _table(_results(summary)),
        "## Training\n\n" + _table(_training(summary, settings, method)),
        "## Settings\n\nAs `--config_file` takes them; paths of that machine are cut to their last part.\n\n"
        + _fenced(_settings_yaml(settings), "yaml"),
        "## Use\n\n" + _fenced(_usage(repository, method, program), "python"),
        "`" + SUMMARY_NAME + "` beside this file has all figures.",
    ]
    return "\n\n".join(parts) + "\n"


def public_text(value: object) -> str:
    """A value as text, with local paths cut to their last part."""

    def last_part(found: re.Match[str]) -> str:
        parts = [part for part in re.split(r"[/\\]", found[0]) if part]
        if "default" in parts and "assets" in parts:  # a path of the package
            return "accel-scale's embedded " + ("model" if parts[-1] == "model" else "data")
        return parts[-1] if parts else ""

    text = str(value)
    whole = re.match(_LOCAL_PATH.pattern, text)  # a whole path, possibly with spaces; else paths in a sentence
    return re.sub(r".+", last_part, text) if whole else _LOCAL_PATH.sub(last_part, text)


def escape(text: object) -> str:
    """The text on one line, escaped so that Markdown and HTML show it literally."""
    plain = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", plain)


def _mapping(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _method(settings: Mapping[str, object]) -> str:
    adapters = "qlora" if settings.get("load_in_4bit") else "lora"
    return str(settings.get("method") or (adapters if settings.get("use_peft") else "full"))


def _what(program: str) -> str:
    return _WHAT.get(program, "trained")


def _data_names(settings: Mapping[str, object]) -> list[str]:
    found: list[str] = []
    for flag in ("dataset_name", "dataset_mixture", "data"):
        value = settings.get(flag)
        found += [str(item) for item in (value if isinstance(value, list) else [value]) if item]
    return found


def _front_matter(settings: Mapping[str, object], program: str, method: str) -> str:
    model = str(settings.get("model_name_or_path") or "")
    data = [re.split(r"[:=]", name)[0] for name in _data_names(settings)]
    values: dict[str, object] = {
        "library_name": "transformers" if method == "full" else "peft",
        "pipeline_tag": _TASKS.get(program, "text-generation"),
        "tags": ["accel-scale", program.removesuffix(".py"), *([method] if method != "full" else [])],
    }
    if _is_hub_id(model):
        values["base_model"] = model
    if names := [name for name in data if _is_hub_id(name)]:
        values["datasets"] = names
    return "---\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True) + "---"


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists() and not Path(name).suffix.startswith(".json")


def _results(summary: Mapping[str, object]) -> dict[str, object]:
    tokens = summary.get("tokens")
    return {
        **end_rows(summary),
        "tokens trained on": format_count(float(tokens)) if isinstance(tokens, (int, float)) else None,
    }


def _training(summary: Mapping[str, object], settings: Mapping[str, object], method: str) -> dict[str, object]:
    parameters, data = _mapping(summary.get("parameters")), _mapping(summary.get("data"))
    machine, versions = _mapping(summary.get("machine")), _mapping(summary.get("versions"))
    sources = data.get("sources") or _data_names(settings)
    rows = data.get("rows")
    named = ", ".join(public_text(source) for source in cast("list[object]", sources)) or "accel-scale's embedded data"
    devices = cast("list[object]", machine.get("devices") or [])
    ranks = summary.get("world_size")
    total, trained = (float(str(parameters.get(key, 0))) for key in ("total", "trainable"))
    return {
        "method": f"{method}, {format_count(trained)} of {format_count(total)} parameters trained",
        "data": named + (f", {format_count(float(str(rows)))} rows" if rows else ""),
        "precision": settings.get("precision"),
        "optimizer": summary.get("optimizer") or settings.get("optim"),
        "learning rate": settings.get("learning_rate"),
        "attention": summary.get("attention"),
        "strategy": f"{summary.get('strategy')}, {ranks} process{'es' * (ranks != 1)}",
        "hardware": f"{devices[0] if devices else 'unknown'}, {machine.get('cores')} cores, {machine.get('system')}",
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items()),
        "date": summary.get("date"),
    }


def _table(rows: Mapping[str, object]) -> str:
    lines = [f"| {escape(name)} | {escape(public_text(value))} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])


def _settings_yaml(settings: Mapping[str, object]) -> str:
    def public(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [public(item) for item in value]
        return public_text(value) if isinstance(value, str) else value

    kept = {name: public(value) for name, value in settings.items() if name not in _LEFT_OUT and value is not None}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=110).rstrip()


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _usage(repository: str, method: str, program: str) -> str:
    name = json.dumps(repository)
    if program == "vision.py":
        return _usage_with_images(name, method)
    kind = "SequenceClassification" if program == "reward.py" else "CausalLM"
    library, cls = ("transformers", f"AutoModelFor{kind}") if method == "full" else ("peft", f"AutoPeftModelFor{kind}")
    imports = [f"from {library} import {cls}", "from transformers import AutoTokenizer"]
    if library == "transformers":
        imports = [f"from transformers import {cls}, AutoTokenizer"]
    loads = [f"model = {cls}.from_pretrained({name})", f"tokenizer = AutoTokenizer.from_pretrained({name})"]
    return "\n".join([*imports, "", *loads])


def _usage_with_images(name: str, method: str) -> str:
    cls = "AutoModelForImageTextToText"
    lines = [f"from transformers import {cls}, AutoProcessor", ""]
    if method == "full":
        lines.append(f"model = {cls}.from_pretrained({name})")
    else:
        lines = [
            "from peft import PeftConfig, PeftModel",
            *lines,
            f"base = PeftConfig.from_pretrained({name}).base_model_name_or_path",
            f"model = PeftModel.from_pretrained({cls}.from_pretrained(base), {name})",
        ]
    return "\n".join([*lines, f"processor = AutoProcessor.from_pretrained({name})"])
