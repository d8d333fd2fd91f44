"""Modules with a row for each token: tables, the output matrix and its bias."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture, base_name, full_name, hidden_size, read
from hf_freeze.layers.adaptive_embedding import AdaptiveSoftmax, BandedOutput
from hf_freeze.layers.derived import features, first_float_tensor, taken
from hf_freeze.layers.expanded_embedding import ExpandedEmbedding
from hf_freeze.layers.factorized_embedding import LowRankEmbedding, LowRankOutput
from hf_freeze.layers.quantized import Quantized
from hf_freeze.seeded import Origin
from hf_freeze.surgery.replacing import (
    dense_linear,
    is_dense,
    is_native,
    native_module,
    put,
    select_features,
    set_values,
)


def token_tables(model: Any, architecture: Architecture) -> dict[str, Any]:
    """Full name -> module, for each token table of the model; some may be tied to others."""
    names = {name: full_name(model, name) for name in architecture.token_tables}
    present = {module_name for module_name, _ in model.base_model.named_modules(remove_duplicate=False)}
    return {full: model.get_submodule(full) for name, full in names.items() if name in present}


def output_name(model: Any, architecture: Architecture) -> str | None:
    """Full name of the linear from hidden states to the vocabulary; None if the task has none."""
    module = model.get_output_embeddings()
    if module is None or architecture.output is not None:
        return None if module is None else architecture.output
    return next(name for name, other in model.named_modules() if other is module)


def native_table(model: Any, name: str, method: str) -> nn.Embedding:
    """The token table of this full name, to be replaced. Raises ValueError if another method has replaced it or changed the
    size of its rows."""
    table = native_module(model, name, nn.Embedding, method)
    if table.embedding_dim != hidden_size(model.config):  # of FactorizedEmbedding in BERT
        raise ValueError(
            f"method {method!r}: another method has given {name!r} rows of {table.embedding_dim} numbers, not of the hidden size "
            f"{hidden_size(model.config)}; leave one of the two out"
        )
    return table


def drawn_std(module: Any) -> float:
    """Standard deviation of the weight that the backbone has just drawn. If nothing has been drawn, as on meta, the value does
    not matter, and 0.02 serves."""
    drawn = 0.0 if module.weight.is_meta else float(module.weight.detach().float().std())
    return drawn if 0 < drawn < 1 else 0.02


@torch.no_grad()
def dense_table(module: Any) -> nn.Embedding:
    """The nn.Embedding that computes the same as `module`, the replacement of a table. It is `module` itself if that is one."""
    if is_native(module, nn.Embedding):
        return module
    weight = module.dense_weight()
    padding = getattr(module, "dense_padding_idx", module.padding_idx)  # a banded table has one per band
    return nn.Embedding(*weight.shape, padding_idx=padding, _weight=weight.clone())


def vocabulary_modules(model: Any, architecture: Architecture) -> dict[str, Any]:
    """Full name -> module, for each module with a row per token: token tables and the output matrix."""
    output = output_name(model, architecture)
    return token_tables(model, architecture) | ({} if output is None else {output: model.get_submodule(output)})


def cut_vocabulary(model: Any, architecture: Architecture, count: int, method: str) -> None:
    """Give tables, output matrix and output bias `count` rows with arbitrary values. The caller must tie tied tables again.

    Raises ValueError if a method has replaced one of them by a module without one row per token.
    """
    bias_on_logits = output_bias(model, architecture)  # found by its size, so before the output matrix changes
    for name, module in vocabulary_modules(model, architecture).items():
        if type(module) in (LowRankEmbedding, LowRankOutput) or isinstance(module, ExpandedEmbedding):
            module.weight = nn.Parameter(module.weight.detach()[:count].clone())
            if isinstance(module, nn.Embedding):
                module.num_embeddings = count
            elif module.bias is not None:
                module.bias = nn.Parameter(module.bias.detach()[:count].clone())
            continue
        if is_native(module, nn.Embedding):
            shorter: nn.Module = _with_rows(module, count)
        elif type(module) is nn.Linear or getattr(module, "has_whole_rows", False):
            shorter = select_features(module, count, outputs=True)
        else:
            raise ValueError(
                f"method {method!r}: {name!r} is a {type(module).__name__} already, which another method made; put {method!r} "
                "before that one, or merge() first"
            )
        put(model, name, shorter)
    if bias_on_logits is not None:
        owner, attribute, bias = bias_on_logits
        shorter_bias = bias.detach()[..., :count].clone()
        setattr(owner, attribute, nn.Parameter(shorter_bias) if attribute in owner._parameters else shorter_bias)
    for module in model.modules():  # some modules keep a copy of the vocabulary size
        for name in {"vocab_size", "n_words"} & vars(module).keys():
            vars(module)[name] = count


def _with_rows(table: Any, count: int) -> Any:
    """A native table of the same class and settings with its first `count` rows."""
    shorter = copy.copy(table)
    shorter._parameters = {"weight": nn.Parameter(table.weight.detach()[:count].clone())}
    shorter.num_embeddings = count
    return shorter


def check_rows(output: Any, largest: int, model: str) -> None:
    """Raise ValueError if the output matrix of the class `model` has no row `largest`, the highest token of a shortlist."""
    if largest >= output.out_features:
        raise ValueError(
            f"the shortlist has the token {largest}, and {model} has 0..{output.out_features - 1}; compute it with the tokenizer "
            "of this model"
        )


@contextmanager
def only_rows(output: Any, rows: Sequence[int]) -> Iterator[None]:
    """Within it, the output matrix `output` computes the logits of the tokens `rows` alone; the others are -inf.

    Raises ValueError for an output whose rows cannot be computed one by one.
    """
    part, count = _rows_of_output(output, rows), output.out_features
    index = torch.tensor(rows, device=first_float_tensor(output).device, dtype=torch.long)

    def forward(x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V)"""
        logits = part(x)
        return logits.new_full((*logits.shape[:-1], count), -torch.inf).index_copy_(-1, index, logits)

    previous = vars(output).get("forward")  # Accelerate sets one on modules that it moves
    output.forward = forward
    try:
        yield
    finally:
        del output.forward
        if previous is not None:
            output.forward = previous


