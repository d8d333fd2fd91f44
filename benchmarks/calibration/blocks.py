"""Names and products that the comparisons share: FFNs and attentions of a plain transformers model, its inputs, its loss.

It needs torch and transformers alone, so that it runs in the environment of each peer.
Shapes: B sequences, T positions, D hidden size, F neurons, N heads, H head dim, I inputs and O outputs of a linear.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Block:
    """A sublayer that adds to the hidden states: names of its linears, and of the module whose input is that of the sublayer."""

    ins: tuple[str, ...]  # of an FFN: before the activation; of an attention: query, key, value
    out: str
    residual: str
    units: int  # neurons, or heads of queries
    size: int  # columns of `out` for each unit
    shared: int = 1  # heads of queries for each head of keys and values
    attention: bool = False

    @property
    def linears(self) -> tuple[str, ...]:
        return (*self.ins, self.out)


def blocks(model: nn.Module) -> list[Block]:
    """FFNs and attentions of a BERT, Llama or Marian, in the order in which they compute."""
    config: Any = model.config
    if config.model_type == "bert":
        found = [_bert(f"encoder.layer.{i}", config) for i in range(config.num_hidden_layers)]
    elif config.model_type == "llama":
        found = [_llama(f"model.layers.{i}", config) for i in range(config.num_hidden_layers)]
    elif config.model_type == "marian":
        found = [_marian(f"model.encoder.layers.{i}", config, ("self_attn",)) for i in range(config.encoder_layers)]
        attentions = ("self_attn", "encoder_attn")
        found += [_marian(f"model.decoder.layers.{i}", config, attentions) for i in range(config.decoder_layers)]
    else:
        raise ValueError(f"unknown model type {config.model_type!r}; choose from bert, llama, marian")
    return [block for layer in found for block in layer]


def _bert(layer: str, config: Any) -> list[Block]:
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    ins = tuple(f"{layer}.attention.self.{part}" for part in ("query", "key", "value"))
    up = f"{layer}.intermediate.dense"
    return [
        Block(ins, f"{layer}.attention.output.dense", ins[0], heads, size, attention=True),
        Block((up,), f"{layer}.output.dense", up, config.intermediate_size, 1),
    ]


def _llama(layer: str, config: Any) -> list[Block]:
    heads, shared = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    ins = tuple(f"{layer}.self_attn.{part}_proj" for part in "qkv")
    ups = (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
    attention = Block(
        ins, f"{layer}.self_attn.o_proj", f"{layer}.input_layernorm", heads, config.head_dim, shared, attention=True
    )
    norm = f"{layer}.post_attention_layernorm"
    return [attention, Block(ups, f"{layer}.mlp.down_proj", norm, config.intermediate_size, 1)]


def _marian(layer: str, config: Any, attentions: tuple[str, ...]) -> list[Block]:
    stack = layer.split(".")[1]
    heads, width = getattr(config, f"{stack}_attention_heads"), getattr(config, f"{stack}_ffn_dim")
    found = []
    for name in attentions:
        ins = tuple(f"{layer}.{name}.{part}_proj" for part in "qkv")
        found.append(Block(ins, f"{layer}.{name}.out_proj", ins[0], heads, config.d_model // heads, attention=True))
    return [*found, Block((f"{layer}.fc1",), f"{layer}.fc2", f"{layer}.fc1", width, 1)]


def ffns(model: nn.Module) -> list[Block]:
    return [block for block in blocks(model) if not block.attention]


def attentions(model: nn.Module) -> list[Block]:
    return [block for block in blocks(model) if block.attention]


def weight(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_submodule(name).weight.data  # type: ignore[return-value]


def remove_units(model: nn.Module, block: Block, kept: list[int]) -> None:
    """Zero everything that computes the units that are not `kept`. The shapes stay; the outputs are those without the units."""
    gone = torch.ones(block.units, dtype=torch.bool)
    gone[kept] = False
    with torch.no_grad():
        out: Any = model.get_submodule(block.out)
        out.weight[:, gone.repeat_interleave(block.size)] = 0
        ins = block.ins if block.shared == 1 else block.ins[:1]  # keys and values may serve heads that stay
        for name in ins:
            linear: Any = model.get_submodule(name)
            rows = gone.repeat_interleave(block.size)
            linear.weight[rows] = 0
            if linear.bias is not None:
                linear.bias[rows] = 0


def real_tokens(name: str, batch: Batch) -> torch.Tensor | None:
    """(B, T) of bool: which positions of the inputs of a linear are no padding. None: all are."""
    if "labels" in batch and ".decoder." in f".{name}":
        return batch["labels"] != -100
    return batch["attention_mask"].bool() if "attention_mask" in batch else None


class _Stop(Exception):
    pass


def inputs_of(model: nn.Module, names: tuple[str, ...], batches: list[Batch]) -> Iterator[list[torch.Tensor]]:
    """For each batch the inputs of each module at real tokens, (tokens, I); modules behind the last are not computed."""
    caught: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def catch(_: nn.Module, inputs: tuple[torch.Tensor, ...], keywords: dict[str, torch.Tensor]) -> None:
            caught[name] = inputs[0] if inputs else next(iter(keywords.values()))
            if name == names[-1]:
                raise _Stop

        return catch

    for batch in batches:
        handles = [model.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True) for name in names]
        with torch.no_grad(), contextlib.suppress(_Stop):
            model(**arguments(batch))
        for handle in handles:
            handle.remove()
        yield [at_real_tokens(caught[name], name, batch) for name in names]


def at_real_tokens(states: torch.Tensor, name: str, batch: Batch) -> torch.Tensor:
    """(B, T, I) -> (tokens, I)"""
    mask = real_tokens(name, batch)
    return states.flatten(0, 1) if mask is None else states[mask]


def arguments(batch: Batch) -> Batch:
    """What the model takes of a batch."""
    return {key: value for key, value in batch.items() if key != "vectors"}


def grams(model: nn.Module, names: list[str], batches: list[Batch]) -> dict[str, torch.Tensor]:
    """The sum of x xᵀ over the inputs x of each linear at real tokens, in fp64, (I, I)."""
    total: dict[str, Any] = dict.fromkeys(names, 0)
    batch: Batch = {}

    def hook(name: str) -> Callable[..., None]:
        def add(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            states = at_real_tokens(inputs[0], name, batch).double()
            total[name] = total[name] + states.T @ states

        return add

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    with torch.no_grad():
        for batch in batches:
            model(**arguments(batch))
    for handle in handles:
        handle.remove()
    return total


def sentence_vectors(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean of the last hidden states over real tokens, of length 1: (B, D)."""
    mask = batch["attention_mask"][..., None].float()
    states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def loss_of(model: nn.Module, batch: Batch, temperature: float = 0.05) -> torch.Tensor:
    """Mean loss without human labels: of a language model on its tokens, of a translator on its own translations, of an encoder
    the cross entropy of finding the whole model's vector of a text among those of the batch (`batch["vectors"]`, (B, D))."""
    if "vectors" in batch:
        scores = sentence_vectors(model, batch) @ batch["vectors"].T / temperature
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    labels = batch.get("labels", batch["input_ids"])
    return model(**{**batch, "labels": labels}).loss
