"""axolotl's training data: its lists of data sets, by path and type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_scale.importing.draft import CHECK, LOST, MAPPED, NO_EFFECT, Draft, joins, leaves, number

DATA_ROWS = (
    *joins(
        "datasets", "pretraining_dataset", "val_set_size", "test_datasets", "train_on_inputs", "chat_template",
        "chat_template_jinja", "pretrain_multipack_attn", "streaming", "eot_tokens",
    ),
    *leaves("prepared rows are kept in the cache of datasets", "dataset_prepared_path", "dataset_processes",
            "dataset_num_proc", "dataset_keep_in_memory", "skip_prepare_dataset", "streaming_multipack_buffer_size",
            "pretrain_multipack_buffer_size", "sample_packing_group_size", "sample_packing_bin_size",
            "num_dataset_shards_to_save", changes=False),
    *leaves("rows are shuffled by --seed in each epoch", "shuffle_merged_datasets", "shuffle_before_merging_datasets",
            changes=False),
    *leaves("rows of a batch are as long as the longest, and padding is left out of the loss", "pad_to_sequence_len",
            "eval_sample_packing", "pad_to_multiple_of", "batch_flattening", changes=False),
    *leaves("take those rows out of the file first", "dataset_exact_deduplication", "min_sample_len",
            "dataset_shard_num", "dataset_shard_idx"),
    *leaves("write it into the rows, as a system turn", "default_system_message"),
)  # fmt: skip
# Names of file readers, which some configurations give as the path.
_READERS = ("json", "csv", "parquet", "arrow", "text")
_ROLES = {"system", "user", "assistant", "tool"}


def read_data(draft: Draft) -> None:
    """Read the data sets, their columns, the held-out rows, and the chat template."""
    if draft.recipe == "pretrain":
        _pretraining(draft)
    else:
        _rows(draft)
    _held_out(draft)
    draft.note("eot_tokens", CHECK, "the end of a turn is that of the chat template, and it is learnt")
    template, file = draft.get("chat_template"), draft.get("chat_template_jinja")
    if file and str(file).endswith((".jinja", ".j2")):
        draft.set("chat_template_path", file, "chat_template_jinja", "chat_template")
    elif file:
        draft.note(
            "chat_template_jinja", LOST, "save the template as a .jinja file, and name it: --chat_template_path"
        )
    elif template and template != "tokenizer_default":
        text = f"the tokenizer's own template is used; if it is not {template}'s, pass --chat_template_path"
        draft.note("chat_template", CHECK, text)
    elif template:
        draft.note("chat_template", MAPPED, "the tokenizer's own template")


def _entries(draft: Draft, key: str) -> list[Mapping[str, object]]:
    given = draft.get(key)
    if isinstance(given, str):
        return [{"path": given}]
    entries = given if isinstance(given, Sequence) else [given]
    return [entry for entry in entries if isinstance(entry, Mapping)]


def _names(draft: Draft, key: str, entry: Mapping[str, object]) -> list[str]:
    files = entry.get("data_files")
    named = [str(file) for file in (files if isinstance(files, list) else [files])] if files else []
    path = str(entry.get("path") or "")
    if named and (path in _READERS or Path(path).is_dir()):
        return [str(Path(path) / name) if Path(path).is_dir() else name for name in named]
    if named:
        draft.note(key, LOST, f"data_files of {path}: name the files themselves, or take the whole data set")
    config = entry.get("name")
    return [f"{path}:{config}" if config else path]


def _rows(draft: Draft) -> None:
    names: list[str] = []
    columns: dict[str, str] = {}
    splits: set[str] = set()
    turns = False
    for entry in _entries(draft, "datasets"):
        names += _names(draft, "datasets", entry)
        splits.add(str(entry.get("split") or "train"))
        found, is_turns = _columns(draft, entry)
        turns = turns or is_turns
        if any(columns.setdefault(role, column) != column for role, column in found.items()):
            draft.note(
                "datasets", LOST, "columns have other names in each data set: rename them, --columns are common"
            )
    if not names:
        return
    if len(splits) > 1:
        draft.note("datasets", LOST, f"splits differ ({', '.join(sorted(splits))}): ours is one for all")
    draft.flags["dataset_train_split"] = sorted(splits)[0]
    if len(names) == 1:
        name, _, config = names[0].partition(":")
        draft.set("dataset_name", name, "datasets")
        if config:
            draft.flags["dataset_config"] = config
    else:
        draft.set("dataset_mixture", names, "datasets")
    if columns:
        draft.flags["columns"] = [f"{role}={column}" for role, column in columns.items()]
    if draft.recipe != "sft":
        return
    if draft.is_on("train_on_inputs"):
        draft.set("completion_only_loss", False, "train_on_inputs")
    elif turns:
        draft.flags["assistant_only_loss"] = True
        draft.note("train_on_inputs", MAPPED, "assistant_only_loss: true")
    else:
        draft.note("train_on_inputs", MAPPED, "completions alone carry the loss")


def _columns(draft: Draft, entry: Mapping[str, object]) -> tuple[dict[str, str], bool]:
    """Column of each role in one data set, and whether its rows are turns."""
    kind = entry.get("type")
    path = entry.get("path")
    if isinstance(kind, Mapping):
        return _own_format(draft, kind), False
    name = str(kind or "").partition(":")[0]
    base = name.split(".")[0]
    for key in (
        "roles_to_train",
        "train_on_eos",
        "message_field_training",
        "shards",
        "temperature",
        "drop_system_message",
    ):
        value = entry.get(key)
        if value not in (None, False, ["assistant"], "turn"):
            draft.note("datasets", LOST, f"{key}: {value} of {path}: assistant turns carry the loss, ends included")
    unknown = _unknown_speakers(entry)
    if unknown:
        draft.note("datasets", LOST, f"roles {', '.join(unknown)} of {path}: rename them in the rows")
    if base in ("alpaca", "alpaca_chat"):
        text = f"{path}: with a chat template instruction and output become turns, without one Alpaca's text"
        draft.note("datasets", CHECK, text)
        return {}, False
    if base == "completion" or base == "pretrain":
        draft.note(
            "datasets", CHECK, f"{path}: text beyond max_length is left out; accel-scale pretrain takes all of it"
        )
        return {"text": str(entry.get("field") or "text")}, False
    if base in ("chat_template", "sharegpt"):
        default = "conversations" if base == "sharegpt" else "messages"
        field = str(entry.get("field_messages") or default)
        if draft.recipe in ("dpo", "reward"):
            text = f"chosen and rejected of {path}: a recipe reads lists of turns; make lists of single turns"
            draft.note("datasets", CHECK, text)
            return {
                "prompt": field,
                "chosen": str(entry.get("field_chosen") or "chosen"),
                "rejected": str(entry.get("field_rejected") or "rejected"),
            }, True
        return {"messages": field}, True
    if draft.recipe == "kto" and base in ("llama3", "chatml"):
        return _labelled(draft, path, name.partition(".")[2])
    if draft.recipe in ("dpo", "reward") and base in ("bradley_terry",):
        return {"chosen": "chosen", "rejected": "rejected"}, True
    draft.note("datasets", LOST, f"type {kind} of {path}: make rows that a recipe reads, or map them with --columns")
    return {}, False


def _labelled(draft: Draft, path: object, shape: str) -> tuple[dict[str, str], bool]:
    """Columns of labelled answers, for types that wrap text in a chat template of their own."""
    if shape == "argilla_chat":  # turns whose last one is the answer
        draft.note("datasets", CHECK, f"{path}: the tokenizer's own chat template is used")
        return {"messages": "completion", "label": "label"}, True
    text = f"{path}: text is trained as it is: write prompt and completion as turns, for the chat template"
    draft.note("datasets", LOST, text)
    prompt = {"argilla": "instruction", "intel": "question"}.get(shape, "prompt")
    return {"prompt": prompt, "completion": "completion", "label": "label"}, False


def _unknown_speakers(entry: Mapping[str, object]) -> list[str]:
    roles = entry.get("roles")
    return [str(role) for role in roles if role not in _ROLES] if isinstance(roles, Mapping) else []


def _own_format(draft: Draft, kind: Mapping[str, object]) -> dict[str, str]:
    """Columns of a custom prompt format, which converts only if the prompt is the bare instruction."""
    formats = {key: str(kind[key]).strip() for key in kind if key.endswith("format") and kind[key]}
    own = {"format": "{instruction}", "no_input_format": "{instruction}", "prompt_format": "{prompt}"}
    own |= {"chosen_format": "{chosen}", "rejected_format": "{rejected}", "completion_format": "{completion}"}
    if kind.get("system_prompt") or any(own.get(key) != text for key, text in formats.items()):
        draft.note("datasets", LOST, "a prompt format of its own: write it into the rows' prompts")
    if draft.recipe in ("dpo", "reward"):
        keys = {"prompt": "field_prompt", "chosen": "field_chosen", "rejected": "field_rejected"}
        return {role: str(kind.get(key) or role) for role, key in keys.items()}
    if draft.recipe == "kto":
        return {role: str(kind.get(f"field_{role}") or role) for role in ("prompt", "completion", "label")}
    found = {
        "prompt": str(kind.get("field_instruction") or "instruction"),
        "completion": str(kind.get("field_output") or "output"),
    }
    return found | ({"system": str(kind["field_system"])} if kind.get("field_system") else {})


def _pretraining(draft: Draft) -> None:
    entries = _entries(draft, "pretraining_dataset")
    draft.set("data", [name for entry in entries for name in _names(draft, "pretraining_dataset", entry)])
    draft.note("pretraining_dataset", MAPPED, f"data: [{', '.join(map(str, draft.flags['data']))}]")  # type: ignore[call-overload]
    fields = {str(entry.get("text_column") or "text") for entry in entries}
    draft.flags["text_column"] = sorted(fields)[0]
    if len(fields) > 1:
        draft.note("pretraining_dataset", LOST, "text columns have other names in each data set: rename them")
    for entry in entries:
        if str(entry.get("split") or "train") != "train":
            draft.note("pretraining_dataset", LOST, f"split {entry['split']}: the training split is read")
        if entry.get("skip"):
            draft.note("pretraining_dataset", LOST, "skip: take those rows out of the files first")
    isolates = draft.get("pretrain_multipack_attn") is not False
    draft.set("isolate_documents", isolates, "pretrain_multipack_attn", "sample_packing")


def _held_out(draft: Draft) -> None:
    size = number(draft.get("val_set_size") or 0, "val_set_size")
    if draft.is_on("test_datasets"):
        draft.note("test_datasets", LOST, "name the split to evaluate on: --dataset_test_split, --eval_strategy steps")
    if draft.recipe == "pretrain":
        if draft.get("val_set_size") is not None:
            draft.set("validation_share", size, "val_set_size")
        return
    if not size:
        return
    split = str(draft.flags.get("dataset_train_split", "train"))
    if "[" in split:
        draft.note("val_set_size", LOST, f"rows held out of {split}: cut it in two, e.g. train[:90%] and train[90%:]")
        return
    cut = f"-{int(size)}" if size >= 1 else f"{100 - round(100 * size)}%"
    draft.flags["dataset_train_split"] = f"{split}[:{cut}]"
    draft.set("dataset_test_split", f"{split}[{cut}:]", "val_set_size")
    draft.note("val_set_size", CHECK, "the last rows are held out; theirs are drawn at random")
    if not draft.is_on("datasets"):
        draft.note("val_set_size", NO_EFFECT, "there are no data sets")
