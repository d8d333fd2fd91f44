"""What it is worth to fit the weights of a layer together after it is cut: each cut with and without, in one run.

    python benchmarks/calibration/fitted.py stories260k --model stories260k/hf --cuts "3/4 of the neurons" "4 of 5 layers"

Heads and neurons are allocated over layers. Models, texts, cuts and measures are those of run.py. One thread; for each choice of
texts both forms get the same ones. Columns: the whole model, the cut without the fit, and with it, each the mean over the choices
of texts; the difference of the two, its mean and range; CPU seconds of both.

The cut "3/4 of the channels" (HiddenPruning) is not fitted so: in its forms, linears that write the hidden states are refitted
one by one, or on what the states lack.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import measures
import peer_hf_freeze
import torch

from hf_freeze import make_variant, methods

CHANNELS = "3/4 of the channels"


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("task", choices=list(measures.TASKS))
    new.add_argument("--model", type=Path, nargs="+", required=True, help="a folder; of translators one for each seed")
    new.add_argument("--data", type=Path, default=Path(), help="folder of the captions, or of Multi30k")
    new.add_argument("--cuts", nargs="+", required=True, help=f"of run.py, or {CHANNELS!r}")
    new.add_argument("--texts", type=int, help="how many, where not as many as in run.py")
    new.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of the choice of texts")
    new.add_argument("--cache", type=Path, default=Path("runs/calibration/fitted"))
    return new


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    options.cache.mkdir(parents=True, exist_ok=True)
    scores: dict[str, list[tuple[float, float, float]]] = {cut: [] for cut in options.cuts}
    seconds: dict[str, list[tuple[float, float]]] = {cut: [] for cut in options.cuts}
    for number, seed in enumerate(options.seeds):
        folder = options.model[min(number, len(options.model) - 1)]
        cache = options.cache / f"{options.task}-{seed if len(options.model) > 1 else 'one'}"
        cache.mkdir(exist_ok=True)
        task = measures.TASKS[options.task](folder, options.data, "test", cache)

        def score(model: object, task: measures.Task = task) -> float:
            return float(measures.score_of(task.main)(task.measure(model)[task.main].sum(0)))

        texts, batches = task.calibration(seed, options.texts or measures.CALIBRATION_TEXTS[options.task])
        given = {"calibration": batches} if texts is None else {"calibration": texts, "tokenizer": task.tokenizer()}
        whole = score(task.whole)
        for cut in options.cuts:
            if cut == CHANNELS:
                chosen = [methods.HiddenPruning(width=task.whole.config.hidden_size * 3 // 4)]
            else:
                chosen = peer_hf_freeze.methods_of(measures.CUTS[options.task][cut], task.whole.config, allocated=True)
            found = []
            for fits in (False, True):
                left_out = "CalibrationPass._joins" if cut == CHANNELS else "descend"
                without = mock.patch(f"hf_freeze.model.calibrating.{left_out}", return_value=None)
                with nullcontext() if fits else without:
                    began = time.process_time()
                    variant = make_variant(task.whole, chosen, **given).eval()
                    spent = time.process_time() - began
                found.append((score(variant), spent))
            scores[cut].append((whole, found[0][0], found[1][0]))
            seconds[cut].append((found[0][1], found[1][1]))
            print(
                f"{options.task}, {cut}, seed {seed}: {task.main} {whole:.4f}, {found[0][0]:.4f}, {found[1][0]:.4f}",
                flush=True,
            )
    print("\n| cut | whole | not fitted | fitted | difference | CPU s |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for cut in options.cuts:
        means = [sum(column) / len(column) for column in zip(*scores[cut], strict=True)]
        changes = [fitted - plain for _, plain, fitted in scores[cut]]
        times = [sum(column) / len(column) for column in zip(*seconds[cut], strict=True)]
        change = f"{sum(changes) / len(changes):+.4f} ({min(changes):+.4f} to {max(changes):+.4f})"
        print(
            f"| {cut} | "
            + " | ".join(f"{mean:.4f}" for mean in means)
            + f" | {change} | {times[0]:.0f}, {times[1]:.0f} |"
        )


if __name__ == "__main__":
    main()
