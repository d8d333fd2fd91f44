"""Layers removed: which, what is left of them, what the config says, and what is refused."""

import copy

import pytest
import torch
from support.models import perturbed
from transformers import AutoConfig, AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods._spacing import evenly_spaced

MARIAN = ARCHITECTURES["marian"]
CONFIG = MarianConfig(**MARIAN.tiny | {"encoder_layers": 6, "decoder_layers": 4})
BATCH = MARIAN.tiny_inputs("seq2seq-lm")


@pytest.fixture
def backbone():
    return perturbed(MarianMTModel(copy.deepcopy(CONFIG)).eval())


def select(model, **kept):
    return make_variant(model, [methods.LayerSelection(**kept)])


def test_what_is_left_computes_as_a_native_model_without_the_other_layers(backbone):
    variant = select(backbone, keep={"encoder": [0, 2, 5], "decoder": [3]})
    by_hand = copy.deepcopy(backbone)
    encoder, decoder = by_hand.model.encoder, by_hand.model.decoder
    encoder.layers = torch.nn.ModuleList(encoder.layers[i] for i in (0, 2, 5))
    decoder.layers = torch.nn.ModuleList([decoder.layers[3]])
    with torch.no_grad():
        expected = by_hand(**BATCH, use_cache=False).logits
        assert torch.equal(variant(**BATCH, use_cache=False).logits, expected)
    merged = variant.merge()
    assert type(merged) is MarianMTModel
    assert (merged.config.encoder_layers, merged.config.decoder_layers) == (3, 1)
    with torch.no_grad():
        assert torch.equal(merged(**BATCH).logits, expected)


def test_the_places_in_the_cache_are_those_of_the_layers(backbone):
    variant = select(backbone, keep={"decoder": [1, 3]})
    inputs = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 6, "num_beams": 2, "forced_eos_token_id": None, "eos_token_id": None}
    cached, plain = (variant.generate(**inputs, **settings, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, plain)
    started = torch.zeros(2, 1, dtype=torch.long)
    cache = variant(**inputs, decoder_input_ids=started, use_cache=True).past_key_values.self_attention_cache
    assert [layer.get_seq_length() for layer in cache.layers] == [1, 1]


def test_the_config_has_the_new_depth_and_the_file_loads_with_it(backbone, tmp_path):
    variant = select(backbone, keep={"encoder": [1, 4]})
    assert variant.config.encoder_layers == variant.model.encoder.config.encoder_layers == 2
    assert variant.config.original_fields == {"encoder_layers": 6}
    variant.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(**BATCH).logits, variant(**BATCH).logits)
    assert loaded.config.to_diff_dict() | {"_name_or_path": ""} == variant.config.to_diff_dict() | {"_name_or_path": ""}
    assert backbone.config.encoder_layers == len(backbone.model.encoder.layers) == 6, "the backbone stays as it was"


def test_numbers_of_later_methods_are_the_new_ones(backbone):
    twice = make_variant(
        backbone,
        [
            methods.LayerSelection(keep={"encoder": [0, 2, 4]}),
            methods.LayerSelection(keep={"encoder": [1, 2]}),
            methods.LowRank(rank=2, layers={"encoder": [1]}),
        ],
    )
    weight = backbone.model.encoder.layers[2].fc1.weight
    assert torch.equal(twice.model.encoder.layers[0].fc1.weight, weight)
    assert type(twice.model.encoder.layers[1].fc1).__name__ == "LowRankLinear"
    assert twice.config.original_fields == {"encoder_layers": 6}
    with pytest.raises(ValueError, match=r"no layer 2 in stack 'encoder' of marian: it has layers 0\.\.1"):
        make_variant(twice, [methods.LowRank(rank=2, layers={"encoder": [2]})])


@pytest.mark.parametrize(
    ("depth", "share", "kept"),
    [
        (6, 0.5, [0, 2, 4]),
        (12, 2 / 3, [0, 1, 3, 4, 6, 7, 9, 10]),
        (12, 5 / 12, [0, 3, 6, 8, 11]),
        (3, 0.0, [0]),
        (2, 1, [0, 1]),
    ],
)
def test_a_share_is_evenly_spaced(depth, share, kept):
    """The first two are LayerDrop's own: every other layer, and without each third."""
    config = MarianConfig(**MARIAN.tiny | {"encoder_layers": depth, "decoder_layers": depth})
    with torch.device("meta"):
        variant = make_variant(config, [methods.LayerSelection(share=share)], task="seq2seq-lm")
    assert variant.config.encoder_layers == variant.config.decoder_layers == len(kept)
    assert evenly_spaced(depth, len(kept)) == kept


