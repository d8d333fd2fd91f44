"""python -m support.children.killed FOLDER SEED WORK=KILLS ...: do each work again and again.

Each time it runs in a forked process (imports would be most of the time of a new one) that SIGKILL ends at a random moment, and
what is left is looked at. Prints a JSON object of what was seen."""

import gc
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import datasets
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.runs.execute import execute
from support.cases import ALL
from support.recipes import EACH, LONGER, SCHEDULED, figures, write_recipe
from support.reports import make_runs


def lives(work, seconds=None):
    """Whether `work()` came to its end, in a process that is killed after so many seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + (seconds or 300)
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise SystemExit("the work failed")
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if seconds is None:
        raise SystemExit("the work does not end")
    return False


def timed(work):
    began = time.monotonic()
    lives(work)
    return time.monotonic() - began


def training(folder, kills, draw):
    """Runs of every task, each killed until it ends: their figures and weights are those of an undisturbed one.

    By default without the first task, of which a whole grid is killed."""
    tasks = list(EACH)[not ALL :]
    of_tasks = [
        training_of(task, folder / task, kills // len(tasks), draw, late=number % 2 == 0)
        for number, task in enumerate(tasks)
    ]
    return {name: sum(counts[name] for counts in of_tasks) for name in of_tasks[0]}


def training_of(task, folder, kills, draw, late):
    """`late`: the first kill is in the second half, where there is a checkpoint to go on from; every other one is as late."""
    folder.mkdir()
    recipe = write_recipe(folder / "r.yaml", only=["2.1"], **EACH[task], **LONGER, **SCHEDULED)
    (run,) = expand(load_recipe(recipe))

    def result(at):
        record = json.loads((at / "metrics.json").read_text())
        return figures(record), {name: value.tolist() for name, value in weights(at / "model").items()}

    whole = folder / "whole"
    seconds = timed(lambda: execute(run, whole))
    killed = resumed = equal = runs = 0
    while killed < kills:
        at, runs = folder / f"run-{runs}", runs + 1
        began = time.monotonic()
        while True:
            moment = seconds * draw.uniform(0.5 * ((killed % 2 == 0) == late), 1)
            if lives(lambda at=at: execute(run, at), moment if killed < kills else None):
                # The first run may have taken twice as long as the later ones: then they would all end before they are killed.
                seconds = min(seconds, time.monotonic() - began)
                break
            killed += 1
            if (at / "metrics.json").exists():  # written last: what it stands for is there
                assert result(at) == result(whole)
        resumed += json.loads((at / "metrics.json").read_text())["resumed"]
        equal += result(at) == result(whole)
    return {"kills": killed, "runs": runs, "resumed": resumed, "equal": equal}


def saving(folder, kills, draw):
    """Two variants of other random values in turns into one folder: it always holds one of them."""
    config = AutoConfig.for_model("gpt2", **ARCHITECTURES["gpt2"].tiny | {"n_embd": 64, "vocab_size": 4000})
    models = [make_variant(config, [methods.Freeze(ffn="random", seed=seed)], task="causal-lm") for seed in (1, 2)]
    expected = [model.state_dict() for model in models]

    def save():
        for model, shard in zip(itertools.cycle(models), itertools.cycle(("50GB", "50GB", "200KB", "200KB"))):
            model.save_pretrained(folder / "model", max_shard_size=shard)
            time.sleep(0.05)  # for some to find it finished

    models[0].save_pretrained(folder / "model")
    found = {"kills": kills, "whole": 0}
    while found["whole"] < kills:
        lives(save, draw.uniform(0, 0.4))
        state = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
        assert any(all(torch.equal(state[name], one[name]) for name in one) for one in expected), "a mixture was loaded"
        found["whole"] += 1
    return found


def reporting(folder, kills, draw):
    """What is there of a report is whole."""
    make_runs(folder / "runs")
    names = ("report.md", "report.html", "report.png")
    seconds = timed(lambda: write_report(folder / "runs", out=folder / "whole"))
    found = {"kills": kills, "there": 0, "missing": 0}
    for number in range(kills):
        out = folder / f"report-{number % 3}"  # fresh, and over an old one
        lives(lambda out=out: write_report(folder / "runs", out=out), draw.uniform(0.5, 1) * seconds)
        for name in names:
            if (out / name).exists():
                assert (out / name).read_bytes() == (folder / "whole" / name).read_bytes(), name
                found["there"] += 1
            else:
                found["missing"] += 1
    return found


def weights(folder):
    return load_file(folder / "model.safetensors")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    folder, seed, *words = sys.argv[1:]
    gc.freeze()  # what is imported stays: forks need not look through it for garbage, which would copy its pages
    seen, draw = {}, random.Random(int(seed))
    for word in words:
        work, _, kills = word.partition("=")
        of_work = Path(folder) / work
        of_work.mkdir()
        seen[work] = globals()[work](of_work, int(kills), draw)
    print(json.dumps(seen))
