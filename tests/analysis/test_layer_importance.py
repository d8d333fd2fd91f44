"""What layers are worth, by removal and by similarity; and the search for the layers to keep."""

import copy
import math
from itertools import combinations, product

import pytest
import torch
from support.deep import deep_model, each_architecture, layers_of, put_layers
from support.models import differences, outputs, perturbed
from transformers import AutoConfig, T5ForConditionalGeneration

from hf_freeze import analysis, make_variant
from hf_freeze.analysis.layer_search import total_loss
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import LayerDrop, LayerSelection

MARIAN = ARCHITECTURES["marian"]


def mean_loss(model, batches):
    loss, labels = total_loss(model, batches)
    return loss / labels


def without(native, architecture, stack, number):
    by_hand = copy.deepcopy(native)
    layers = layers_of(by_hand, architecture, stack)
    put_layers(by_hand, architecture, stack, [layer for place, layer in enumerate(layers) if place != number])
    return by_hand


@each_architecture
def test_removal_is_the_rise_of_the_loss(architecture):
    native, batch = deep_model(architecture)
    batches = [batch, {name: value[:1] for name, value in batch.items()}]
    scores = analysis.layer_importance(native, batches)
    whole = mean_loss(native, batches)
    for stack, values in scores.items():
        assert values.shape == (4,)
        for number, value in enumerate(values.tolist()):
            expected = mean_loss(without(native, architecture, stack, number), batches) - whole
            assert value == pytest.approx(expected, abs=1e-5)


@each_architecture
def test_sublayers_add_nothing(architecture):
    native, batch = deep_model(architecture)
    scores = analysis.layer_importance(native, [batch], unit="sublayers")
    expected = {f"{stack}.ffn" for stack in architecture.stacks}
    expected |= {
        f"{stack}.{kind}"
        for stack, description in architecture.stacks.items()
        for kind in description.attentions_in(native.config)
    }
    assert scores.keys() == expected
    whole = mean_loss(native, [batch])
    for name, values in scores.items():
        stack, kind = name.split(".")
        description = architecture.stacks[stack]
        linear = description.ffn[-1] if kind == "ffn" else description.attentions[kind].o
        for number in (0, 3):
            by_hand = copy.deepcopy(native)
            for parameter in layers_of(by_hand, architecture, stack)[number].get_submodule(linear).parameters():
                parameter.data.zero_()
            assert values[number].item() == pytest.approx(mean_loss(by_hand, [batch]) - whole, abs=1e-5)


@each_architecture
def test_block_influence_by_hidden_states(architecture):
    """Equation 1 of Men et al. (2024), on the states that the native model returns; without padding."""
    native, batch = deep_model(architecture)
    unlabelled = {name: value for name, value in batch.items() if "labels" not in name}
    if "decoder" in architecture.stacks and native.config.is_encoder_decoder:
        unlabelled["decoder_input_ids"] = torch.tensor([[0, 6, 2, 9], [0, 7, 1, 5]])
    scores = analysis.layer_importance(native, [unlabelled], measure="similarity")
    with torch.no_grad():
        result = native(**unlabelled, output_hidden_states=True)
    mask = unlabelled["attention_mask"].bool()
    for stack, values in scores.items():
        is_decoder = native.config.is_encoder_decoder and stack == "decoder"
        states = result.get(f"{stack}_hidden_states") or result.hidden_states
        checked = 4 if architecture.model_type in ("bert", "marian") else 3  # the last state is normed elsewhere
        for number in range(checked):
            x, y = states[number].double(), states[number + 1].double()
            influence = 1 - (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
            influence = influence.flatten() if is_decoder else influence[mask]
            assert values[number].item() == pytest.approx(influence.mean().item(), abs=1e-5)


def test_it_leaves_the_model_as_it_was():
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p={"layers": 0.5, "ffn": 0.5})]).train()
    variant.advance(1, 9)
    expected = outputs(native, batch)
    for settings in ({}, {"unit": "sublayers"}, {"measure": "similarity"}):
        found = analysis.layer_importance(variant, [batch], **settings)
        assert differences(found, analysis.layer_importance(native, [batch], **settings)) == []
        assert variant.training
    assert differences(outputs(variant.eval(), batch), expected) == []


