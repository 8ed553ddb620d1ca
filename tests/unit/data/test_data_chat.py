"""Chat templates and stop tokens, checked on the tokens that TRL actually trains on."""

from __future__ import annotations

from typing import Any

import pytest

from accel_scale.data.chat import (
    end_of_turn_token,
    ensure_chat_template,
    ensure_image_chat,
    ensure_stop_token,
    last_stop_token,
)
from accel_scale.errors import ConfigError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Templates that never say where the assistant's turn ends.
ENDLESS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ENDLESS_MARKED = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}\n{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": "It is Lily."}]
ROWS = {
    "text": {"text": "Once upon a time."},
    "plain": {"prompt": "Who is it? ", "completion": "It is Lily."},
    "messages": {"messages": TURNS},
    "turns": {"prompt": TURNS[:1], "completion": TURNS[1:]},
}


@pytest.fixture
def tokenizer(shared_data) -> Any:
    """The 512-token Llama tokenizer, without a chat template, plus ChatML's two tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260k")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def model(shared_data) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shared_data / "stories260k")
    model.resize_token_embeddings(514)
    return model


def trainer_of(row: dict[str, Any], tokenizer: Any, model: Any, folder: Any, **arguments: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], max_length=128, **arguments)
    return SFTTrainer(model, args, train_dataset=Dataset.from_list([row] * 2), processing_class=tokenizer)


def trained_labels(trainer: Any) -> list[int]:
    """The unmasked labels of the first row, as the collator hands them to the loss."""
    rows = [dict(trainer.train_dataset[0]), dict(trainer.train_dataset[1])]
    longer = {name: values + values[-1:] * 3 for name, values in rows[1].items() if isinstance(values, list)}
    batch = trainer.data_collator([rows[0], longer])  # the first row is padded
    return [label for label in batch["labels"][0].tolist() if label != -100]


@pytest.mark.slow
@pytest.mark.parametrize("pad_is_eos", [True, False])
@pytest.mark.parametrize(
    ("kind", "template"),
    [("text", None), ("plain", None), ("plain", CHATML)]
    + [(kind, template) for kind in ("messages", "turns") for template in (CHATML, ENDLESS)],
)
def test_every_format_teaches_where_to_stop(kind, pad_is_eos, template, tokenizer, model, tmp_path) -> None:
    conversational = kind in ("messages", "turns")
    tokenizer.pad_token = tokenizer.eos_token if pad_is_eos else "<unk>"
    tokenizer.chat_template = template  # not used for plain rows
    stop = ensure_stop_token(tokenizer, conversational=conversational)
    assert stop == ("<|im_end|>" if conversational and template is CHATML else "</s>")
    labels = trained_labels(trainer_of(ROWS[kind], tokenizer, model, tmp_path))
    assert last_stop_token(labels, tokenizer) == tokenizer.convert_tokens_to_ids(stop)
    assert labels.count(tokenizer.eos_token_id) == (0 if conversational and template is CHATML else 1)


@pytest.mark.slow
def test_without_help_an_endless_template_teaches_no_stop(tokenizer, model, tmp_path) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = ENDLESS
    labels = trained_labels(trainer_of(ROWS["messages"], tokenizer, model, tmp_path))
    assert last_stop_token(labels, tokenizer) is None


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML_MARKED, ENDLESS_MARKED])
def test_assistant_only_loss_trains_the_reply_and_its_end(template, tokenizer, model, tmp_path) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template
    stop = ensure_stop_token(tokenizer, conversational=True)
    trainer = trainer_of(ROWS["messages"], tokenizer, model, tmp_path, assistant_only_loss=True)
    labels = trained_labels(trainer)
    assert last_stop_token(labels, tokenizer) == tokenizer.convert_tokens_to_ids(stop)
    assert tokenizer.decode(labels).replace(stop, "").strip() == "It is Lily."


@pytest.mark.slow
def test_a_row_that_ends_in_eos_gets_no_second(tokenizer, model, tmp_path) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    labels = trained_labels(trainer_of({"text": "Once.</s>"}, tokenizer, model, tmp_path))
    assert labels.count(tokenizer.eos_token_id) == 1


def test_the_appended_stop_leaves_prompts_alone(tokenizer) -> None:
    tokenizer.chat_template = ENDLESS
    before = tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert ensure_stop_token(tokenizer, conversational=True) == "</s>"
    assert tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True) == before
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == before + "It is Lily.\n</s>"
    assert end_of_turn_token(tokenizer) == "</s>"
    template = tokenizer.chat_template
    ensure_stop_token(tokenizer, conversational=True)
    assert tokenizer.chat_template == template
    # A turn that is being continued gets nothing appended.
    open_end = tokenizer.apply_chat_template(TURNS, tokenize=False, continue_final_message=True)
    assert open_end.endswith("It is Lily.")


def test_templates_given_as_named_variants(tokenizer) -> None:
    tokenizer.chat_template = {"default": ENDLESS, "rag": CHATML}
    assert ensure_stop_token(tokenizer, conversational=True) == "</s>"
    assert tokenizer.chat_template["rag"] == CHATML
    assert tokenizer.apply_chat_template(TURNS, tokenize=False).endswith("</s>")


def test_a_processors_template_ends_a_turn_or_is_given_an_end(tokenizer) -> None:
    """The template's turns are lists of parts; an added end token is stored in the processor, not in its tokenizer."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    parts = "{% for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}"
    shown = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    for template, stop in ((CHATML, "<|im_end|>"), (ENDLESS, "</s>")):
        of_parts = template.replace("{{ m['content'] }}", parts)
        processor = LlavaProcessor(CLIPImageProcessorPil(), tokenizer, chat_template=of_parts)
        assert ensure_image_chat(processor) == stop
        assert processor.apply_chat_template(shown, tokenize=False).rstrip().endswith(stop)
        assert (processor.chat_template == of_parts) == (stop == "<|im_end|>")
    of_text = CHATML.replace("{{ m['content'] }}", "{{ m['content'] + '' }}")
    with pytest.raises(ConfigError, match="does not take turns of parts"):
        ensure_image_chat(LlavaProcessor(CLIPImageProcessorPil(), tokenizer, chat_template=of_text))


def test_eos_that_cannot_be_learnt(tokenizer) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no EOS token"):
        ensure_stop_token(tokenizer, conversational=False)
    tokenizer.eos_token = "</s>"
    tokenizer.split_special_tokens = True
    with pytest.raises(ConfigError, match="splits its EOS token"):
        ensure_stop_token(tokenizer, conversational=False)


def test_turns_need_a_template(tokenizer, tmp_path) -> None:
    ensure_chat_template(tokenizer, conversational=False)
    with pytest.raises(ConfigError, match="no chat template") as caught:
        ensure_chat_template(tokenizer, conversational=True)
    assert "--chat_template_path" in caught.value.fix
    path = tmp_path / "chatml.jinja"
    with pytest.raises(ConfigError, match="does not exist"):
        ensure_chat_template(tokenizer, conversational=True, chat_template_path=str(path))
    path.write_text(CHATML)
    ensure_chat_template(tokenizer, conversational=True, chat_template_path=str(path))
    assert tokenizer.chat_template == CHATML


def test_assistant_only_loss_needs_marks(tokenizer) -> None:
    from trl.chat_template_utils import qwen2_5_chat_template

    with pytest.raises(ConfigError, match="have no turns"):
        ensure_chat_template(tokenizer, conversational=False, assistant_only_loss=True)
    tokenizer.chat_template = CHATML
    with pytest.raises(ConfigError, match="does not mark the assistant's turns"):
        ensure_chat_template(tokenizer, conversational=True, assistant_only_loss=True)
    for template in (CHATML_MARKED, qwen2_5_chat_template):
        tokenizer.chat_template = template
        ensure_chat_template(tokenizer, conversational=True, assistant_only_loss=True)
    outside = CHATML_MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    tokenizer.chat_template = outside
    with pytest.raises(ConfigError, match="would not learn to stop"):
        ensure_chat_template(tokenizer, conversational=True, assistant_only_loss=True)


def test_templates_cloned_from_a_model(tokenizer, tmp_path) -> None:
    other, folder = tokenizer, str(tmp_path / "other")
    other.chat_template = CHATML_MARKED
    other.save_pretrained(folder)
    other.chat_template = None
    clone = {"conversational": True, "chat_template_path": folder}
    ensure_chat_template(tokenizer, assistant_only_loss=True, **clone)
    assert ensure_stop_token(tokenizer, **clone) == "<|im_end|>"
    other.chat_template = ENDLESS
    other.save_pretrained(folder)
    with pytest.raises(ConfigError, match="does not end the assistant's turn"):
        ensure_stop_token(tokenizer, **clone)
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        ensure_chat_template(tokenizer, conversational=True, chat_template_path=str(tmp_path / "nothing"))
