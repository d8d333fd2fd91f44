"""How large a backbone may be: every published dense model passes, a hostile config is refused at once."""

import time

import pytest
import torch
from transformers import AutoConfig, AutoModel

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import Freeze, LayerSharing

LLAMA = {"vocab_size": 32000, "max_position_embeddings": 4096}
LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 131072}
PUBLISHED = {
    "Llama 2 7B": ("llama", 6.74e9, LLAMA | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}),
    "Llama 2 13B": (
        "llama",
        13.02e9,
        LLAMA | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    ),
    "Llama 2 70B": (
        "llama",
        68.98e9,
        LLAMA
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8},
    ),
    "Llama 3.1 405B": (
        "llama",
        405.85e9,
        LLAMA_3
        | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
        | {"num_key_value_heads": 8},
    ),
    "GPT-2 XL": ("gpt2", 1.5576e9, {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "BERT large": (
        "bert",
        0.335e9,
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "OPUS-MT": (
        "marian",
        75e6,
        {"vocab_size": 58101, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "max_position_embeddings": 512}
        | {
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
        },
    ),
    "Marian big": (
        "marian",
        235e6,
        {
            "vocab_size": 58101,
            "d_model": 1024,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "max_position_embeddings": 1024,
        }
        | {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 4096}
        | {"decoder_ffn_dim": 4096},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_pass(name):
    model_type, parameters, fields = PUBLISHED[name]
    config = AutoConfig.for_model(model_type, **fields)
    architecture = ARCHITECTURES[model_type]
    architecture.check_sizes(config)
    assert 0.99 * parameters < architecture.matrix_sizes(config) < 3 * parameters  # Marian's four tables are one


def test_the_largest_becomes_a_variant_on_meta():
    model_type, parameters, fields = PUBLISHED["Llama 3.1 405B"]
    with torch.device("meta"):
        variant = make_variant(AutoConfig.for_model(model_type, **fields), [Freeze(ffn="random")], task="causal-lm")
    assert sum(parameter.numel() for parameter in variant.parameters()) == pytest.approx(parameters, rel=0.001)


SWITCHES = [
    {},
    {"is_decoder": True, "add_cross_attention": True},
    {"tie_word_embeddings": False},
    {"head_dim": 24, "num_key_value_heads": 4},
    {"n_inner": None},
    {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 300},
    {"encoder_layers": 3, "decoder_ffn_dim": 300, "decoder_attention_heads": 8},
]


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda architecture: architecture.model_type)
def test_the_count_is_that_of_all_that_is_allocated(architecture, fields):
    plain = AutoConfig.for_model(architecture.model_type)
    config = AutoConfig.for_model(
        architecture.model_type,
        **architecture.tiny | {name: value for name, value in fields.items() if hasattr(plain, name)},
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModel.from_config(config).named_parameters() if p.ndim == 2}
    tables = architecture.token_tables | architecture.other_tables
    for name, shape in shapes.items():
        if architecture.component(name) in ("embeddings", "constant"):
            assert shape == (getattr(config, tables[name.removesuffix(".weight")]), config.hidden_size)
    in_layers = sum(s.numel() for name, s in shapes.items() if architecture.component(name) in ("attention", "ffn"))
    rows = [getattr(config, field) for field in tables.values()]
    output = config.hidden_size * config.vocab_size
    assert architecture.matrix_sizes(config) == in_layers + config.hidden_size * sum(rows) + output


HUGE = 2**12
HOSTILE = {
    "many huge layers": ("llama", {"num_hidden_layers": 1024, "hidden_size": 2**16, "intermediate_size": 2**16}),
    "as many layers": ("llama", {"num_hidden_layers": HUGE, "hidden_size": 2**15}),
    "a wide FFN": ("llama", {"hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 126}),
    "heads of another size": ("llama", {"head_dim": 2**40}),
    "large heads": ("llama", {"head_dim": 2**16, "hidden_size": 2**16, "num_attention_heads": 2**12}),
    "more heads": ("llama", {"num_attention_heads": 2**40, "hidden_size": 2**40}),
    "heads of keys": ("llama", {"num_key_value_heads": 2**40}),
    "no heads of keys": ("llama", {"num_key_value_heads": 0}),
    "labels": ("llama", {"num_labels": 2**40}),
    "types": ("bert", {"type_vocab_size": 2**40}),
    "positions": ("bert", {"max_position_embeddings": 2**24}),
    "GPT-2 positions": ("gpt2", {"n_positions": 2**40}),
    "GPT-2 neurons": ("gpt2", {"n_inner": 2**60}),
    "GPT-2 layers": ("gpt2", {"n_layer": 2**60}),
    "Marian layers": ("marian", {"decoder_layers": 2**60}),
    "Marian heads": ("marian", {"decoder_attention_heads": 2**60}),
    "Marian vocabulary": ("marian", {"decoder_vocab_size": 2**60}),
    "vocabulary": ("bert", {"vocab_size": 2**24, "hidden_size": 2**16, "num_attention_heads": 16}),
    "no layers": ("bert", {"num_hidden_layers": 0}),
    "a layer less than none": ("bert", {"num_hidden_layers": -1}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_configs_are_refused_at_once(name):
    model_type, fields = HOSTILE[name]
    began = time.perf_counter()
    with pytest.raises(ValueError, match=rf"{model_type} config: .* (is outside 1\.\.\d+|the limit is)|multiple of"):
        AutoConfig.for_model(f"hf_freeze_{model_type}", **ARCHITECTURES[model_type].tiny | fields)
    assert time.perf_counter() - began < 0.5


def test_a_depth_that_a_method_makes_is_refused_at_once():
    config = AutoConfig.for_model("bert", **ARCHITECTURES["bert"].tiny)
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"num_hidden_layers=1099511627776 is outside 1\.\.1024"):
        make_variant(config, [LayerSharing(depth={"encoder": 2**40})], task="masked-lm")
    assert time.perf_counter() - began < 0.5
