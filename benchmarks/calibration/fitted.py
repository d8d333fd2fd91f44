"""Two forms of a cut side by side, in one run: what it is worth to fit the weights of a layer together, and the like.

    python benchmarks/calibration/fitted.py stories260k --model stories260k/hf --cuts "3/4 of the neurons" "4 of 5 layers"

The forms, in this order:

- of a cut of run.py, with heads and neurons allocated over layers: without and with the fit of all weights of a layer;
- "3/4 of the channels" (HiddenPruning): linears that write the hidden states refitted one by one, and on what the states lack;
- "1/2 of the weights", "3/4 of the weights" (of all heads and neurons): equal shares, each allocated over layers, and one budget
  (`share="auto"`).

Models, texts and measures are those of run.py. One thread; for each choice of texts both forms get the same ones. Columns: the
whole model and both forms, each the mean over the choices of texts; the difference of the forms, its mean and range; CPU seconds
of both.
"""

import argparse
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import measures
import peer_hf_freeze
import torch

from hf_freeze import make_variant, methods

CHANNELS = "3/4 of the channels"
BUDGETS = {"1/2 of the weights": 0.5, "3/4 of the weights": 0.75}

Form = tuple[list[Any], dict[str, Any], AbstractContextManager[Any]]  # methods, arguments, what it is made in


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("task", choices=list(measures.TASKS))
    new.add_argument("--model", type=Path, nargs="+", required=True, help="a folder; of translators one for each seed")
    new.add_argument("--data", type=Path, default=Path(), help="folder of the captions, or of Multi30k")
    new.add_argument("--cuts", nargs="+", required=True, help=f"of run.py, or {[CHANNELS, *BUDGETS]}")
    new.add_argument("--texts", type=int, help="how many, where not as many as in run.py")
    new.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of the choice of texts")
    new.add_argument("--cache", type=Path, default=Path("runs/calibration/fitted"))
    return new


def forms_of(cut: str, task: str, config: Any) -> list[Form]:
    if (budget := BUDGETS.get(cut)) is not None:
        equal = [methods.HeadPruning(share=budget, scope="global"), methods.FFNPruning(share=budget)]
        auto = [methods.HeadPruning(share="auto"), methods.FFNPruning(share="auto")]
        return [(equal, {}, nullcontext()), (auto, {"budget": budget}, nullcontext())]
    if cut == CHANNELS:
        chosen: list[Any] = [methods.HiddenPruning(width=config.hidden_size * 3 // 4)]
        left_out = "streams.Streams.joins"
    else:
        chosen = peer_hf_freeze.methods_of(measures.CUTS[task][cut], config, allocated=True)
        left_out = "fitting.descend"
    without = mock.patch(f"hf_freeze.model.{left_out}", return_value=None)
    return [(chosen, {}, without), (chosen, {}, nullcontext())]


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
            found = []
            for chosen, more, context in forms_of(cut, options.task, task.whole.config):
                with context:
                    began = time.process_time()
                    variant = make_variant(task.whole, chosen, **given, **more).eval()
                    spent = time.process_time() - began
                found.append((score(variant), spent))
            scores[cut].append((whole, found[0][0], found[1][0]))
            seconds[cut].append((found[0][1], found[1][1]))
            print(
                f"{options.task}, {cut}, seed {seed}: {task.main} {whole:.4f}, {found[0][0]:.4f}, {found[1][0]:.4f}",
                flush=True,
            )
    print(
        "\n| cut | whole | first form | second form | difference | CPU s |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for cut in options.cuts:
        means = [sum(column) / len(column) for column in zip(*scores[cut], strict=True)]
        changes = [second - first for _, first, second in scores[cut]]
        times = [sum(column) / len(column) for column in zip(*seconds[cut], strict=True)]
        change = f"{sum(changes) / len(changes):+.4f} ({min(changes):+.4f} to {max(changes):+.4f})"
        print(
            f"| {cut} | "
            + " | ".join(f"{mean:.4f}" for mean in means)
            + f" | {change} | {times[0]:.0f}, {times[1]:.0f} |"
        )


if __name__ == "__main__":
    main()
