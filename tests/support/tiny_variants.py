"""Tiny Marian and BERT variants, and what to look at in them."""

import torch
from transformers import BertConfig, MarianConfig, MarianPreTrainedModel

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES

MARIAN, BERT = ARCHITECTURES["marian"], ARCHITECTURES["bert"]
TABLE, FC1, QUERY = (
    "model.shared.weight",
    "model.encoder.layers.0.fc1.weight",
    "model.encoder.layers.0.self_attn.q_proj.weight",
)


def marian_config(**changes):
    return MarianConfig(**(MARIAN.tiny | changes))


def bert_config(**changes):
    return BertConfig(**(BERT.tiny | changes))


@torch.no_grad()
def shake(model):
    """Stand-in for training: every trainable value moves."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def fresh_marian(*methods, **arguments):
    return make_variant(marian_config(**arguments), list(methods), task="seq2seq-lm", init="marian", seed=1)


@torch.no_grad()
def logits(model, task="seq2seq-lm"):
    batch = (MARIAN if isinstance(model, MarianPreTrainedModel) else BERT).tiny_inputs(task)
    return model.eval()(**batch).logits


def trainable(model):
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def tensors(model):
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
