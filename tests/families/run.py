"""`make families`: derive and prove every family of transformers, and hold every method that it offers to the contract.

    python tests/families/run.py docs [--only roberta,t5] [--jobs 2]

Writes families.json and families.md to the folder and, if that is docs, what failed and what was derived into the package, where
`hf-freeze describe` reads it. About an hour on two cores.
"""

# ruff: noqa: E402
import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # each job has its core; in new processes, other threads would round otherwise

from support import fork_server

fork_server.start()  # before hf_freeze is imported

from families.contract import problems_before_loading, problems_of_kinds, problems_of_loading
from transformers.utils import logging

from hf_freeze.architectures.families import FAILURES, describe_family, failures_file, families_page, model_types
from hf_freeze.cli.describe import KNOWN, derived
from hf_freeze.io import write_whole

LIMIT = 600  # seconds for one family
_loading = threading.Lock()  # one server of new processes serves all


def write_known() -> None:
    """Write what `hf-freeze describe TYPE` reads, of every family: minutes."""
    types = {}
    for name in model_types():
        with contextlib.suppress(Exception):  # its default config may not work at all, or nothing of it is understood
            types[name] = derived(name)
    lines = [f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in types.items()]
    text = f'{{"transformers": "{version("transformers")}", "types": {{\n' + ",\n".join(lines) + "\n}}\n"
    write_whole(KNOWN, text)


def examine(model_type: str) -> dict[str, Any]:
    """The description of a family, and what did not fulfil the contract; each family in a process of its own."""
    folder = Path(tempfile.mkdtemp())
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_build, args=(model_type, folder, sender))
    child.start()
    sender.close()
    try:
        family = receiver.recv() if receiver.poll(LIMIT) else _not_done(f"not done within {LIMIT} s")
    except EOFError:
        family = _not_done(f"its process ended with {child.exitcode}")
    child.kill()
    child.join()
    if family["understood"] and "" not in family["contract"]:
        with _loading:
            loading = problems_of_loading(folder)  # a folder is named by its method, and the cell if it has several
            family["contract"] = {name.partition("-")[0]: why for name, why in loading.items()} | family["contract"]
    shutil.rmtree(folder)
    return family


def _build(model_type: str, folder: Path, sender: Any) -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    family = describe_family(model_type)
    if family["understood"]:
        try:
            problems = problems_before_loading(model_type, folder)
            family["contract"] = problems_of_kinds(model_type, folder) | problems
        except Exception as error:
            family["contract"] = {"": (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:200]}
    sender.send(family)


def _not_done(why: str) -> dict[str, Any]:
    return {"understood": False, "reason": why}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=lambda names: names.split(","))
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.only or model_types()
    path = arguments.folder / "families.json"
    families: dict[str, Any] = json.loads(path.read_text()) if path.exists() and arguments.only else {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(examine, name): name for name in names}
        for number, future in enumerate(as_completed(futures), 1):
            name = futures[future]
            families[name] = future.result()
            print(
                f"{number}/{len(names)} {name}: {families[name].get('contract', families[name]['reason'])}", flush=True
            )
            ordered = {name: families[name] for name in model_types() if name in families}
            path.write_text(json.dumps(ordered, indent=1) + "\n")
    (arguments.folder / "families.md").write_text(families_page(ordered))
    if arguments.folder.resolve() == Path(__file__).resolve().parents[2] / "docs":
        FAILURES.write_text(failures_file(ordered))
        write_known()
