"""A grid or a search as job arrays of Slurm (https://slurm.schedmd.com/job_array.html): a script to look at, and to run where
`sbatch` is."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.recipe import Recipe

_ARRAY = """\
# {what}
job=$(sbatch --parsable {depends}--array=0-{last} --job-name={name} --output={log} --requeue --open-mode=append {options} <<'JOB'
#!/bin/bash
{body}
JOB
)
"""
_ONE_RUN = """\
rows=({rows})
seeds=({seeds})
row=${{rows[$SLURM_ARRAY_TASK_ID]}} seed=${{seeds[$SLURM_ARRAY_TASK_ID]}}
exec {command} --set "only=['$row']" --set "seeds=[$seed]\""""


def job_script(recipe: Recipe, command: Sequence[str], out: Path, options: str = "") -> str:
    """Bash that submits one array of jobs for the runs of `recipe` that start from none, then one for those that start from
    these, and so on; at last a job that gathers and reports. `command`: the words of the `hf-freeze run` of the whole grid,
    into `out`, which all machines see; `options`: of `sbatch`, such as --gres=gpu:1. A requeued job goes on where it was."""
    waves: dict[Path, int] = {}
    runs = expand(recipe)
    for run in runs:
        waves[run.folder(out)] = 1 + max((waves.get(folder, -1) for folder in run.needed_folders(out)), default=-1)
    text = _head(f"{len(runs)} runs of {recipe.name}", out)
    name, log = _name_and_log(recipe, out)
    for wave in range(max(waves.values()) + 1):
        chosen = [run for run in runs if waves[run.folder(out)] == wave]
        text.append(
            _ARRAY.format(
                what=f"wave {wave + 1}: {len(chosen)} runs",
                depends="--dependency=afterok:$job " if wave else "",
                last=len(chosen) - 1,
                name=name,
                log=log,
                options=options,
                body=_ONE_RUN.format(
                    rows=" ".join(run.row for run in chosen),
                    seeds=" ".join(str(run.seed) for run in chosen),
                    command=shlex.join(command),
                ),
            )
        )
    # All are finished then, so that this one trains nothing.
    text.append(_last_job("afterok", name, log, options, command))
    return "\n".join(text) + "\n"


def workers_script(recipe: Recipe, command: Sequence[str], out: Path, workers: int, options: str = "") -> str:
    """Bash that submits an array of `workers` jobs, which share the search of `recipe` in `out`. When all have ended or
    failed, a last job trains what they left and scores the front. `command`: the words of `hf-freeze search`, the same for all;
    `out`, `options`: as for `job_script`."""
    text = _head(f"{workers} workers of the search {recipe.name}", out)
    name, log = _name_and_log(recipe, out)
    array = _ARRAY.format(
        what="each draws, trains and tells trials until there are enough",
        depends="",
        last=workers - 1,
        name=name,
        log=log,
        options=options,
        body=f"exec {shlex.join(command)}",
    )
    text += [array, _last_job("afterany", name, log, options, command)]
    return "\n".join(text) + "\n"


def _head(what: str, out: Path) -> list[str]:
    return [
        "#!/bin/bash",
        f"# {what} into {out}: bash this file where sbatch is",
        "set -euo pipefail",
        f"mkdir -p {shlex.quote(str(out))}",
        "",
    ]


def _name_and_log(recipe: Recipe, out: Path) -> tuple[str, str]:
    return shlex.quote(recipe.name), shlex.quote(str(out / "slurm-%A_%a.log"))


def _last_job(after: str, name: str, log: str, options: str, command: Sequence[str]) -> str:
    words = f"--dependency={after}:$job --job-name={name} --output={log} {options}".rstrip()
    return f"sbatch {words} --wrap {shlex.quote(shlex.join(command))}"
