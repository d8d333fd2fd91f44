"""Child of test_many_gpus.py: one of two processes that train variants together. Writes what is wrong, as JSON.

What is sent is what torch's profiler saw the backend send, C++ included, and not what we believe it to be asked for.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.lab.runs.launcher import leave_processes
from hf_freeze.methods import Freeze, HeadPruning, LayerDrop, LayerSharing, MagnitudePruning, Theseus
from support.cases import MODEL, Case
from support.models import build, differences, snapshot
from support.processes import ranks_disagree
from support.training import BATCH_ROWS, changed_though_frozen, stack, training_rows

STEPS = 2
TASK = "seq2seq-lm"
VARIANTS = {
    "frozen": [Freeze(ffn="frozen", embeddings="frozen")],
    "seeded": [Freeze(ffn="random", embeddings="random", seed=3)],
    "LayerDrop": [LayerDrop(p=0.5, seed=8)],
    "rates learnt": [LayerDrop(p=0.5, learned=True, seed=8)],
    "Theseus": [Theseus(rate=0.5, train="all")],
    "heads pruned": [HeadPruning(share=0.5)],
    "heads pruned in training": [HeadPruning(share=0.5, begin=0.0, end=0.75)],
    "weights pruned": [MagnitudePruning(sparsity=0.5), Freeze(attention="frozen")],
    "shared": [LayerSharing(start="middle"), Freeze(norm="frozen")],
}


def variant(name):
    case = Case(ARCHITECTURES["marian"], TASK, MODEL, tuple(VARIANTS[name]))
    return build(case).train(), training_rows(case)


def train(model, rows, labels, *, forward=None, scale=1.0):
    """Steps of SGD with momentum over `rows`, whose loss is the mean over the `labels` of a step."""
    optimizer = torch.optim.SGD(
        (p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9, weight_decay=0.1
    )
    for step in range(STEPS):
        if model.scheduled:
            model.advance(step, STEPS)
        loss = (forward or model)(**stack(rows), num_items_in_batch=labels).loss
        (scale * loss).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def watched():
    """Yields a list that holds, at the end, (kind of collective, elements sent) of all that the backend did."""
    sent = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        yield sent
    for event in seen.profiler.kineto_results.events():  # of which seen.events() makes a tree, for a second each time
        if event.name().startswith("gloo:"):
            size = sum(torch.Size(shape).numel() for shape in event.shapes() if shape)
            sent.append((event.name().removeprefix("gloo:"), size))


def total(sent, kind):
    return sum(size for name, size in sent if name == kind)


def elements(tensors):
    return sum(tensor.numel() for tensor in tensors)


def joint_update(name):
    model, rows = variant(name)
    labels = sum(int((row["labels"] != -100).sum()) for row in rows)
    train(model, rows, labels)
    return {n: p.detach() for n, p in model.named_parameters()}, labels


def data_parallel(name, rank):
    expected, labels = joint_update(name)
    model, rows = variant(name)
    before = snapshot(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    seeded = {id(model.get_parameter(n)) for n in model.seeded_tensors}
    with_buffers = name != "weights pruned"  # masks follow from weights and step
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    buffers = elements(b for n, b in model.named_buffers() if n not in ignored) * with_buffers
    measured = elements(b for n, b in model.named_buffers() if n.endswith(".importance"))
    problems = [] if bool(seeded) == (name == "seeded") else [f"{len(seeded)} tensors are seeded"]
    with watched() as start:
        wrapped = DistributedDataParallel(model, find_unused_parameters=model.skips, broadcast_buffers=with_buffers)
    # DDP compares the sizes and strides of what it reduces, and then sends everything but what a seed has made.
    agreed = 2 * sum(p.dim() for p in trainable)
    expected_start = agreed + buffers + elements(p for p in model.parameters() if id(p) not in seeded)
    if total(start, "broadcast") != expected_start:
        problems.append(f"{total(start, 'broadcast')} elements broadcast at the start, not {expected_start}")
    with watched() as steps:
        train(model, rows[rank :: dist.get_world_size()], labels, forward=wrapped, scale=dist.get_world_size())
    # Which parameters were used is a bit for each.
    reduced, used = STEPS * (elements(trainable) + measured), STEPS * len(trainable) * model.skips
    if total(steps, "all_reduce") not in (reduced, reduced + used):
        problems.append(f"{total(steps, 'all_reduce')} elements reduced in {STEPS} steps, not {reduced} (+ {used})")
    # Buffers in every forward; and once in which order gradients come, which is asked where all of them do.
    order = 0 if model.skips else len(trainable) + 2
    if total(steps, "broadcast") != STEPS * buffers + order:
        problems.append(
            f"{total(steps, 'broadcast')} elements broadcast in {STEPS} steps, not {STEPS * buffers + order}"
        )
    if others := {kind for kind, _ in steps} - {"all_reduce", "broadcast"}:
        problems.append(f"and there was {others}")
    after = {n: p.detach() for n, p in model.named_parameters()}
    problems += differences(after, expected, 1e-5) + ranks_disagree(after) + changed_though_frozen(model, before)
    if not any((after[n] != before[n]).any() for n in after):
        problems.append("nothing was trained")
    return problems


def fully_sharded(name, rank, folder, whole):
    """`whole`: whether what a seed has made stays so, on every rank."""
    expected, labels = joint_update(name)
    model, rows = variant(name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seeded = {model.get_parameter(n) for n in model.seeded_tensors if whole}
    trainable = elements(p for p in model.parameters() if p.requires_grad)
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    in_layers = elements(p for layer in layers for p in layer.parameters() if p not in seeded)
    sharded = elements(p for p in model.parameters() if p not in seeded)
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=seeded)
    fully_shard(model, mesh=mesh, ignored_params=seeded)
    with watched() as steps:
        train(model, rows[rank :: dist.get_world_size()], labels, scale=dist.get_world_size())
    # Layers are put together for the forward and again for the backward, the rest once; each rank sends its half.
    wanted = {"all_gather": STEPS * (sharded + in_layers) // dist.get_world_size(), "all_reduce": STEPS * trainable}
    found = {kind: total(steps, kind) for kind, _ in steps}
    problems = [] if found == wanted else [f"sent {found} in {STEPS} steps, not {wanted}"]
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
        again, info = AUTO_CLASSES[TASK].from_pretrained(folder, output_loading_info=True)
        problems += [f"{kind}: {names}" for kind, names in info.items() if names]
        after = {n: p.detach() for n, p in again.named_parameters()}
        problems += differences(after, expected, 1e-5)
    dist.barrier()
    return problems


def main(result, rank):
    dist.init_process_group("gloo")
    torch.manual_seed(1000 + rank)
    assert BATCH_ROWS % dist.get_world_size() == 0
    problems, checked = [], []
    for name in VARIANTS:
        problems += [f"DDP, {name}: {problem}" for problem in data_parallel(name, rank)]
        checked.append(f"DDP, {name}")
    for name, whole in (("frozen", False), ("seeded", False), ("seeded", True)):
        found = fully_sharded(name, rank, result.parent / f"{name} {whole}", whole)
        problems += [f"FSDP2, {name}, {whole}: {problem}" for problem in found]
        checked.append(f"FSDP2, {name}, {whole}")
    result.write_text(json.dumps({"problems": problems, "checked": checked}))
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
