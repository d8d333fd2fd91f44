"""A grid as job arrays of Slurm (https://slurm.schedmd.com/job_array.html): a script to look at, and to run where `sbatch` is."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_freeze.experiments.recipes.expand import expand
from hf_freeze.run_folder import run_folder, start_folder, teacher_folder

_ARRAY = """\
# {what}
job=$(sbatch --parsable {depends}--array=0-{last} --job-name={name} --output={log} --requeue --open-mode=append {options} <<'JOB'
#!/bin/bash
rows=({rows})
seeds=({seeds})
row=${{rows[$SLURM_ARRAY_TASK_ID]}} seed=${{seeds[$SLURM_ARRAY_TASK_ID]}}
exec {command} --set "only=['$row']" --set "seeds=[$seed]"
JOB
)
"""


def job_script(recipe: dict[str, Any], command: Sequence[str], out: Path, options: str = "") -> str:
    """Bash that submits one array of jobs for the runs of `recipe` that start from none, then one for those that start from
    these, and so on; at last a job that gathers and reports. `command`: the words of the `hf-freeze run` of the whole grid,
    into `out`, which all machines see; `options`: of `sbatch`, such as --gres=gpu:1. A requeued job goes on where it was."""
    waves: dict[Path, int] = {}
    runs = expand(recipe)
    for run in runs:
        origins = [folder for folder in (start_folder(out, run), teacher_folder(out, run)) if folder is not None]
        waves[run_folder(out, run)] = 1 + max((waves.get(folder, -1) for folder in origins), default=-1)
    text = [
        "#!/bin/bash",
        f"# {len(runs)} runs of {recipe['name']} into {out}: bash this file where sbatch is",
        "set -euo pipefail",
        f"mkdir -p {shlex.quote(str(out))}",
        "",
    ]
    name, log = shlex.quote(recipe["name"]), shlex.quote(str(out / "slurm-%A_%a.log"))
    for wave in range(max(waves.values()) + 1):
        chosen = [run for run in runs if waves[run_folder(out, run)] == wave]
        text.append(
            _ARRAY.format(
                what=f"wave {wave + 1}: {len(chosen)} runs",
                depends="--dependency=afterok:$job " if wave else "",
                last=len(chosen) - 1,
                name=name,
                log=log,
                options=options,
                rows=" ".join(run["row"] for run in chosen),
                seeds=" ".join(str(run["seed"]) for run in chosen),
                command=shlex.join(command),
            )
        )
    # All are finished then, so that this one trains nothing.
    gather = f"--dependency=afterok:$job --job-name={name} --output={log} {options}".rstrip()
    text.append(f"sbatch {gather} --wrap {shlex.quote(shlex.join(command))}")
    return "\n".join(text) + "\n"
