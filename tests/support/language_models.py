"""Folders of small language models, for what compares an original with its variant."""

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_freeze import make_variant, methods
from support.small import small_config
from support.text import fast_tokenizer


def llama_small_and_bert(folder, positions, components, **saving):
    """In `folder`: a Llama, "small", a variant of it of low rank, and BERT, which is no causal language model. `saving`: options
    of the variant's `save_pretrained`."""
    torch.manual_seed(0)
    tokenizer = fast_tokenizer(folder / "llama", end_of_text=False)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
    model = AutoModelForCausalLM.from_config(small_config("llama", **sizes, pad_token_id=0, eos_token_id=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(folder / "llama")
    variant = make_variant(model, [methods.LowRank(components=components, rank=2)])
    variant.save_pretrained(folder / "small", **saving)
    AutoModelForMaskedLM.from_config(small_config("bert", vocab_size=len(tokenizer))).save_pretrained(folder / "bert")
    for name in ("small", "bert"):
        fast_tokenizer(folder / name, end_of_text=False)