def test_parameters_by_hand():
    with torch.device("meta"):
        whole = make_variant(CONFIG, [], task="seq2seq-lm")
        part = make_variant(CONFIG, [methods.LayerSelection(keep={"decoder": [0]})], task="seq2seq-lm")
    d, f = CONFIG.d_model, CONFIG.decoder_ffn_dim
    layer = 2 * 4 * (d * d + d) + 2 * d * f + f + d + 3 * 2 * d  # two attentions, an FFN and three norms
    assert count_parameters(whole).total - count_parameters(part).total == 3 * layer


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({}, r"LayerSelection\(keep=None, share=None\): give one of them"),
        ({"keep": {"encoder": [0]}, "share": 0.5}, r"share=0\.5\): give one of them"),
        ({"keep": {}}, r"LayerSelection\(keep=\{\}\): must be a dict such as"),
        ({"keep": [0, 1]}, r"LayerSelection\(keep=\[0, 1\]\): must be a dict such as"),
        ({"keep": {"encoder": []}}, r"\{'encoder': \[\]\}\): must be a list of different layers, at least one"),
        (
            {"keep": {"encoder": [2, 0]}},
            r"\[2, 0\]\}\): must be a list of different layers, at least one, in ascending",
        ),
        ({"keep": {"encoder": [1, 1]}}, r"\[1, 1\]\}\): must be a list of different layers"),
        ({"keep": {"encoder": 3}}, r"must be None or a dict such as"),
        ({"keep": {"encoder": [0, 6]}}, r"no layer 6 in stack 'encoder' of marian: it has layers 0\.\.5"),
        ({"keep": {"encoder": [-1, 0]}}, r"no layer -1 in stack 'encoder'"),
        ({"keep": {"middle": [0]}}, r"no stack 'middle' in marian; choose from \['decoder', 'encoder'\]"),
        ({"share": 1.5}, r"LayerSelection\(share=1\.5\): must be a share in 0\.\.1"),
    ],
)
def test_settings_that_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        make_variant(CONFIG, [methods.LayerSelection(**setting)], task="seq2seq-lm")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (methods.LayerSharing(groups=2), "after 'layer_sharing', which names layers by number"),
        (methods.Theseus(successor={"encoder": 3}), "after 'theseus', which names layers by number"),
        (methods.MagnitudePruning(sparsity=0.5), "after 'magnitude_pruning', which names layers by number"),
    ],
)
def test_methods_that_it_would_give_other_layers(before, message):
    with pytest.raises(ValueError, match=f"{message}.*put LayerSelection first"):
        make_variant(CONFIG, [before, methods.LayerSelection(share=0.5)], task="seq2seq-lm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"original_fields": {}}, "the methods make .* but the config says"),
        ({"original_fields": {"encoder_layers": 7, "decoder_layers": 4}, "methods": []}, "the methods make {} of"),
        ({"encoder_layers": 4}, "was changed by hand"),
        ({"original_fields": 3}, "original_fields must be a dict, not 3"),
        ({"original_fields": {"encoder_layers": "6"}}, "original_fields: 'encoder_layers' cannot be '6': it is 3 now"),
        ({"original_fields": {"methods": []}}, r"original_fields: 'methods' cannot be \[\]"),
        ({"original_fields": {"encoder_layers": 1 << 30, "decoder_layers": 4}}, "encoder_layers=1073741824 is outside"),
    ],
)
def test_a_config_changed_by_hand_is_refused(change, message):
    with torch.device("meta"):
        config = make_variant(CONFIG, [methods.LayerSelection(share=0.5)], task="seq2seq-lm").config
    data = config.to_dict()
    assert AutoConfig.for_model(**copy.deepcopy(data)).encoder_layers == 3
    with pytest.raises(ValueError, match=message):
        AutoConfig.for_model(**data | change)
