"""Chat templates and stop tokens: ensure that there is a template and that the model learns where to stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from accel_scale.errors import ConfigError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_PARTS_PROBE: list[dict[str, object]] = [
    {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in _PROBE
]
# Appended to a template that does not end the assistant's last turn: the EOS token, trained on where the reply is.
_STOP = "{{ eos_token }}"
_MARKED_STOP = "{% generation %}{{ eos_token }}{% endgeneration %}"
_SUFFIX = "{% if not add_generation_prompt and messages[-1]['role'] == 'assistant' %}STOP{% endif %}"


def ensure_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    *,
    conversational: bool,
    assistant_only_loss: bool = False,
    chat_template_path: str | None = None,
    place: str = "--model_name_or_path",
) -> None:
    """Check that rows of turns can be rendered, and the assistant's part identified where the loss needs it.

    Args:
        tokenizer: Receives the template if `chat_template_path` is a ``.jinja`` file; do not pass that path to TRL as
            well, since reading it again would overwrite what `ensure_stop_token` adds. Other paths name a model from
            whose tokenizer TRL clones the template and its tokens; that tokenizer is checked here.
        conversational: Whether the rows are turns, see `LoadedData.conversational`.

    Raises:
        ConfigError: no template; `assistant_only_loss` on rows without turns, with a template that has neither
            ``{% generation %}`` nor a training version in TRL, or with one that leaves the end of the turn out of the
            loss.
    """
    if chat_template_path and is_template_file(chat_template_path):
        path = Path(chat_template_path)
        if not path.is_file():
            raise ConfigError(f"{path} does not exist.", place="--chat_template_path", fix="check the path.")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    elif chat_template_path:
        tokenizer, place = _cloned_from(chat_template_path), "--chat_template_path"
    if assistant_only_loss and not conversational:
        refuse_plain_rows("--assistant_only_loss")
    if conversational and not tokenizer.chat_template:
        raise ConfigError(
            "the rows are turns of a conversation, and the tokenizer has no chat template to write them with.",
            place=place,
            fix="pass --chat_template_path with a .jinja file, or with a model whose template to use, "
            "e.g. --chat_template_path HuggingFaceTB/SmolLM2-135M-Instruct.",
        )
    if assistant_only_loss:
        _check_generation_markers(tokenizer)


def refuse_plain_rows(place: str) -> NoReturn:
    """Refuse a loss on the assistant's part of rows that have no turns."""
    raise ConfigError(
        "the rows have no turns, so there is no assistant's part to take the loss on.",
        place=place,
        fix="remove it; rows of prompt and completion take the loss on the completion by default.",
    )


def is_template_file(chat_template_path: str) -> bool:
    """True for a template's file, False for a model whose template is cloned."""
    return chat_template_path.endswith((".jinja", ".j2"))


def _cloned_from(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer can be loaded from {path} ({first_line(error)}).",
            place="--chat_template_path",
            fix="name a .jinja file, a folder with a tokenizer, or a hub id.",
        ) from error


def _check_generation_markers(tokenizer: PreTrainedTokenizerBase) -> None:
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    template = None
    if not has_generation_markers(tokenizer.chat_template):
        try:
            template = get_training_chat_template(tokenizer)
        except ValueError:
            raise ConfigError(
                "the chat template does not mark the assistant's turns with {% generation %} … {% endgeneration %}, "
                "and TRL has no training version of it.",
                place="--assistant_only_loss",
                fix="pass a --chat_template_path whose template has the marks, or leave --assistant_only_loss off.",
            ) from None
    if not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        raise ConfigError(
            "the chat template ends the assistant's turn outside {% generation %} … {% endgeneration %}, "
            "so the model would not learn to stop.",
            place="--assistant_only_loss",
            fix="move the end-of-turn token before {% endgeneration %}, or leave --assistant_only_loss off.",
        )


