"""Child of experiments/test_crashes.py, started by torchrun: `FOLDER TASK ...` runs the grid FOLDER/TASK.yaml of each task."""

import sys
from pathlib import Path
from unittest import mock

from hf_freeze.cli import app
from hf_freeze.experiments.runs import launcher

if __name__ == "__main__":
    folder, *tasks = sys.argv[1:]
    with mock.patch.object(launcher, "leave_processes"):  # the group is left once, at the end
        for task in tasks:
            command = ["run", str(Path(folder) / f"{task}.yaml"), "--out", str(Path(folder) / task)]
            app(command, standalone_mode=False)
    launcher.leave_processes()
