"""Tiny vision-language models with their processors, and rows with pictures, as recipes/vision.py reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{{- '<|im_end|>' + ('\\n' if message['role'] != 'assistant' else '') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (30, 60, 220), "white": (240, 240, 240)}
KINDS = ("llava", "idefics3", "gemma3")
IMAGE = "<image>"
_MORE_TOKENS = {
    "idefics3": ["<fake_token_around_image>", "<end_of_utterance>"],
    "gemma3": ["<start_of_image>", "<end_of_image>"],
}
_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_SIDE = 28  # side of a picture as the towers take it, in pixels: 2 × 2 patches


def write_model(kind: str, folder: Path) -> Path:
    """Save a tiny model of the family `kind`, with its processor and the embedded tokenizer, in `folder`."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer

    from accel_scale.data.default import default_model_path

    more = _MORE_TOKENS.get(kind, [])
    named = {}
    if kind == "gemma3":  # its processor asks the tokenizer for these
        named = {"extra_special_tokens": {"image_token": IMAGE, "boi_token": more[0], "eoi_token": more[1]}}
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model_path(), **named)
    tokenizer.add_tokens([IMAGE, *more], special_tokens=True)
    template = TEMPLATE.replace("IMAGE", more[0] if kind == "gemma3" else IMAGE)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    text = {**_TEXT, **ids, "vocab_size": len(tokenizer)}
    config = CONFIG_MAPPING[kind](**_parts(kind, text, tokenizer.convert_tokens_to_ids(IMAGE)), **ids)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    _processor(kind, tokenizer, template).save_pretrained(folder)
    return folder


def _parts(kind: str, text: dict[str, Any], image_id: int) -> dict[str, Any]:
    size = {"image_size": _SIDE, "patch_size": 14}
    if kind == "llava":
        tower = {**_TOWER, **size, "model_type": "clip_vision_model", "projection_dim": 32}
        return {
            "text_config": {**text, "model_type": "llama"},
            "vision_config": tower,
            "image_token_index": image_id,
        }
    if kind == "gemma3":
        return {
            "text_config": {**text, "head_dim": 8, "tie_word_embeddings": True},
            "vision_config": {**_TOWER, **size},
            "image_token_index": image_id,
            "boi_token_index": image_id + 1,
            "eoi_token_index": image_id + 2,
            "mm_tokens_per_image": 4,
        }
    return {
        "text_config": {**text, "model_type": "llama"},
        "vision_config": {**_TOWER, **size},
        "image_token_id": image_id,
        "scale_factor": 2,
    }


def _processor(kind: str, tokenizer: Any, template: str) -> Any:
    import transformers

    if kind == "llava":
        images = transformers.CLIPImageProcessorPil(
            size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}
        )
        return transformers.LlavaProcessor(
            images, tokenizer, patch_size=14, vision_feature_select_strategy="default", chat_template=template,
            num_additional_image_tokens=1,
        )  # fmt: skip
    if kind == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
        return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": _SIDE}, max_image_size={"longest_edge": _SIDE}, do_image_splitting=False
    )
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=template)


def write_pictures(folder: Path, count: int = 24, *, several: bool = False) -> Path:
    """Write `train.jsonl` to the new `folder`: `count` questions on the colours of pictures in `pictures/` next to it.

    Args:
        several: Give every third row two pictures.
    """
    (folder / "pictures").mkdir(parents=True)
    names, rows = list(COLOURS), []
    for number in range(count):
        colours = [names[(number + shift) % len(names)] for shift in range(2 if several and number % 3 == 0 else 1)]
        files = [f"pictures/{number}-{place}.png" for place in range(len(colours))]
        for place, (file, colour) in enumerate(zip(files, colours, strict=True)):
            picture = Image.new("RGB", (20 + number, 24 + place), COLOURS[colour])
            picture.putpixel((number % 20, number % 24), (number, 0, 0))
            picture.save(folder / file)
        question = f"Which colour, number {number}?"
        rows.append(
            {
                "images": files,
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": f"It is {' and '.join(colours)}."},
                ],
            }
        )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
