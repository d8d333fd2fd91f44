"""DeFINE with `unit="dextra"`: DeLighT's unit as the embedding of a model whose blocks stay."""

import pytest
import torch
from support.models import outputs
from support.training import training_step
from transformers import AutoConfig

from hf_freeze import count_parameters, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import LowRankOutput
from hf_freeze.layers.dextra import DExTraEmbedding
from hf_freeze.methods import DeFINE, DeLighT, LiteTransformer

TASK = {"marian": "seq2seq-lm", "bert": "masked-lm", "gpt2": "causal-lm", "llama": "causal-lm"}
TINY = {"unit": "dextra", "depth": 2, "width": 8, "groups": 2, "map_dim": 4, "dropout": 0.0}


def config_of(name, **fields):
    return AutoConfig.for_model(name, **ARCHITECTURES[name].tiny | {"tie_word_embeddings": True} | fields)


def made(name, *others, fields=(), **settings):
    methods = [DeFINE(**TINY | settings), *others]
    return make_variant(config_of(name, **dict(fields)), methods, task=TASK[name], seed=1).eval()


def on_meta(d, *methods):
    stacks = {f"{stack}_layers": 8 for stack in ("encoder", "decoder")}
    heads = {f"{stack}_attention_heads": 8 for stack in ("encoder", "decoder")}
    config = config_of("marian", d_model=d, vocab_size=1000, decoder_vocab_size=1000, **stacks, **heads)
    with torch.device("meta"):
        return make_variant(config, list(methods), task="seq2seq-lm")


@pytest.mark.parametrize("d", [128, 256, 384, 512, 640])
def test_units_have_the_sizes_of_delights(d):
    """At DeLighT's published widths: a table of 128 columns, four group layers, twice as wide."""
    groups = 2 ** (-(-d // 32) - 1).bit_length()
    define = DeFINE(unit="dextra", depth=4, width=256, groups=groups, map_dim=128)
    unit, expected = (on_meta(d, method).model.shared.unit for method in (define, DeLighT()))
    shapes = [{name: tuple(p.shape) for name, p in one.named_parameters()} for one in (unit, expected)]
    assert shapes[0] == shapes[1]


def test_a_tied_table_costs_one_unit_and_one_projection():
    """512 wide: 2, 4, 4 and 2 groups; from 256 (before the first) and 512 (with 256 mixed in) to 256, 256, 256 and 512."""
    dense = count_parameters(on_meta(512)).total
    counts = count_parameters(on_meta(512, DeFINE(unit="dextra", depth=4, width=256, groups=16, map_dim=128)))
    linears = [(128, 256, 1), (256, 256, 2), (512, 256, 4), (512, 256, 4), (512, 512, 2), (768, 512, 1)]
    unit = sum(i * o // g + o + 2 * o // g for i, o, g in linears)
    assert unit == 659_968
    assert counts.by_component["embeddings"].total == 1000 * 128 + unit
    assert dense - counts.total == 1000 * (512 - 128) - unit - 128 * 512


@pytest.mark.parametrize("name", TASK)
def test_blocks_see_what_the_unit_makes_of_a_row(name):
    model, batch = made(name), ARCHITECTURES[name].tiny_inputs(TASK[name])
    table = model.get_input_embeddings()
    assert isinstance(table, DExTraEmbedding)
    scale = 4 if name == "marian" else 1  # which Marian multiplies by
    with torch.no_grad():
        torch.testing.assert_close(table(torch.arange(40)), table.unit(2 * table.weight) / scale)
    assert isinstance(model.get_output_embeddings(), LowRankOutput)
    assert model.get_output_embeddings().weight is table.weight
    training_step(model, batch)
    expected = outputs(model, batch)["logits"]
    torch.testing.assert_close(outputs(model.merge(), batch)["logits"], expected, rtol=1e-5, atol=1e-5)


def test_tied_tables_share_their_unit_and_what_eval_mode_keeps():
    model = made("marian").model
    tables = [model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens]
    for name, parameter in tables[0].named_parameters():
        assert all(table.get_parameter(name) is parameter for table in tables)
    with torch.no_grad():
        assert tables[1].cached_table() is tables[2].cached_table() is tables[0].cached_table()
    apart = made("marian", fields={"share_encoder_decoder_embeddings": False}).model
    weights = [table.unit.layers[0].linear.weight for table in (apart.encoder.embed_tokens, apart.decoder.embed_tokens)]
    assert not torch.equal(*weights)


def test_other_blocks_may_be_put_in_as_well():
    model = made("marian", LiteTransformer.example)
    assert isinstance(model.model.shared, DExTraEmbedding)
    training_step(model, ARCHITECTURES["marian"].tiny_inputs("seq2seq-lm"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "delight"}, r"DeFINE\(unit='delight'\): .*'define', 'dextra'"),
        ({"map_dim": 20}, r"DeFINE\(map_dim=20\): must be in 1\.\.16, the hidden size of this marian"),
        (
            {"groups": 3, "depth": 3},
            r"DeFINE: a layer of 3 groups mixes in 8 numbers, in a unit from 4 to 16: the groups must",
        ),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        made("marian", **settings)


def test_trained_weights_are_refused():
    native = make_variant(config_of("gpt2"), [], task="causal-lm")
    with pytest.raises(ValueError, match=r"'define': its blocks train from scratch .* pass the config of the backbone"):
        make_variant(native, [DeFINE(**TINY)])
