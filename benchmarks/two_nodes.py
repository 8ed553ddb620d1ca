"""Two nodes of which one dies and comes back: check that the run is bitwise equal to an undisturbed one.

    python benchmarks/two_nodes.py                         # writes benchmarks/results/two_nodes.md, about 15 minutes
    python benchmarks/two_nodes.py --strategies ddp --events worker

Each strategy trains a small model with recipes/pretrain.py in fp32 on two nodes of one CPU process each (two
`accelerate launch` agents connected over loopback, elastic rendezvous c10d): once undisturbed, then once per event.

- worker: the rank of the second node is killed (SIGKILL). Its agent restarts both ranks.
- node: agent and rank of the second node are killed together; its agent is restarted five seconds later.
- first node: the same for the node where agents meet. The other agent loses its store and ends too; both are
  restarted, as a Slurm step, a pod's restart policy or the SSH script would do.
- signal: SIGUSR1 to both agents, as before a time limit; both are restarted.

A disturbed run must log bitwise the same losses, gradient norms, learning rates and rows at every step as the
undisturbed one, and end with the same weights. Repeated steps are those between the last checkpoint and the kill.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "distributed"))

from node_pair import LAUNCH_FILES, TwoNodes, differences, make_inputs, two_nodes  # noqa: E402

EVENTS = ("worker", "node", "first node", "signal")
_BACK_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """Cost of one event.

    Attributes:
        killed_at: Last step logged before the event.
        resumed_from: Step of the checkpoint from which the run resumed.
        pause_seconds: Time from the event until a step after `killed_at` was logged; mostly imports.
    """

    strategy: str
    event: str
    killed_at: int
    resumed_from: int
    pause_seconds: float
    seconds: float
    differences: list[str]


def disturb(nodes: TwoNodes, event: str) -> int:
    """Trigger `event` and restart what an operator or scheduler would; returns the last step logged before."""
    if event == "signal":
        for agent in nodes.agents.values():
            agent.send_signal(signal.SIGUSR1)
        nodes.wait()
        last = nodes.last_step()
        nodes.start(0, 1)
        return last
    if event == "worker":
        nodes.kill_worker(1)
        return nodes.last_step()
    nodes.kill_node(1 if event == "node" else 0)
    last = nodes.last_step()
    if event == "node":
        time.sleep(_BACK_SECONDS)
        nodes.start(1)
    else:
        nodes.wait(1)  # its store is gone
        nodes.start(0, 1)
    return last


def run_event(nodes: TwoNodes, event: str, reference: Path, at: int) -> Outcome:
    """Run once with `event`."""
    started = time.perf_counter()
    nodes.start(0, 1)
    nodes.wait_for_step(at)
    moment = time.perf_counter()
    killed_at = disturb(nodes, event)
    nodes.wait_for_step(killed_at + 1)
    pause = time.perf_counter() - moment
    statuses = nodes.wait()
    found = differences(reference, nodes.out)
    if any(statuses):
        found.insert(0, f"agents ended with {statuses}")
    resumed = nodes.resumed_steps()
    if len(resumed) != 1:
        found.insert(0, f"resumed {len(resumed)} times")
    seconds = time.perf_counter() - started
    return Outcome(nodes.strategy, event, killed_at, (resumed or [0])[-1], pause, seconds, found)


def run_strategy(strategy: str, options: argparse.Namespace, root: Path) -> list[Outcome]:
    """Run undisturbed, then once with every event."""
    inputs = make_inputs(root / "inputs")
    outcomes = []
    settings = {"steps": options.steps, "save_steps": options.save_steps}
    with two_nodes(strategy, root / f"{strategy}_whole", inputs, **settings) as whole:
        started = time.perf_counter()
        whole.start(0, 1)
        if any(whole.wait()):
            raise SystemExit(f"{strategy}: the undisturbed run failed\n{whole.tail()}")
        print(f"{strategy}: undisturbed in {time.perf_counter() - started:.0f} s", flush=True)
    for event in options.events:
        with two_nodes(strategy, root / f"{strategy}_{event.replace(' ', '_')}", inputs, **settings) as nodes:
            outcome = run_event(nodes, event, whole.out, options.at)
        outcomes.append(outcome)
        print(row(outcome), flush=True)
    return outcomes


def row(outcome: Outcome) -> str:
    """One line of the table."""
    lost = max(0, outcome.killed_at - outcome.resumed_from)
    verdict = "the same, bit for bit" if not outcome.differences else f"DIFFER: {outcome.differences[0]}"
    return (
        f"| {outcome.strategy} | {outcome.event} | {outcome.killed_at} | {outcome.resumed_from} | {lost} | "
        f"{outcome.pause_seconds:.0f} s | {verdict} |"
    )


def table(outcomes: list[Outcome], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    import os

    from accel_scale.reporting.summary import _commit, installed_versions

    versions = installed_versions()
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "accelerate", "deepspeed") if name in versions)
    lines = [
        "# Two nodes, and one of them dies", "",
        f"`python benchmarks/two_nodes.py`, whose first lines say what each event is: {options.steps} steps of "
        f"recipes/pretrain.py, a checkpoint every {options.save_steps}, fp32, two agents of one process each on "
        f"{os.cpu_count()} CPU cores ({platform.machine()}), {named}, {datetime.date.today().isoformat()}, commit "
        f"{_commit()}.", "",
        "| strategy | event | at step | resumed from | steps taken again | until a new step | log, rows and weights |",
        "|---|---|---:|---:|---:|---:|---|",
        *(row(outcome) for outcome in outcomes), "",
        "Most of the time until a new step is the imports of two ranks that start again on the same cores; `node` has "
        f"{_BACK_SECONDS:.0f} s in it for which the node was away.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    """Entry point; status 1 if a run differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=list(LAUNCH_FILES), default=list(LAUNCH_FILES))
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=list(EVENTS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save_steps", type=int, default=12)
    parser.add_argument("--at", type=int, default=28, help="the event happens once this step is logged")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as folder:
        outcomes: list[Outcome] = []
        for strategy in options.strategies:
            outcomes += run_strategy(strategy, options, Path(folder))
            options.results.mkdir(parents=True, exist_ok=True)
            (options.results / "two_nodes.md").write_text(table(outcomes, options))
    print(table(outcomes, options))
    return int(any(outcome.differences for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
