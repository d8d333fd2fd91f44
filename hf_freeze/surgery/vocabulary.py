"""What has a row for each token: tables, the output matrix, its bias."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture, base_name, full_name
from hf_freeze.layers.expanded_embedding import ExpandedEmbedding
from hf_freeze.layers.factorized_embedding import LowRankEmbedding, LowRankOutput
from hf_freeze.seeded import Origin
from hf_freeze.surgery.replacing import native_module, put, select_features


def token_tables(model: Any, architecture: Architecture) -> dict[str, Any]:
    """Full name -> module, of the tables of token embeddings that the model has; some may be tied to others."""
    names = {name: full_name(model, name) for name in architecture.token_tables}
    present = {module_name for module_name, _ in model.base_model.named_modules(remove_duplicate=False)}
    return {full: model.get_submodule(full) for name, full in names.items() if name in present}


def output_name(model: Any, architecture: Architecture) -> str | None:
    """Full name of the linear from hidden states to the vocabulary; None where the task has none."""
    return None if model.get_output_embeddings() is None else architecture.output


def native_table(model: Any, name: str, method: str) -> nn.Embedding:
    """The same of a table of tokens. Raises ValueError also where another method has left it one of other rows."""
    table = native_module(model, name, nn.Embedding, method)
    if table.embedding_dim != model.config.hidden_size:  # of FactorizedEmbedding in BERT
        raise ValueError(
            f"method {method!r}: {name!r} has rows of {table.embedding_dim} numbers already, not of the hidden size "
            f"{model.config.hidden_size}, by another method; leave one of the two out"
        )
    return table


def drawn_std(module: Any) -> float:
    """Of the weight as the backbone has just drawn it; where nothing is drawn, as on meta, any."""
    drawn = 0.0 if module.weight.is_meta else float(module.weight.detach().float().std())
    return drawn if 0 < drawn < 1 else 0.02


@torch.no_grad()
def dense_table(module: Any) -> nn.Embedding:
    """The nn.Embedding that computes the same as the table that `module` took the place of."""
    weight = module.dense_weight()
    padding = getattr(module, "dense_padding_idx", module.padding_idx)  # of bands, in whatever band it is
    return nn.Embedding(*weight.shape, padding_idx=padding, _weight=weight.clone())


def vocabulary_modules(model: Any, architecture: Architecture) -> dict[str, Any]:
    """Full name -> module with a row for each token: the tables of those that it has, and the output matrix."""
    output = output_name(model, architecture)
    return token_tables(model, architecture) | ({} if output is None else {output: model.get_submodule(output)})


def cut_vocabulary(model: Any, architecture: Architecture, count: int, method: str) -> None:
    """Give tables, output matrix and output bias `count` rows, of no particular values. What was tied must be tied anew.

    Raises ValueError where a method has replaced one of them before by what has not one row for each token.
    """
    for name, module in vocabulary_modules(model, architecture).items():
        if type(module) in (LowRankEmbedding, LowRankOutput) or isinstance(module, ExpandedEmbedding):
            module.weight = nn.Parameter(module.weight.detach()[:count].clone())
            if isinstance(module, nn.Embedding):
                module.num_embeddings = count
            elif module.bias is not None:
                module.bias = nn.Parameter(module.bias.detach()[:count].clone())
            continue
        if type(module) is nn.Embedding:
            weight = module.weight
            made: nn.Module = nn.Embedding(
                count, module.embedding_dim, module.padding_idx, device=weight.device, dtype=weight.dtype
            )
        elif type(module) is nn.Linear:
            made = select_features(module, count, outputs=True)
        else:
            raise ValueError(
                f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made; put {method!r} "
                "before that one, or merge() first"
            )
        put(model, name, made)
    if (found := output_bias(model, architecture)) is not None:
        owner, attribute, bias = found
        cut = bias.detach()[..., :count].clone()
        setattr(owner, attribute, nn.Parameter(cut) if attribute in owner._parameters else cut)
    for module in model.modules():  # some models keep a copy of the number, as `resize_token_embeddings` does
        if "vocab_size" in vars(module):
            vars(module)["vocab_size"] = count


def token_origins(model: Any, architecture: Architecture, kept: Sequence[int]) -> dict[str, Origin]:
    """Where the tables of the base model come from when they keep the rows `kept`."""
    names = (f"{base_name(model, name)}.weight" for name in token_tables(model, architecture))
    rows = {getattr(model.config, field) for field in architecture.token_tables.values()}
    return {name: Origin(name, 0, tuple(kept), max(rows)) for name in names}


@torch.no_grad()
def copy_tokens(old: Any, new: Any, architecture: Architecture, kept: Sequence[int]) -> None:
    """Fill tables, output matrix and output bias of `new` with the rows `kept` of those of `old`."""
    for name, module in vocabulary_modules(new, architecture).items():
        source = old.get_submodule(name)
        index = torch.tensor(kept, device=source.weight.device)
        module.weight.copy_(source.weight[index])
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(source.bias[index])
    if (found := output_bias(new, architecture)) is not None:
        source = output_bias(old, architecture)[2]  # type: ignore[index]
        found[2].copy_(source[..., torch.tensor(kept, device=source.device)])


def output_bias(model: Any, architecture: Architecture) -> tuple[Any, str, torch.Tensor] | None:
    """(module, its attribute, value) of the bias on the logits that lies outside the output matrix, if the model has one."""
    if architecture.output_bias is None or model.get_output_embeddings() is None:
        return None
    path, _, attribute = architecture.output_bias.rpartition(".")
    owner = model.get_submodule(path)
    return owner, attribute, getattr(owner, attribute)