def test_t5_whose_first_layer_hands_on_its_position_bias():
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 3, "num_heads": 2, "vocab_size": 40}
    config = AutoConfig.for_model("t5", **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    torch.manual_seed(0)
    native, batch = perturbed(T5ForConditionalGeneration(config).eval()), MARIAN.tiny_inputs("seq2seq-lm")
    scores = analysis.layer_importance(native, [batch])
    by_hand = make_variant(native, [analysis.select_layers({"encoder": torch.tensor([1.0, 0, 1])}, {"encoder": 2})])
    assert scores["encoder"][1].item() == pytest.approx(
        mean_loss(by_hand, [batch]) - mean_loss(native, [batch]), abs=1e-5
    )
    assert all(values.isfinite().all() for values in scores.values())
    best = analysis.search_layers(native, {"encoder": 1, "decoder": 2}, [batch])
    with_first = LayerSelection(keep=best.keep | {"encoder": [0]})
    losses = [mean_loss(make_variant(native, [method]), [batch]) for method in (best, with_first)]
    assert best.keep["encoder"] != [0], "the first layer may go, and leaves its bias behind"
    assert losses[0] <= losses[1] + 1e-5


def test_the_layers_of_the_highest_scores_are_kept():
    scores = {"encoder": torch.tensor([0.1, 0.4, 0.4, -0.2, 0.3]), "decoder": torch.tensor([1.0, 2.0])}
    assert analysis.select_layers(scores, {"encoder": 3}).keep == {"encoder": [1, 2, 4]}
    assert analysis.select_layers(scores, {"encoder": 1, "decoder": 2}).keep == {"encoder": [1], "decoder": [0, 1]}


# -- search ------------------------------------------------------------------------------------------------------------------


def test_the_search_compares_all_sub_networks():
    native, batch = deep_model(MARIAN)
    best = analysis.search_layers(native, {"encoder": 2, "decoder": 1}, [batch])
    losses = {}
    for encoder, decoder in product(combinations(range(4), 2), combinations(range(4), 1)):
        by_hand = copy.deepcopy(native)
        for stack, kept in (("encoder", encoder), ("decoder", decoder)):
            layers = layers_of(by_hand, MARIAN, stack)
            put_layers(by_hand, MARIAN, stack, [layers[number] for number in kept])
        losses[encoder, decoder] = mean_loss(by_hand, [batch])
    encoder, decoder = min(losses, key=losses.get)
    assert best.keep == {"encoder": [*encoder], "decoder": [*decoder]}


def test_a_search_of_few_trials_is_never_worse_than_every_other_layer():
    native, batch = deep_model(MARIAN, depth=6)
    layers, calls = {"encoder": 3, "decoder": 3}, []

    def evaluate(model):
        assert not model.training
        calls.append(model.config.encoder_layers)
        return -mean_loss(model, [batch])

    found = analysis.search_layers(native, layers, evaluate=evaluate, trials=12)
    assert len(calls) == 12, "of 400 sub-networks"
    assert set(calls) == {3}
    searched, every_other = (
        mean_loss(make_variant(native, [choice]), [batch]) for choice in (found, analysis.extract_depth(native, layers))
    )
    assert searched < every_other
    assert found == analysis.search_layers(native, layers, [batch], trials=12), "the loss and its negative decide alike"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, b: analysis.layer_importance(m, b, measure="size"),
            r"measure='size'\): choose from \['removal', 'simil",
        ),
        (
            lambda m, b: analysis.layer_importance(m, b, unit="heads"),
            r"unit='heads'\): choose from \['layers', 'sublayers'\]",
        ),
        (
            lambda m, b: analysis.layer_importance(m, b, measure="similarity", unit="sublayers"),
            "sublayers are measured by 'removal' only",
        ),
        (lambda m, b: analysis.layer_importance(m, []), "the dataloader is empty"),
        (
            lambda m, b: analysis.layer_importance(m, [{k: v for k, v in b[0].items() if k != "labels"} | DECODER]),
            "layer_importance needs a loss: batches with labels",
        ),
        (lambda m, b: analysis.select_layers({}, {"encoder": 1}), r"no scores of stack 'encoder'; choose from \[\]"),
        (
            lambda m, b: analysis.select_layers({"encoder": torch.ones(2)}, {"encoder": 3}),
            r"an integer in 1\.\.2, its layers",
        ),
        (lambda m, b: analysis.search_layers(m, {"encoder": 1}), "search_layers: give one of data and evaluate"),
        (
            lambda m, b: analysis.search_layers(m, {"encoder": 1}, b, trials=0),
            r"trials=0\): must be an integer of at least 1",
        ),
        (lambda m, b: analysis.search_layers(m, {"encoder": 9}, b), r"must be an integer in 1\.\.4, its layers"),
        (lambda m, b: analysis.search_layers(m, {"encoder": 1}, evaluate=lambda _: math.nan), "have the score nan"),
    ],
)
def test_what_is_refused(call, message):
    native, batch = deep_model(MARIAN)
    with pytest.raises(ValueError, match=message):
        call(native, [batch])


DECODER = {"decoder_input_ids": torch.tensor([[0, 6], [0, 7]])}
