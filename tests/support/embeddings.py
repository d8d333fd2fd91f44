"""Backbones with all kinds of tables, and their variants with factorised and adaptive ones."""

import itertools

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MarianMTModel,
)

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import AdaptiveInputEmbedding

# Rows of the tables, hidden size, rank; first rows of the tails of adaptive tables, and the widths of their bands.
V, H, E = 40, 16, 5
CUTOFFS, WIDTHS = [7, 20], [16, 8, 4]
TWO_TABLES = {"share_encoder_decoder_embeddings": False}
UNTIED = {"tie_word_embeddings": False}


# name -> (config, native class, source tables whose factors are their own, those tied to the first or last of them)
BACKBONES = {
    "marian": ({}, MarianMTModel, ["model.shared"]),
    "marian-two-tables": (TWO_TABLES, MarianMTModel, ["model.encoder.embed_tokens", "model.decoder.embed_tokens"]),
    "marian-two-tables-untied": (
        TWO_TABLES | UNTIED,
        MarianMTModel,
        ["model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"],
    ),
    "gpt2": ({}, GPT2LMHeadModel, ["transformer.wte"]),
    "llama": ({"tie_word_embeddings": True}, LlamaForCausalLM, ["model.embed_tokens"]),
    "llama-untied": (UNTIED, LlamaForCausalLM, ["model.embed_tokens", "lm_head"]),
}
WITH_BERT = [*BACKBONES, "bert"]
every_backbone = pytest.mark.parametrize("name", BACKBONES)


def backbone(name, **fields):
    """With weights as if trained, padding rows zero as native models have them."""
    torch.manual_seed(1)
    changes, native_class, _ = BACKBONES[name]
    config = native_class.config_class(**ARCHITECTURES[model_type(name)].tiny | changes | fields)
    model = native_class(config).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.2 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.weight.requires_grad:
                module.weight[module.padding_idx] = 0
    return model


def model_type(name):
    return name.split("-")[0]


def batch_of(name):
    architecture = ARCHITECTURES[model_type(name)]
    return architecture.tiny_inputs(architecture.tasks[0])


def factorized(model, rank=E, *others, **settings):
    return make_variant(model, [methods.FactorizedEmbedding(rank=rank, **settings), *others]).eval()


def logits(model, batch):
    with torch.no_grad():
        return model(**batch, use_cache=False).logits


def bert(native_class, **fields):
    torch.manual_seed(2)
    model = native_class(BertConfig(**ARCHITECTURES["bert"].tiny | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def no_dropout(name):
    return {
        "marian": {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "llama": {},
    }[model_type(name)]


def adaptive(model, *others, **settings):
    chosen = {"cutoffs": CUTOFFS, "factor": 2} | settings
    return make_variant(model, [methods.AdaptiveEmbedding(**chosen), *others]).eval()


def wide_batch(name):
    """The tiny batch with ids and labels of all bands."""
    batch = batch_of(name)
    batch["input_ids"] = torch.tensor([[5, 39, 3, 7, 1], [20, 19, 1, 0, 0]])
    batch["labels"] = torch.tensor([[6, 25, 9, 7, 1], [20, 39, 1, -100, -100]])
    return batch


def trained(name, **settings):
    """In training mode without dropout, from weights as if trained, with another matrix of tails."""
    variant = adaptive(backbone(name, **no_dropout(name)), **settings).train()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in variant.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for module in variant.modules():  # natively a padding row stays zero
            if isinstance(module, AdaptiveInputEmbedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return variant


def edges(rows=V):
    return list(itertools.pairwise([0, *CUTOFFS, rows]))


def bands_of(variant, name):
    """Full name -> parameter, of all tables and projections."""
    return {
        f"{own}.{n}": p
        for own in BACKBONES[name][2]
        for n, p in variant.get_submodule(own).named_parameters()
        if "to_tails" not in n
    }


def with_labels(name, **settings):
    """(variant in training mode, a batch with labels of all bands, those that are predicted, which logits predict them)"""
    if name == "bert":
        native = bert(BertForMaskedLM, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        variant, batch = adaptive(native, **settings).train(), ARCHITECTURES["bert"].tiny_inputs("masked-lm")
        batch["labels"] = torch.tensor([[-100, 25, 9, 7, -100], [20, 39, 1, -100, -100]])
    else:
        variant, batch = trained(name, **settings), wide_batch(name)
    shift = int(variant.shifts_labels)
    return variant, batch, batch["labels"][:, shift:], slice(None, batch["labels"].shape[1] - shift)


def check_rows(table, before, rows):
    """`before`, `rows`: what a table had of parameters and dense rows. It has the same bits of the parameters; the dense rows are
    products, which not every CPU rounds alike for other numbers of rows."""
    for name, value in table.named_parameters():
        kept = min(len(value), len(before[name]))
        assert torch.equal(value[:kept], before[name][:kept]), name
    kept = min(table.num_embeddings, len(rows))
    torch.testing.assert_close(table.dense_weight()[:kept], rows[:kept], rtol=0, atol=1e-6)


def on_meta(config, task, *applied):
    with torch.device("meta"):
        return count_parameters(make_variant(config, list(applied), task=task))