@torch.no_grad()
def _rows_of_output(output: Any, rows: Sequence[int]) -> nn.Module:
    """A copy of an output matrix with these rows alone."""
    if type(output) is LowRankOutput:
        shorter = copy.copy(output)
        shorter._parameters = {name: value if name == "projection" or value is None else nn.Parameter(taken(value, 0, rows))
                               for name, value in output._parameters.items()}  # fmt: skip
        return shorter
    if isinstance(output, BandedOutput) and not isinstance(output, AdaptiveSoftmax):
        output = dense_linear(output)
    if not is_dense(output) and not hasattr(output, "selected"):
        raise ValueError(
            f"{type(output).__name__} cannot compute the logits of some tokens alone: use an output matrix without softmax, or "
            "merge() first"
        )
    return select_features(output, rows, outputs=True)


def token_origins(model: Any, architecture: Architecture, kept: Sequence[int]) -> dict[str, Origin]:
    """The origins of the tables of the base model when they keep the rows `kept`."""
    names = (f"{base_name(model, name)}.weight" for name in token_tables(model, architecture))
    rows = {read(model.config, field) for field in architecture.token_tables.values()}
    return {name: Origin(name, 0, tuple(kept), max(rows)) for name in names}


@torch.no_grad()
def copy_tokens(old: Any, new: Any, architecture: Architecture, kept: Sequence[int]) -> None:
    """Fill tables, output matrix and output bias of `new` with the rows `kept` of those of `old`."""
    for name, module in vocabulary_modules(new, architecture).items():
        source = old.get_submodule(name)
        if isinstance(module, Quantized):
            for buffer, values in source.rows_of_buffers(kept).items():
                module.get_buffer(buffer).copy_(values)
        else:
            set_values(module.weight, taken(source.weight, 0, kept))
        if getattr(module, "bias", None) is not None:
            set_values(module.bias, taken(source.bias, 0, kept))
    if (output := output_bias(new, architecture)) is not None:
        source = output_bias(old, architecture)[2]  # type: ignore[index]
        output[2].copy_(source[..., torch.tensor(kept, device=source.device)])


def ties_to_module(target: str, source_weight: str, parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> its source, full names: ties `parameters` of the module `target` to those of the module that has
    `source_weight`, such as "model.shared.weight". The backbone itself ties `weight`, which is left out."""
    source = source_weight.removesuffix("weight")
    return {f"{target}.{name}": f"{source}{name}" for name in parameters if name != "weight"}


def output_bias(model: Any, architecture: Architecture) -> tuple[Any, str, torch.Tensor] | None:
    """(module, its attribute, value of (V,) or (1, V)) of the bias on the logits outside the output matrix; None if the model has
    none."""
    name = output_bias_name(model, architecture)
    if name is None:
        return None
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    return owner, attribute, getattr(owner, attribute)


def output_bias_name(model: Any, architecture: Architecture) -> str | None:
    """Full name of the bias on the logits outside the output matrix, a parameter or a buffer; None if the model has none."""
    output = output_name(model, architecture)
    if output is None or architecture.output_bias is not None:
        return None if output is None else architecture.output_bias
    module, inside = model.get_submodule(output), full_name(model, "")
    rows = features(module)[1]
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in tensors:
        outside = not name.startswith((f"{output}.", *([inside] if inside else [])))
        if outside and tensor.ndim in (1, 2) and tensor.shape[-1] == rows and tensor.numel() == rows:
            return name
    return None
