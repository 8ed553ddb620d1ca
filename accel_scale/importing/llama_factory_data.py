"""LLaMA-Factory's training data: names defined in its dataset_info.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from accel_scale.importing.draft import CHECK, LOST, MAPPED, Draft, as_list, joins, leaves, number, takes

INFO = "dataset_info.json"
DATA_ROWS = (
    *takes("cutoff_len", flag="max_length"),
    *takes("preprocessing_num_workers", flag="dataset_num_proc"),
    *joins(
        "dataset", "dataset_dir", "eval_dataset", "val_size", "max_samples", "template", "packing", "neat_packing",
        "train_on_prompt", "streaming", "mix_strategy", "interleave_probs",
    ),
    *leaves("rows are kept in the cache of datasets", "overwrite_cache", "preprocessing_batch_size", "tokenized_path",
            "data_shared_file_system", "buffer_size", changes=False),
    *leaves("padding is left out of the loss", "ignore_pad_token_for_loss", changes=False),
    *leaves("every assistant turn carries the loss: cut the rows before their last turn", "mask_history"),
    *leaves("write it into the rows, as a system turn", "default_system"),
    *leaves("of the template: the tokenizer's own decides", "tool_format", "enable_thinking", "preserve_thinking"),
    *leaves("of rows with images, sound or video: ours are text", "media_dir"),
)  # fmt: skip
_TAGS = ({"role_tag": "from", "content_tag": "value"}, {"role_tag": "role", "content_tag": "content"})
_UNREAD = ("images", "videos", "audios", "history")


def read_data(draft: Draft) -> None:
    """Read the data sets, their columns, the held-out rows, and the chat template."""
    names: list[str] = []
    columns: dict[str, str] = {}
    split, turns = "train", False
    given = draft.get("dataset")
    info = _info(draft)
    for name in as_list(given) if given else []:
        entry = info.get(name)
        if not isinstance(entry, Mapping):
            if info:
                draft.note("dataset", LOST, f"{name} is not in {INFO}: name its file with --dataset_name")
            continue
        source, config = _source(draft, name, entry, info.folder)
        if source is None:
            continue
        names.append(f"{source}:{config}" if config else source)
        split = str(entry.get("split") or split)
        if entry.get("num_samples"):
            split = f"{split}[:{entry['num_samples']}]"
        found, is_turns = _columns(draft, name, entry)
        turns = turns or is_turns
        if any(columns.setdefault(role, column) != column for role, column in found.items()):
            draft.note("dataset", LOST, "columns have other names in each data set: rename them, --columns are common")
    if draft.get("dataset_dir") is not None:
        draft.note("dataset_dir", MAPPED, f"where {INFO} is read from")
    if draft.recipe == "pretrain":
        _text(draft, names, columns)
    elif names:
        _rows(draft, names, columns, split, turns)
    _template(draft)


class _Info(dict[str, object]):
    """The entries of a `dataset_info.json`, and its folder."""

    folder: Path = Path()


def _info(draft: Draft) -> _Info:
    folder = str(draft.get("dataset_dir") or "data")
    found = _Info()
    for base in (Path(), draft.path.parent):
        file = base / folder / INFO
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                draft.note("dataset", LOST, f"{file} is not valid JSON ({error})")
                return found
            found.folder = file.parent
            found.update(content if isinstance(content, dict) else {})
            return found
    if draft.get("dataset"):
        text = f"there is no {folder}/{INFO} here to say what it is: import where it is, or name files: --dataset_name"
        draft.note("dataset", LOST, text)
    return found


def _source(draft: Draft, name: str, entry: Mapping[str, object], folder: Path) -> tuple[str | None, str | None]:
    subset = entry.get("subset")
    if entry.get("hf_hub_url"):
        if entry.get("folder"):
            draft.note("dataset", LOST, f"{name}: a folder of {entry['hf_hub_url']}: name its files themselves")
        return str(entry["hf_hub_url"]), str(subset) if subset else None
    if entry.get("file_name"):
        return str(folder / str(entry["file_name"])), None
    draft.note("dataset", LOST, f"{name} is neither a file nor on the Hugging Face hub: fetch it, and name the file")
    return None, None


def _columns(draft: Draft, name: str, entry: Mapping[str, object]) -> tuple[dict[str, str], bool]:
    """Column of each role in one data set, and whether its rows are turns."""
    given = entry.get("columns")
    columns = {str(k): str(v) for k, v in given.items() if v} if isinstance(given, Mapping) else {}
    for key in _UNREAD:
        if key in columns:
            draft.note("dataset", LOST, f"{name}: {key} ({columns[key]}) are not read; rows of text and turns are")
    roles: dict[str, str] = {role: column for role, column in columns.items() if role in ("system", "tools")}
    if draft.recipe == "kto":
        roles["label"] = columns.get("kto_tag", "kto_tag")
    if entry.get("ranking"):
        roles |= {role: columns.get(role, role) for role in ("chosen", "rejected")}
    if entry.get("formatting", "alpaca") == "sharegpt":
        tags = entry.get("tags")
        named = (
            {k: v for k, v in tags.items() if k in ("role_tag", "content_tag")} if isinstance(tags, Mapping) else {}
        )
        if {**_TAGS[0], **named} not in _TAGS:
            draft.note(
                "dataset", LOST, f"{name}: turns have other keys than role and content: rename them in the rows"
            )
        main = columns.get("messages", "conversations")
        if entry.get("ranking"):
            draft.note(
                "dataset", LOST, f"{name}: chosen and rejected are single turns: make lists of one turn of them"
            )
        return roles | {"prompt" if entry.get("ranking") else "messages": main}, True
    if draft.recipe == "pretrain":
        return {"text": columns.get("prompt", "text")}, False
    prompt, query = columns.get("prompt", "instruction"), columns.get("query", "input")
    response = columns.get("response", "output")
    if entry.get("ranking"):
        if "query" in columns:
            draft.note("dataset", CHECK, f"{name}: {query} is joined to the question there, and not here")
        return roles | {"prompt": prompt}, False
    if draft.recipe == "kto":
        text = f"{name}: text is trained as it is, and {query} is not read: write turns, for the chat template"
        draft.note("dataset", CHECK, text)
    elif (prompt, query, response) == ("instruction", "input", "output"):
        return roles, False
    if "query" in columns:
        draft.note("dataset", LOST, f"{name}: {prompt} and {query} make one question there: join them in the rows")
    return roles | {"prompt": prompt, "completion": response}, False


def _rows(draft: Draft, names: list[str], columns: dict[str, str], split: str, turns: bool) -> None:
    if draft.get("max_samples") is not None:
        limit = int(number(draft.get("max_samples"), "max_samples"))
        split = f"{split.partition('[')[0]}[:{limit}]"
        draft.note("max_samples", MAPPED, f"dataset_train_split: {split}")
    if len(names) == 1:
        name, _, config = names[0].partition(":")
        draft.set("dataset_name", name, "dataset")
        if config:
            draft.flags["dataset_config"] = config
    else:
        draft.set("dataset_mixture", names, "dataset")
    strategy = str(draft.get("mix_strategy") or "concat")
    if strategy != "concat":
        draft.note("mix_strategy", LOST, f"{strategy}: give the data sets weights, --dataset_mixture a=0.7 b=0.3")
    draft.flags["dataset_train_split"] = split
    if draft.is_on("streaming"):
        draft.set("dataset_streaming", True, "streaming")
    if columns:
        draft.flags["columns"] = [f"{role}={column}" for role, column in columns.items()]
    if draft.recipe == "sft":
        if draft.is_on("train_on_prompt"):
            draft.set("completion_only_loss", False, "train_on_prompt")
        elif turns:
            draft.flags["assistant_only_loss"] = True
        packs = draft.is_on("packing") or draft.is_on("neat_packing")
        draft.set("packing", packs, "packing", "neat_packing")
        if draft.is_on("packing") and not draft.is_on("neat_packing"):
            draft.note(
                "packing", CHECK, "documents that share a row do not see one another here, as with neat_packing"
            )
    _held_out(draft, split)


def _held_out(draft: Draft, split: str) -> None:
    if draft.is_on("eval_dataset"):
        draft.note("eval_dataset", LOST, "name a split of the data to evaluate on: --dataset_test_split")
    size = number(draft.get("val_size") or 0, "val_size")
    if not size:
        return
    if "[" in split:
        draft.note("val_size", LOST, f"rows held out of {split}: cut it in two, e.g. train[:90%] and train[90%:]")
        return
    cut = f"-{int(size)}" if size >= 1 else f"{100 - round(100 * size)}%"
    draft.flags["dataset_train_split"] = f"{split}[:{cut}]"
    draft.set("dataset_test_split", f"{split}[{cut}:]", "val_size")
    draft.note("val_size", CHECK, "the last rows are held out; theirs are drawn at random")


def _text(draft: Draft, names: list[str], columns: dict[str, str]) -> None:
    if names:
        draft.set("data", names, "dataset")
        draft.flags["text_column"] = columns.get("text", "text")
    isolates = draft.is_on("neat_packing")
    draft.set("isolate_documents", isolates, "packing", "neat_packing")
    if draft.get("max_samples") is not None:
        draft.note("max_samples", LOST, "cut the files, or set --max_tokens")
    if draft.get("val_size") is not None:
        draft.set("validation_share", draft.get("val_size"), "val_size")


def _template(draft: Draft) -> None:
    name = draft.get("template")
    if name is not None:
        text = f"the tokenizer's own template is used; if it is not that of {name}, pass --chat_template_path"
        draft.note("template", CHECK, text)
