"""`hf-freeze search`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box

from hf_freeze import terminal
from hf_freeze.lab.cli import options, places

if TYPE_CHECKING:
    from hf_freeze.lab.report.report import Report
    from hf_freeze.lab.search.search import Found

_SAMPLERS = ("tpe", "nsga2", "random")
_PLAIN: Any = {"box": box.SIMPLE_HEAD, "padding": 0}
# Models that are only tested have no epochs and no time of training: a narrow terminal leaves these columns out.
_FOR_WIDE_TERMINALS = ("chrF", "dev ppl", "best epoch", "epochs", "parameters", "train min")


def search(
    recipe: Annotated[Path, typer.Argument(help="A recipe with a space: a YAML file or a name, such as search.")],
    trials: Annotated[int, typer.Option(min=1, help="Trials to train; those that are refused do not count.")] = 30,
    out: Annotated[Path | None, typer.Option(help="Folder of the search; runs/NAME if not given.")] = None,
    settings: options.Settings = None,
    smoke: options.Smoke = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Trials at the same time, each in its own process; 1 if not given. --on ray: at most so many, else all that "
            "its nodes have room for. --on slurm: workers.",
        ),
    ] = None,
    sampler: Annotated[str, typer.Option(help="tpe; nsga2; or random, to compare with.")] = "tpe",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler; trainings have the recipe's first seed.")] = 0,
    report_to: options.ReportTo = None,
    resume_anyway: options.ResumeAnyway = False,
    on: places.On = "local",
    sbatch: places.Sbatch = "",
    address: places.Address = None,
    cpus: places.Cpus = None,
    gpus: places.Gpus = None,
    retries: places.Retries = None,
) -> None:
    """Search a recipe's space for the Pareto front of loss, size and multiply-adds, and test its models.

    The same command resumes a stopped search. Several processes may share a folder, on several machines if its file system
    passes locks on. The search uses the training and dev splits; the test split scores the front alone, at the end.

    Example: hf-freeze search search --trials 20 --jobs 2

    Example: hf-freeze search search --trials 20 --sampler random --out runs/search-random

    Example: hf-freeze search search --trials 20 --on ray --address auto --gpus 0.5 --out /shared/search

    Example: hf-freeze search search --trials 20 --on slurm --jobs 8 --sbatch "--gres=gpu:1" --out /shared/search > jobs.sh
    """
    from hf_freeze.install import how_to_install

    with terminal.one_line_errors():
        if sampler not in _SAMPLERS:
            raise ValueError(f"--sampler {sampler!r}: choose from {list(_SAMPLERS)}")
        ray_settings: dict[str, Any] = {"address": address, "cpus": cpus, "gpus": gpus, "retries": retries}
        ray = places.ray_options(on, sbatch, **ray_settings)
        try:
            import optuna  # noqa: F401
        except ImportError as error:
            raise ValueError(f"hf-freeze search needs the package optuna; {how_to_install('search')}") from error
        from hf_freeze.lab.recipes.load import load_recipe
        from hf_freeze.lab.search.front import score_front, summary, write_search_report
        from hf_freeze.lab.search.search import Search

        settings = settings or []
        tracked = [f"report_to={report_to}"] if report_to else []
        loaded = load_recipe(recipe, [*settings, *tracked], smoke=smoke)
        if loaded.space is None:
            raise ValueError(f"{recipe} has no 'space' to search; hf-freeze run is for its rows")
        folder = out or Path("runs") / (loaded.name + ("-smoke" if smoke else ""))
        words = [str(recipe), "--trials", str(trials), "--sampler", sampler, "--seed", str(seed)]
        if on == "slurm":
            words += [word for setting in [*settings, *tracked] for word in ("--set", setting)]
            words += ["--smoke"] * smoke + ["--resume-anyway"] * resume_anyway + ["--out", str(folder)]
            from hf_freeze.lab.runs.slurm import workers_script

            script = workers_script(loaded, ["hf-freeze", "search", *words], folder, jobs or 1, sbatch)
            typer.echo(script, nl=False)
            return
        folder.mkdir(parents=True, exist_ok=True)
        words += places.words_of(settings, None, smoke, jobs or 1, on, ray_settings)
        terminal.say(f"{loaded.title}, {sampler}, search in {folder}")
        one = Search(
            *(loaded, folder),
            sampler=sampler,
            seed=seed,
            jobs=jobs,
            console=terminal.console,
            command=" ".join(["hf-freeze search", *words]),
            resume_anyway=resume_anyway,
            ray=ray,
        )
        found = one.run(trials)
        terminal.say(summary(found, sampler))
        if found.busy:
            terminal.say(f"Other processes are at {', '.join(found.busy)}: run the command again for the front.")
            return
        if not found.front:
            raise ValueError("no trial was trained to its end within the bounds, so there is no front to test")
        _print_front(found)
        if not score_front(one, found):
            terminal.say("Another process is scoring the front and writes the report.")
            return
        reports = write_search_report(folder, found, sampler, terminal.say)
    terminal.say("\nThe front on the test split:")
    _print_scores(reports[0])
    terminal.say(f"Written: {', '.join(str(folder / f'report.{kind}') for kind in ('html', 'md', 'png'))}")


def _print_front(found: "Found") -> None:
    goals = ["dev_loss", *(goal for goal in found.goals if goal != "dev_loss")]
    headings = ["row", *(goal.replace("_", " ") for goal in goals)]
    rows = [
        (name, f"{point[0]:.3f}", *(f"{value:,.0f}" for value in point[1:]))
        for name, point in sorted(found.front.items(), key=lambda item: item[1])
    ]
    terminal.show_table(headings, rows, title="The front on the dev split", numbers=headings[1:], **_PLAIN)


def _print_scores(report: "Report") -> None:
    """The table of the report, but with the labels last: those of trials are long."""
    from hf_freeze.lab.report.table import table_cells
    from hf_freeze.lab.report.wording import legend

    headings, cells = table_cells(report)
    order = [column for column in range(len(headings)) if column != 1] + [1]
    headings, rows = [headings[column] for column in order], [[row[column] for column in order] for row in cells]
    terminal.show_table(headings, rows, numbers=headings[1:-1], optional=_FOR_WIDE_TERMINALS, **_PLAIN)
    terminal.say("\n".join(legend(report)))
