"""recipes/grpo.py and rloo.py train like TRL's own scripts, rewards are what they claim, and mistakes are named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trl.scripts
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer, rloo_trainer

from accel_scale.checks import recipe_rules
from accel_scale.data.default import default_model_path
from accel_scale.data.loading import load_training_data
from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.spec import RecipeSpec
from accel_scale.recipe_specs.trl import GRPO, RLOO
from accel_scale.settings import vllm_flags
from accel_scale.settings.vllm_flags import VLLM_FLAGS
from accel_scale.trainers.rewarded_run import as_prompts
from accel_scale.trainers.rewards import exact_match, number, reward_functions

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.bad_inputs import load_recipe  # noqa: E402

REWARDS = Path(__file__).with_name("rewards_of_tests.py")
STEPS = 8


def write_questions(folder: Path, *, answer: str) -> Path:
    """Write `train.jsonl` to the new `folder`: 40 sums as turns; column `answer` has the answers, turns or text."""
    folder.mkdir()
    rows = []
    for n in range(40):
        said = str(n + n % 7)
        turn = [{"role": "assistant", "content": said}]
        prompt = [{"role": "user", "content": f"What is {n} plus {n % 7}?"}]
        rows.append({"prompt": prompt, answer: said if answer == "answer" else turn})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(script: Path, data: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    words = [
        *("--model_name_or_path", default_model_path(), "--dataset_name", str(data)),
        *("--max_steps", str(STEPS), "--per_device_train_batch_size", "8", "--num_generations", "4"),
        *("--max_completion_length", "12", "--temperature", "2", "--learning_rate", "1e-4", "--seed", "7"),
        *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--logging_steps", "1"),
        *("--save_strategy", "steps", "--save_steps", str(STEPS), "--output_dir", str(folder), *flags),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REWARDS.parent)}
    environment["PYTHONPATH"] += f":{REPOSITORY}"
    command = [sys.executable, str(script), *words]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def logged(folder: Path, *names: str) -> list[float]:
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry[name] for entry in state["log_history"] if "loss" in entry for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", "rloo"])
@pytest.mark.parametrize(
    "adapters", [[], ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj", "--beta", "0.1"]]
)
def test_losses_and_rewards_are_those_of_trls_script(tmp_path: Path, adapters: list[str], recipe: str) -> None:
    """Generation agrees as well: with the same seed both draw the same tokens."""
    data = write_questions(tmp_path / "ours-data", answer="completion")
    dropout = ["--lora_dropout", "0"] if adapters else []
    wanted = ["--rewards", f"{REWARDS}:even_characters", "--precision", "fp32"]
    done = run(REPOSITORY / f"recipes/{recipe}.py", data, tmp_path / "ours", *wanted, *adapters, *dropout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    script = Path(trl.scripts.__file__).with_name(f"{recipe}.py")
    plain = ["--dtype", "float32", "--bf16", "false", "--use_cpu", "--report_to", "none"]
    plain += ["--reward_funcs", "rewards_of_tests.even_characters"]
    data = write_questions(tmp_path / "their-data", answer="answer")
    theirs = run(script, data, tmp_path / "theirs", *plain, *adapters, *dropout)
    assert theirs.returncode == 0, theirs.stderr[-3000:]
    ours = logged(tmp_path / "ours", "loss", "reward")
    assert len(ours) == 2 * STEPS
    assert ours == pytest.approx(logged(tmp_path / "theirs", "loss", "reward"), abs=1e-6)
    assert max(ours) - min(ours) > 0.1, "rewards differ"
    assert len(set(ours[::2])) > 2, "so do losses"
    summary = json.loads((tmp_path / "ours" / "run_summary.json").read_text())
    assert summary["recipe"] == f"{recipe}.py"
    assert summary["rewards"] == pytest.approx(ours[1::2])
    assert summary["tokens"] > 8 * STEPS * 10, "prompts and completions are counted"


@pytest.mark.slow
def test_rewards_that_never_differ_are_an_error(tmp_path: Path) -> None:
    data = write_questions(tmp_path / "data", answer="completion")
    done = run(
        REPOSITORY / "recipes/grpo.py", data, tmp_path / "out", "--rewards", "format=never", "--precision", "fp32"
    )
    assert done.returncode == 2
    assert "nothing was learnt" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_rewards_are_what_their_names_say() -> None:
    turn = [{"role": "assistant", "content": " 12. "}]
    assert exact_match([turn, "13", "twelve"], ["12", "12", "Twelve"]) == [1.0, 0.0, 1.0]
    said = ["so 3 + 4 = 7", "1,024 eggs", "none", "-2.50"]
    assert number(said, ["#### 7", "1024", "3", "-2.5"]) == [1.0, 1.0, 0.0, 1.0]
    assert number(["5"], ["no number"]) == [None]
    (form, own) = reward_functions([r"format=<think>.*</think>\d+", f"{REWARDS}:even_characters"], weights=[1.0, 0.5])
    assert form(completions=["<think>a\nb</think>7", "7"], answer=["", ""]) == [1.0, 0.0]
    assert own(completions=["bdfa"]) == [0.75]


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["exactmatch"], None, "exactmatch is no reward.*exact_match"),
        (["format=("], None, "not a regular expression"),
        (["nowhere.py:f"], None, "nowhere.py does not exist"),
        ([f"{REWARDS}:missing"], None, "no function missing"),
        (["no_such_module:f"], None, "cannot be imported.*no_such_module"),
        (["exact_match", "number"], [1.0], "2 rewards and 1 weights"),
        ([], None, "nothing is rewarded"),
    ],
)
def test_rewards_that_are_not_there_are_named(names: list[str], weights: list[float] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_functions(names, weights=weights)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--plan", "auto", "--steps_per_generation", "2"], "steps_per_generation"),
        (["--plan", "auto", "--generation_batch_size", "16"], "generation_batch_size"),
        (["--long_rows", "true"], "long_rows"),
        (["--auto_find_batch_size", "true"], "auto_find_batch_size"),
        (["--dataset_streaming", "true"], "dataset_streaming"),
        (["--log_completions", "true"], "log_completions"),
    ],
)
def test_what_is_not_done_where_the_model_generates_is_refused(flags: list[str], named: str) -> None:
    given = ["--model_name_or_path", "m", "--dataset_name", "d", *flags]
    with pytest.raises(ConfigError, match="remove") as refused:
        GRPO.refuse(parse_flags(GRPO.flags, given, program="grpo.py"))
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "place", "says"),
    [
        ("--vllm_mode server", "--vllm_mode", "add --use_vllm true"),
        ("--vllm_importance_sampling_mode token_mask", "--vllm_importance_sampling_mode", "add --use_vllm true"),
        ("--use_vllm --vllm_mode beside", "--vllm_mode", "beside is no mode. Fix: use colocate or server"),
        ("--use_vllm --vllm_server_host gpu7", "--vllm_server_host", "add --vllm_mode server"),
        ("--use_vllm --vllm_mode server --vllm_tensor_parallel_size 2", "--vllm_tensor_parallel_size", "`vllm serve`"),
        ("--use_vllm --vllm_mode server --vllm_server_base_url http://a:1 --vllm_server_port 2", "--vllm_server_port",
         "names host and port"),
        ("--use_vllm --cache_implementation static", "--cache_implementation", "and vLLM does"),
        ("--use_vllm --ds3_gather_for_generation false", "--ds3_gather_for_generation", "whole weights"),
        ("--use_vllm --vllm_gpu_memory_utilization 1.2", "--vllm_gpu_memory_utilization", "at most 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recipe", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_flags_of_vllm_that_would_be_ignored_are_refused(
    recipe: RecipeSpec, flags: str, place: str, says: str
) -> None:
    if "importance_sampling" in flags and recipe is RLOO:
        return  # only for GRPO
    given = ["--model_name_or_path", "m", "--dataset_name", "d", *flags.split()]
    with pytest.raises(ConfigError) as refused:
        recipe.refuse(parse_flags(recipe.flags, given, program=recipe.program))
    assert refused.value.place == place
    assert says in str(refused.value)


def test_every_flag_of_vllm_is_known_and_left_out_of_a_rehearsal() -> None:
    config = vars(GRPOConfig)["__dataclass_fields__"]
    assert {name for name in config if "vllm" in name} == set(VLLM_FLAGS)
    assert set(VLLM_FLAGS) <= set(GRPO.rehearsal.dropped)


def test_vllm_is_given_the_weights_of_each_step_and_what_ends_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but vLLM itself; transformers generates the answers in its place."""
    engines: list[EngineOfTests] = []

    class EngineOfTests:
        def __init__(self, model: PreTrainedModel, **options: object) -> None:
            self.model, self.options, self.loaded = model, options, list[float]()
            engines.append(self)

        def sync_weights(self) -> None:
            self.loaded.append(float(sum(weight.detach().double().abs().sum() for weight in self.model.parameters())))

        def generate(self, prompts: list[list[int]], num_generations: int, **unused: object) -> tuple[object, ...]:
            written = [[50 + n % 4, 51, 2] for n, _ in enumerate(prompts)]
            return prompts, written, [[[-1.0]] * 3 for _ in prompts], None

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", EngineOfTests)
    for module in (vllm_flags, recipe_rules):
        monkeypatch.setattr(module, "why_no_vllm", lambda **asked: None)
    data = write_questions(tmp_path / "data", answer="completion")
    flags = f"--model_name_or_path {default_model_path()} --dataset_name {data} --max_steps 3 --precision fp32"
    flags += " --logging_steps 1 --save_strategy no --learning_rate 1e-3 --temperature 2"
    flags += " --use_vllm --vllm_gpu_memory_utilization 0.4"
    flags += f" --vllm_importance_sampling_mode token_truncate --rewards {REWARDS}:even_characters"
    load_recipe("grpo").main([*flags.split(), "--output_dir", str(tmp_path / "out")])
    (engine,) = engines
    assert len(set(engine.loaded)) == 3, "other weights at each step"
    told = {name: engine.options[name] for name in ("mode", "gpu_memory_utilization", "temperature")}
    assert told == {"mode": "colocate", "gpu_memory_utilization": 0.4, "temperature": 2.0}
    assert engine.options["generation_kwargs"] == {"stop_token_ids": [2, 0]}, "<|im_end|>, and the model's own"
    summary = json.loads((tmp_path / "out" / "run_summary.json").read_text())
    assert len(summary["rewards"]) == 3


