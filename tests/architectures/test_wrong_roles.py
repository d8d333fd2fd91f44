"""A role that is wrong is not proved: each fault is planted into the description of a small model that is understood."""

import re
from dataclasses import replace

import pytest
import torch
from support.small import small_config
from torch import nn
from transformers import AutoConfig

from hf_freeze.architectures import exchange as proofs
from hf_freeze.architectures.derive import derive
from hf_freeze.architectures.describe import describe
from hf_freeze.architectures.fields import with_fields
from hf_freeze.architectures.probe import Probe
from hf_freeze.architectures.verify import sees_the_future, verify, verify_layers

LAYOUTS = {  # family -> changes of its config, the layout of its fused projection by the source of transformers
    "gpt_neox": ({}, "heads"),
    "bloom": ({}, "heads"),
    "falcon with a key for all heads": ({}, "blocks"),
    "falcon with a key for each head": ({"multi_query": False}, "heads"),
    "falcon with groups": ({"new_decoder_architecture": True, "num_kv_heads": 2}, "groups"),
    "phi3": ({}, "blocks"),
    "phi3 with groups": ({"num_key_value_heads": 2}, "blocks"),
}


def described(model_type="bert", **changes):
    """A probe and the description of its model, not proved, whose one stack is named "encoder"."""
    probe = Probe(small_config(model_type, **changes))
    return probe, describe(probe.model, probe.config)


def with_stack(architecture, **changes):
    return replace(architecture, stacks={"encoder": replace(architecture.stacks["encoder"], **changes)})


def with_attention(architecture, **changes):
    attention = architecture.stacks["encoder"].attentions["self"]
    return with_stack(architecture, attentions={"self": replace(attention, **changes)})


def swapped(architecture, one, other):
    attention = architecture.stacks["encoder"].attentions["self"]
    return with_attention(architecture, **{one: getattr(attention, other), other: getattr(attention, one)})


def test_the_right_description_is_proved():
    probe, architecture = described()
    assert verify(architecture, probe).refusals == {}
    assert verify_layers(with_fields(architecture, probe.config), probe).refusals == {}


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_an_output_projection_in_another_role_is_refused(role):
    probe, architecture = described()
    refusals = verify(swapped(architecture, role, "o"), probe).refusals
    assert refusals == {"heads": "encoder self: exchanging its heads changes the outputs: heads are not alike"}


