"""What is derived of the four families described by hand is what their descriptions say."""

import functools
import logging

import pytest
import torch
import transformers
from support.small import small_config
from transformers import AutoConfig

import hf_freeze.architectures.derive
from hf_freeze import make_variant
from hf_freeze.architectures.base import base_name, canonical_parameters
from hf_freeze.architectures.derive import base_model, derive
from hf_freeze.architectures.probe import Probe
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import native_class
from hf_freeze.architectures.verify import verify, verify_layers
from hf_freeze.methods import VocabularyTrimming

CONFIGS = [(model_type, name) for model_type, by_hand in ARCHITECTURES.items() for name in by_hand.tiny_configs]
every_config = pytest.mark.parametrize(("model_type", "name"), CONFIGS, ids=map("-".join, CONFIGS))

# Where a derived description differs, and why: (model type, config) -> what is derived.
STACK_NAMES = {
    ("bert", "cross_attention"): {"encoder": "decoder"}
}  # `is_decoder` makes it causal; by hand it keeps its name
BIDIRECTIONAL = {("bert", "cross_attention"): False}  # for the same reason
WIDTHS = {("gpt2", "default_width"): None}  # n_inner is None in this config, so no integer of it decides the width
# By hand, all tables that some config has are named: only those that this one has count. Tables that are one have the field that
# decides their rows, which is not that of a decoder's own table.
MARIAN_SHARED = dict.fromkeys(("shared", "encoder.embed_tokens", "decoder.embed_tokens"), "vocab_size")
TOKEN_TABLES = {("marian", name): MARIAN_SHARED for name in ("base", "uneven", "other_heads")}


@functools.cache
def config_of(model_type, name):
    return AutoConfig.for_model(model_type, **ARCHITECTURES[model_type].tiny_configs[name])


def stacks_of(model_type, name):
    """(by hand, derived) for each stack."""
    by_hand, derived = ARCHITECTURES[model_type], derive(config_of(model_type, name))
    names = STACK_NAMES.get((model_type, name), {})
    assert set(derived.stacks) == {names.get(stack, stack) for stack in by_hand.stacks}
    return [(stack, derived.stacks[names.get(place, place)]) for place, stack in by_hand.stacks.items()]


@every_config
def test_stacks_are_as_described_by_hand(model_type, name):
    for by_hand, derived in stacks_of(model_type, name):
        assert derived.layers == by_hand.layers
        assert derived.depth == by_hand.depth
        assert derived.ffn == by_hand.ffn
        assert derived.activation == by_hand.activation
        assert derived.reads == by_hand.reads
        assert derived.width == WIDTHS.get((model_type, name), by_hand.width)
        assert (derived.absent, derived.projections, derived.others, derived.apart) == ({}, (), (), False)


@every_config
def test_attentions_are_as_described_by_hand(model_type, name):
    config = config_of(model_type, name)
    for by_hand, derived in stacks_of(model_type, name):
        described = by_hand.attentions_in(config)
        assert list(derived.attentions) == list(described)
        for kind, expected in described.items():
            found = derived.attentions[kind]
            assert (found.q, found.k, found.v, found.o) == (expected.q, expected.k, expected.v, expected.o)
            for number in ("head_count", "head_size", "key_head_count"):
                assert getattr(found, number)(config) == getattr(expected, number)(config), number
            assert found.layout == expected.layout
            assert found.bidirectional == BIDIRECTIONAL.get((model_type, name), expected.bidirectional)
            assert (found.others, found.biases, found.norms) == ((), (), {})


@every_config
def test_every_parameter_of_every_task_has_the_component_described_by_hand(model_type, name):
    config, by_hand = config_of(model_type, name), ARCHITECTURES[model_type]
    derived = derive(config)
    assert set(by_hand.tasks) <= set(derived.tasks)
    for task in by_hand.tasks:
        with torch.device("meta"):
            model = native_class(task, type(config))(config)
        names = [base_name(model, parameter) for parameter, _ in canonical_parameters(model)]
        expected = {parameter: by_hand.component(parameter) for parameter in names}
        assert {parameter: derived.component(parameter) for parameter in names} == expected
        assert {parameter: found for parameter in names if len(found := set(derived.matches(parameter))) > 1} == {}


@every_config
def test_tables_of_tokens_are_those_described_by_hand(model_type, name):
    config, by_hand = config_of(model_type, name), ARCHITECTURES[model_type]
    with torch.device("meta"):
        modules = dict(native_class("feature-extraction", type(config))(config).named_modules(remove_duplicate=False))
    present = {table: field for table, field in by_hand.token_tables.items() if table in modules}
    assert derive(config).token_tables == TOKEN_TABLES.get((model_type, name), present)