def test_prompts_and_answers_come_from_any_layout_but_plain_text(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    assert as_prompts(load_training_data(str(rows)), place="d").train[0] == {"prompt": turns[:1], "answer": "a"}
    rows.write_text('{"question": "q", "solution": "a"}\n')
    found = load_training_data(str(rows), columns=["prompt=question", "completion=solution"], chat=False)
    assert as_prompts(found, place="d").train[0] == {"prompt": "q", "answer": "a"}
    rows.write_text('{"text": "q"}\n')
    with pytest.raises(ConfigError, match="--dataset_name: rows of plain text have no prompt"):
        as_prompts(load_training_data(str(rows)), place="--dataset_name")


def test_a_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a model that answers already.*--model_name_or_path"):
        GRPO.refuse(parse_flags(GRPO.flags, [], program="grpo.py"))


@pytest.mark.parametrize(("beta", "loaded"), [("0.1", [{"revision": "v2", "use_cache": False}]), ("0", [])])
def test_the_reference_is_loaded_as_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beta: str, loaded: list[dict[str, object]]
) -> None:
    """TRL loads the reference by name; the revision and the options are passed along."""
    given: list[dict[str, object]] = []
    load = rloo_trainer.create_model_from_path

    def recorded(model_id: str, **options: object) -> object:
        given.append({name: options[name] for name in ("revision", "use_cache") if name in options})
        return load(model_id, **options)

    monkeypatch.setattr(rloo_trainer, "create_model_from_path", recorded)
    data = write_questions(tmp_path / "data", answer="completion")
    flags = f"--model_name_or_path {default_model_path()} --model_revision v2 --dataset_name {data} --max_steps 1"
    flags += f" --precision fp32 --save_strategy no --max_completion_length 4 --beta {beta}"
    options = ["--model_init_kwargs", '{"use_cache": false}', "--output_dir", str(tmp_path / "out")]
    load_recipe("rloo").main([*flags.split(), *options])
    assert given == loaded


