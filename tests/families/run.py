"""`make families`: derive and prove every family of transformers, and hold every method that it offers to the contract.

    python tests/families/run.py docs [--only roberta,t5] [--jobs 2]

Writes families.json and families.md to the folder. About an hour on two cores.
"""

import argparse
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from families.contract import problems_of, tiny_config
from transformers.utils import logging

from hf_freeze.architectures.families import describe_family, families_page, model_types

LIMIT = 900  # seconds for one family


def examine(model_type: str) -> dict[str, Any]:
    """The description of a family, and what did not fulfil the contract."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(LIMIT)
    family = describe_family(model_type)
    folder = Path(tempfile.mkdtemp())
    try:
        if family["understood"]:
            tiny_config(model_type)
            family["contract"] = problems_of(model_type, folder)
    except BaseException as error:
        family["contract"] = {"": (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:200]}
    finally:
        signal.alarm(0)
        shutil.rmtree(folder)
    return family


def _too_late(*_: Any) -> None:
    raise TimeoutError(f"not done within {LIMIT} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=lambda names: names.split(","))
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.only or model_types()
    families: dict[str, Any] = {}
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, max_tasks_per_child=8) as pool:
        futures = {pool.submit(examine, name): name for name in names}
        for number, future in enumerate(as_completed(futures), 1):
            name = futures[future]
            families[name] = future.result()
            print(
                f"{number}/{len(names)} {name}: {families[name].get('contract', families[name]['reason'])}", flush=True
            )
            ordered = {name: families[name] for name in names if name in families}
            (arguments.folder / "families.json").write_text(json.dumps(ordered, indent=1) + "\n")
    (arguments.folder / "families.md").write_text(families_page(ordered))
