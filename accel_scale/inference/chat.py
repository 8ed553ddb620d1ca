"""Chat with a model, streamed token by token: with its chat template if it has one, else as text continuation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from transformers import GenerationConfig, TextStreamer

from accel_scale.data.chat import end_of_turn_token
from accel_scale.errors import ConfigError, first_line
from accel_scale.modeling.files import longest_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Control characters that a terminal would interpret; line feed and tab are kept.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class _Writer(TextStreamer):
    """Passes finished text on without control characters, and keeps the whole text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write, self.text = write, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._write(text.translate(_CONTROLS))


class Chat:
    """A conversation: the turns so far, and the model that answers them.

    Args:
        system: The system turn, at the start of every prompt.
        temperature: 0 for greedy decoding; None for the value in the model's generation_config.json.

    Raises:
        ConfigError: if a system turn is given, and there is no chat template or it does not take one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float | None = None,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.has_template = bool(tokenizer.chat_template)
        if system is not None and not self.has_template:
            raise ConfigError(
                "the model has no chat template, so it knows no system turn.", place="--system", fix="leave it out."
            )
        self._head = [{"role": "system", "content": system}] if system is not None else []
        self.turns: list[dict[str, str]] = []
        self._longest = longest_rows(model.config)
        self._settings = self._generation(max_new_tokens, temperature)
        if self.has_template:
            self._prompt([*self._head, {"role": "user", "content": "?"}], place="--system" if system else None)

    def _generation(self, max_new_tokens: int, temperature: float | None) -> GenerationConfig:
        own = self._model.generation_config
        settings = GenerationConfig(**own.to_dict()) if own is not None else GenerationConfig()
        ends = {self._tokenizer.eos_token_id}
        ends |= set(settings.eos_token_id) if isinstance(settings.eos_token_id, list) else {settings.eos_token_id}
        with contextlib.suppress(Exception):  # a template that refuses the probe is reported by `_prompt`
            if self.has_template and (token := end_of_turn_token(self._tokenizer)):
                ends.add(self._tokenizer.convert_tokens_to_ids(token))
        settings.eos_token_id = sorted(end for end in ends if isinstance(end, int)) or None
        if settings.pad_token_id is None:
            settings.pad_token_id = self._tokenizer.pad_token_id
        settings.max_new_tokens, settings.max_length, settings.use_cache = max_new_tokens, None, True
        if temperature == 0:
            settings.do_sample, settings.temperature, settings.top_p, settings.top_k = False, 1.0, 1.0, 50
        elif temperature is not None:
            settings.do_sample, settings.temperature = True, temperature
        return settings

    def answer(self, text: str, write: Callable[[str], object]) -> None:
        """Stream the answer to `text`, or its continuation, to `write`; Ctrl-C ends the answer, which is kept.

        Raises:
            ConfigError: if the text is longer than the model's positions.
        """
        import torch

        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        try:
            ids = self._fitting_prompt(text)
        except ConfigError:
            self.turns = before
            raise
        writer = _Writer(self._tokenizer, write)
        tokens = torch.tensor([ids], device=self._model.device)
        generate = cast("Callable[..., object]", self._model.generate)
        with contextlib.suppress(KeyboardInterrupt), torch.inference_mode():
            generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=self._settings,
                streamer=writer,
            )
        self.turns.append({"role": "assistant", "content": writer.text})

    def _fitting_prompt(self, text: str) -> list[int]:
        """Tokens of the conversation; the oldest turns are dropped if they exceed the model's positions."""
        while True:
            ids = self._prompt([*self._head, *self.turns]) if self.has_template else self._tokenizer(text)["input_ids"]
            room = None if self._longest is None else self._longest - int(self._settings.max_new_tokens or 0)
            if room is None or len(ids) <= room:
                return list(ids)
            if not self.has_template or len(self.turns) == 1:
                raise ConfigError(
                    f"{len(ids):,} tokens and {self._settings.max_new_tokens:,} new ones are more than the model's "
                    f"{self._longest:,} positions.",
                    place="--max_new_tokens",
                    fix="write less, or ask for fewer new tokens.",
                )
            del self.turns[:2]

    def _prompt(self, messages: list[dict[str, str]], *, place: str | None = None) -> list[int]:
        from jinja2 import TemplateError

        try:
            encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            problem = f"the chat template refuses these turns: {first_line(error)}."
            fix = "leave it out." if place else "use a tokenizer whose template takes user turns."
            raise ConfigError(problem, place=place or "the tokenizer", fix=fix) from None
        return list(cast("Mapping[str, list[int]]", encoded)["input_ids"])
