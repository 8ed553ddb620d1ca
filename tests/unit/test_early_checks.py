"""Wrong names on a command line are reported before the libraries are imported."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from said_early import said_with_imports

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import INTERRUPTED_STATUS
from accel_scale.launching import hub_reach
from accel_scale.modeling.files import check_stored_row_length
from accel_scale.starting.early_checks import check_command_line


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """A folder with a model, rows and a file of flags; an unreachable hub; an empty cache."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    hub_reach.unreachable_hub.cache_clear()
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("rows.jsonl").write_text("{}\n")
    Path("flags.yaml").write_text("# comment\nmodel_name_or_path: ./absent\n")
    Path("resumed.yaml").write_text("resume: absent\n")
    yield
    hub_reach.unreachable_hub.cache_clear()


@dataclasses.dataclass
class Named:
    """The flags of both recipes that name something."""

    model_name_or_path: str | None = None
    tokenizer: str | None = None
    dataset_name: str | None = None
    output_dir: str | None = None
    resume_from_checkpoint: str | None = "auto"
    resume: str = "auto"
    dataset_mixture: list[str] = dataclasses.field(default_factory=list)
    data: list[str] = dataclasses.field(default_factory=list)


def check(words: str) -> None:
    check_command_line("sft.py", __file__, words.split(), (Named,), lambda parsed: None)


@pytest.mark.parametrize(
    ("words", "place", "problem"),
    [
        ("--model_name_or_path /absent", "--model_name_or_path", "no folder '/absent'"),
        ("--model_name_or_path=model/deep/er", "--model_name_or_path", "no folder 'model/deep/er'"),
        ("--config_file flags.yaml", "flags.yaml:2", r"no folder '\./absent'"),
        ("--config_file absent.yaml", "absent.yaml", "does not exist"),
        ("--config_file model", "model", "is not a file"),
        ("--dataset_name row.jsonl", "--dataset_name", r"row\.jsonl does not exist"),
        ("--dataset_mixture rows.jsonl=0.5 rows.json=0.5", "--dataset_mixture", r"rows\.json does not exist"),
        ("--data web/*.jsonl", "--data", r"no data file matches web/\*\.jsonl"),
        ("--tokenizer ./absent", "--tokenizer", "no folder"),
        ("--model_name_or_path owner/name", "--model_name_or_path", r"127\.0\.0\.1 cannot be reached"),
        ("--dataset_name owner/rows:main", "--dataset_name", r"127\.0\.0\.1 cannot be reached"),
        ("--model_name_or_path model --output_dir model", "--output_dir", "would be overwritten"),
        ("--resume_from_checkpoint out/checkpoint-2", "--resume_from_checkpoint", "no folder 'out/checkpoint-2'"),
        ("--config_file resumed.yaml", "resumed.yaml:1", "no folder 'absent'"),
        ("--output_dir model", "--output_dir", r"holds a model \(config\.json\)"),
    ],
)
def test_it_is_refused_by_name(words, place, problem):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=problem) as refused:
        check(words)
    assert refused.value.place == place
    assert refused.value.fix
    assert time.monotonic() - started < 2.5


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--model_name_or_path model --dataset_name rows.jsonl --output_dir out",
        "--config_file flags.yaml --model_name_or_path model",
        "--tokenizer byte --data rows.jsonl=0.7",
        "--resume_from_checkpoint model",
        "--resume_from_checkpoint True",
        "--resume no",
        "--help --model_name_or_path /absent",
    ],
)
def test_what_is_there_passes(words):
    check(words)


def test_without_a_network_the_cache_is_used_and_said(monkeypatch, capsys):
    snapshot = Path("cache/hub/models--owner--name/snapshots/abc")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    check("--model_name_or_path owner/name")
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # so that nothing retries
    assert "owner/name comes from the local cache" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check("--model_name_or_path owner/other")


@pytest.mark.slow
def test_a_hub_that_never_answers_is_waited_for_two_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as hub, contextlib.ExitStack() as others:
        address = hub.getsockname()
        for _ in range(3):  # these are never accepted, and the next one is not even refused
            waiting = others.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{address[1]}")
        started = time.monotonic()
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1 cannot be reached"):
            check("--model_name_or_path owner/name")
    assert 1.9 < time.monotonic() - started < 4


@pytest.mark.parametrize(
    "words",
    [
        ["recipes/sft.py", "--model_name_or_path", "/absent"],
        ["recipes/sft.py", "--resume_from_checkpoint", "/absent"],
        ["recipes/pretrain.py", "--data", "/absent.txt"],
        [
            "-m",
            "accel_scale.cli.main",
            "rehearse",
            "--config_file",
            "accelerate_configs/ddp.yaml",
            "recipes/sft.py",
            "--model_name_or_path",
            "/absent",
        ],
        ["-m", "accel_scale.cli.main", "merge", "/absent", "--output_dir", "/tmp/merged"],
        ["-m", "accel_scale.cli.main", "prepare", "--data", "/absent.txt", "--tokenizer", "byte", "--output", "/x/y"],
    ],
)
def test_commands_say_so_before_torch_is_imported(repository, words):
    said, imports = said_with_imports(repository, words)
    assert "/absent" in said
    assert " Fix: " in said
    assert not imports & {"torch", "transformers", "datasets"}


