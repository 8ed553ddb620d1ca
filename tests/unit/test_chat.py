"""`accel-scale chat`: what a saved folder answers, line by line, and what is refused before it is loaded."""

from __future__ import annotations

import io
import json
import shutil
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_scale.cli.main import main
from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.inference.chat import Chat
from accel_scale.inference.saved import find_saved, load_saved

QUESTION = "What is 3 + 4?"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with another head: untuned as it is, it would end each answer at once."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    shutil.copytree(default_model_path(), folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(saved):
    return load_saved(find_saved(str(saved)))


@pytest.fixture
def plain(saved: Path, tmp_path: Path) -> Path:
    """The same without its chat template."""
    shutil.copytree(saved, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    return tmp_path / "plain"


@pytest.fixture(scope="module")
def adapter(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that change what the model says."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(saved), LoraConfig(target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def greedy(model, messages: list[dict[str, str]], *, num_tokens: int) -> str:
    """The whole answer at once, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def visible(text: str) -> str:
    """Without characters that a terminal would obey."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")


def chat_with(monkeypatch, capsys, text: str, *words: str) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["chat", *words]) == 0
    return capsys.readouterr()


def test_piped_lines_are_turns_of_one_conversation(monkeypatch, capsys, saved):
    out, _ = chat_with(monkeypatch, capsys, f"{QUESTION}\n\nAnd again?\n", str(saved), "--max_new_tokens", "12")
    model = AutoModelForCausalLM.from_pretrained(saved)
    first = greedy(model, [{"role": "user", "content": QUESTION}], num_tokens=12)
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first}]
    second = greedy(model, [*turns, {"role": "user", "content": "And again?"}], num_tokens=12)
    assert first
    assert out == visible(f"{first}\n{second}\n")


def test_an_adapter_answers_with_the_base_that_it_names(monkeypatch, capsys, saved, adapter):
    out, _ = chat_with(monkeypatch, capsys, QUESTION, str(adapter), "--max_new_tokens", "12")
    base = AutoModelForCausalLM.from_pretrained(saved)
    messages = [{"role": "user", "content": QUESTION}]
    unchanged = greedy(base, messages, num_tokens=12)
    from peft import PeftModel

    expected = greedy(PeftModel.from_pretrained(base, adapter), messages, num_tokens=12)
    assert out == visible(f"{expected}\n")
    assert expected != unchanged


def test_a_model_without_a_template_continues_text_and_says_so(monkeypatch, capsys, plain):
    out, err = chat_with(monkeypatch, capsys, "The capital of\n", str(plain), "--max_new_tokens", "8")
    assert err == "no chat template: each line is continued as text, without the lines before it.\n"
    tokenizer, model = AutoTokenizer.from_pretrained(plain), AutoModelForCausalLM.from_pretrained(plain)
    prompt = tokenizer("The capital of", return_tensors="pt")
    made = model.generate(input_ids=prompt["input_ids"], max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert out == visible(f"{expected}\n")
    with pytest.raises(SystemExit) as end:
        main(["chat", str(plain), "--system", "Be brief."])
    assert end.value.code == 2
    assert "--system: the model has no chat template" in capsys.readouterr().err


def test_ctrl_c_ends_the_answer_and_not_the_chat(loaded):
    chat = Chat(*loaded, max_new_tokens=30, temperature=0)
    shown: list[str] = []

    def interrupted(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    chat.answer(QUESTION, interrupted)
    assert visible(chat.turns[-1]["content"]) == "".join(shown)
    chat.answer(QUESTION, shown.append)
    assert len(chat.turns) == 4


def test_in_a_terminal_ctrl_c_at_the_prompt_goes_on_and_ctrl_d_ends(monkeypatch, capsys, saved):
    typed = iter([KeyboardInterrupt(), "Hello?", "word " * 2000, EOFError()])

    def ask(prompt: str) -> str:
        assert prompt == "> "
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["chat", str(saved), "--max_new_tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    said = [line for line in err.splitlines() if line]
    assert said[:2] == ["Ctrl-C ends an answer, Ctrl-D the chat.", "Ctrl-D ends the chat."]
    assert said[-1].startswith("--max_new_tokens: ")  # too long, and the chat goes on


def test_words_come_before_the_answer_is_whole(loaded):
    pieces: list[str] = []
    chat = Chat(*loaded, max_new_tokens=30, temperature=0)
    chat.answer("What is the capital of France?", pieces.append)
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == visible(chat.turns[-1]["content"])


def test_oldest_turns_are_forgotten_where_positions_end(loaded):
    chat = Chat(*loaded, max_new_tokens=8, temperature=0)
    long = "word " * 300  # of 1,024 positions
    for _ in range(4):
        chat.answer(long, lambda text: None)
    assert 2 <= len(chat.turns) < 8
    with pytest.raises(ConfigError, match="1,024 positions"):
        chat.answer("word " * 2000, lambda text: None)
    assert chat.turns[-1]["role"] == "assistant"


def test_a_temperature_draws_other_tokens(loaded):
    answers = set()
    for seed in range(6):
        torch.manual_seed(seed)
        chat = Chat(*loaded, max_new_tokens=12, temperature=3.0)
        chat.answer(QUESTION, lambda text: None)
        answers.add(chat.turns[-1]["content"])
    assert len(answers) > 1


def test_what_cannot_be_loaded_is_one_line(tmp_path, saved, adapter):
    def said(*words: str, **options) -> str:
        with pytest.raises(ConfigError) as error:
            find_saved(*words, **options)
        return error.value.one_line()

    run = tmp_path / "run"
    (run / "checkpoint-20").mkdir(parents=True)
    assert f"FOLDER: there is no model in {run}." in said(str(run))
    (run / "checkpoint-20" / "config.json").write_text("{}")
    assert f"name the checkpoint itself: {run / 'checkpoint-20'}" in said(str(run))
    (run / "config.json").write_text("{}")
    (run / "pytorch_model.bin").write_bytes(b"\x80")
    assert "pytorch_model.bin is a pickle" in said(str(run))
    lost = tmp_path / "lost"
    shutil.copytree(adapter, lost)
    config = json.loads((lost / "adapter_config.json").read_text())
    (lost / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/no/base"}))
    assert "/no/base" in (line := said(str(lost)))
    assert "Fix: pass --base_model." in line
    assert find_saved(str(lost), base_model=str(saved)).base == saved
    assert "is a whole model" in said(str(saved), base_model=str(saved))
