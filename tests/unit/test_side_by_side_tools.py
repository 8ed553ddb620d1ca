"""The other tools of benchmarks/sft_side_by_side.py: their commands, their training data, how they count tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def tools(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import measured_run
    import measured_torchtune
    import sft_side_by_side
    import sft_tools
    import sft_workloads

    class Modules:
        run, tune, compare, tools, workloads = (
            measured_run, measured_torchtune, sft_side_by_side, sft_tools, sft_workloads
        )  # fmt: skip

    yield Modules
    for name in ("measured_run", "measured_torchtune", "sft_side_by_side", "sft_tools", "sft_workloads"):
        del sys.modules[name]


def test_every_tool_trains_on_the_tokens_of_one_step_and_on_the_same_rows(tools, tmp_path):
    workload = tools.workloads.WORKLOADS["embedded"](tmp_path, 240)
    lengths = tools.workloads.document_lengths(workload)
    mean = sum(lengths) / len(lengths)
    for contestant in tools.tools.TOOLS["llama_factory"].contestants(workload, "/env/bin/python"):
        command = contestant.command(tmp_path / "report.json", tmp_path / "model")
        assert command[0] == "/env/bin/python"
        assert command[1].endswith("measured_run.py")
        assert command[3:5] == ["/env/bin/llamafactory-cli", "train"]
        assert command[-1] == f"--output_dir={tmp_path / 'model'}"
        flags = dict(word.removeprefix("--").split("=") for word in command[5:])
        assert flags["finetuning_type"] == "full"
        assert flags["use_cpu"] == "true"
        assert flags["learning_rate"] == "0.001"
        documents = int(flags["per_device_train_batch_size"]) * int(flags["gradient_accumulation_steps"])
        packed = flags.get("neat_packing") == "true"
        tokens = documents * (int(flags["cutoff_len"]) if packed else mean)
        assert tokens == pytest.approx(workload.tokens_per_step, rel=0.15)
        (rows,) = json.loads((tmp_path / "llama_factory" / "dataset_info.json").read_text()).values()
        assert rows["file_name"] == str(workload.data / "train.jsonl")


def test_torchtunes_configuration_has_the_models_shape_and_the_tokens_of_one_step(tools, tmp_path):
    workload = tools.workloads.WORKLOADS["embedded"](tmp_path, 240)
    lengths = tools.workloads.document_lengths(workload)
    shape = json.loads((workload.model / "config.json").read_text())
    recipe = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "recipes" / "full_finetune_single_device.py"
    recipe.parent.mkdir(parents=True)
    recipe.touch()
    names = set()
    for contestant in tools.tools.TOOLS["torchtune"].contestants(workload, str(tmp_path / "env" / "bin" / "python")):
        command = contestant.command(tmp_path / "report.json", tmp_path / "model")
        assert command[1].endswith("measured_torchtune.py")
        assert command[3] == str(recipe)
        assert command[-1] == f"output_dir={tmp_path / 'model'}"
        config = json.loads(Path(command[command.index("--config") + 1]).read_text())
        assert config["model"]["num_layers"] == shape["num_hidden_layers"] == 4
        assert config["model"]["norm_eps"] == shape["rms_norm_eps"]
        assert config["optimizer"]["betas"] == [0.9, 0.95]
        rows = config["batch_size"] * config["gradient_accumulation_steps"]
        tokens = rows * (512 if config["dataset"]["packed"] else sum(lengths) / len(lengths))
        assert tokens == pytest.approx(workload.tokens_per_step, rel=0.15)
        names.add((config["dtype"], config["dataset"]["packed"], config["batch_size"]))
    assert len(names) == 5


def test_torchtune_trains_on_the_tokens_and_the_mask_of_the_others(tools, tmp_path):
    workload = tools.workloads.WORKLOADS["embedded"](tmp_path, 40)
    tokenizer = tools.tune.ChatTokenizer(str(workload.model / "tokenizer.json"), "<|pad|>", 512)
    rows = [json.loads(line)["messages"] for line in (workload.data / "train.jsonl").read_text().splitlines()]

    class Message:
        def __init__(self, role, content):
            self.role, self.text_content, self.masked = role, content, role != "assistant"

    for messages, (ids, mask) in zip(rows, tools.workloads.tokenize(workload, "train"), strict=True):
        sample = tokenizer({"messages": [Message(**message) for message in messages]})
        assert sample["tokens"] == ids
        assert [not masked for masked in sample["mask"]] == [bool(kept) for kept in mask]


def test_padding_is_not_counted(tools):
    padded = torch.tensor([[5, 6, 7, 3], [8, 3, 3, 3]])
    assert tools.run.count_tokens(padded, 3) == 4
    assert tools.tune.count_tokens({"tokens": padded}, 3) == 4
    assert tools.tune.count_tokens({"tokens": torch.tensor([[5, 6, 7, 0, 0]])}, 3) == 3  # packed rows end in zeros


def test_no_document_has_the_id_that_torchtune_pads_packed_rows_with(tools, tmp_path):
    workload = tools.workloads.WORKLOADS["embedded"](tmp_path, 600)
    ids = {token for document, _ in tools.workloads.tokenize(workload, "train") for token in document}
    assert tools.tune.PACKED_PADDING not in ids
    assert 3 not in ids


def test_the_table_says_who_is_missing_and_which_versions_took_part(tools):
    found = tools.compare.notes({"tools": {"torchtune": {"torchtune": "0.6.1", "torch": "2.13.0"}}})
    assert found[:2] == [
        "LLaMA-Factory was not measured: no --llama_factory_python.",
        "torchtune: torchtune 0.6.1, torch 2.13.0.",
    ]
    assert found[2].startswith("axolotl")


def test_an_environment_without_the_tool_is_refused_before_anything_runs(tools):
    with pytest.raises(SystemExit, match=r"has no LLaMA-Factory .*llamafactory"):
        tools.tools.versions(sys.executable, tools.tools.TOOLS["llama_factory"])
