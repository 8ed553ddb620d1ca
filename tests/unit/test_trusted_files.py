"""Files and signals of a run: what is read from a checkpoint, what a final folder says, and who stops whom."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from safetensors.torch import save_file

from accel_scale.errors import ConfigError
from accel_scale.training.checkpoints import signals as stop_signals
from accel_scale.training.checkpoints.atomic import checkpoint_problems
from accel_scale.training.checkpoints.pickles import load_safely, refuse_unsafe, refuse_unsafe_folder
from accel_scale.training.checkpoints.signals import STOP_SIGNALS, StopSignals
from accel_scale.training.checkpoints.strategies import check_fit, refuse_other_savers
from accel_scale.training.saving.final_model import correct_config, make_base_resolvable


class Custom:
    """An object that only an unrestricted unpickler reads."""


def test_folders_that_torch_writes_are_read_and_what_could_run_code_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    states = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16), "step": 7}
    dist_cp.save(states, checkpoint_id=folder / "shards", no_dist=True)
    torch.save({"a": torch.ones(2)}, folder / "optimizer.bin")
    torch.save(Custom(), folder / "training_args.bin")  # never loaded
    (folder / "notes.txt").write_bytes(pickle.dumps(Custom()))
    refuse_unsafe_folder(folder)
    assert load_safely(folder / "optimizer.bin")["a"].tolist() == [1, 1]
    start = pickle.dumps([0], protocol=2)[:2]
    for place, name in (("torch", "float32"), ("torch.nn", "float32"), ("builtins", "eval"), ("torch", "load"),
                        ("torch.distributed.checkpoint.metadata", "field"),
                        ("torch.distributed.checkpoint.metadata", "Any")):  # fmt: skip
        (folder / "shards" / ".metadata").write_bytes(start + f"c{place}\n{name}\n.".encode())
        if (place, name) == ("torch", "float32"):
            refuse_unsafe_folder(folder)
            continue
        with pytest.raises(ConfigError, match=rf"shards/\.metadata holds {place}\.{name}, which"):
            refuse_unsafe_folder(folder)
    (folder / "shards" / ".metadata").unlink()
    for file in ("deep.pt", "other.bin"):
        torch.save(Custom(), folder / "shards" / file)
        with pytest.raises(ConfigError, match=rf"{file} holds .*Custom, which only"):
            refuse_unsafe_folder(folder)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(folder / "shards" / file)
        refuse_unsafe(folder / "shards" / file, allowed=set(names))
        (folder / "shards" / file).unlink()


def test_signals_are_remembered_in_their_order_and_handlers_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # A run that another test left unfinished in this process would keep protecting its workers.
    monkeypatch.setattr(stop_signals, "_num_installed", 0)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signals = StopSignals()
    signals.restore()  # does nothing before an install
    assert stop_signals._num_installed == 0
    signals.install()
    signals.install()  # a second call changes nothing
    try:
        assert stop_signals._num_installed == 1
        assert signals.received == 0
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.received == signal.SIGUSR1
        child = os.fork()
        if child == 0:  # a worker survives signals that are sent to the whole group
            os._exit(int(signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        signals.restore()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    assert stop_signals._num_installed == 0
    child = os.fork()
    if child == 0:
        os._exit(int(signal.getsignal(signal.SIGUSR1) != before[signal.SIGUSR1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    elsewhere = StopSignals()
    thread = threading.Thread(target=elsewhere.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]


def test_structure_of_folders_of_other_programs(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-2.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    shards = [problem for problem in checkpoint_problems(tmp_path) if "model-" in problem]
    assert shards == []
    whole = (tmp_path / "model-2.safetensors").read_bytes()
    for content, said in (
        (whole[:-1], f"has {len(whole) - 1} bytes instead of {len(whole)}"), (whole + b"x", "instead of"),
        (whole[:4], "is cut off"), (whole[:20], "is cut off"), (whole[:8] + b"?" * (len(whole) - 8), "no readable"),
    ):  # fmt: skip
        (tmp_path / "model-2.safetensors").write_bytes(content)
        assert any(said in problem for problem in checkpoint_problems(tmp_path)), said
    (tmp_path / "model-2.safetensors").unlink()
    assert "model.safetensors.index.json names model-2.safetensors, which is missing" in checkpoint_problems(tmp_path)
    index.write_text("{")
    assert "model.safetensors.index.json is not valid JSON" in checkpoint_problems(tmp_path)


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        ({"use_cache": False, "dtype": "float32"}, None, {"use_cache": True, "dtype": "float32"}),
        ({"use_cache": False}, torch.bfloat16, {"use_cache": True, "dtype": "bfloat16"}),
        ({"dtype": "float32"}, torch.float16, {"dtype": "float16"}),
        ({"use_cache": True, "kept": 1}, None, {"use_cache": True, "kept": 1}),
        ({"use_cache": None}, None, {"use_cache": None}),
    ],
)
def test_a_saved_configuration_is_that_of_the_model_that_will_be_loaded(
    config: dict[str, Any], dtype: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    correct_config(tmp_path, dtype)
    assert not list(tmp_path.iterdir()), "an adapter has none"
    (tmp_path / "config.json").write_text(json.dumps(config))
    correct_config(tmp_path, dtype)
    assert json.loads((tmp_path / "config.json").read_text()) == expected


def test_only_a_base_in_a_folder_that_is_there_is_named_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    names = {
        "base": str(tmp_path / "base"),
        "org/model": "org/model",
        "": "",
        "./base/../base": str(tmp_path / "base"),
    }
    names |= {str(tmp_path / "link" / ".." / "base"): str(tmp_path / "link" / ".." / "base")}
    configs = {name: SimpleNamespace(base_model_name_or_path=name) for name in names}
    configs["none"] = SimpleNamespace(base_model_name_or_path=None)
    model = torch.nn.Linear(1, 1)
    make_base_resolvable(model)
    model.peft_config = configs  # type: ignore[assignment]
    make_base_resolvable(model)
    assert configs.pop("none").base_model_name_or_path is None
    assert {name: config.base_model_name_or_path for name, config in configs.items()} == names


def test_what_this_run_could_load_only_in_part_is_refused() -> None:
    found: Any = SimpleNamespace(manifest=SimpleNamespace(strategy="ddp"), folder=Path("checkpoint-3"))
    strategy: Any = SimpleNamespace(name="fsdp2", loads_checkpoints_of=lambda name: name == "ddp")
    check_fit(found, strategy, {"a"}, {"a"})
    with pytest.raises(ConfigError, match="checkpoint-3 and this run differ in what is registered: b, c"):
        check_fit(found, strategy, {"a", "b"}, {"a", "c"})
    found.manifest.strategy = "zero3"
    with pytest.raises(ConfigError, match="checkpoint-3 was written under zero3, this run is fsdp2"):
        check_fit(found, strategy, {"a"}, {"a"})
    names = ("_custom_objects", "_save_model_state_pre_hook", "_load_model_state_pre_hook")
    refuse_other_savers(SimpleNamespace(**dict.fromkeys(names, ())))
    for name in names:
        with pytest.raises(ConfigError, match="this manager"):
            refuse_other_savers(SimpleNamespace(**{**dict.fromkeys(names, ()), name: (1,)}))
