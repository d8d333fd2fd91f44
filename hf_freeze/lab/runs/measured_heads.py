"""Attention heads in a grid: what those of a finished run are worth to it, and runs that start without some of them."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_freeze import analysis, methods
from hf_freeze.analysis.head_importance import heads_of
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.io import write_whole
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.rows import Heads
from hf_freeze.lab.tasks.base import Outcome
from hf_freeze.lab.tasks.scoring import scoring_of
from hf_freeze.run_folder import HEAD_SCORES, HEAD_TESTS, read_head_scores


def measure(run: Run, folder: Path, trainer: Any, train: Any, test: Callable[[Path], Outcome]) -> None:
    """Write the `head_scores` of the trainer's model that `run` asks for into `folder`; a broken measurement goes on where it
    was. `test(folder)`: the outcome on the dev split.

    `importance`: `head_importance` on the encoded training split, `train`. `ablation`: what the score of the task loses on the
    dev split without each head; `one_head`: without all others of its attention. Both are tested for significance, except with
    several processes.
    """

    model = trainer.accelerator.unwrap_model(trainer.model)
    comparison = scoring_of(run.task, run.metric)
    metric = comparison.columns[comparison.quality][1][-1]
    unit = comparison.units.get(comparison.quality, 1) * (1 if comparison.higher else -1)

    def evaluate(_: Any) -> tuple[float, np.ndarray]:
        with tempfile.TemporaryDirectory() as scratch:
            outcome = test(Path(scratch))
        return unit * outcome.metrics[metric], outcome.items

    head_scores, head_tests = {}, {}
    for name in run.head_scores:
        if name == "importance":
            scores = analysis.head_importance(model, trainer.get_eval_dataloader(train))
        else:
            alone = trainer.args.world_size == 1  # processes that go on from different places would wait for each other
            path = folder / f"head_{name}.jsonl" if alone else None
            scores = analysis.head_ablation(model, evaluate=evaluate, keep_one=name == "one_head", path=path)
            if path is not None:
                tests = analysis.head_ablation_tests(path, comparison.score)
                head_tests[name] = {attention: [test.p_corrected for test in of] for attention, of in tests.items()}
        head_scores[name] = {attention: values.tolist() for attention, values in scores.items()}
    if trainer.is_world_process_zero():
        write_whole(folder / HEAD_SCORES, json.dumps(head_scores, indent=1) + "\n")
        write_whole(folder / HEAD_TESTS, json.dumps(head_tests, indent=1) + "\n")


def pruning(settings: Heads, start: Path, model: Any, seed: int) -> methods.HeadPruning:
    """What removes the heads that a row's `heads` asks for, by the scores of the run in `start`, or drawn from `seed`: the same
    order for all fractions, so that a larger one removes the heads of a smaller one and more.

    Raises ValueError for scores that were not measured there, attentions that the model has not, and fractions that are no
    head.
    """
    architecture = architecture_for(model)
    if settings.by == "random":
        draw = np.random.default_rng(seed)
        attentions = heads_of(model, architecture)
        scores = {name: torch.from_numpy(draw.random(heads.count)) for name, heads in attentions.items()}
    else:
        measured = read_head_scores(start)
        if settings.by not in measured:
            raise ValueError(
                f"heads.by={settings.by!r}: {start} has no such scores, only {sorted(measured)}; give its row "
                f"head_scores: [{settings.by}]"
            )
        scores = {name: torch.tensor(values) for name, values in measured[settings.by].items()}
    kinds = {name: ".".join(name.split(".")[::2]) for name in scores}  # encoder.0.self is of encoder.self
    for kind in settings.attentions or ():
        if kind not in kinds.values():
            raise ValueError(f"heads.attentions names {kind!r}; choose from {list(dict.fromkeys(kinds.values()))}")
    chosen = settings.attentions or kinds.values()
    scores = {name: values for name, values in scores.items() if kinds[name] in chosen}
    group = max(architecture.attentions(model.config)[name].removed_together(model.config) for name in scores)
    return analysis.select_heads(scores, fraction=settings.fraction, group_size=group)