@every_config
def test_everything_is_proved_but_blocks_of_their_own(model_type, name):
    refusals = derive(config_of(model_type, name)).refusals
    assert set(refusals) == {"blocks"}
    assert "description by hand" in refusals["blocks"]


# What a proof cannot show on a config -> why.
NOT_SHOWN = {
    ("bert", "one_head"): {"heads": "encoder self: the small model has one head"},
    ("marian", "untied"): {"vocabulary": "its tables of tokens have [40, 44] rows"},
}


@every_config
def test_descriptions_by_hand_pass_the_same_proofs(model_type, name):
    probe = Probe(config_of(model_type, name))
    proved = verify_layers(verify(ARCHITECTURES[model_type], probe), probe)
    assert proved.refusals == NOT_SHOWN.get((model_type, name), {})


@pytest.mark.parametrize("model_type", ["roberta", "t5", "falcon", "mixtral", "modernbert", "vit", "bart"])
def test_every_parameter_in_a_layer_has_one_component_which_is_not_the_head(model_type):
    config = small_config(model_type)
    derived = derive(config)
    names = [name for name, _ in base_model(config).named_parameters() if derived.layer_of(name)]
    assert names
    found = {name: set(derived.matches(name)) for name in names}
    assert {name: components for name, components in found.items() if len(components) != 1} == {}


def test_two_vocabularies_are_both_described():
    config = small_config("fsmt", src_vocab_size=60, tgt_vocab_size=80)
    tables = {"encoder.embed_tokens": "src_vocab_size", "decoder.embed_tokens": "tgt_vocab_size"}
    assert derive(config).token_tables == tables


def test_a_vocabulary_is_not_trimmed_where_the_output_matrix_is_not_told():
    """FSMT's `get_output_embeddings` gives a table; its logits come from a linear of its own."""
    config = small_config("fsmt")
    reason = "the output of its seq2seq-lm model, a Embedding, is no matrix"
    assert derive(config).refusals["vocabulary"].startswith(reason)
    with pytest.raises(ValueError, match=f"'vocabulary_trimming' does not support 'fsmt'; {reason}"):
        make_variant(config, [VocabularyTrimming(keep=list(range(40)))], task="seq2seq-lm")


def test_a_family_is_derived_once_whatever_class_its_config_names(monkeypatch):
    """A variant's config names the variant's class, where that of its backbone names none."""
    monkeypatch.setattr(hf_freeze.architectures.derive, "_DERIVED", {})
    monkeypatch.setattr(hf_freeze.architectures.derive, "_SMALL", {})
    config = small_config("bloom")
    derived = derive(config)
    config.architectures = ["VariantBloomForCausalLM"]
    assert derive(config) is derived
    config.hidden_size *= 2
    assert derive(config) is not derived


def test_deriving_is_silent_and_leaves_the_verbosity_as_it_was(monkeypatch):
    """It builds models of all tasks, and transformers has advice on some, such as a RobertaLMHeadModel that is no decoder."""
    monkeypatch.setattr(hf_freeze.architectures.derive, "_DERIVED", {})
    monkeypatch.setattr(hf_freeze.architectures.derive, "_SMALL", {})
    config = small_config("roberta")
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "handlers", [handler])
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_info()
    try:
        derive(config)
        assert transformers.utils.logging.get_verbosity() == logging.INFO
    finally:
        transformers.utils.logging.set_verbosity(before)
    assert logged == []


def test_a_shared_expert_as_wide_as_the_hidden_size_is_told_from_its_gate():
    """By shapes alone, the gate of one output could be an FFN's linear."""
    sizes = {"moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    equal, other = (
        derive(AutoConfig.for_model("qwen2_moe", hidden_size=64, shared_expert_intermediate_size=width, **sizes))
        for width in (64, 48)
    )
    assert equal.stacks["decoder"].ffn == other.stacks["decoder"].ffn
    assert equal.stacks["decoder"].others == other.stacks["decoder"].others
    assert "neurons" not in equal.refusals


def test_the_small_model_of_one_with_dense_layers_before_its_experts_has_layers_of_both_kinds():
    stack = derive(AutoConfig.for_model("deepseek_v3")).stacks["decoder"]  # three dense layers, as published
    assert {"mlp.gate_proj", "mlp.shared_experts.gate_proj"} <= set(stack.ffn)
    assert "mlp.experts" in stack.experts
