"""LayerDrop: which layers run in a step of training, beside what else, and the shallower models that are taken from it."""

import copy
import math
import pickle
from fractions import Fraction
from itertools import chain, pairwise, product

import numpy as np
import pytest
import torch
from support.cases import native_config
from support.deep import deep_config, deep_model, each_architecture, layers_of, put_layers
from support.models import differences, outputs, perturbed
from support.training import objective
from test_theseus import MARIAN, check_independent, in_training, successors
from transformers import AutoConfig, TrainerControl, TrainerState, TrainingArguments

from hf_freeze import VariantCallback, analysis, make_variant
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.layer_forward import Replaced, Skipped
from hf_freeze.methods import FFNPruning, Freeze, HeadPruning, LayerDrop, LowRank, Theseus

ALL = 1 - 1e-9  # a probability with which every layer is left out


def dropped(model, architecture=MARIAN, stacks=None):
    """Whether each layer is left out now, by stack."""
    return {
        stack: [Skipped.of(layer).active for layer in layers_of(model, architecture, stack)]
        for stack in stacks or architecture.stacks
    }


def without(native, architecture, gone):
    """The native model without these layers, and the layers that it has."""
    by_hand = copy.deepcopy(native)
    for stack, out in gone.items():
        layers = layers_of(by_hand, architecture, stack)
        put_layers(by_hand, architecture, stack, [layer for layer, left in zip(layers, out, strict=True) if not left])
    return by_hand


def draws_of(model, steps, total=5000):
    return torch.tensor([(model.advance(step, total), [*chain(*dropped(model).values())])[1] for step in steps])


def on_meta(*methods, config=None):
    with torch.device("meta"):
        return make_variant(config or deep_config(MARIAN), list(methods), task="seq2seq-lm")


# -- what runs ---------------------------------------------------------------------------------------------------------------


@each_architecture
def test_a_step_computes_and_learns_as_a_model_without_the_layers(architecture):
    native, batch = deep_model(architecture)
    variant = make_variant(native, [LayerDrop(p=0.5, seed=1)])
    patterns = []
    for step in range(6):
        variant.advance(step, 6)
        assert differences(outputs(variant, batch), outputs(native, batch)) == []
        gone = dropped(variant, architecture)
        patterns.append(str(gone))
        by_hand = without(native, architecture, gone)
        assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []
        variant.zero_grad()
        objective(variant, batch).backward()
        objective(by_hand, batch).backward()
        for stack, out in gone.items():
            left = iter(layers_of(by_hand, architecture, stack))
            for layer, skipped in zip(layers_of(variant, architecture, stack), out, strict=True):
                expected = {} if skipped else dict(next(left).named_parameters())
                for name, parameter in layer.named_parameters():
                    assert (parameter.grad is None) == (skipped or expected[name].grad is None), name
                    if parameter.grad is not None:
                        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-7)
    assert len(set(patterns)) > 3


@each_architecture
def test_all_layers_may_be_left_out(architecture):
    native, batch = deep_model(architecture)
    variant = make_variant(native, [LayerDrop(p=ALL)])
    variant.advance(0, 1)
    by_hand = without(native, architecture, dict.fromkeys(architecture.stacks, [True] * 4))
    assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []
    assert differences(in_training(variant, batch), in_training(native, batch)) != []
    objective(variant, batch).backward()


def test_so_they_may_where_only_layers_before_them_are_trained():
    """The loss then has no gradient, though the encoder's states have one."""
    native, batch = deep_model(MARIAN)
    rest = Freeze(embeddings="frozen", norm="frozen", head="frozen")
    variant = make_variant(native, [rest, LayerDrop(p=ALL, stacks=["decoder"])])
    variant.advance(0, 1)
    by_hand = without(native, MARIAN, {"decoder": [True] * 4}).train()
    loss = variant.train()(**batch).loss
    torch.testing.assert_close(loss, by_hand(**batch).loss)
    loss.backward()
    assert not any(p.grad is not None and p.grad.any() for p in variant.parameters())


