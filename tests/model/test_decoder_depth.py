"""Encoders that are shallower than their decoder: the cache has a place for every layer of the decoder.

T5 and its relatives call the depth of the encoder `num_layers`, and transformers would size the cache by it. In deeper stacks,
all layers use the table of relative positions that only the first one has.
"""

import copy
import json

import pytest
import torch
from support.cases import ALL
from support.generation import generation_problems
from support.models import perturbed
from support.processes import printed_by
from support.small import small_config
from transformers import AutoModelForSeq2SeqLM
from transformers.models.t5.modeling_t5 import T5Attention

from hf_freeze import make_variant, methods
from hf_freeze.architectures.base import read
from hf_freeze.architectures.probe import Probe
from hf_freeze.architectures.published import default_config
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.verify import verify
from hf_freeze.model.native_code import write_remote_code

BATCH = {
    "input_ids": torch.tensor([[5, 9, 3, 7, 1], [8, 4, 1, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}
STARTS = torch.tensor([[0, 6, 4], [0, 7, 3]])
METHODS = {
    "selection": methods.LayerSelection(keep={"encoder": [0], "decoder": [0, 1]}),
    "sharing": methods.LayerSharing(depth={"decoder": 3}),
}
FAMILIES = ["t5", "umt5", "bart", *["mt5", "longt5", "switch_transformers"] * ALL]
every_family = pytest.mark.parametrize("model_type", FAMILIES)
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def native(model_type, **changes):
    torch.manual_seed(0)
    return perturbed(AutoModelForSeq2SeqLM.from_config(small_config(model_type, **changes))).eval()


def logits(model, **options):
    with torch.no_grad():
        return model(**BATCH, decoder_input_ids=STARTS, **options).logits


@every_family
@every_method
def test_it_runs_and_generates_with_and_without_a_cache_alike(model_type, method):
    variant = make_variant(native(model_type), [method]).eval()
    assert torch.equal(logits(variant), logits(variant, use_cache=False))
    assert generation_problems(variant, BATCH, widths=(2,)) == []


@every_family
def test_the_merged_model_generates_the_same_in_plain_transformers(model_type, tmp_path):
    variant = make_variant(native(model_type), [METHODS["selection"]]).eval()
    variant.merge().save_pretrained(tmp_path)
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert "hf_freeze" not in merged.config.model_type
    assert torch.equal(logits(merged), logits(variant))
    expected = variant.generate(**BATCH, max_new_tokens=5, use_cache=False)
    assert torch.equal(merged.generate(**BATCH, max_new_tokens=5), expected)


@pytest.mark.parametrize("model_type", ["t5", *["mt5", "longt5", "switch_transformers", "umt5"] * ALL])
def test_the_first_layer_leaves_its_table_of_positions_to_the_first_that_is_left(model_type, tmp_path):
    backbone = native(model_type, num_layers=4, num_decoder_layers=4)
    by_hand = copy.deepcopy(backbone)
    for stack in (by_hand.get_encoder(), by_hand.get_decoder()):
        first, second = stack.block[0].layer[0], stack.block[1].layer[0]
        if model_type != "umt5":  # which has a table in each layer
            name = next(name for name, _ in first.named_children() if name.endswith("SelfAttention"))
            module, other = getattr(first, name), getattr(second, name)
            other.relative_attention_bias, other.has_relative_attention_bias = module.relative_attention_bias, True
        stack.block = torch.nn.ModuleList([stack.block[1], stack.block[3]])
        stack.config.num_layers = by_hand.config.num_decoder_layers = 2
    variant = make_variant(backbone, [methods.LayerSelection(keep={"encoder": [1, 3], "decoder": [1, 3]})]).eval()
    assert torch.equal(logits(variant, use_cache=False), logits(by_hand, use_cache=False))
    assert generation_problems(variant, BATCH, widths=(1,)) == []
    variant.save_pretrained(tmp_path / "variant")
    variant.merge().save_pretrained(tmp_path / "merged")
    for folder in ("variant", "merged"):
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / folder).eval()
        assert torch.equal(logits(loaded, use_cache=False), logits(by_hand, use_cache=False))


def test_a_random_table_of_positions_stays_what_its_seed_gives_in_another_layer(tmp_path):
    backbone = make_variant(native("t5"), [methods.Freeze(attention="random", seed=3)])
    variant = make_variant(backbone, [methods.LayerSelection(keep={"encoder": [1]})]).eval()
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert table in variant.seeded_tensors
    assert torch.equal(variant.get_parameter(table), backbone.get_parameter(table))
    variant.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()), logits(variant))


@pytest.mark.parametrize("model_type", ["t5", "bart", *["longt5"] * ALL])
def test_a_native_encoder_may_be_the_shallower_one(model_type):
    """The native T5 runs, but cannot generate with a cache; its variant can."""
    field = "encoder_layers" if model_type == "bart" else "num_layers"
    backbone = native(model_type, **{field: 1})
    variant = make_variant(backbone, [methods.Freeze(ffn="frozen")]).eval()
    assert torch.equal(logits(variant), logits(backbone))
    assert generation_problems(variant, BATCH, widths=(2,)) == []


