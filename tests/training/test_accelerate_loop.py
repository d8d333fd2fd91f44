"""A hand-written accelerate loop: accumulation over unequal batches is the step of one big batch, and what is frozen stays."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoConfig

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES

CELLS = [(a, task) for a in ARCHITECTURES.values() for task in a.tasks if "labels" in a.tiny_inputs(task)]


@pytest.mark.parametrize(("architecture", "task"), CELLS, ids=[f"{a.model_type}-{task}" for a, task in CELLS])
def test_accumulation_is_one_big_batch(architecture, task):
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny)
    batch = architecture.tiny_inputs(task)
    items = (batch["labels"] != -100).sum()
    AcceleratorState._reset_state()  # the precision of an earlier test of this process, such as bf16, would stay
    trained = []
    for parts in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        model = make_variant(config, [methods.Freeze(ffn="random")], task=task, seed=4).eval()  # no dropout
        before = {name: p.clone() for name, p in model.named_parameters()}
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(parts))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1))
        for part in parts:
            with accelerator.accumulate(model):
                rows = {name: values[part] for name, values in batch.items()}
                loss = model(**rows, num_items_in_batch=items).loss
                accelerator.backward(loss * len(parts))  # accelerate divides by the number of accumulated batches
                optimizer.step()
                optimizer.zero_grad()
        after = dict(accelerator.unwrap_model(model).named_parameters())
        for name, parameter in after.items():
            if not parameter.requires_grad:
                assert torch.equal(parameter, before[name]), name
        assert any(not torch.equal(parameter, before[name]) for name, parameter in after.items())
        trained.append(after)
    for name, parameter in trained[0].items():
        torch.testing.assert_close(trained[1][name], parameter, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
