"""What inference costs in memory: the bytes that stay in it, and those that a decoding step reads. Works for models on `meta`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_freeze.architectures.base import Architecture, base_name
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.layers.seeded_weight import SeededWeight
from hf_freeze.model.execution import check_mode
from hf_freeze.seeded.tiles import scratch_bytes, whole_only


@dataclass(frozen=True, kw_only=True)
class InferenceMemory:
    """Bytes of weights and buffers, in the dtypes that the model has.

    `resident`: in memory after loading, with the buffer for tiles. `read`: of them, what one decoding step reads for one token;
    for a model that does not generate, what a forward of one token reads. `scratch`: the buffer for tiles, which is the same for
    all layers; it stays in the cache, and is not in `read`.
    """

    resident: int
    read: int
    scratch: int


def inference_memory(model: Any, execution: str | None = None) -> InferenceMemory:
    """Count the bytes of a variant or of a native model of a registered architecture, tied tensors once.

    `execution`: a mode of `set_seeded_execution`; None: that of the model. Seeded tensors that are generated where they are used
    count 0 in both numbers. A decoding step of an encoder-decoder does not read the encoder, nor the keys and values of
    cross-attention, which it has in its cache. Of tables it reads one row, of those that are the output matrix too all of it. All
    experts of a mixture count.

    Raises ValueError for an unknown mode and for an architecture that is not registered.
    """
    mode = getattr(model, "seeded_execution", "resident") if execution is None else execution
    check_mode(mode)
    architecture = architecture_for(model)
    definitions = getattr(model, "seeded_tensors", {}) if mode != "resident" else {}
    made = {name for name, definition in definitions.items() if whole_only(definition) is None}
    output = _output_tensors(model)
    resident = read = 0
    for name, tensor in _tensors(model):
        if name in made or (isinstance(tensor, SeededWeight) and mode != "resident"):
            continue
        size = tensor.numel() * tensor.element_size()
        resident += size
        below = base_name(model, name)
        if id(tensor) in output:
            read += size
        elif _is_table(architecture, below) and tensor.ndim == 2:
            read += tensor.shape[1] * tensor.element_size()
        elif not _is_of_encoder(architecture, below) and not _is_cached(architecture, model, below):
            read += size
    scratch = scratch_bytes() if made else 0
    return InferenceMemory(resident=resident + scratch, read=read, scratch=scratch)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all parameters and buffers, each once. Ties are known by name too: on meta they may be tensors apart."""
    tied, seen = getattr(model, "all_tied_weights_keys", {}), set()
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in both:
        if name not in tied and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _output_tensors(model: Any) -> set[int]:
    """Identities of the tensors of the output matrix; of its source, if it is tied."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return set()
    names = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    tied = getattr(model, "all_tied_weights_keys", {})
    prefix = next(name for name, module in model.named_modules(remove_duplicate=False) if module is head)
    own = [name for name in names if name.startswith(f"{prefix}.")]
    return {id(names[tied.get(name, name)]) for name in own}


def _is_table(architecture: Architecture, name: str) -> bool:
    owner = name.rpartition(".")[0]
    return name.endswith("weight") and owner in {*architecture.token_tables, *architecture.other_tables}


def _is_of_encoder(architecture: Architecture, name: str) -> bool:
    """Whether it is in the encoder of an encoder-decoder."""
    stacks = architecture.stacks
    if not {"encoder", "decoder"} <= stacks.keys():
        return False
    encoder, decoder = (stacks[stack].layers.partition(".")[0] for stack in ("encoder", "decoder"))
    return encoder != decoder and name.startswith(f"{encoder}.")


def _is_cached(architecture: Architecture, model: Any, name: str) -> bool:
    """Whether it is a projection to the keys or values of cross-attention, which has one of its own for them."""
    owner = name.rpartition(".")[0]
    for key, attention in architecture.attentions(model.config).items():
        if key.endswith(".cross") and owner in (attention.k, attention.v):
            return attention.k != attention.q
    return False