def test_stacks_limit_it():
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=ALL, stacks=["decoder"])])
    variant.advance(0, 1)
    by_hand = without(native, MARIAN, {"decoder": [True] * 4})
    assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []


def test_without_a_probability_it_needs_no_schedule():
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=0)])
    assert not variant.scheduled
    assert not variant.skips
    variant.train()(**batch).loss.backward()  # where LayerDrop(p=.2) is refused without a callback
    assert differences(in_training(variant, batch), in_training(native, batch)) == []
    with pytest.raises(ValueError, match=r"the methods \['layer_drop'\] follow the progress of training"):
        make_variant(native, [LayerDrop(p=0.2)]).train()(**batch)


def test_a_draw_is_a_function_of_the_seed_and_the_step(tmp_path):
    variant = make_variant(deep_model(MARIAN)[0], [LayerDrop(p=0.5, seed=7)])
    expected = draws_of(variant, range(64))
    variant.save_pretrained(tmp_path)
    for other in (AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path), on_meta(LayerDrop(p=0.5, seed=7))):
        assert torch.equal(draws_of(other, range(64)), expected)
    assert torch.equal(draws_of(variant, reversed(range(64)), total=64).flip(0), expected)


def test_draws_come_with_the_probability_and_know_nothing_of_each_other():
    rare = draws_of(on_meta(LayerDrop()), range(2000)).double()
    assert float(rare.mean()) == pytest.approx(0.2, abs=4 * math.sqrt(0.2 * 0.8 / rare.numel()))
    check_independent(*(draws_of(on_meta(LayerDrop(p=0.5, seed=seed)), range(2000)) for seed in (0, 1)))


def saved_and_loaded(model, folder):
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [lambda model, _: copy.deepcopy(model), lambda model, _: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_drops_layers_by_itself(copied, tmp_path):
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=0.5)])
    variant.advance(1, 9)
    expected = in_training(variant, batch)
    twin = copied(variant, tmp_path)
    assert differences(in_training(twin, batch), expected) == []
    twin.advance(2, 9)
    assert dropped(twin) != dropped(variant)
    by_hand = without(perturbed(twin).merge(), MARIAN, dropped(twin))
    assert differences(in_training(twin, batch), in_training(by_hand, batch)) == []
    assert differences(in_training(variant, batch), expected) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"p": 1}, r"LayerDrop\(p=1\): must be a share of at least 0 and below 1"),
        ({"p": -0.1}, r"LayerDrop\(p=-0\.1\): must be a share"),
        ({"stacks": ["middle"]}, r"no stack 'middle' in marian; choose from \['decoder', 'encoder'\]"),
        ({"stacks": []}, r"stacks=\[\]\): must be None or a list of different stacks"),
        ({"stacks": ["encoder", "encoder"]}, r"must be None or a list of different stacks"),
        ({"stacks": "encoder"}, r"stacks='encoder'\): must be None or a list"),
        ({"seed": -1}, r"LayerDrop\(seed=-1\)"),
    ],
)
def test_settings_that_are_refused(setting, message):
    with pytest.raises(ValueError, match=message) as refused:
        on_meta(LayerDrop(**setting))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_second_one_is_refused_be_it_the_same(seed):
    with pytest.raises(ValueError, match="LayerDrop after 'layer_drop': it can be applied only once"):
        on_meta(LayerDrop(), LayerDrop(seed=seed))
    with pytest.raises(ValueError, match="LayerDrop after 'layer_drop'"), torch.device("meta"):
        make_variant(on_meta(LayerDrop()), [LayerDrop(seed=seed)])


@pytest.mark.parametrize("field", ["encoder_layerdrop", "decoder_layerdrop"])
def test_that_of_the_backbone_is_refused(field):
    config = deep_config(MARIAN)
    setattr(config, field, 0.1)
    with pytest.raises(ValueError, match=rf"the backbone skips layers already, by {field}=0\.1; set that to 0"):
        on_meta(LayerDrop(), config=config)


