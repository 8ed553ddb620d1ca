"""Search a recipe's flags with Optuna; every trial is its own `accelerate launch`, and bad trials are ended early.

    python recipes/tune.py recipes/sft.py                 # embedded model and data: 12 short trials
    python recipes/tune.py recipes/sft.py --space space.yaml --num_trials 40 --output_dir outputs/tune \\
        --launch_file accelerate_configs/fsdp2.yaml -- --config_file my_run.yaml --max_steps 300

Flags after `--` go to the recipe itself and are the same in every trial. The space is YAML, one flag of the recipe per
line: `{low: 1e-5, high: 1e-3, log: true}`, a list of choices, or one fixed value. The same command again continues the
study. `--help` lists the flags; docs/tuning.md says what to search first, and when not to.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from accel_scale.ending.user_errors import user_errors
from accel_scale.errors import ConfigError
from accel_scale.quiet import quiet_imports

quiet_imports()  # before importing libraries that print at import

from accel_scale.flags.parsing import parse_flags  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import optuna

    from accel_scale.recipe_specs.finding import Recipe
    from accel_scale.tuning.recipe import FixedFlags
    from accel_scale.tuning.space import SearchSpace
    from accel_scale.tuning.trials import TrialSettings

    Handler = Callable[[int, FrameType | None], object] | int | None

PROGRAM = "tune.py"
T = TypeVar("T")


def _flag(default: T, text: str, *choices: str) -> T:
    return field(default=default, metadata={"help": text, **({"choices": list(choices)} if choices else {})})


@dataclass
class TuneArguments:
    """Flags of the search; the recipe's own come after ``--``."""

    space: str | None = _flag(None, "YAML file of what is searched. Default: configs/tune_NAME.yaml by the recipe.")
    num_trials: int = _flag(12, "Trials of the study, over all processes that share it.")
    output_dir: str = _flag("outputs/tune", "Holds trials/N, the study and the results.")
    launch_file: str | None = _flag(None, "Accelerate launch file of every trial. Default: as `accelerate launch`.")
    sampler: str = _flag("tpe", "Who proposes values; grid tries every combination.", "tpe", "random", "grid")
    pruner: str = _flag(
        "median",
        "Who ends trials early. median: worse than half of the earlier trials at the same step; halving: not among "
        "the best quarter at steps that grow fourfold.",
        "median",
        "halving",
        "none",
    )
    prune_after: int = _flag(0, "Nothing is pruned up to this step; the end of the warm-up is a good value.")
    metric: str = _flag("eval_loss", "What is optimised: a name in the trials' metrics.jsonl; its last value counts.")
    direction: str = _flag("minimize", "Whether less or more of it is better.", "minimize", "maximize")
    storage: str | None = _flag(
        None, "Optuna storage URL; several machines may share a study. Default: SQLite in --output_dir."
    )
    study_name: str | None = _flag(None, "Name of the study in its storage. Default: the recipe's name.")
    timeout: float | None = _flag(None, "Seconds after which no further trial begins.")
    trial_timeout: float | None = _flag(None, "Seconds after which a trial is ended and counts as failed.")
    keep_models: str = _flag("best", "Whose models stay on disk; logs and metrics always do.", "best", "all")
    seed: int = _flag(0, "Of the sampler.")


@dataclass
class Search:
    """Everything decided before the first trial."""

    args: TuneArguments
    recipe: Recipe
    space: SearchSpace
    fixed: FixedFlags
    settings: TrialSettings
    study: optuna.Study
    storage_url: str
    num_trials: int
    stop: Stop
    started: float

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return Path(self.args.output_dir)

    @property
    def flags(self) -> list[str]:
        """Names of the searched flags."""
        return list(self.space.dimensions)


def main(argv: Sequence[str] | None = None) -> int:
    """Run or continue the study; returns the exit status, 1 if no trial finished."""
    with Stop() as stop:
        search = resolve(*split(sys.argv[1:] if argv is None else argv), stop=stop)
        report_start(search)
        try:
            run(search)
        except KeyboardInterrupt:
            report_end(search)
            say("interrupted; the same command continues the study")
            return 128 + (stop.signal_number or signal.SIGINT)
    return report_end(search)


# ── Resolve ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def split(argv: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Split the command line into the recipe, the search's flags, and the recipe's flags after ``--``."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    own, fixed = list(argv[:cut]), list(argv[cut + 1 :])
    if own and not own[0].startswith("-"):
        return own[0], own[1:], fixed
    if {"-h", "--help"} & set(own):
        return "", ["--help"], []
    raise ConfigError(
        "the recipe to search comes first.", place="command line", fix="tune.py recipes/sft.py [flags] [-- its flags]."
    )