HEADS = {  # numbers and sizes that the model does not have -> what is said; it has 4 heads of 8
    "two of 16": ({"heads": 2, "size": 16}, "a removed head is not the same as one that is zero"),
    "eight of 4": ({"heads": 8, "size": 4}, "a removed head is not the same as one that is zero"),
    "two of 8": ({"heads": 2}, "its projections do not hold 2 heads as expected"),
    "eight of 8": ({"heads": 8}, "its projections do not hold 8 heads as expected"),
    "shared keys": ({"groups": 2}, "its projections do not hold 4 heads as expected"),
    "one of 32": ({"heads": 1, "size": 32}, "the small model has one head"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_wrong_number_or_size_of_heads_is_refused(name):
    probe, architecture = described()
    changes, expected = HEADS[name]
    refusals = verify(with_attention(architecture, **changes), probe).refusals
    assert list(refusals) == ["heads"]
    assert f"encoder self: {expected}" in refusals["heads"]
    assert "\n" not in refusals["heads"]


def test_too_few_heads_for_keys_are_refused():
    probe, architecture = described("llama", num_key_value_heads=2)
    assert verify(architecture, probe).refusals == {}
    refusals = verify(with_attention(architecture, groups=None), probe).refusals
    assert "its projections do not hold 4 heads as expected" in refusals["heads"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_a_fused_projection_is_found(name):
    changes, layout = LAYOUTS[name]
    probe, architecture = described(name.split()[0], **changes)
    for planted in proofs.LAYOUTS:
        proved = verify(with_attention(architecture, layout=planted), probe)
        assert "heads" not in proved.refusals
        assert proved.stacks["encoder"].attentions["self"].layout == layout


# With one key for each head, groups are heads; with one for all heads, the only group is a block.
ALIKE = {
    "gpt_neox": "groups",
    "bloom": "groups",
    "falcon with a key for each head": "groups",
    "falcon with a key for all heads": "groups",
}
WRONG = [
    (n, other) for n, (_, right) in LAYOUTS.items() for other in proofs.LAYOUTS if other not in (right, ALIKE.get(n))
]


@pytest.mark.parametrize(("name", "layout"), WRONG, ids=[f"{name}, {layout}" for name, layout in WRONG])
def test_a_wrong_layout_is_refused(name, layout, monkeypatch):
    monkeypatch.setattr(proofs, "LAYOUTS", (layout,))
    probe, architecture = described(name.split()[0], **LAYOUTS[name][0])
    refusals = verify(architecture, probe).refusals
    assert list(refusals) == ["heads"]
    assert re.search("exchanging its heads changes the outputs|do not hold 4 heads as expected", refusals["heads"])


FFNS = {  # linears -> what is said
    "in the wrong order": (
        lambda q, first, last: (last, first),
        "exchanging the neurons of its FFN changes the outputs",
    ),
    "a query as the first": (lambda q, first, last: (q, last), "its FFN is not a matrix or two, an activation and"),
    "one of two": (lambda q, first, last: (last,), "its FFN is not a matrix or two, an activation and a matrix"),
    "none": (lambda q, first, last: (), "no linears in its FFN"),
}


@pytest.mark.parametrize("name", FFNS)
def test_a_wrong_ffn_is_refused(name):
    probe, architecture = described()
    stack = architecture.stacks["encoder"]
    choose, expected = FFNS[name]
    ffn = choose(stack.attentions["self"].q, *stack.ffn)
    refusals = verify(with_stack(architecture, ffn=ffn), probe).refusals
    assert list(refusals) == ["neurons"]
    assert refusals["neurons"].startswith(f"encoder: {expected}")


def test_half_of_a_gated_ffn_is_refused():
    probe, architecture = described("llama")
    gate, up, down = architecture.stacks["encoder"].ffn
    assert verify(architecture, probe).refusals == {}
    for one in (gate, up):
        refusals = verify(with_stack(architecture, ffn=(one, down)), probe).refusals
        assert refusals == {"neurons": "encoder: exchanging the neurons of its FFN changes the outputs"}


def test_a_table_of_something_else_is_refused():
    probe, architecture = described()
    tables = {"embeddings.position_embeddings": ""}
    assert "changes the outputs" in verify(replace(architecture, token_tables=tables), probe).refusals["vocabulary"]
    tables |= architecture.token_tables
    refusals = verify(replace(architecture, token_tables=tables), probe).refusals
    assert refusals["vocabulary"] == "its tables of tokens have [64, 99] rows"


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + 1


def put(probe, name, module, weight):
    """Put a module in the place of another of the probe's model."""
    with torch.no_grad():
        module.weight.copy_(weight)
    probe.model.set_submodule(name, module)
    probe.outputs = probe.run()


def test_a_linear_that_computes_something_else_is_refused():
    probe, architecture = described()
    name = "encoder.layer.1.output.dense"
    put(probe, name, Doubled(48, 32), probe.model.get_submodule(name).weight)
    assert verify(architecture, probe).refusals["linears"] == f"{name!r} computes something else than x Wᵀ + b"


class Grouped(nn.Linear):
    """Each half of the outputs has inputs of its own, as in DeepSeek-V4: the matrix has half as many columns."""

    def forward(self, x):
        halves = zip(x.chunk(2, dim=-1), self.weight.chunk(2), strict=True)
        return torch.cat([part @ rows.T for part, rows in halves], dim=-1) + self.bias


def test_a_linear_with_a_matrix_of_another_shape_is_refused():
    probe, architecture = described()
    name = "encoder.layer.1.output.dense"
    put(probe, name, Grouped(24, 32), probe.model.get_submodule(name).weight[:, :24])
    refusals = verify(architecture, probe).refusals
    assert refusals["linears"] == f"{name!r} computes something else than x Wᵀ + b"


def test_a_linear_that_is_never_called_is_refused():
    probe, architecture = described("roberta", add_cross_attention=True, is_decoder=True)
    assert verify(architecture, probe).refusals == {}
    del probe.inputs["encoder_hidden_states"]
    probe.outputs = probe.run()
    refusals = verify(architecture, probe).refusals
    assert refusals["linears"] == "'encoder.layer.0.crossattention.self.query' is not called as a module"
    assert refusals["heads"] == "encoder cross: its heads do not matter for the outputs"


def test_a_table_that_does_more_than_look_up_is_refused():
    probe, architecture = described()
    name = "embeddings.word_embeddings"
    put(probe, name, Shifted(99, 32), probe.model.get_submodule(name).weight)
    refusals = verify(architecture, probe).refusals
    assert refusals == {"vocabulary": "its Shifted does more than look up rows and scale them"}


@pytest.mark.parametrize("field", ["num_attention_heads", "type_vocab_size"])
def test_a_depth_in_another_field_is_refused(field):
    probe, architecture = described()
    architecture = with_stack(with_fields(architecture, probe.config), depth=field)
    refusals = verify_layers(architecture, probe).refusals
    assert list(refusals) == ["layers"]
    assert refusals["layers"].startswith("encoder: a shallower native model has ")


CAUSAL = {
    "bert": False,
    "roberta": False,
    "gpt2": True,
    "llama": True,
    "bloom": True,
    "modernbert": False,
    "vit": False,
}


@pytest.mark.parametrize("model_type", CAUSAL)
def test_causal_models_do_not_see_the_future(model_type):
    config = small_config(model_type)
    assert sees_the_future(Probe(config)) == (not CAUSAL[model_type])
    ((name, stack),) = derive(config).stacks.items()
    assert name == ("decoder" if CAUSAL[model_type] else "encoder")
    assert [attention.bidirectional for attention in stack.attentions.values()] == [not CAUSAL[model_type]]


def test_a_switch_of_the_config_decides_what_is_seen():
    decoder = small_config("roberta", is_decoder=True)
    assert not sees_the_future(Probe(decoder))
    assert list(derive(decoder).stacks) == ["decoder"]


def test_what_a_proof_cannot_see_is_refused_by_hand():
    config = AutoConfig.for_model("big_bird")
    assert "short sentences" in derive(config).refusals["heads"]