def test_the_cache_is_as_deep_as_the_decoder_also_where_the_encoder_is_deeper():
    variant = make_variant(native("t5"), [methods.LayerSelection(keep={"decoder": [0]})])
    cache = variant(**BATCH, decoder_input_ids=STARTS, use_cache=True).past_key_values
    assert len(cache.self_attention_cache.layers) == len(cache.cross_attention_cache.layers) == 1
    assert variant.config.get_text_config(decoder=True).num_hidden_layers == 1
    assert variant.config.get_text_config().num_hidden_layers == variant.config.num_layers == 2


@pytest.mark.parametrize("model_type", ["marian", *["blenderbot", "led", "t5"] * ALL])
def test_a_decoder_deeper_than_the_default_config_of_its_family_has_a_deep_cache(model_type):
    """transformers asks the config twice for that of the decoder, and the first answer has lost its field of the depth."""
    stack = architecture_of(small_config(model_type)).stacks["decoder"]
    depth = read(default_config(model_type), stack.depth) + 1
    variant = make_variant(native(model_type, **{stack.depth: depth}), [methods.Freeze(ffn="frozen")]).eval()
    once = variant.config.get_text_config(decoder=True)
    assert [once.num_hidden_layers, once.get_text_config(decoder=True).num_hidden_layers] == [depth, depth]
    assert generation_problems(variant, BATCH, widths=(1,), tokens=2) == []


def test_a_static_cache_is_sized_alike():
    variant = make_variant(native("t5"), [METHODS["selection"]]).eval()
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = variant.generate(**BATCH, **settings, use_cache=False)
    assert torch.equal(variant.generate(**BATCH, **settings, cache_implementation="static"), expected)


def test_remote_code_generates_the_same_with_a_cache(tmp_path):
    variant = make_variant(native("t5"), [METHODS["selection"]]).eval()
    variant.save_pretrained(tmp_path)
    write_remote_code(tmp_path, variant)
    program = (
        "import json, sys, torch; sys.modules['hf_freeze'] = None;"  # as where it is not installed
        "from transformers import AutoModelForSeq2SeqLM as Auto;"
        "model = Auto.from_pretrained(sys.argv[1], trust_remote_code=True).eval();"
        "batch = {name: torch.tensor(rows) for name, rows in json.loads(sys.argv[2]).items()};"
        "print(model.generate(**batch, max_new_tokens=5).tolist())"
    )
    batch = json.dumps({name: rows.tolist() for name, rows in BATCH.items()})
    printed = printed_by(program, tmp_path, batch).splitlines()[-1]
    assert json.loads(printed) == variant.generate(**BATCH, max_new_tokens=5, use_cache=False).tolist()


def test_the_depth_that_a_merged_config_names_for_its_cache_follows_later_methods():
    merged = make_variant(native("t5"), [METHODS["selection"]]).merge()
    deeper = make_variant(merged, [methods.LayerSharing(depth={"decoder": 4})]).eval()
    assert generation_problems(deeper, BATCH, widths=(1,)) == []
    assert generation_problems(deeper.merge(), BATCH, widths=(2,)) == []


@pytest.mark.parametrize("model_type", ["t5", "umt5", *["longt5"] * ALL])
@pytest.mark.parametrize("applied", [{}, {"norms": "separate"}, {"groups": 2, "start": "middle"}], ids=str)
def test_layers_that_share_the_first_ones_table_merge(model_type, applied):
    """T5 has one table of relative positions, in its first layer; UMT5 has one in each."""
    backbone = native(model_type)
    variant = make_variant(backbone, [methods.LayerSharing(depth={"encoder": 3, "decoder": 5}, **applied)]).eval()
    merged = variant.merge()
    assert (merged.config.num_layers, merged.config.num_decoder_layers) == (3, 5)
    assert set(merged.state_dict()) == set(native(model_type, num_layers=3, num_decoder_layers=5).state_dict())
    assert torch.allclose(logits(merged), logits(variant), rtol=0, atol=1e-5)
    assert not torch.allclose(logits(merged), logits(backbone), atol=1e-3), "the depth matters"
    assert logits(variant).isfinite().all()


def test_a_stack_of_one_layer_becomes_deeper_and_merges():
    chosen = [methods.LayerSelection(keep={"encoder": [0]}), methods.LayerSharing(depth={"encoder": 3})]
    variant = make_variant(native("t5"), chosen).eval()
    assert torch.allclose(logits(variant.merge()), logits(variant), rtol=0, atol=1e-5)


def test_parameters_of_the_first_layer_alone_are_left_out_only_if_its_copies_do_not_read_them(monkeypatch):
    config = small_config("t5")
    table = ("layer.0.SelfAttention.relative_attention_bias.weight",)
    described, probe = architecture_of(config), Probe(config)
    assert {name: stack.unread for name, stack in described.stacks.items()} == {"encoder": table, "decoder": table}
    native_forward = T5Attention.forward

    def forward(self, *args, position_bias=None, **kwargs):
        """Every layer that has a table computes its own bias."""
        own = self.has_relative_attention_bias and kwargs.get("key_value_states") is None
        return native_forward(self, *args, position_bias=None if own else position_bias, **kwargs)

    monkeypatch.setattr(T5Attention, "forward", forward)
    stacks = verify(described, probe).stacks
    assert {name: (stack.leads, stack.unread) for name, stack in stacks.items()} == {
        "encoder": (True, ()),
        "decoder": (True, ()),
    }
