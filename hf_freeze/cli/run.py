"""`hf-freeze run`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_freeze.cli import options, terminal
from hf_freeze.cli.report import report

if TYPE_CHECKING:
    from hf_freeze.experiments.runs.on_ray import RayOptions

_PLACES = ("local", "ray", "slurm")


def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file, or a name that `hf-freeze recipes` lists.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; runs/NAME if not given.")] = None,
    settings: options.Settings = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run seeds 1 to N instead of the recipe's seeds.")] = None,
    smoke: options.Smoke = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, each in its own process.")] = 1,
    report_to: options.ReportTo = None,
    resume_anyway: options.ResumeAnyway = False,
    on: Annotated[
        str, typer.Option(help="local; ray; or slurm, which prints a script of job arrays and runs nothing.")
    ] = "local",
    sbatch: Annotated[str, typer.Option(help="With --on slurm: options of sbatch, such as '--gres=gpu:1'.")] = "",
    address: Annotated[
        str | None,
        typer.Option(
            help="With --on ray: HOST:PORT or auto. If not given, RAY_ADDRESS, else a Ray on this machine alone."
        ),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(help="With --on ray: CPUs, and so threads, of each run; 1 if not given.")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(
            help="With --on ray: GPUs of each run, 0 to 1, such as 0.5. If not given, 1 where there are GPUs."
        ),
    ] = None,
    retries: Annotated[
        int | None, typer.Option(help="With --on ray: retries after a node is lost; 3 if not given.")
    ] = None,
) -> None:
    """Run a grid: every row and seed of a recipe. Finished runs are skipped, interrupted runs resume.

    Example: hf-freeze run freeze_ablation/multi30k --set data.root=data/multi30k --seeds 3

    Example: hf-freeze run freeze_ablation --report-to tensorboard; tensorboard --logdir runs/freeze-ablation

    Example: hf-freeze run freeze_ablation --on slurm --sbatch "--gres=gpu:1 --time=4:00:00" > jobs.sh

    Example: hf-freeze run freeze_ablation --on ray --address auto --gpus 0.5 --out /shared/runs
    """
    from hf_freeze.experiments.recipes.load import load_recipe
    from hf_freeze.experiments.runs.grid import FailedRuns, run_grid
    from hf_freeze.experiments.runs.launcher import is_first_process, is_launched, leave_processes

    settings = settings or []
    ray_settings = {"address": address, "cpus": cpus, "gpus": gpus, "retries": retries}
    ray_settings = {name: value for name, value in ray_settings.items() if value is not None}
    with terminal.one_line_errors():
        with_seeds = [*settings, f"seeds={list(range(1, seeds + 1))}"] if seeds else settings
        all_settings = [*with_seeds, f"report_to={report_to}"] if report_to else with_seeds
        loaded = load_recipe(recipe, all_settings, smoke=smoke)
        folder = out or Path("runs") / (loaded["name"] + ("-smoke" if smoke else ""))
        _check_place(on, sbatch, ray_settings)
        if on == "slurm":
            _print_job_script(recipe, loaded, all_settings, folder, sbatch, smoke=smoke, resume_anyway=resume_anyway)
            return
        ray = _ray_options(ray_settings) if on == "ray" else None
        command = _command(recipe, settings, seeds, smoke, jobs, on, ray_settings)
        if is_first_process():
            terminal.say(f"{options.title_of(loaded)}, runs in {folder}")
        failed: Exception | None = None
        try:
            run_grid(
                *(loaded, folder),
                jobs=jobs,
                console=terminal.console,
                command=command,
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


def _check_place(on: str, sbatch: str, ray_settings: dict[str, Any]) -> None:
    if on not in _PLACES:
        raise ValueError(f"--on {on!r}: choose from {list(_PLACES)}")
    if sbatch and on != "slurm":
        raise ValueError(f"--sbatch {sbatch!r} needs --on slurm, not --on {on}")
    if ray_settings and on != "ray":
        name, value = next(iter(ray_settings.items()))
        raise ValueError(f"--{name} {value} needs --on ray, not --on {on}")


def _ray_options(ray_settings: dict[str, Any]) -> "RayOptions":
    from hf_freeze.experiments.runs.on_ray import RayOptions

    return RayOptions(**ray_settings)


def _print_job_script(
    recipe: Path,
    loaded: dict[str, Any],
    settings: list[str],
    folder: Path,
    sbatch: str,
    *,
    smoke: bool,
    resume_anyway: bool,
) -> None:
    from hf_freeze.experiments.runs.slurm import job_script

    words = ["hf-freeze", "run", str(recipe), *(word for setting in settings for word in ("--set", setting))]
    words += ["--smoke"] * smoke + ["--resume-anyway"] * resume_anyway + ["--out", str(folder)]
    typer.echo(job_script(loaded, words, folder, sbatch), nl=False)


def _command(
    recipe: Path,
    settings: list[str],
    seeds: int | None,
    smoke: bool,
    jobs: int,
    on: str,
    ray_settings: dict[str, Any],
) -> str:
    """The command for the report. Folders of data and addresses of nodes are left out: they are private, and change no result."""
    options = [f"--set {shlex.quote(setting)}" for setting in settings if not setting.startswith("data.root=")]
    options += [f"--seeds {seeds}"] * bool(seeds) + ["--smoke"] * smoke + [f"--jobs {jobs}"] * (jobs > 1)
    if on == "ray":
        options += ["--on ray", *(f"--{name} {value}" for name, value in ray_settings.items() if name != "address")]
    return " ".join(["hf-freeze run", str(recipe), *options])
