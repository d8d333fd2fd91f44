"""Child of lab/test_crashes.py, one of a group: `RESULT ...` runs the grid FOLDER/TASK.yaml of each task in grids.json.

Writes what is wrong at the end to RESULT, in the same folder."""

import json
import sys
from pathlib import Path
from unittest import mock

from hf_freeze.cli import app
from hf_freeze.lab.runs import launcher
from support.processes import left_processes

if __name__ == "__main__":
    result = Path(sys.argv[1])
    with mock.patch.object(launcher, "leave_processes"):  # the group is left once, at the end
        for task in json.loads((result.parent / "grids.json").read_text()):
            command = ["run", str(result.parent / f"{task}.yaml"), "--out", str(result.parent / task)]
            app(command, standalone_mode=False)
    result.write_text(json.dumps(left_processes()))