# -- parts of layers ---------------------------------------------------------------------------------------------------------

UNITS = {"attention": 0.5, "ffn": 0.5, "heads": 0.3, "neurons": 0.3}


def thinned_by_hand(native, variant, architecture):
    """The native model with zeros in the output matrices for what `variant` leaves out now, and in their biases for a whole
    sublayer; with the names of these matrices."""
    by_hand, ends = copy.deepcopy(native), set()
    for stack in architecture.stacks:
        pairs = zip(layers_of(variant, architecture, stack), layers_of(by_hand, architecture, stack), strict=True)
        for layer, plain in pairs:
            drop = layer.thinned
            for name, kept in drop.kept.items():
                linear = plain.get_submodule(name)
                inputs = linear.weight if hasattr(linear, "nf") else linear.weight.T  # GPT-2's are (inputs, outputs)
                for rows, keep in zip(inputs.data.tensor_split(len(kept)), kept, strict=True):
                    rows *= keep
                ends.add(linear)
            for name in drop.silent:
                linear = plain.get_submodule(name)
                for parameter in linear.parameters():
                    parameter.data.zero_()
                ends.add(linear)
    return by_hand, {name for name, module in by_hand.named_modules() if module in ends}


@each_architecture
def test_sublayers_heads_and_neurons_are_left_out(architecture):
    native, batch = deep_model(architecture)
    variant = make_variant(native, [LayerDrop(p=UNITS, groups=4, seed=2)])
    assert differences(outputs(variant, batch), outputs(native, batch)) == []
    seen = []
    for step in range(3):
        variant.advance(step, 3)
        by_hand, ends = thinned_by_hand(native, variant, architecture)
        seen.append(in_training(variant, batch))
        assert differences(seen[-1], in_training(by_hand, batch)) == []
        variant.zero_grad()
        objective(variant, batch).backward()
        objective(by_hand, batch).backward()
        for name, parameter in variant.named_parameters():
            expected = by_hand.get_parameter(name).grad
            if name.rpartition(".")[0] in ends or expected is None:  # the gradient of a zero is no zero
                continue
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert all(differences(one, other) != [] for one, other in pairwise(seen))


@each_architecture
def test_without_any_sublayer_the_hidden_states_pass_through(architecture):
    """And their parameters get no gradient, so that an optimiser leaves them as they are."""
    native, batch = deep_model(architecture)
    variant = make_variant(native, [LayerDrop(p={"attention": ALL, "ffn": ALL})])
    variant.advance(0, 1)
    objective(variant.train(), batch).backward()
    linears = [name for part in ("attention", "ffn") for _, _, name in architecture.linears(variant.config, part)]
    for name in linears:
        assert all(parameter.grad is None for parameter in variant.base_model.get_submodule(name).parameters()), name
    if architecture.model_type in ("gpt2", "llama"):  # whose norms lie within the sublayers
        by_hand = without(native, architecture, dict.fromkeys(architecture.stacks, [True] * 4))
        assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []


