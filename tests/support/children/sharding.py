"""Child of test_sharding.py: one of a group of processes that load variants in shards. Writes what is wrong, as JSON.

The first group (of two) trains and saves a distributed checkpoint; the later ones, of other sizes, resume from it.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from hf_freeze.experiments.runs.launcher import leave_processes
from hf_freeze.model.loading import load_model
from hf_freeze.training import load_sharded

IDS = torch.arange(24).reshape(6, 4) % 20 + 3  # rows for one, two and three processes
STEPS = 3


def differing(sharded, whole):
    """Names of tensors that are not the same, or not trainable alike."""
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    actual = dict(sharded.named_parameters()) | dict(sharded.named_buffers())
    names = [] if expected.keys() == actual.keys() else [f"names: {expected.keys() ^ actual.keys()}"]
    for name in expected.keys() & actual.keys():
        value = actual[name].full_tensor() if hasattr(actual[name], "full_tensor") else actual[name]
        if not torch.equal(value, expected[name]) or actual[name].requires_grad != expected[name].requires_grad:
            names.append(name)
    return names


def optimizer_of(model):
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=0.01)


def train(model, optimizer, rows):
    """The losses of some steps on the mean over `rows`, of all processes together."""
    losses = []
    for _ in range(STEPS):
        inputs = {"input_ids": rows, "labels": rows}
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if dist.get_world_size() > 1 and hasattr(next(model.parameters()), "full_tensor"):
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(float(total))
    return losses


def main(result, rank):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    folder, problems = result.parent, []
    for path in sorted(folder.glob("variant-*")):
        sharded, whole = load_sharded(path, mesh), load_model(path)
        problems += [f"{path.name}: {name}" for name in differing(sharded, whole)]
        held = sum(parameter.to_local().numel() for parameter in sharded.parameters())
        total = sum(parameter.numel() for parameter in whole.parameters())
        rows = sum(parameter[0].numel() for parameter in whole.parameters())  # a process may hold a row more of each
        if held > total / world + rows:
            problems.append(f"{path.name}: {held} of {total} values are held")
    chosen = folder / "variant-trained"
    model, saved = load_sharded(chosen, mesh).train(), folder / "saved"
    optimizer = optimizer_of(model)
    if saved.exists():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(state, checkpoint_id=saved)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = train(model, optimizer, IDS[rank::world])
    if not saved.exists():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.save(state, checkpoint_id=saved)
    result.write_text(json.dumps({"problems": problems, "losses": losses}))
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