@pytest.mark.parametrize("recipe", ["sft", "pretrain"])
def test_recipes_do_not_write_into_the_model_that_they_read(repository, recipe):
    shutil.copytree(default_model_path(), "base")
    before = {path.name: path.read_bytes() for path in Path("base").iterdir()}
    words = ["--model_name_or_path", "base", "--output_dir", "base"]
    words += ["--data" if recipe == "pretrain" else "--dataset_name", "rows.jsonl"]
    said, imports = said_with_imports(Path.cwd(), [str(repository / f"recipes/{recipe}.py"), *words])
    assert "--output_dir: base is where --model_name_or_path is read from: base would be overwritten." in said
    assert {path.name: path.read_bytes() for path in Path("base").iterdir()} == before
    assert not imports & {"torch", "transformers", "datasets"}


@pytest.mark.parametrize(
    ("recipe", "flags", "line"),
    [
        (
            "sft",
            "--columns prompt=qestion completion=answer",
            "--columns prompt=qestion: rows.jsonl has no column 'qest",
        ),
        ("sft", "--dataset_train_split trian", "rows.jsonl has no split 'trian'; it has 'train'"),
        (
            "sft",
            "--eval_strategy epoch --columns prompt=question completion=answer",
            "rows.jsonl has no split 'test'; it",
        ),
        ("sft", "--dataset_name empty.jsonl", "empty.jsonl: the file has no row that can be read"),
        (
            "sft",
            "--dataset_name= --dataset_mixture rows.jsonl=1 empty.jsonl=1 --columns prompt=question completion=answer",
            "empty.jsonl: the file has no row",
        ),
        (
            "sft",
            "--columns prompt=question completion=answer --max_length 65",
            "rows of 65 tokens are longer than the mod",
        ),
        ("sft", "--warmup_ratio 1.5", "--warmup_ratio: warmup_ratio cannot be 1.5."),
        ("dpo", "", "rows.jsonl holds no pairs of answers; its columns are question (text), answer (text)"),
        ("grpo", "--columns prompt=qestion completion=answer", "--columns prompt=qestion: rows.jsonl has no column"),
        ("grpo", "--rewards exact", "--rewards: exact is no reward"),
        ("grpo", "--rewards format=(", "--rewards: '(' is not a regular expression"),
        ("grpo", "--rewards absent.py:score", "--rewards: absent.py does not exist"),
        ("grpo", "--rewards number --reward_weights 1 2", "--reward_weights: there are 1 rewards and 2 weights"),
    ],
)
def test_rows_lengths_and_rewards_are_checked_before_torch_is_imported(repository, recipe, flags, line):
    Path("model/config.json").write_text('{"model_type": "gpt2", "n_positions": 64}')
    Path("rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 4)
    Path("empty.jsonl").write_text("")
    named = ["--model_name_or_path", "model", "--dataset_name", "rows.jsonl", "--output_dir", "out"]
    said, imports = said_with_imports(Path.cwd(), [str(repository / f"recipes/{recipe}.py"), *named, *flags.split()])
    assert line in said
    assert " Fix: " in said
    assert not imports & {"torch", "transformers", "datasets"}


@pytest.mark.parametrize(("recipe", "fix"), [("sft", "add --dataset_name"), ("pretrain", "add --data.")])
def test_a_rehearsal_refuses_what_the_recipe_would_before_it_shrinks_the_model(repository, recipe, fix):
    words = [
        "--config_file",
        str(repository / "accelerate_configs/ddp.yaml"),
        str(repository / f"recipes/{recipe}.py"),
    ]
    words = ["-m", "accel_scale.cli.main", "rehearse", *words, "--model_name_or_path", "model"]
    said, imports = said_with_imports(Path.cwd(), words)
    assert said.startswith("accel-scale rehearse: error: --model_name_or_path: a model is given but nothing to train")
    assert fix in said
    assert not imports & {"torch", "transformers", "datasets"}


def test_ctrl_c_among_the_imports_is_one_line_that_says_how_to_go_on(repository):
    command = [sys.executable, "-X", "importtime", str(repository / "recipes/sft.py"), "--output_dir", "out"]
    env = {**os.environ, "PYTHONPATH": str(repository)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        for line in process.stderr:
            if line.rpartition("|")[2].strip().startswith("torch."):  # torch is being imported
                break
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
        assert process.stdout.read() == ""
    assert said == ["sft.py: interrupted; the same command starts over, or continues from its last checkpoint."]
    assert process.returncode == INTERRUPTED_STATUS


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ('{"max_position_embeddings": 64}', True),
        ('{"max_position_embeddings": 65}', False),
        ('{"text_config": {"max_position_embeddings": 64}}', True),
        ('{"max_position_embeddings": 64, "alibi": true}', False),
        ('{"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}', True),
        ('{"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}', False),
        ('{"max_position_embeddings": null}', False),
        ("not json", False),
    ],
)
def test_only_positions_that_are_plain_are_judged_by_the_file_alone(config, is_refused):
    Path("model/config.json").write_text(config)
    if is_refused:
        with pytest.raises(ConfigError, match="longer than the model's 64 positions"):
            check_stored_row_length(Path("model"), 65, place="--max_length")
    else:
        check_stored_row_length(Path("model"), 65, place="--max_length")
