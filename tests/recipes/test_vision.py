"""recipes/vision.py trains on images like TRL's own trainer, resumes after a kill, and names bad rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import KINDS, write_model, write_pictures
from safetensors.torch import load_file

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import EXIT_STOPPED
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.trl import VISION

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 8
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of each family, and `rows`, every third of which has two pictures."""
    folder = tmp_path_factory.mktemp("vision")
    for kind in KINDS:
        write_model(kind, folder / kind)
    write_pictures(folder / "rows", several=True)
    return folder


def run(script: Path, *words: object, status: int = 0) -> str:
    command = [sys.executable, str(script), *map(str, words)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def recipe_words(made: Path, kind: str, out: Path) -> list[str]:
    words = f"--model_name_or_path {made / kind} --dataset_name {made / 'rows'} --output_dir {out} --precision fp32 "
    words += "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --seed 7 "
    words += "--lr_scheduler_type constant --warmup_steps 0 --logging_steps 1 --lora_dropout 0"
    return words.split()


def losses_of(out: Path) -> list[float]:
    losses: list[float] = json.loads((out / "run_summary.json").read_text())["losses"]
    return losses


# Every kind of model and every way to train once; the other pairs are soaks.
PAIRS = {
    ("gemma3", "full", "none"),
    ("llava", "full", "projector"),
    ("idefics3", "full", "all"),
    ("llava", "lora", "none"),
}
TRAINED = [("full", "none"), ("full", "projector"), ("full", "all"), ("lora", "none")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "train_vision"),
    [
        pytest.param(kind, *trained, marks=[] if (kind, *trained) in PAIRS else [pytest.mark.soak])
        for kind in KINDS
        for trained in TRAINED
    ],
)
def test_losses_and_what_is_trained_are_trls(
    kind: str, method: str, train_vision: str, made: Path, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    flags = ["--max_steps", STEPS, "--save_strategy", "no", "--method", method, "--train_vision", train_vision]
    flags += ["--lora_target_modules", "q_proj", "v_proj"] if method == "lora" else []
    said = run(REPOSITORY / "recipes/vision.py", *recipe_words(made, kind, ours), *flags)
    run(
        REPOSITORY / "tests/recipes/plain_vision.py",
        *("--model", made / kind, "--data", made / "rows", "--out", theirs, "--steps", STEPS),
        *("--method", method, "--train_vision", train_vision),
    )
    found = losses_of(ours)
    assert len(found) == STEPS
    assert found == pytest.approx(json.loads((theirs / "losses.json").read_text()), abs=1e-6)
    assert found[-1] < found[0] - 1e-3, "something is learnt"
    projector = "trained" if train_vision != "none" else "frozen"
    tower = "trained" if train_vision == "all" else "frozen"
    name = "connector" if kind == "idefics3" else "multi_modal_projector"
    assert f"model.{name} {projector}" in said
    assert f"model.vision_{'model' if kind == 'idefics3' else 'tower'} {tower}" in said
    if method == "full":
        before, after = (load_file(path / "model.safetensors") for path in (made / kind, ours))
        moved = {key for key in before if not before[key].equal(after[key])}
        assert any(name in key for key in moved) == (train_vision != "none")
        assert any("vision_" in key for key in moved) == (train_vision == "all")
        assert any("q_proj" in key and "vision" not in key for key in moved)


@pytest.mark.slow
def test_what_was_saved_sees_and_is_evaluated(made: Path, tmp_path: Path) -> None:
    """The folder holds a processor and a model; evaluation rows come from a split of the same folder."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    rows, out = tmp_path / "rows", tmp_path / "out"
    shutil.copytree(made / "rows", rows)
    lines = (rows / "train.jsonl").read_text().splitlines(keepends=True)
    (rows / "train.jsonl").write_text("".join(lines[6:]))
    (rows / "test.jsonl").write_text("".join(lines[:6]))
    words = recipe_words(made, "llava", out)
    words[words.index("--dataset_name") + 1] = str(rows)
    run(REPOSITORY / "recipes/vision.py", *words, "--max_steps", 3, "--eval_strategy", "steps", "--eval_steps", 3)
    summary = json.loads((out / "run_summary.json").read_text())
    assert summary["recipe"] == "vision.py"
    assert summary["parts"] == {
        "language model": "trained", "model.vision_tower": "frozen", "model.multi_modal_projector": "frozen",
    }  # fmt: skip
    assert 0 < summary["eval_loss"] < 7
    assert summary["plan"] is None
    assert (out / "report.html").is_file()
    processor = AutoProcessor.from_pretrained(out)
    turn = {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (30, 30))}]}
    inputs = processor.apply_chat_template([[turn]], tokenize=True, return_dict=True, return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(out)
    assert model(**inputs).logits.isfinite().all()


# ── Bad rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def broken(change: Callable[[Path, list[dict[str, Any]]], None], made: Path, folder: Path) -> Path:
    shutil.copytree(made / "rows", folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    change(folder, rows)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def missing_file(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / rows[4]["images"][0]).unlink()


def no_picture(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / rows[4]["images"][0]).write_text("not a picture")


def no_images(folder: Path, rows: list[dict[str, Any]]) -> None:
    rows[4]["images"] = []


def too_many_places(folder: Path, rows: list[dict[str, Any]]) -> None:
    rows[4]["messages"][0]["content"] = "<image><image> Which colour?"


def on_the_network(folder: Path, rows: list[dict[str, Any]]) -> None:
    rows[4]["images"] = ["https://example.org/cat.png"]


def held_in_the_turn(folder: Path, rows: list[dict[str, Any]]) -> None:
    rows[4]["messages"][0]["content"] = [{"type": "image", "image": "cat.png"}]


def a_sound(folder: Path, rows: list[dict[str, Any]]) -> None:
    rows[4]["messages"][0]["content"] = [{"type": "audio", "audio": "cat.wav"}]


def number_in_the_column(folder: Path, rows: list[dict[str, Any]]) -> None:
    rows[4]["images"] = [5]


def nobody_asks(folder: Path, rows: list[dict[str, Any]]) -> None:
    rows[4]["messages"] = rows[4]["messages"][1:]


BAD_ROWS = [
    (missing_file, "an image does not exist"), (no_picture, "an image cannot be read"), (no_images, "no image in"),
    (too_many_places, "another number of images than of places for them (1 and 2)"),
    (on_the_network, "an image is not a file on this machine"), (held_in_the_turn, "holds an image itself"),
    (a_sound, "neither text nor image (audio)"), (number_in_the_column, "something that is no image"),
    (nobody_asks, "no user turn to show an image in"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), BAD_ROWS)
def test_bad_rows_are_named_before_a_library_is_imported(
    change: Callable[[Path, list[dict[str, Any]]], None], reason: str, made: Path, tmp_path: Path
) -> None:
    folder = broken(change, made, tmp_path / "rows")
    given = ["--model_name_or_path", str(made / "llava"), "--dataset_name", str(folder)]
    with pytest.raises(ConfigError) as refused:
        VISION.refuse(parse_flags(VISION.flags, given, program="vision.py"))
    line = refused.value.one_line()
    assert line.startswith(f"{folder}/train.jsonl:5: ")
    assert reason in line
    assert "--on_bad_row skip" in line
    assert "\n" not in line
    VISION.refuse(parse_flags(VISION.flags, [*given, "--on_bad_row", "skip"], program="vision.py"))


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "bmp"])
def test_truncated_files_are_found_before_training_and_can_be_skipped(ending: str, made: Path, tmp_path: Path) -> None:
    from PIL import Image

    from accel_scale.data.loading import load_training_data

    def cut(folder: Path, rows: list[dict[str, Any]]) -> None:
        path = folder / f"pictures/whole.{ending}"
        Image.effect_noise((90, 90), 50).convert("RGB").save(path)
        rows[0]["images"][:1] = [f"pictures/whole.{ending}"]
        data = path.read_bytes()
        (folder / f"pictures/cut.{ending}").write_bytes(data[: len(data) * 2 // 3])
        rows[4]["images"] = [f"pictures/cut.{ending}"]

    folder = broken(cut, made, tmp_path / "rows")
    with pytest.raises(ConfigError, match=rf"train\.jsonl:5: an image cannot be read .*cut\.{ending}: "):
        load_training_data(str(folder), rows_with="images")
    data = load_training_data(str(folder), rows_with="images", on_bad_row="skip")
    assert (data.num_rows, data.skipped_reasons) == (23, {"an image cannot be read": 1})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--packing true", "rows with images are not packed"),
        ("--padding_free true", "padding_free"),
        ("--long_rows true", "long_rows"),
        ("--truncation_mode keep_end", "keep_start"),
        ("--dataset_streaming true", "dataset_streaming"),
        ("--exact_match_samples 5", "--eval_strategy"),
        ("--train_sampling_strategy group_by_length", "use random or sequential"),
        ("--shuffle_dataset true", "shuffle_dataset"),
        ("--dataset_num_proc 2", "--dataloader_num_workers"),
        ("--dataset_kwargs {}", "dataset_kwargs"),
        ("--chat_template_path some/model", ".jinja"),
        ("--plan auto", "the vision tower and the tokens of images are not counted"),
        ("--plan check", "--max_steps 1"),
        ("--plan_gpu 4090", "plan_gpu"),
        ("--method lora --train_vision projector", "--lora_modules_to_save"),
        ("--use_peft true --train_vision all", "--method full"),
    ],
)
def test_what_is_not_done_for_images_is_refused(flags: str, named: str, made: Path) -> None:
    given = ["--model_name_or_path", str(made / "llava"), "--dataset_name", str(made / "rows"), *flags.split()]
    with pytest.raises(ConfigError) as refused:
        VISION.refuse(parse_flags(VISION.flags, given, program="vision.py"))
    assert named in refused.value.one_line()


def test_a_model_must_be_named_and_have_a_processor(made: Path, tmp_path: Path) -> None:
    def refusal(*given: str) -> str:
        with pytest.raises(ConfigError) as refused:
            VISION.refuse(parse_flags(VISION.flags, [*given, "--dataset_name", str(made / "rows")], program="v"))
        return refused.value.one_line()

    assert "name one with --model_name_or_path" in refusal()
    folder = shutil.copytree(made / "llava", tmp_path / "llava")
    (folder / "processor_config.json").unlink()
    assert f"{folder} has no processor for images" in refusal("--model_name_or_path", str(folder))


@pytest.mark.slow
def test_models_of_text_and_broken_processors_are_one_line(made: Path, tmp_path: Path) -> None:
    text = shutil.copytree(default_model_path(), tmp_path / "text")
    shutil.copy(made / "llava" / "processor_config.json", text)
    words = recipe_words(made, "llava", tmp_path / "out")
    words[1] = str(text)
    assert "takes no images: it is a model of text (llama)" in run(REPOSITORY / "recipes/vision.py", *words, status=2)
    other = shutil.copytree(made / "llava", tmp_path / "other")
    (other / "processor_config.json").write_text("{}")
    words[1] = str(other)
    said = run(REPOSITORY / "recipes/vision.py", *words, status=2)
    assert f"{str(other)!r} has no processor for images" in said or f"{other} has no processor for images" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_rows_that_lose_their_images_to_max_length_are_named(made: Path, tmp_path: Path) -> None:
    words = [*recipe_words(made, "llava", tmp_path / "out"), "--max_length", "6", "--max_steps", "1"]
    said = run(REPOSITORY / "recipes/vision.py", *words, status=2)
    assert "--max_length 6 cuts those of its images" in said
    assert "train.jsonl:" in said
    assert "Traceback" not in said


def test_only_rows_that_lose_tokens_of_an_image_are_refused(made: Path) -> None:
    """TRL's collator with a real processor: text alone is cut as usual, and the refused row is named by its place."""
    from transformers import AutoProcessor
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from accel_scale.data.image_batches import ImageCollator

    processor = AutoProcessor.from_pretrained(made / "llava")
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    picture = {"bytes": None, "path": str(made / "rows/pictures/1-0.png")}

    def row(number: int, *question: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": text} if text else {"type": "image"} for text in question]
        turns = [{"role": "user", "content": parts}]
        turns += [{"role": "assistant", "content": [{"type": "text", "text": "It is red."}]}]
        return {"messages": turns, "images": [{**picture, "place": f"rows:{number}"}]}

    def collate(limit: int | None, *rows: dict[str, Any]) -> Any:
        trls = DataCollatorForVisionLanguageModeling(processor, max_length=limit)
        return ImageCollator(trls, token, limit)(rows)

    first, last = row(1, "", "Which colour?"), row(2, "Which colour?", "")
    whole = collate(None, first, last)["input_ids"]
    (shown,) = set((whole == token).sum(1).tolist())
    image_ends = [int((ids == token).nonzero().max()) + 1 for ids in whole]
    assert image_ends[0] < image_ends[1] < whole.shape[1]
    for limit in (image_ends[1], image_ends[1] + 1):  # at and after the end of both images
        cut = collate(limit, first, last)["input_ids"]
        assert cut.shape[1] == limit
        assert set((cut == token).sum(1).tolist()) == {shown}
    with pytest.raises(ConfigError, match=f"the row has {whole.shape[1]} tokens, and --max_length") as refused:
        collate(image_ends[1] - 1, first, last)
    assert refused.value.place == "rows:2"
    assert collate(image_ends[1] - 1, first)["input_ids"].shape[1] == image_ends[1] - 1
    with pytest.raises(ConfigError, match="does not take this row") as refused:
        collate(None, row(3, "Which colour?"))
    assert refused.value.place == "rows:3"


def test_files_that_vanish_while_it_trains_are_named(made: Path, tmp_path: Path) -> None:
    """The files existed when the rows were read; workers of the data loader, too, report one line."""
    folder = broken(lambda *_: None, made, tmp_path / "rows")
    (folder / "pictures/1-0.png").write_text("not a picture")
    image = {"bytes": None, "path": f"{folder}/pictures/1-0.png", "place": f"{folder}/train.jsonl:2"}
    script = tmp_path / "script.py"
    script.write_text(f"""
from torch.utils.data import DataLoader
from accel_scale.data.image_batches import ImageCollator
from accel_scale.errors import ConfigError
for workers in (0, 1):
    try:
        list(DataLoader([{{"images": [{image}]}}], collate_fn=ImageCollator(None, None, None), num_workers=workers))
    except ConfigError as error:
        print(error.one_line())
""")
    expected = (
        f"{folder}/train.jsonl:2: the image {folder}/pictures/1-0.png can no longer be read: cannot identify image "
        f"file '{folder}/pictures/1-0.png'. Fix: put the file back, or leave the row out."
    )
    assert [line for line in run(script).splitlines() if "train.jsonl" in line] == [expected, expected]


def test_turned_pictures_are_turned_as_datasets_turns_them(tmp_path: Path) -> None:
    from datasets import Image as Column
    from PIL import Image

    from accel_scale.data.image_batches import decoded

    exif = Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = 6
    Image.linear_gradient("L").resize((40, 20)).convert("RGB").save(tmp_path / "a.jpg", exif=exif)
    for data in (None, (tmp_path / "a.jpg").read_bytes()):
        found = decoded({"bytes": data, "path": str(tmp_path / "a.jpg"), "place": "x"})
        theirs = Column().decode_example({"bytes": data, "path": str(tmp_path / "a.jpg")})
        assert found.size == (20, 40)
        assert found.tobytes() == theirs.tobytes()


# ── Stops ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("method", "number"),
    [("full", signal.SIGKILL), pytest.param("lora", signal.SIGTERM, marks=pytest.mark.soak)],
)
def test_a_stopped_run_goes_on_bit_for_bit(method: str, number: signal.Signals, made: Path, tmp_path: Path) -> None:
    def start(folder: Path) -> subprocess.Popen[str]:
        words = [*recipe_words(made, "idefics3", folder), "--max_steps", "6", "--save_steps", "2", "--method", method]
        return subprocess.Popen(
            [sys.executable, "recipes/vision.py", *words],
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    weights = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    process = start(undisturbed)
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    process = start(stopped)
    while process.poll() is None and not (stopped / "checkpoint-2").exists():
        time.sleep(0.002)
    process.send_signal(number)
    output = process.communicate()[0]
    assert process.returncode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: EXIT_STOPPED}[number], output[
        -3000:
    ]
    process = start(stopped)
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    assert "checkpoint-" in output
    assert (stopped / weights).read_bytes() == (undisturbed / weights).read_bytes()
    assert "nothing is left to do" in start(stopped).communicate()[0]


# ── Commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_4_bit_base_keeps_the_parts_that_see_as_they_are_and_merges(made: Path, tmp_path: Path) -> None:
    """A projector that is trained whole cannot be in 4 bits."""
    from accel_scale.merging.adapter import merge_adapter

    out, merged = tmp_path / "out", tmp_path / "merged"
    words = [*recipe_words(made, "llava", out), "--max_steps", "2", "--method", "qlora", "--save_strategy", "no"]
    run(REPOSITORY / "recipes/vision.py", *words, "--lora_modules_to_save", "multi_modal_projector")
    record = json.loads((out / "quantization_config.json").read_text())
    assert record["llm_int8_skip_modules"] == ["lm_head", "model.multi_modal_projector", "model.vision_tower"]
    assert "logits differ by at most" in merge_adapter(out, merged).check
    before, after = (load_file(path / "model.safetensors") for path in (made / "llava", merged))
    assert all(before[name].equal(after[name]) for name in before if "vision_tower" in name)
    assert any(not before[name].equal(after[name]) for name in before if "projector" in name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_merged_adapter_sees_as_the_base_with_it_does(made: Path, tmp_path: Path) -> None:
    """With a projector that is trained whole next to the adapters."""
    import torch
    from peft import PeftModel
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from accel_scale.merging.adapter import merge_adapter

    out, merged = tmp_path / "out", tmp_path / "merged"
    words = [*recipe_words(made, "llava", out), "--max_steps", "4", "--method", "lora", "--save_strategy", "no"]
    said = run(REPOSITORY / "recipes/vision.py", *words, "--lora_modules_to_save", "multi_modal_projector")
    assert "language model adapters" in said
    merge_adapter(out, merged, check=False)
    processor = AutoProcessor.from_pretrained(merged)
    turn = {"role": "user", "content": [{"type": "image", "image": Image.effect_noise((40, 30), 90).convert("RGB")}]}
    inputs = processor.apply_chat_template([[turn]], tokenize=True, return_dict=True, return_tensors="pt")
    base = AutoModelForImageTextToText.from_pretrained(made / "llava", dtype=torch.float32)
    with torch.no_grad():
        untrained = base(**inputs).logits
        expected = PeftModel.from_pretrained(base, str(out))(**inputs).logits
        found = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - untrained).abs().max() > 1e-2
    before, after = (load_file(path / "model.safetensors") for path in (made / "llava", merged))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert any("projector" in name for name in moved)
    assert not any("vision_tower" in name for name in moved)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rehearsal_shrinks_the_model_and_keeps_its_processor(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data are not on this machine, so embedded questions get pictures."""
    from accel_scale.cli.main import main

    given = f"--model_name_or_path {made / 'idefics3'} --dataset_name HuggingFaceM4/the_cauldron --train_vision all"
    words = ["rehearse", "--config_file", "accelerate_configs/fsdp2.yaml", "--keep", str(tmp_path / "kept")]
    assert main([*words, "recipes/vision.py", *given.split()]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "Idefics3ForConditionalGeneration" in said
    assert "embedded rows in place of HuggingFaceM4/the_cauldron" in said
    assert (tmp_path / "kept" / "model" / "processor_config.json").is_file()


def test_nothing_is_planned_for_images(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accel_scale.cli.main import main

    for name in ("vision", str(REPOSITORY / "recipes/vision.py")):
        with pytest.raises(SystemExit) as ended:
            main(["plan", str(made / "llava"), "--gpu", "4090", "--recipe", name])
        assert ended.value.code == 2
        assert "the vision tower and the tokens of images are not counted" in capsys.readouterr().err


def test_runs_on_a_gpu_plan_nothing_either() -> None:
    from types import SimpleNamespace

    from accel_scale.planning.search.recipe_choices import SFT_PLAN, VISION_PLAN
    from accel_scale.settings.planned import mode_of

    def mode(recipe: object) -> str:
        scale, launch = SimpleNamespace(plan=None, plan_gpu=None), SimpleNamespace(device_type="cuda")
        settings: Any = SimpleNamespace(scale=scale, launch=launch, recipe=recipe, sources={})
        return mode_of(settings)

    assert (mode(SFT_PLAN), mode(VISION_PLAN)) == ("check", "off")
