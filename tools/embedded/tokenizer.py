"""Build the embedded model's tokenizer: a byte-level BPE whose digits and capital letters are always single tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 768
MAX_LENGTH = 1024
TURN_START, TURN_END, DOCUMENT_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>"

# A word may become one token with the space before it and its capital letter. Digits, capital letters that start no
# word (codes such as QXKD) and other white space are never merged, so that the model sees what it must work on.
WORD_PIECES = r" ?[A-Z]?[a-z]+|[A-Z]|[0-9]|[^\sA-Za-z0-9]+|\s"

# ChatML. The markers around the assistant's turn let TRL and transformers compute assistant-only loss masks; they
# cover the answer and its end-of-turn token, which is how the model learns to stop.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `VOCAB_SIZE` tokens on `texts`; it encodes any string and decodes it back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[DOCUMENT_END, TURN_START, TURN_END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, DOCUMENT_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
