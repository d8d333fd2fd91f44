"""Where `run` and `search` have their trainings done: options `--on` and those that go with it."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_freeze.lab.runs.on_ray import RayOptions

On = Annotated[str, typer.Option(help="local; ray; or slurm, which prints a script of job arrays and runs nothing.")]
Sbatch = Annotated[str, typer.Option(help="With --on slurm: options of sbatch, such as '--gres=gpu:1'.")]
Address = Annotated[
    str | None,
    typer.Option(help="With --on ray: HOST:PORT or auto. If not given, RAY_ADDRESS, else a Ray on this machine alone."),
]
Cpus = Annotated[float | None, typer.Option(help="With --on ray: CPUs, and so threads, of each run; 1 if not given.")]
Gpus = Annotated[
    float | None,
    typer.Option(help="With --on ray: GPUs of each run, 0 to 1, such as 0.5. If not given, 1 where there are GPUs."),
]
Retries = Annotated[int | None, typer.Option(help="With --on ray: retries after a node is lost; 3 if not given.")]

_PLACES = ("local", "ray", "slurm")


def ray_options(on: str, sbatch: str, **settings: float | str | None) -> "RayOptions | None":
    """Those that are given, None for another place. Raises ValueError where options and place do not fit."""
    given = _given(settings)
    if on not in _PLACES:
        raise ValueError(f"--on {on!r}: choose from {list(_PLACES)}")
    if sbatch and on != "slurm":
        raise ValueError(f"--sbatch {sbatch!r} needs --on slurm, not --on {on}")
    if given and on != "ray":
        name, value = next(iter(given.items()))
        raise ValueError(f"--{name} {value} needs --on ray, not --on {on}")
    if on != "ray":
        return None
    from hf_freeze.lab.runs.on_ray import RayOptions

    return RayOptions(**given)


def words_of(
    settings: list[str], seeds: int | None, smoke: bool, jobs: int, on: str, ray_settings: dict[str, Any]
) -> list[str]:
    """The words for the report. Folders of data and addresses of nodes are left out: they are private, and change no result."""
    words = [f"--set {shlex.quote(setting)}" for setting in settings if not setting.startswith("data.root=")]
    words += [f"--seeds {seeds}"] * bool(seeds) + ["--smoke"] * smoke + [f"--jobs {jobs}"] * (jobs > 1)
    given = _given(ray_settings | {"address": None})
    return [*words, *(["--on ray", *(f"--{name} {value}" for name, value in given.items())] if on == "ray" else [])]


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
