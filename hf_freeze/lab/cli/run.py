"""`hf-freeze run`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_freeze import terminal
from hf_freeze.lab.cli import options, places
from hf_freeze.lab.cli.report import report


def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file, or a name that `hf-freeze recipes` lists.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; runs/NAME if not given.")] = None,
    settings: options.Settings = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run seeds 1 to N instead of the recipe's seeds.")] = None,
    smoke: options.Smoke = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, each in its own process.")] = 1,
    report_to: options.ReportTo = None,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of another grid: take its finished runs of the same settings, such as row 0. Repeatable."
        ),
    ] = None,
    resume_anyway: options.ResumeAnyway = False,
    on: places.On = "local",
    sbatch: places.Sbatch = "",
    address: places.Address = None,
    cpus: places.Cpus = None,
    gpus: places.Gpus = None,
    retries: places.Retries = None,
) -> None:
    """Run a grid: every row and seed of a recipe. Finished runs are skipped, interrupted runs resume.

    Example: hf-freeze run freeze_ablation/multi30k --set data.root=data/multi30k --seeds 3

    Example: hf-freeze run theseus/multi30k --set data.root=data/multi30k --reuse runs/freeze-ablation-multi30k

    Example: hf-freeze run freeze_ablation --report-to tensorboard; tensorboard --logdir runs/freeze-ablation

    Example: hf-freeze run freeze_ablation --on slurm --sbatch "--gres=gpu:1 --time=4:00:00" > jobs.sh

    Example: hf-freeze run freeze_ablation --on ray --address auto --gpus 0.5 --out /shared/runs
    """
    from hf_freeze.lab.recipes.load import load_recipe
    from hf_freeze.lab.runs.grid import FailedRuns, run_grid
    from hf_freeze.lab.runs.launcher import is_first_process, is_launched, leave_processes

    settings = settings or []
    ray_settings: dict[str, Any] = {"address": address, "cpus": cpus, "gpus": gpus, "retries": retries}
    with terminal.one_line_errors():
        with_seeds = [*settings, f"seeds={list(range(1, seeds + 1))}"] if seeds else settings
        all_settings = [*with_seeds, f"report_to={report_to}"] if report_to else with_seeds
        loaded = load_recipe(recipe, all_settings, smoke=smoke)
        folder = out or Path("runs") / (loaded.name + ("-smoke" if smoke else ""))
        ray = places.ray_options(on, sbatch, **ray_settings)
        reused = reuse or []
        if on == "slurm":
            from hf_freeze.lab.runs.slurm import job_script

            words = ["hf-freeze", "run", str(recipe), *(word for one in all_settings for word in ("--set", one))]
            words += [word for grid in reused for word in ("--reuse", str(grid))]
            words += ["--smoke"] * smoke + ["--resume-anyway"] * resume_anyway + ["--out", str(folder)]
            typer.echo(job_script(loaded, words, folder, sbatch), nl=False)
            return
        words = places.words_of(settings, seeds, smoke, jobs, on, ray_settings)
        if is_first_process():
            terminal.say(f"{loaded.title}, runs in {folder}")
        failed: Exception | None = None
        try:
            run_grid(
                *(loaded, folder),
                jobs=jobs,
                console=terminal.console,
                command=" ".join(["hf-freeze run", str(recipe), *words]),
                reuse=reused,
                resume_anyway=resume_anyway,
                ray=ray,
            )
        except FailedRuns as error:  # the finished runs are reported all the same
            failed = error
    if is_launched():
        leave_processes()
        if not is_first_process():
            return
    if failed is None or (folder / "results.jsonl").stat().st_size:
        report([folder])
    if failed is not None:
        with terminal.one_line_errors():
            raise failed
