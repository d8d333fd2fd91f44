"""Child of contract/test_processes.py: one of two processes that train every method with the Trainer. Writes problems as JSON.

Each case is opened from the parent's files: opening must not make a constant trainable, or DDP stops at an unused parameter.
"""

import json
import sys
from pathlib import Path

import torch

from support.cases import once
from support.models import build, differences, is_scheduled, reload, snapshot
from support.processes import left_processes, ranks_disagree
from support.training import (
    BATCH_ROWS,
    changed_though_frozen,
    plain_update,
    sgd_step_of_trainer,
    training_rows,
    unreached_natively,
    without_noise,
)


def problems_of(case, folder, rank):
    rows = training_rows(case)
    with without_noise(case):
        expected = plain_update(build(case), rows)
    model, _ = reload(case, folder)
    torch.manual_seed(1000 + rank)
    before = snapshot(model)
    arguments = {"batch_size": 1, "accumulate": BATCH_ROWS // 2}
    for_a_while = is_scheduled(model) and bool(model.frozen_for_a_while() or model.skips)
    some_unused = for_a_while or bool(unreached_natively(case))  # some parameters have no gradient
    with without_noise(case):
        trainer = sgd_step_of_trainer(model, rows, folder, ddp_find_unused_parameters=some_unused, **arguments)
    assert trainer.args.world_size == 2, f"{trainer.args.world_size} process: nothing distributed was tested"
    after = {name: p.detach() for name, p in model.named_parameters()}
    return differences(after, expected, 1e-4) + changed_though_frozen(model, before) + ranks_disagree(after)


result, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(1000 + rank)
problems, trained = [], 0
for case in once(lambda case: case.has_loss):
    print(case.id, file=sys.stderr, flush=True)  # the last one named is the one that hung
    problems += [f"{case.id}: {problem}" for problem in problems_of(case, result.parent / case.id, rank)]
    trained += 1
problems += left_processes()
result.write_text(json.dumps({"trained": trained, "problems": problems}))