def test_answers_end_where_turns_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if neither tokenizer nor model says so, as with base models that have a chat template."""
    model, ends = tmp_path / "model", list[list[int]]()
    shutil.copytree(default_model_path(), model)
    changed = (("tokenizer_config", "eos_token", "<|endoftext|>"), ("generation_config", "eos_token_id", 0))
    for name, key, token in changed:
        values = json.loads((model / f"{name}.json").read_text())
        (model / f"{name}.json").write_text(json.dumps({**values, key: token}))

    def generate(trainer: GRPOTrainer, prompt_ids: list[list[int]], *unused: object) -> tuple[list[list[int]], None]:
        ends.append(trainer.eos_token_ids)
        return [[50 + n % 4, 0] for n, _ in enumerate(prompt_ids)], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    data = write_questions(tmp_path / "data", answer="completion")
    flags = f"--model_name_or_path {model} --dataset_name {data} --max_steps 1 --precision fp32 --save_strategy no"
    load_recipe("grpo").main([*flags.split(), "--output_dir", str(tmp_path / "out")])
    assert sorted(ends[0]) == [0, 2], "<|endoftext|> and <|im_end|>"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_little_tuned_model_is_taught_by_rewards_alone(tmp_path: Path) -> None:
    """`make grpo`: exact match on held-out questions rises by 20 points or more."""
    recipes = [sys.executable, str(REPOSITORY / "recipes/sft.py"), "--max_steps", "15"]
    subprocess.run([*recipes, "--output_dir", str(tmp_path / "tuned")], cwd=REPOSITORY, check=True)
    recipes = [sys.executable, str(REPOSITORY / "recipes/grpo.py"), "--model_name_or_path", str(tmp_path / "tuned")]
    subprocess.run([*recipes, "--output_dir", str(tmp_path / "out")], cwd=REPOSITORY, check=True)
    found = json.loads((tmp_path / "out" / "run_summary.json").read_text())["exact_match"]
    assert found["after"]["accuracy"] - found["before"]["accuracy"] >= 0.2
