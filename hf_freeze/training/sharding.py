"""Variants in shards, by torch's FSDP2: each process holds its rows of every tensor, and never a whole model.

`accelerate launch` with `fsdp_version: 2` shards a model that each process has loaded; this is for a training loop of your own.
"""

import contextlib
import ctypes
import os
import sys
from collections import Counter
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from hf_freeze import surgery
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compat.transformers import draw
from hf_freeze.model.loading import empty_model
from hf_freeze.model.weights import generated, no_draws


@torch.no_grad()
def load_sharded(folder: str | os.PathLike[str], mesh: DeviceMesh, **options: Any) -> Any:
    """The model of a directory, native or a variant, in shards over the processes of a `mesh` of one dimension.

    Each process reads its rows of what is stored and generates its rows of what is seeded. The digests of seeded tensors are
    checked in turns: each process generates some of them as a whole, one after another. `options` go to `fully_shard`, which is
    called for the whole, and for each layer and each token table that shares nothing with others. Gradients are those of the
    mean over the processes. On the CPU, with glibc, blocks of memory from 4 MB on go back to the system when they are freed.

    Raises ValueError for an architecture that is not registered and for a digest that does not match, FileNotFoundError for a
    missing directory.
    """
    if mesh.device_type == "cpu":
        _return_freed_memory()
    model = empty_model(folder)
    model.tie_weights(recompute_mapping=False)  # on meta, only native ties are made
    for part in _parts(model):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if model.can_generate():
        register_fsdp_forward_method(model, "generate")  # which calls encoders by themselves
    model.to_empty(device=mesh.device_type)
    _tie_buffers(model)
    reader = HuggingFaceStorageReader(os.fspath(folder))
    in_files = reader.read_metadata().state_dict_metadata.keys()
    load({name: value for name, value in model.state_dict().items() if name in in_files}, storage_reader=reader)
    seeded = getattr(model, "seeded_tensors", {})
    for name, definition in seeded.items():
        shard, start = _shard(model.get_parameter(name), mesh)
        shard.copy_(definition.generate_rows(start, start + len(shard), mesh.device_type))
    for name in list(seeded)[mesh.get_local_rank() :: mesh.size()]:
        generated(model, name, mesh.device_type)
    _compute_the_rest(model, mesh, {*in_files, *seeded, *model.all_tied_weights_keys})
    distributed.barrier(mesh.get_group())
    return model


def _return_freed_memory() -> None:
    """Have glibc map blocks from 4 MB on one by one. In its heap, the tensors that stay lie between the layers that are put
    together and freed, which cost as much memory as the shards themselves."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(-3, 1 << 22)  # M_MMAP_THRESHOLD


def _parts(model: Any) -> list[nn.Module]:
    """What is put together by itself: layers, and tables, which are large. All the rest is whole from the forward to the end of
    the backward, and has what is shared."""
    architecture = architecture_for(model)
    layers = [
        layer
        for stack in architecture.stacks.values()
        for layer in model.base_model.get_submodule(stack.layers.removesuffix(".{}"))
    ]
    owners = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    tables = [*surgery.token_tables(model, architecture).values(), model.get_output_embeddings()]
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        *(layer for layer in layers if all(owners[id(parameter)] == 1 for parameter in layer.parameters())),
        *(
            table
            for table in tables
            if type(table) in (nn.Embedding, nn.Linear)  # those of methods may be read outside of their forward
            and all(names[id(parameter)] == 1 for parameter in table.parameters())
        ),
    ]


def _tie_buffers(model: Any) -> None:
    """Tie the buffers of quantised tables again: `to_empty` makes a new tensor of every buffer, under each of its names."""
    for target, source in model.all_tied_weights_keys.items():
        owner, _, name = target.rpartition(".")
        if name in (buffers := model.get_submodule(owner)._buffers):
            buffers[name] = model.get_buffer(source)


def _shard(tensor: Any, mesh: DeviceMesh) -> tuple[torch.Tensor, int]:
    """(the rows of this process, the number of the first one). FSDP2 gives each process ⌈rows / processes⌉, as long as there are
    any; a buffer is whole everywhere."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    per_process = -(-tensor.shape[0] // mesh.size())
    return tensor.to_local(), min(per_process * mesh.get_local_rank(), tensor.shape[0])


def _compute_the_rest(model: Any, mesh: DeviceMesh, filled: set[str]) -> None:
    """Fill what no file holds and no seed generates, such as rotary frequencies, from a second model. Its other tensors are never
    written and take no memory."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [name for name in tensors if name not in filled]
    if not names:
        return
    with no_draws(model.dtype):
        other = type(model)(model.config)
    for owner in {name.rpartition(".")[0] for name in names}:
        draw(other, other.get_submodule(owner))
    for name in names:
        shard, start = _shard(tensors[name], mesh)
        owner, _, attribute = name.rpartition(".")
        value = getattr(other.get_submodule(owner), attribute)
        shard.copy_(value[start : start + len(shard)] if shard.ndim else value)
