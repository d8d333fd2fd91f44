"""Child of training/test_schedules.py: one of two processes that train a model frozen in phases."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import TrainingArguments

from hf_freeze.methods import Freeze
from support.models import differences
from support.processes import left_processes, ranks_disagree
from support.schedules import STEPS, scheduled_model, trainer


def train(folder):
    model = scheduled_model()
    running = trainer(model, folder, accumulate=1, sgd=True, ddp_find_unused_parameters=True)
    assert running.args.world_size == 2, f"{running.args.world_size} process: nothing distributed was tested"
    running.train()
    assert running.state.global_step == STEPS
    after = {name: parameter.detach() for name, parameter in model.named_parameters()}
    problems = differences(after, load_file(folder / "expected.safetensors"), 1e-5) + ranks_disagree(after)
    refused = 0
    name = "model.decoder.layers.0.encoder_attn.k_proj.bias"
    message = rf"'{name}' is frozen for a while, but with 2 processes .* ddp_find_unused_parameters=True"
    checkpointing = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"
    for arguments in ({"ddp_find_unused_parameters": False}, {f"{checkpointing}_checkpointing": True}):
        with pytest.raises(ValueError, match=message):
            trainer(scheduled_model(), folder, accumulate=1, **arguments).train()
        refused += 1
    # Nothing is frozen for a while: nothing is to be refused.
    permanent = scheduled_model(phases=[Freeze(norm="frozen")])
    trainer(permanent, folder, max_steps=1, accumulate=1, ddp_find_unused_parameters=False).train()
    return problems, refused


if __name__ == "__main__":
    result = Path(sys.argv[1])
    problems, refused = train(result.parent)
    result.write_text(json.dumps({"problems": problems + left_processes(), "refused": refused}))