def resolve(script: str, own: list[str], rest: list[str], *, stop: Stop) -> Search:
    """Combine flags, space, launch file and study; refuse here whatever can be refused."""
    parsed = parse_flags((TuneArguments,), own, program=PROGRAM, description=__doc__)
    args = TuneArguments(**parsed.explicit)
    try:
        import optuna
    except ImportError:
        raise ConfigError("Optuna is not installed.", place=PROGRAM, fix="pip install 'accel-scale[tune]'") from None
    from accel_scale.flags.paths import as_list, named_inputs
    from accel_scale.launching.run_folder import OutputFolder
    from accel_scale.recipe_specs.finding import load_recipe
    from accel_scale.tuning import recipe as recipes
    from accel_scale.tuning import study as studies
    from accel_scale.tuning.launch import read_trial_launch_file
    from accel_scale.tuning.space import read_space
    from accel_scale.tuning.trials import TrialSettings, refuse_foreign_trials

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # Optuna would report every trial again in its own words
    launch_file = read_trial_launch_file(args.launch_file) if args.launch_file else None
    recipe = load_recipe(script)
    space = read_space(args.space or default_space(recipe.path), recipe)
    fixed = recipes.fixed_flags(recipe, rest, space.fixed, space.searched)
    check_metric(args.metric, recipe, fixed, space)
    sampler, limit = studies.make_sampler(args.sampler, space, args.seed)
    folder = Path(args.output_dir)
    inputs = named_inputs(lambda flag: as_list(fixed.values.get(flag)))
    OutputFolder(folder, PROGRAM, inputs, place=parsed.place("output_dir")).mark()
    storage_url = args.storage or f"sqlite:///{folder.resolve()}/study.db"
    trials = folder / "trials"
    names = {path.name for path in trials.iterdir()} if trials.is_dir() else set()
    study = studies.open_study(
        studies.open_storage(storage_url, say),
        name=args.study_name or recipe.stem,
        direction=args.direction,
        sampler=sampler,
        pruner=studies.make_pruner(args.pruner, prune_after=args.prune_after),
        definition={
            "recipe": recipe.program,
            "metric": args.metric,
            "space": space.describe(),
            "fixed": fixed.values,
        },
    )
    refuse_foreign_trials(names, {trial.number for trial in study.get_trials(deepcopy=False)}, trials)
    settings = TrialSettings(
        recipe=recipe,
        space=space,
        fixed=fixed.values,
        folder=trials,
        metric=args.metric,
        launch_file=launch_file,
        timeout_seconds=args.trial_timeout,
        interrupted=lambda: stop.asked,
        on_progress=show_progress,
    )
    return Search(
        args=args,
        recipe=recipe,
        space=space,
        fixed=fixed,
        settings=settings,
        study=study,
        storage_url=studies.masked(storage_url),
        num_trials=args.num_trials if limit is None else min(limit, args.num_trials),
        stop=stop,
        started=time.perf_counter(),
    )


def default_space(recipe: Path) -> Path:
    """The recipe's default search space, for its embedded model and data."""
    path = recipe.parent / "configs" / f"tune_{recipe.stem}.yaml"
    if not path.is_file():
        raise ConfigError(f"{recipe} has no space of its own.", place="command line", fix="add --space FILE.yaml.")
    return path


def check_metric(metric: str, recipe: Recipe, fixed: FixedFlags, space: SearchSpace) -> None:
    """Refuse a validation metric if no trial would validate."""
    if not metric.startswith("eval_") or not recipe.has("eval_strategy") or "eval_strategy" in space.dimensions:
        return
    if str(fixed.values.get("eval_strategy", recipe.default("eval_strategy"))) == "no":
        raise ConfigError(
            f"--metric {metric} is never measured: the trials do not validate.",
            place=fixed.origins.get("eval_strategy", "--metric"),
            fix="add `-- --eval_strategy steps --eval_steps N`, with several validations in a trial.",
        )


# ── Search ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Stop:
    """Handles Ctrl-C and SIGTERM: the first ends the launch and queues its trial again; the second ends at once."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, Handler] = {}

    @property
    def asked(self) -> bool:
        """True once a signal has asked the search to stop."""
        return self.signal_number is not None

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.signal_number = number


def run(search: Search) -> None:
    """Run the remaining trials."""
    from accel_scale.reporting.study_tables import trial_line
    from accel_scale.tuning import study as studies
    from accel_scale.tuning.results import best_trial, row
    from accel_scale.tuning.trials import remove_model

    def on_end(trial: optuna.trial.FrozenTrial) -> None:
        best = best_trial(search.study)
        star = " *" if best is not None and best.number == trial.number else ""
        say(trial_line(row(trial, search.space), search.flags, search.args.metric) + star)
        if search.args.keep_models == "best":
            for other in search.study.get_trials(deepcopy=False):
                if other.state.is_finished() and (best is None or other.number != best.number):
                    remove_model(search.settings.folder / str(other.number))

    studies.search(
        search.study,
        search.settings,
        num_trials=search.num_trials,
        timeout_seconds=search.args.timeout,
        on_end=on_end,
        say=say,
    )


def say(line: str) -> None:
    """Print one line, replacing the trial's progress line on a terminal."""
    print(f"\r\033[K{line}" if sys.stdout.isatty() else line, flush=True)