def test_one_kind_of_attention_and_whole_layers_beside_it():
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p={"cross": ALL, "layers": 0.5}, seed=3)])
    variant.advance(0, 1)
    silent = copy.deepcopy(native)
    for layer in layers_of(silent, MARIAN, "decoder"):
        for parameter in layer.encoder_attn.out_proj.parameters():
            parameter.data.zero_()
    gone = dropped(variant)
    assert {True, False} == {*gone["encoder"], *gone["decoder"]}
    assert differences(in_training(variant, batch), in_training(without(silent, MARIAN, gone), batch)) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again_lack_the_same_parts(reentrant):
    native, batch = deep_model(MARIAN)
    grads = []
    for checkpointing in (False, True):
        variant = make_variant(native, [LayerDrop(p=UNITS | {"layers": 0.2}, seed=1)]).train()
        if checkpointing:
            enable = getattr(variant, "activation_checkpointing_enable", variant.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        variant.advance(1, 9)
        variant(**batch).loss.backward()
        grads.append({name: p.grad for name, p in variant.named_parameters() if p.grad is not None and p.grad.any()})
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_layers_are_drawn_the_same_whatever_else_is_dropped():
    alone, beside = on_meta(LayerDrop(p=0.5, seed=7)), on_meta(LayerDrop(p={"layers": 0.5, "ffn": 0.2}, seed=7))
    assert torch.equal(draws_of(alone, range(32)), draws_of(beside, range(32)))


def test_parts_are_dropped_with_their_probabilities():
    variant, counts = on_meta(LayerDrop(p={"self": 0.2, "heads": 0.4, "neurons": 0.1}, groups=3)), {True: [], False: []}
    heads, neurons = [], []
    for step in range(500):
        variant.advance(step, 500)
        for stack in MARIAN.stacks:
            for layer in layers_of(variant, MARIAN, stack):
                drop = layer.thinned
                counts[True].append("self_attn.out_proj" in drop.silent)
                heads += [not kept for name, of in drop.kept.items() if "attn" in name for kept in of]
                neurons += [not kept for kept in drop.kept["fc2"]]
    for found, p in ((counts[True], 0.2), (heads, 0.4), (neurons, 0.1)):
        assert sum(found) / len(found) == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / len(found)))
    assert len(heads) == 500 * 12 * 2
    assert len(neurons) == 500 * 8 * 3


def test_a_saved_one_goes_on_with_the_same_draws(tmp_path):
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=UNITS, seed=5)])
    variant.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert differences(outputs(loaded.eval(), batch), outputs(native, batch)) == []
    for model in (variant, loaded):
        model.advance(3, 9)
    assert differences(in_training(loaded, batch), in_training(variant, batch)) == []
    for twin in (copy.deepcopy(variant), pickle.loads(pickle.dumps(variant))):
        assert differences(in_training(twin, batch), in_training(variant, batch)) == []
    assert differences(outputs(variant.eval().merge(), batch), outputs(native, batch)) == []


def test_later_methods_remove_heads_and_replace_linears():
    native, batch = deep_model(MARIAN)
    cut = HeadPruning(heads={"encoder.0.self": [1], "decoder.1.cross": [0, 1]})
    small = [cut, FFNPruning(width=7), LowRank(rank=3, components=["ffn"])]
    variant = make_variant(native, [LayerDrop(p={"attention": 0.3, "ffn": 0.3, "heads": 0.5, "neurons": 0.5}), *small])
    plain = make_variant(native, small)
    assert differences(outputs(variant, batch), outputs(plain, batch)) == []
    for step in range(4):
        variant.advance(step, 4)
        kept = [layer.thinned.kept for layer in layers_of(variant, MARIAN, "encoder")]
        assert [len(of["self_attn.out_proj"]) for of in kept] == [1, 2, 2, 2]
        assert differences(in_training(variant, batch), in_training(plain, batch)) != []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"p": {}}, r"LayerDrop\(p=\{\}\): must be a share, or a dict such as \{'layers': 0\.2, 'heads': 0\.1\}"),
        ({"p": {"ffn": 1}}, r"LayerDrop\(p\['ffn'\]=1\): must be a share of at least 0 and below 1"),
        (
            {"p": {"fnn": 0.1}},
            r"no unit 'fnn' in marian; choose from \['layers', 'attention', 'self', 'cross', 'ffn', 'heads',",
        ),
        ({"p": {"cross": 0.1}, "stacks": ["encoder"]}, r"no unit 'cross' in marian; choose from .*'self', 'ffn'"),
        ({"p": {"attention": 0.1, "self": 0.1}}, r"'attention' and 'self' name the same; leave one of them out"),
        ({"p": 0.1, "groups": 0}, r"LayerDrop\(groups=0\): must be an integer of at least 1"),
    ],
)
def test_units_that_are_refused(setting, message):
    with pytest.raises(ValueError, match=message) as refused:
        on_meta(LayerDrop(**setting))
    assert "\n" not in str(refused.value)


