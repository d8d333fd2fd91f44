"""Child of test_fsdp2_adapters.py: one of two processes that `accelerate launch` starts with recipes/accelerate/fsdp2.yaml. It
trains adapters on a variant in shards, and saves them.

Without a GPU, accelerate takes such processes for those of DistributedDataParallel. Here they are told that they have FSDP2.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from hf_freeze.lab.runs.launcher import leave_processes
from hf_freeze.model.loading import load_model
from hf_freeze.training.adapters import with_adapters

IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
STEPS = 3


def train(model, optimizer, rows, backward):
    """The losses of some steps on the mean over `rows`."""
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def optimizer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def main(source, out):
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    model = with_adapters(load_model(source), seed=0)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    rank, count = accelerator.process_index, accelerator.num_processes
    losses = train(model, optimizer, IDS[rank::count], accelerator.backward)
    state = accelerator.get_state_dict(model)
    found = {
        "rank": rank,
        "count": count,
        "losses": losses,
        "whole": [name for name, _ in model.named_parameters() if name not in sharded],
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
        "numbers": sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)),
    }
    (out / f"{rank}.json").write_text(json.dumps(found))
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(out / "adapter", state_dict=state)
    accelerator.wait_for_everyone()
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
