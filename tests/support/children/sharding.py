"""Child of test_sharding.py: one of a group of processes that load variants in shards. Writes what is wrong, as JSON.

The first group (of two) trains and saves a distributed checkpoint; the later ones, of other sizes, resume from it.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer

from hf_freeze.lab.runs.launcher import leave_processes
from hf_freeze.lab.training import teacher_translations
from hf_freeze.lab.training.decoding import translate
from hf_freeze.model.loading import load_model
from hf_freeze.training import load_sharded
from support.cases import ALL, once
from support.models import differences
from support.training import gradients

IDS = torch.arange(24).reshape(6, 4) % 20 + 3  # rows for one, two and three processes
STEPS = 3
DECODING = {"max_tokens": 12}  # more batches than processes, and not as many for each
SENTENCES = ["simdi", "homor nukostu simdi", "", "pyhiz", "nukostu", "simdi homor", "pyhiz homor", "homor simdi pyhiz"]


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


def checkpointed(sharded, whole, batch):
    """Problems of the gradients of a model in shards that computes its layers again in the backward."""
    if sharded.needs_teacher:
        for model in (sharded, whole):
            model.set_teacher(load_model(whole.config.name_or_path))
    expected_loss, expected = gradients(whole, batch)
    checkpoint = getattr(
        sharded, "activation_checkpointing_enable", sharded.gradient_checkpointing_enable
    )  # its older name
    checkpoint({"use_reentrant": False})  # older transformers have True, for which FSDP2 has no gradients
    loss, actual = gradients(sharded, batch)
    problems = differences({name: value.full_tensor() for name, value in actual.items()}, expected, 1e-5)
    return problems + (
        []
        if abs(loss - expected_loss) < 1e-5 * max(1.0, abs(expected_loss))
        else [f"the loss is {loss}, not {expected_loss}"]
    )


def refused(sharded, batch):
    """Problems, unless training is refused: learnt scores of layers cannot be in shards."""
    try:
        gradients(sharded, batch)
    except ValueError as error:
        return [] if "the scores of layers cannot be in shards" in str(error) else [str(error)]
    return ["learnt scores of layers were trained in shards"]


def translations(folder, mesh):
    """Of SENTENCES: what a whole model gives, one in shards, and the file of a teacher; how many sentences this process read."""
    tokenizer, found, read = AutoTokenizer.from_pretrained(folder), {}, []
    model = load_model(folder)
    with mock.patch.object(tokenizer, "pad", wraps=tokenizer.pad) as padded:
        found["whole"] = translate(model, tokenizer, SENTENCES, **DECODING)
        read = [len(call.args[0]["input_ids"]) for call in padded.call_args_list]
    sharded = load_sharded(folder, mesh)
    found["in shards"] = translate(sharded, tokenizer, SENTENCES, **DECODING)
    sharded(input_ids=IDS, labels=IDS).loss.backward()  # what decoding has put together can be trained
    path = folder / "kept.jsonl"
    for name in ("teacher", "again"):  # the second time, from the file
        found[name] = teacher_translations(model, SENTENCES, path, tokenizer=tokenizer, **DECODING)
    dist.barrier()
    lines = path.read_text("utf-8").splitlines()[1:]
    found["in the file"] = [text for line in lines for text in json.loads(line)]
    return found, sum(read)


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
        number = path.name.removeprefix("variant-")
        if world == 2 and number != "trained" and (ALL or int(number) % 2 == 0):  # each was equal when it was loaded
            batch = once()[int(number)].batch()
            learned = any(getattr(method, "learned", False) for method in whole.methods)
            found = refused(sharded, batch) if learned else checkpointed(sharded, whole, batch)
            problems += [f"{path.name}, checkpointed: {problem}" for problem in found]
    translated, read = translations(folder / "translator", mesh) if world == 3 else ({}, 0)
    chosen = folder / "variant-trained"
    model, saved = load_sharded(chosen, mesh).train(), folder / "saved"
    if not isinstance(model.get_output_embeddings(), FSDPModule):
        problems.append("the output matrix, which is not tied, is whole until the end of the backward")
    optimizer = optimizer_of(model)
    if saved.exists():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(state, checkpoint_id=saved)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = train(model, optimizer, IDS[rank::world])
    if not saved.exists():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.save(state, checkpoint_id=saved)
    found = {"problems": problems, "losses": losses, "translations": translated, "read": read}
    result.write_text(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
