"""Child of lab/test_crashes.py: `RECIPE FOLDER LIMIT ...` executes a run whose disk gets full, once for each limit.

After the first checkpoint no file may grow beyond LIMIT bytes. Each run is in FOLDER/LIMIT, in a fork of its own: a limit
cannot be taken back. Prints limit -> the last line of the error, as JSON.
"""

import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs import text_training
from hf_freeze.lab.runs.execute import execute


class Filler(text_training._ReportProgress):
    """Fills the disk when the second checkpoint is about to be written."""

    limit = 0
    saved = 0

    def on_save(self, args, state, control, **kwargs):
        self.saved += 1
        if self.saved == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))


def fill(run, folder: Path, limit: int) -> str:
    """The message of the error that ends the run, from a fork."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        Filler.limit = limit
        try:
            execute(run, run.folder(folder / str(limit)))
            message = "nothing was raised"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}".splitlines()[-1]
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as pipe:
        return pipe.read()


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    text_training._ReportProgress = Filler
    recipe, folder, *limits = sys.argv[1:]
    (run,) = expand(load_recipe(recipe))
    gc.freeze()  # what is imported stays: forks need not look through it for garbage, which would copy its pages
    print(json.dumps({limit: fill(run, Path(folder), int(limit)) for limit in limits}))
