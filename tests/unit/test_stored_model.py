"""Errors that a local model's files reveal are refused before a library is imported; nothing that trains is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from activation_models import FIELDS
from said_early import said_with_imports
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.settings.stored_model import refuse_stored_model

SLOW = {"torch", "transformers", "trl", "datasets", "peft"}
ROW = '{"question": "1 + 1?", "answer": "2"}\n'


def flags(folder: Path, **more: object) -> ParsedFlags:
    return ParsedFlags({"model_name_or_path": str(folder), **more}, {}, None)


@pytest.mark.parametrize("architecture", FIELDS)
def test_a_saved_model_and_adapters_on_each_of_its_linears_pass(architecture: str, tmp_path: Path) -> None:
    """Experts are stored under names other than those of their class."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**FIELDS[architecture]))
    model.save_pretrained(tmp_path)
    linears = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    experts = [name.rpartition(".")[2] for name, _ in model.named_parameters() if ".experts." in name]
    targets = {name.rpartition(".")[2] for name in linears} | set(experts) | {"all-linear"}
    refuse_stored_model(flags(tmp_path, lora_target_modules=sorted(targets)))
    with pytest.raises(ConfigError, match="has no module 'q_prj'"):
        refuse_stored_model(flags(tmp_path, lora_target_modules=["q_prj"]))
    refuse_stored_model(flags(tmp_path, lora_target_modules=[r".*\.q_prj"]))  # PEFT interprets patterns


@pytest.mark.parametrize("labels", [{"num_labels": 1}, {"id2label": {"0": "LABEL_0"}}])
def test_a_reward_model_says_its_one_score_in_either_way(labels: dict[str, object], tmp_path: Path) -> None:
    scoring = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps({**scoring, **labels}))
    assert AutoConfig.from_pretrained(tmp_path).num_labels == 1
    refuse_stored_model(flags(tmp_path), rewards=True)
    (tmp_path / "config.json").write_text(json.dumps({**scoring, "num_labels": 3}))
    with pytest.raises(ConfigError, match="into 3 classes"):
        refuse_stored_model(flags(tmp_path), rewards=True)


def changed(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


def with_new_padding(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": rows, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<new>"}))


@pytest.mark.parametrize(
    ("change", "recipe", "words", "said"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "sft", "", "cannot be loaded: its config.json"),
        (changed(num_key_value_heads=1), "sft", "", "k_proj.weight is"),
        (changed(vocab_size=99999), "sft", "", "this configuration makes it 99999"),
        (changed(vocab_size=99999), "pretrain", "", "this configuration makes it 99999"),
        (with_new_padding, "sft", "", "the tokenizer has tokens up to"),
        (changed(architectures=["LlamaForSequenceClassification"]), "sft", "", "scores rows"),
        (changed(architectures=["LlamaForSequenceClassification"]), "reward", "", "sorts rows into 2 classes"),
        (changed(), "sft", "--method lora --lora_target_modules q_proj v_prj", "did you mean v_proj?"),
        (changed(), "pretrain", "--method lora --lora_target_modules q_prj", "did you mean q_proj?"),
        (changed(), "sft", "--eos_token nowhere", "'nowhere' is no token"),
        (changed(), "sft", "--checkpointing_policy segments_40", "segments_40 asks for more layers than the"),
        (changed(), "pretrain", "--checkpointing_policy every_40", "every_40 asks for more layers than the"),
        (changed(), "sft", "--assistant_only_loss true", "the rows have no turns"),
        (changed(), "sft", "--dataset_name broken.jsonl", "broken.jsonl:3: not valid JSON"),
        (changed(), "sft", "--dataset_name saved", "not a whole folder of `save_to_disk` (there is no saved/d.arrow)"),
        (changed(), "grpo", "--num_generations 3", "8 answers, as many as are written at the same time"),
        (changed(), "rloo", "--num_generations 16 --gradient_accumulation_steps 3", "24 answers"),
        (changed(), "kto", "--loss_type kto", "rows.jsonl holds no answers with labels"),
    ],
)
def test_it_is_said_before_the_libraries_are_imported(
    repository: Path, tmp_path: Path, change: Callable[[Path], Any], recipe: str, words: str, said: str
) -> None:
    shutil.copytree(default_model_path(), tmp_path / "model")
    change(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(ROW * 4)
    (tmp_path / "broken.jsonl").write_text(ROW * 2 + '{"question": "What\n' + ROW)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
    (tmp_path / "saved/dataset_info.json").write_text("{}")
    data = "--data rows.jsonl" if recipe == "pretrain" else "--dataset_name rows.jsonl"
    given = f"--model_name_or_path model {data} --output_dir out"
    given += " --columns prompt=question completion=answer" if recipe == "sft" else ""
    line, imports = said_with_imports(
        tmp_path, [str(repository / f"recipes/{recipe}.py"), *given.split(), *words.split()]
    )
    assert said in line
    assert " Fix: " in line
    assert not imports & SLOW


def test_a_cut_adapter_is_said_before_the_libraries_are_imported(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    words = ["-m", "accel_scale.cli.main", "merge", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    line, imports = said_with_imports(repository, words)
    assert "adapter_model.safetensors: cut off" in line
    assert not imports & SLOW


def test_rows_that_may_be_skipped_and_rows_in_a_list_are_left_to_the_loader(repository: Path, tmp_path: Path) -> None:
    from accel_scale.data.loading import check_local_data

    (tmp_path / "broken.jsonl").write_text(ROW * 2 + '{"question": "What\n' + ROW)
    columns = ["prompt=question", "completion=answer"]
    check_local_data(str(tmp_path / "broken.jsonl"), columns=columns, on_bad_row="skip")
    with pytest.raises(ConfigError, match=r"broken\.jsonl:3"):
        check_local_data(str(tmp_path / "broken.jsonl"), columns=columns)