def show_progress(number: int, step: int, value: float) -> None:
    """Show how far the trial is, on a terminal."""
    if sys.stdout.isatty():
        print(f"\r\033[Ktrial {number}: step {step}, {value:.5g}", end="", flush=True)


# ── Report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def report_start(search: Search) -> None:
    """Print the table before the first trial."""
    from accel_scale.reporting.tables import print_table
    from accel_scale.tuning.results import outcome

    args = search.args
    there = [outcome(trial) for trial in search.study.get_trials(deepcopy=False)]
    counts = ", ".join(f"{there.count(name)} {name}" for name in sorted(set(there)))
    print_table(
        "tune",
        {
            "recipe": search.recipe.path,
            "space": search.space.path,
            **{f"  {flag}": space_text(described) for flag, described in search.space.describe().items()},
            "fixed": ", ".join(f"{name}={value}" for name, value in search.fixed.values.items()) or None,
            "launch file": args.launch_file,
            "trials": f"{search.num_trials}, by {args.sampler}, pruned by {args.pruner}",
            "goal": f"{args.direction} {args.metric}",
            "study": f"{search.study.study_name} in {search.storage_url}",
            "so far": counts or None,
        },
    )


def space_text(described: list[object] | dict[str, float]) -> str:
    """Format a list of choices or a range on one line."""
    if isinstance(described, list):
        return ", ".join(str(value) for value in described)
    text = f"{described['low']:g} to {described['high']:g}"
    text += ", logarithmic" if described.get("log") else ""
    return text + (f", in steps of {described['step']:g}" if "step" in described else "")


def report_end(search: Search) -> int:
    """Print the tables; write best.yaml, trials.csv, the plots and study_summary.json."""
    from accel_scale.reporting.study_tables import print_trials, short
    from accel_scale.reporting.summary import write_summary
    from accel_scale.reporting.tables import format_seconds, print_table
    from accel_scale.tuning import results

    args, study, space = search.args, search.study, search.space
    trials = study.get_trials(deepcopy=False)
    rows = [results.row(trial, space) for trial in trials]
    print_trials(rows, search.flags, args.metric, maximize=args.direction == "maximize")
    shares, best = results.importances(study), results.best_trial(study)
    files = [results.write_csv(search.folder, trials, space).name, *results.write_plots(search.folder, study)]
    seconds = time.perf_counter() - search.started
    document = {
        "recipe": str(search.recipe.path),
        "storage": search.storage_url,
        "metric": args.metric,
        "sampler": args.sampler,
        "pruner": args.pruner,
        "launch_file": args.launch_file,
        "seconds": seconds,
        **results.summary(study, space, search.fixed, shares),
    }
    files.append(write_summary(search.folder, document, name=results.SUMMARY_NAME).name)
    elsewhere = document["counts"].get("running", 0)
    if best is None:
        say(f"no trial reached its end: no {results.BEST_NAME}. Logs are in {search.settings.folder}/N/trial.log.")
        return 1
    path = results.write_best(search.folder, search.recipe, space, search.fixed, best, args.metric)
    launch = f"--config_file {args.launch_file} " if args.launch_file else ""
    complete = document["counts"]["complete"]
    print_table(
        "done",
        {
            "best": f"trial {best.number}, {args.metric} {best.value:.5g}",
            **{f"  {name}": short(value) for name, value in space.values_of(best.params).items()},
            f"importance ({complete} complete)": ", ".join(f"{n} {share:.0%}" for n, share in shares.items()) or None,
            "trials": ", ".join(f"{count} {name}" for name, count in document["counts"].items()),
            "time": format_seconds(seconds),
            "run it": f"accelerate launch {launch}{search.recipe.path} --config_file {path}",
            "saved": f"{search.folder} ({', '.join(files)})",
            "not final": f"{elsewhere} trials still run elsewhere; the same command reports again" * bool(elsewhere)
            or None,
        },
    )
    return 0


if __name__ == "__main__":
    with user_errors(PROGRAM):
        status = main()
    raise SystemExit(status)