def test_units_of_derived_families():
    """T5's sublayers are modules of their own; Mixtral's FFNs are experts."""
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    t5 = AutoConfig.for_model("t5", **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    variant = make_variant(t5, [LayerDrop(p=UNITS)], task="seq2seq-lm")
    batch = MARIAN.tiny_inputs("seq2seq-lm")
    expected = outputs(variant.merge(), batch)
    assert differences(outputs(variant, batch), expected) == []
    variant.advance(0, 1)
    assert differences(in_training(variant, batch), expected) != []
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    mixtral = AutoConfig.for_model("mixtral", **sizes, num_key_value_heads=2, num_local_experts=2)
    with pytest.raises(ValueError, match="'ffn' of this mixtral cannot be left out: its FFNs have experts"):
        make_variant(mixtral, [LayerDrop(p={"ffn": 0.1})], task="causal-lm")
    make_variant(mixtral, [LayerDrop(p={"heads": 0.1})], task="causal-lm").advance(0, 1)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", [LayerDrop(p=0.5), LayerDrop(p=0.5, learned=True), Theseus(train="all")], ids=str)
def test_layers_that_return_a_tuple_are_checkpointed(method, reentrant):
    """T5's return the position bias. What a step leaves out has no gradient, as without checkpointing; none of zeros."""
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 4, "num_heads": 2, "vocab_size": 40}
    t5 = AutoConfig.for_model("t5", **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    variant = make_variant(t5, [method], task="seq2seq-lm").train()
    variant.enable_input_require_grads()
    grads = []
    for checkpointing in (False, True):
        variant.zero_grad()
        if checkpointing:
            enable = getattr(variant, "activation_checkpointing_enable", variant.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        variant.advance(1, 9)
        variant(**MARIAN.tiny_inputs("seq2seq-lm")).loss.backward()
        grads.append({name: p.grad for name, p in variant.named_parameters() if p.grad is not None})
    assert len(grads[0]) < sum(p.requires_grad for p in variant.parameters())
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


# -- beside others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [LayerDrop, Theseus])
def test_beside_theseus_a_module_is_left_out_or_replaced(first):
    """Before Theseus, LayerDrop leaves out what was there, which the predecessor is a copy of without draws of its own: layers
    of the successor. After it, whole modules."""
    (native, batch), both = deep_model(MARIAN), [LayerDrop(p=0.4, seed=3), Theseus(seed=4)]
    variant = perturbed(make_variant(native, both if first is LayerDrop else both[::-1]))
    seen = set()
    for step in range(10):
        variant.advance(step, 10)
        by_hand = copy.deepcopy(native)
        for stack in MARIAN.stacks:
            former, new, layers = layers_of(by_hand, MARIAN, stack), successors(variant, native, MARIAN, stack), []
            for number, module in enumerate(layers_of(variant, MARIAN, stack)):
                former_runs, out = Replaced.of(module).active, Skipped.of(module).active
                seen.add((former_runs, out))
                if former_runs and (first is LayerDrop or not out):
                    layers += former[2 * number : 2 * number + 2]
                elif not out:
                    layers.append(new[number])
            put_layers(by_hand, MARIAN, stack, layers)
        assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []
    assert len(seen) == 4
    variant.finalize()
    plain = variant.merge()
    for step in range(4):
        variant.advance(step, 10)
        by_hand = without(plain, MARIAN, dropped(variant))
        assert differences(in_training(variant, batch), in_training(by_hand, batch)) == []
    assert variant.config.encoder_layers == 2


def test_the_effect_of_heads_can_be_measured_in_training():
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LayerDrop(p=0.5)])
    variant.advance(1, 9)
    expected, found = in_training(variant, batch), analysis.head_ablation(variant, [batch])
    assert differences(found, analysis.head_ablation(native, [batch])) == []
    assert variant.training
    assert differences(in_training(variant, batch), expected) == []
    variant.advance(2, 9)
    assert differences(in_training(variant, batch), in_training(without(native, MARIAN, dropped(variant)), batch)) == []


