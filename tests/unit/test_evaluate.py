"""`accel-scale eval`: question files, the embedded questions, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_scale.cli.main import main
from accel_scale.data.default import default_dataset, default_model_path
from accel_scale.training.evaluation.exact_match import exact_match

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(default_model_path(), tmp_path / "model")
    return tmp_path / "model"


def result_of(folder: Path) -> dict[str, dict[str, object]]:
    return json.loads((folder / "eval.json").read_text(encoding="utf-8"))["results"]


def questions(path: Path, rows: list[object]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["eval", *words])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_file_of_questions_is_scored_by_exact_match(model, tmp_path, capsys):
    tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    rows: list[object] = []
    for number, prompt in enumerate(("The capital of", "Once upon a", "two and two", "a b c d")):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        said = tokenizer.decode(loaded.generate(ids, max_new_tokens=6)[0, ids.shape[1] :], skip_special_tokens=True)
        rows.append({"prompt": prompt, "completion": said if number else "something else", "task": f"t{number % 2}"})
    file = questions(tmp_path / "q.jsonl", [*rows, ""])
    assert main(["eval", str(model), "--tasks", file, "--max_new_tokens", "6", "--batch_size", "3"]) == 0
    found = result_of(model)["q.jsonl"]
    assert (found["num_correct"], found["num_questions"]) == (3, 4)
    assert found["tasks"] == {"t0": 0.5, "t1": 1.0}
    assert "75.0% of 4 questions (t0 50.0%, t1 100.0%)" in capsys.readouterr().out
    assert main(["eval", str(model), "--tasks", file, "--max_new_tokens", "6", "--limit", "1"]) == 0
    assert result_of(model)["q.jsonl"]["num_questions"] == 1


def test_embedded_is_what_the_recipe_reports(model, tmp_path, capsys):
    output = tmp_path / "figures.json"
    assert main(["eval", str(model), "--tasks", "embedded", "--batch_size", "100", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["results"]["embedded"]
    expected = exact_match(
        AutoModelForCausalLM.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
        default_dataset()[1].select(range(200)),
    )
    assert (found["num_correct"], found["num_questions"]) == (expected.num_correct, 200)
    assert expected.num_correct > 0
    assert not (model / "eval.json").exists()


def test_rows_are_refused_by_file_and_line(model, tmp_path, capsys):
    for row, problem in (("{", "no JSON"), ([1], "a row is an object"), ({"prompt": "a"}, "no expected answer"),
                         ({"messages": ["a"]}, "no question and answer")):  # fmt: skip
        file = questions(tmp_path / "q.jsonl", [{"prompt": "a", "completion": "b"}, row])
        line = refused(capsys, str(model), "--tasks", file)
        assert f"{file}:2: " in line
        assert problem in line
    assert "it has no rows" in refused(capsys, str(model), "--tasks", questions(tmp_path / "none.jsonl", []))


def test_a_file_of_somebody_elses_stays(model, tmp_path, capsys):
    (model / "eval.json").write_text('{"mine": 1}')
    file = questions(tmp_path / "q.jsonl", [{"prompt": "a", "completion": "b"}])
    assert "none of this command's" in refused(capsys, str(model), "--tasks", file)
    assert (model / "eval.json").read_text() == '{"mine": 1}'


@pytest.mark.skipif(HAS_HARNESS, reason="lm-eval is installed")
def test_tasks_of_the_harness_need_it(model, capsys):
    line = refused(capsys, str(model), "--tasks", "embedded", "hellaswag")
    assert "hellaswag are tasks of lm-evaluation-harness" in line
    assert "pip install 'accel-scale[eval]'" in line


@pytest.mark.skipif(not HAS_HARNESS, reason="lm-eval is not installed")
@pytest.mark.slow
def test_tasks_of_the_harness_run_offline(model, tmp_path, capsys):
    questions(tmp_path / "rows.jsonl", [{"q": "The capital of", "a": "x"}, {"q": "Once", "a": "y"}])
    (tmp_path / "own.yaml").write_text(
        f"task: own_task\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: ['x', 'y']\n"
        "doc_to_target: '{{a}}'\nmetric_list: [{metric: acc}]\n"
    )
    words = ["--include_path", str(tmp_path), "--tasks", "own_task", "embedded"]
    assert main(["eval", str(model), *words, "--limit", "2"]) == 0
    found = result_of(model)
    assert found["own_task"]["acc,none"] in (0.0, 0.5, 1.0)
    assert found["embedded"]["num_questions"] == 2
    assert "did you mean own_task?" in refused(
        capsys, str(model), "--include_path", str(tmp_path), "--tasks", "own_tsk"
    )