def ensure_stop_token(
    tokenizer: PreTrainedTokenizerBase, *, conversational: bool, chat_template_path: str | None = None
) -> str:
    """Make sure that every training row ends in a token that ends generation, and return that token.

    TRL appends the EOS token to plain rows, and leaves rows of turns to the chat template. A template that does
    not end the assistant's last turn is given the EOS token there. Put the id of the returned token into
    ``model.generation_config.eos_token_id`` if it is not the tokenizer's EOS token.

    Args:
        chat_template_path: A model whose template TRL will clone, if any: its tokenizer is checked instead. Cloning
            adds the token, so look up its id after the trainer is made.

    Raises:
        ConfigError: no EOS token, one that the tokenizer splits into several, or a template to be cloned that
            does not end the assistant's turn.
    """
    if conversational and chat_template_path and not is_template_file(chat_template_path):
        token = end_of_turn_token(_cloned_from(chat_template_path))
        if token is None:
            raise ConfigError(
                f"the chat template of {chat_template_path} does not end the assistant's turn with a special token.",
                place="--chat_template_path",
                fix="save the template as a .jinja file and name that: the EOS token is then added to it.",
            )
        return token
    if conversational:
        token = end_of_turn_token(tokenizer)
        if token is not None:
            return token
        return _end_with_eos(tokenizer, tokenizer)
    return _known_eos(tokenizer)


def _known_eos(tokenizer: PreTrainedTokenizerBase) -> str:
    """The EOS token, which must be one token."""
    eos_token = tokenizer.eos_token
    if eos_token is None:
        raise ConfigError(
            "the tokenizer has no EOS token, so the model cannot learn to stop.",
            place="--eos_token",
            fix="name a token of its vocabulary, e.g. --eos_token '<|endoftext|>'.",
        )
    if tokenizer("a" + eos_token, add_special_tokens=False)["input_ids"][-1:] != [tokenizer.eos_token_id]:
        raise ConfigError(
            f"the tokenizer splits its EOS token {eos_token!r} into several, so the model cannot learn to stop.",
            place="--eos_token",
            fix="name a token that is one special token, and load the tokenizer with split_special_tokens=False.",
        )
    return str(eos_token)


def _end_with_eos(holder: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> str:
    """Make the template of `holder` end the assistant's last turn with the EOS token, and return that token."""
    from trl.chat_template_utils import has_generation_markers

    eos_token = _known_eos(tokenizer)
    template = _template(holder)
    stop = _MARKED_STOP if has_generation_markers(template) else _STOP
    _set_template(holder, template + _SUFFIX.replace("STOP", stop))
    return eos_token


def ensure_image_chat(
    processor: ProcessorMixin, *, assistant_only_loss: bool = False, chat_template_path: str | None = None
) -> str:
    """`ensure_chat_template` and `ensure_stop_token` for a processor whose template renders turns made of parts.

    Args:
        processor: Receives the template of `chat_template_path`, a ``.jinja`` file.

    Raises:
        ConfigError: as those two functions.
    """
    holder = cast("PreTrainedTokenizerBase", processor)  # its template is kept where a tokenizer's is
    tokenizer = processor.tokenizer
    ensure_chat_template(
        holder, conversational=True, assistant_only_loss=assistant_only_loss, chat_template_path=chat_template_path
    )
    try:
        text = holder.apply_chat_template(_PARTS_PROBE, tokenize=False)  # type: ignore[arg-type]  # of parts
    except Exception as error:  # an unknown template may raise anything
        raise ConfigError(
            f"the chat template does not take turns of parts: {first_line(error)}.",
            place="--chat_template_path" if chat_template_path else "--model_name_or_path",
            fix="pass --chat_template_path with a .jinja file that writes {'type': 'text'} and {'type': 'image'}.",
        ) from error
    stop = last_stop_token(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer)
    if stop is not None:
        return str(tokenizer.convert_ids_to_tokens(stop))
    return _end_with_eos(holder, tokenizer)


def end_of_turn_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The special token with which the chat template ends a conversation, ignoring white space; None without one."""
    rendered: Any = tokenizer.apply_chat_template(_PROBE, tokenize=True, return_dict=True)
    stop = last_stop_token(rendered["input_ids"], tokenizer)
    return None if stop is None else str(tokenizer.convert_ids_to_tokens(stop))


def last_stop_token(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The last token id of a sequence if it is EOS or another special token, ignoring white space; else None.

    For labels, pass only those that are not masked: ``[label for label in labels if label != -100]``.
    """
    special = {*tokenizer.get_added_vocab().values(), tokenizer.eos_token_id}
    for token_id in reversed(token_ids):
        if token_id in special:
            return token_id
        if str(tokenizer.decode([token_id])).strip():
            return None
    return None


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return template["default"] if isinstance(template, dict) else template


def _set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    if isinstance(tokenizer.chat_template, dict):
        tokenizer.chat_template = {**tokenizer.chat_template, "default": template}
    else:
        tokenizer.chat_template = template