@pytest.mark.parametrize(("find_unused", "refused"), [(None, False), (False, True), (True, False)])
def test_two_processes_must_look_for_what_has_no_gradient(find_unused, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda _: 2))
    settings = {"use_cpu": True, "report_to": "none", "ddp_find_unused_parameters": find_unused}
    arguments = TrainingArguments(output_dir=str(tmp_path), **settings)
    for method, left_out in ((LayerDrop(), True), (LayerDrop(p=0), False), (Theseus(), True)):
        begin = VariantCallback().on_train_begin
        state, control, model = TrainerState(max_steps=9), TrainerControl(), on_meta(method)
        if refused and left_out:
            message = "layers are left out in some steps, but with 2 processes .*ddp_find_unused_parameters=True"
            with pytest.raises(ValueError, match=message):
                begin(arguments, state, control, model=model)
        else:
            begin(arguments, state, control, model=model)
            assert model.progress == 0


# -- the shallower models ----------------------------------------------------------------------------------------------------


def kept(depth, count):
    config = native_config(MARIAN)
    config.encoder_layers = depth
    return analysis.extract_depth(config, {"encoder": count}).keep["encoder"]


def test_the_depths_of_the_paper():
    assert kept(6, 3) == [0, 2, 4]
    assert kept(12, 8) == [0, 1, 3, 4, 6, 7, 9, 10]
    assert kept(12, 5) == [0, 3, 6, 8, 11]
    for depth, count in product(range(1, 17), repeat=2):
        if count > depth:
            continue
        every = math.floor(1 / (1 - Fraction(count, depth))) if count < depth else depth + 1
        expected = [layer - 1 for layer in range(1, depth + 1) if layer % every]
        if len(expected) != count:  # then at even distances; a half is rounded up
            expected = np.floor(np.linspace(0, depth - 1, count) + 0.5 + 1e-9).astype(int).tolist()
        assert kept(depth, count) == expected


@each_architecture
def test_the_extracted_model_is_the_trained_one_without_the_layers(architecture):
    native, batch = deep_model(architecture)
    variant = make_variant(native, [LayerDrop(p=0.5)])
    variant.advance(1, 9)
    choice = analysis.extract_depth(variant, dict.fromkeys(architecture.stacks, 2))
    gone = dict.fromkeys(architecture.stacks, [False, True] * 2)
    shallow = make_variant(variant, [choice])
    expected = outputs(without(native, architecture, gone), batch)
    assert differences(outputs(shallow, batch), expected) == []
    assert differences(outputs(shallow.merge(), batch), expected) == []
    whole = make_variant(variant, [analysis.extract_depth(variant, dict.fromkeys(architecture.stacks, 4))])
    assert differences(outputs(whole, batch), outputs(native, batch)) == []


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (torch.nn.Linear(1, 1), {"encoder": 2}, "extract_depth: Linear is neither a transformers model nor a config"),
        (AutoConfig.for_model("squeezebert"), {"encoder": 2}, "squeezebert: no list of layers with linears"),
        (None, {}, r"layers=\{\}\): must be a dict from stacks to numbers"),
        (None, 3, r"layers=3\): must be a dict from stacks to numbers"),
        (None, {"middle": 2}, r"no stack 'middle' in marian; choose from \['decoder', 'encoder'\]"),
        (None, {"decoder": 2, "encoder": 5}, r"\{'encoder': 5\}\): must be an integer in 1\.\.4, its layers"),
        (None, {"encoder": 0}, r"\{'encoder': 0\}\): must be an integer in 1\.\.4"),
        (None, {"encoder": 2.0}, r"\{'encoder': 2\.0\}\): must be an integer in 1\.\.4"),
    ],
)
def test_depths_that_are_refused(model, layers, message):
    with pytest.raises(ValueError, match=message):
        analysis.extract_depth(model or deep_config(MARIAN), layers)
