"""LayerDrop with learnt rates: their mean, their gradient, what is stored of them until `finalize()`, and the layers to keep."""

import copy
import json
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.special import expit
from support.deep import deep_config, deep_model, each_architecture, layers_of
from support.models import differences, outputs
from support.training import objective
from test_layer_drop import MARIAN, draws_of, dropped, in_training, on_meta

from hf_freeze import analysis, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.layer_forward import Skipped
from hf_freeze.layers.learnt_skip import keep_rates
from hf_freeze.methods import Freeze, LayerDrop, LayerSelection, LayerSharing, Theseus

LEARNT = LayerDrop(p=0.3, learned=True, seed=4)


def set_scores(model, architecture, values):
    """Give the layers of each stack these scores."""
    for stack in architecture.stacks:
        for layer, value in zip(layers_of(model, architecture, stack), values, strict=True):
            layer.layer_drop.score.data.fill_(value)


def by_bisection(scores, mean):
    """sigmoid(score + c) of this mean, in numpy."""
    low, high = -2000.0, 2000.0
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if expit(np.array(scores) + c).mean() < mean else (low, c)
    return expit(np.array(scores) + c)


@pytest.mark.parametrize("mean", [0.05, 0.5, 0.8, 0.999])
def test_the_mean_of_the_rates_is_held_and_only_differences_of_scores_count(mean):
    generator = torch.Generator().manual_seed(1)
    for scale in (0.0, 1.0, 3.0, 300.0):
        scores = scale * torch.randn(12, generator=generator)
        rates = keep_rates(scores.tolist(), 1 - mean)
        assert sum(rates) / 12 == pytest.approx(mean, abs=1e-9)
        assert all(0 <= rate <= 1 for rate in rates)
        # The order of a softmax; with the differences of the scores this defines them.
        assert all(rates[n] <= rates[m] for n, m in pairwise(scores.argsort(stable=True).tolist()))
        np.testing.assert_allclose(rates, by_bisection(scores.tolist(), mean), atol=1e-9)
        np.testing.assert_allclose(keep_rates((scores + 2).tolist(), 1 - mean), rates, atol=1e-3)
    assert keep_rates([3.0], 1 - mean) == pytest.approx([mean])


def test_rates_may_be_as_extreme_as_floats_are():
    """A mean that float64 rounds to 1, scores that saturate, and a training step with both."""
    assert keep_rates([0.0, 5.0], 1e-18) == pytest.approx([1.0, 1.0])
    native, batch = deep_model(MARIAN)
    for p in (1e-18, 0.5):
        variant = make_variant(native, [LayerDrop(p=p, learned=True)])
        set_scores(variant, MARIAN, [1e4, -1e4, 2e4, -2e4])
        variant.advance(0, 1)
        objective(variant.train(), batch).backward()
        assert all(q.grad is None or q.grad.isfinite().all() for q in variant.parameters())
        variant.finalize()


@each_architecture
def test_it_begins_as_with_one_rate_for_all(architecture):
    native, batch = deep_model(architecture)
    learnt, equal = make_variant(native, [LEARNT]), make_variant(native, [LayerDrop(p=0.3, seed=4)])
    assert differences(outputs(learnt, batch), outputs(native, batch)) == []
    for step in range(4):
        for model in (learnt, equal):
            model.advance(step, 4)
        assert dropped(learnt, architecture) == dropped(equal, architecture)
        assert differences(in_training(learnt, batch), in_training(equal, batch)) == []
        for model in (learnt, equal):
            model.zero_grad()
            objective(model, batch).backward()
        found = {
            name: p.grad for name, p in learnt.named_parameters() if p.grad is not None and "layer_drop" not in name
        }
        expected = {name: p.grad for name, p in equal.named_parameters() if p.grad is not None}
        assert differences(found, expected) == []


def in_double(model):
    """In float64 throughout: Llama's norms compute in float32."""
    for module in model.double().modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = (
                lambda x, norm=module: norm.weight * x / (x.square().mean(-1, True) + norm.variance_epsilon).sqrt()
            )
    return model


def weighted_logits(model, batch):
    """In place of the loss, which GPT-2 and Llama compute in float32."""
    logits = model(**batch).logits
    return (logits.flatten() * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)).mean()


def in_shares(model, architecture, scores, first, mean):
    """The objective if each layer f gave x + g (f(x) - x), with g = 1 where it runs and 0 where not, plus the change of its rate
    from the scores `first` to `scores` over twice the probability of what was drawn; the rates by numpy."""
    hooks = []
    for stack in architecture.stacks:
        rates, before = by_bisection(scores[stack], mean), by_bisection(first[stack], mean)
        for layer, rate, old in zip(layers_of(model, architecture, stack), rates, before, strict=True):
            runs = not Skipped.of(layer).active
            share = runs + (rate - old) / (2 * (old if runs else 1 - old))
            hooks.append(layer.register_forward_hook(in_share(float(share)), with_kwargs=True))
    with torch.no_grad():
        value = float(weighted_logits(model, architecture.tiny_inputs(architecture.tasks[0])))
    for hook in hooks:
        hook.remove()
    return value


def in_share(share):
    def hook(layer, arguments, kwargs, output):
        before = arguments[0] if arguments else kwargs["hidden_states"]
        whole = Skipped.of(layer).usual(*arguments, **kwargs)
        first = whole[0] if isinstance(whole, tuple) else whole
        moved = before + share * (first - before)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    return hook


@each_architecture
def test_the_gradient_of_a_score_is_that_of_finite_differences(architecture):
    """In two steps, each with layers that run and layers that are skipped."""
    native, batch = deep_model(architecture)
    variant = in_double(make_variant(native, [LayerDrop(p=0.4, learned=True, seed=1)])).train()
    values, seen = [0.7, -0.4, 0.1, -1.2], set()
    variant.config.use_cache = False  # which has one place for each layer
    set_scores(variant, architecture, values)
    first = dict.fromkeys(architecture.stacks, values)
    for step in range(2):
        variant.advance(step, 9)
        seen.add(str(dropped(variant, architecture)))
        variant.zero_grad()
        weighted_logits(variant, batch).backward()
        for stack in architecture.stacks:
            for number, layer in enumerate(layers_of(variant, architecture, stack)):
                shifted = [
                    in_shares(
                        variant,
                        architecture,
                        first | {stack: [v + sign * 1e-4 * (n == number) for n, v in enumerate(values)]},
                        first,
                        0.6,
                    )
                    for sign in (1, -1)
                ]
                expected = (shifted[0] - shifted[1]) / 2e-4
                gradient = layer.layer_drop.score.grad
                assert (0 if gradient is None else float(gradient)) == pytest.approx(expected, rel=1e-4, abs=1e-8)
    assert len(seen) == 2
    assert all("True" in pattern and "False" in pattern for pattern in seen)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again_give_the_same_gradient(reentrant):
    native, batch = deep_model(MARIAN)
    grads = []
    for checkpointing in (False, True):
        variant = make_variant(native, [LEARNT]).train()
        set_scores(variant, MARIAN, [0.7, -0.4, 0.1, -1.2])
        if checkpointing:
            enable = getattr(variant, "activation_checkpointing_enable", variant.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        variant.advance(1, 9)
        variant(**batch).loss.backward()
        grads.append({name: p.grad for name, p in variant.named_parameters() if p.grad is not None and p.grad.any()})
    assert any("layer_drop" in name for name in grads[0])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def descend(model, batch, parameters, rate, steps=60):
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for step in range(steps):
        if hasattr(model, "advance"):
            model.advance(step, steps)
        optimizer.zero_grad()
        objective(model.train(), batch).backward()
        optimizer.step()


def test_layers_that_do_nothing_are_the_ones_to_leave_out():
    """A GPT-2 learns its batch without its layers 1 and 2, which are zero; then the scores are trained alone."""
    native, batch = deep_model(ARCHITECTURES["gpt2"])
    for number in (1, 2):
        for linear in (native.transformer.h[number].attn.c_proj, native.transformer.h[number].mlp.c_proj):
            for parameter in linear.parameters():
                parameter.data.zero_()
    rest = [parameter for name, parameter in native.named_parameters() if ".h.1." not in name and ".h.2." not in name]
    descend(native, batch, rest, 0.01)
    kept = Freeze(embeddings="frozen", attention="frozen", ffn="frozen", norm="frozen")
    variant = make_variant(native, [kept, LayerDrop(p=0.4, learned=True, seed=1)])
    descend(variant, batch, [parameter for parameter in variant.parameters() if parameter.requires_grad], 0.1)
    rates = analysis.keep_rates(variant)
    assert float(rates["decoder"].mean()) == pytest.approx(0.6, abs=1e-6)
    assert min(rates["decoder"][[0, 3]]) > max(rates["decoder"][[1, 2]])
    chosen = analysis.select_layers(rates, {"decoder": 2})
    assert chosen == LayerSelection(keep={"decoder": [0, 3]})
    with pytest.raises(ValueError, match=r"which names layers by number: .* or finalize\(\) before"):
        make_variant(variant, [chosen])
    variant.finalize()
    assert differences(analysis.keep_rates(variant), rates, 1e-6) == []
    shallow = make_variant(variant, [chosen])
    assert differences(outputs(shallow, batch), outputs(variant, batch), 1e-5) == []
    assert shallow.methods_now[1].rates == {"decoder": [variant.methods[1].rates["decoder"][n] for n in (0, 3)]}
    torch.testing.assert_close(analysis.keep_rates(shallow)["decoder"], rates["decoder"][[0, 3]])


def test_scores_are_stored_until_the_end(tmp_path):
    native, batch = deep_model(MARIAN)
    variant = make_variant(native, [LEARNT])
    set_scores(variant, MARIAN, [2.0, -1.0, 0.5, -2.5])
    expected = draws_of(variant, range(24))
    assert not torch.equal(expected, draws_of(on_meta(LEARNT), range(24)))
    variant.save_pretrained(tmp_path / "trained")
    loaded = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path / "trained")
    for twin in (loaded, copy.deepcopy(variant), pickle.loads(pickle.dumps(variant))):
        assert torch.equal(draws_of(twin, range(24)), expected)
        set_scores(twin, MARIAN, [0.0] * 4)  # which are its own
    assert torch.equal(draws_of(variant, range(24)), expected)
    rates = analysis.keep_rates(variant)
    variant.finalize()
    variant.save_pretrained(tmp_path / "final")
    assert not any("layer_drop" in name for name in load_file(tmp_path / "final" / "model.safetensors"))
    saved = json.loads((tmp_path / "final" / "config.json").read_text())["methods"][0]
    assert (saved["learned"], [*saved["rates"]]) == (False, ["decoder", "encoder"])
    final = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path / "final")
    assert torch.equal(draws_of(final, range(24)), expected)  # the rates stay as they were
    assert differences(analysis.keep_rates(final), rates, 1e-6) == []
    assert differences(outputs(final, batch), outputs(native, batch)) == []
    merged = final.merge()
    assert differences(outputs(merged, batch), outputs(native, batch)) == []
    assert merged.state_dict().keys() == native.state_dict().keys()


def test_layers_are_left_out_at_their_rates():
    rates = {"encoder": [0.0, 0.1, 0.5, 0.9], "decoder": [0.3] * 4}
    drawn = draws_of(on_meta(LayerDrop(rates=rates)), range(2000)).double().mean(0)
    order = [rate for stack in MARIAN.stacks for rate in rates[stack]]
    torch.testing.assert_close(drawn, torch.tensor(order, dtype=torch.float64), rtol=0, atol=0.045)
    assert drawn[order.index(0.0)] == 0
    part = LayerDrop(p=0.1, rates=rates).parts[0]
    assert part.values(3, 9) == {"share of layers left out": pytest.approx(sum(order) / 8)}


@pytest.mark.parametrize("first", [LEARNT, Theseus(seed=4)], ids=lambda method: method.name)
def test_beside_theseus(first, tmp_path):
    native, batch = deep_model(MARIAN)
    methods = [first, Theseus(seed=4) if first is LEARNT else LEARNT]
    if first is LEARNT:
        with pytest.raises(
            ValueError, match=r"Theseus after 'layer_drop', which names layers by number.*put Theseus first"
        ):
            make_variant(native, methods)
        return
    variant = make_variant(native, methods)
    for step in range(3):
        variant.advance(step, 3)
        objective(variant.train(), batch).backward()
    variant.finalize()
    assert [len(of) for of in variant.methods[1].rates.values()] == [2, 2]
    variant.save_pretrained(tmp_path)
    again = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert differences(outputs(again, batch), outputs(variant, batch)) == []


def test_layers_with_one_set_of_parameters_have_no_scores_of_their_own():
    for methods in ([LEARNT, LayerSharing()], [LayerSharing(), LEARNT]):
        with pytest.raises(ValueError, match="layers that share their parameters cannot keep a mask or score each"):
            on_meta(*methods)
    native, batch = deep_model(MARIAN)
    final = make_variant(native, [LEARNT])
    final.finalize()
    shared = make_variant(final, [LayerSharing()])
    shared.advance(1, 9)
    in_training(shared, batch)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"learned": 1}, r"LayerDrop\(learned=1\): must be True or False"),
        (
            {"p": 0, "learned": True},
            r"LayerDrop\(p=0, learned=True\): give 'layers' a share above 0, the mean of their",
        ),
        ({"p": {"heads": 0.1}, "learned": True}, r"learned=True\): give 'layers' a share above 0"),
        (
            {"learned": True, "rates": {"encoder": [0.1] * 4}},
            r"rates are those of 'layers', learnt or given; leave one",
        ),
        ({"p": {"ffn": 0.1}, "rates": {"encoder": [0.1] * 4}}, r"rates are those of 'layers', learnt or given"),
        ({"rates": {}}, r"LayerDrop\(rates=\{\}\): must be a dict such as"),
        ({"rates": {"encoder": 0.1}}, r"must be a dict such as \{'encoder': \[0\.0, 0\.1\]\}"),
        ({"rates": {"encoder": [0.1, 1.1]}}, r"LayerDrop\(rates\['encoder'\]\[1\]=1\.1\): must be a share in 0\.\.1"),
        (
            {"rates": {"encoder": [0.1] * 4}},
            r"\{'encoder': 4\} numbers by stack; must be \{'encoder': 4, 'decoder': 4\}",
        ),
        (
            {"rates": {"encoder": [0.1] * 3}, "stacks": ["encoder"]},
            r"\{'encoder': 3\} .* must be \{'encoder': 4\}, one",
        ),
    ],
)
def test_settings_that_are_refused(setting, message):
    with pytest.raises(ValueError, match=message) as refused:
        on_meta(LayerDrop(**setting))
    assert "\n" not in str(refused.value)


def test_a_model_without_learnt_rates_has_none_to_read():
    native = deep_model(MARIAN)[0]
    for model in (native, make_variant(native, [LayerDrop()])):
        with pytest.raises(ValueError, match=r"has no learnt rates: train it with LayerDrop\(learned=True\)"):
            analysis.keep_rates(model)


def test_counted_with_the_parameters_of_the_head():
    """So that a learning rate of the component "head" is theirs."""
    config = deep_config(MARIAN)
    names = {
        name for name, _ in make_variant(config, [LEARNT], task="seq2seq-lm").named_parameters() if "layer_drop" in name
    }
    assert len(names) == 8
    assert {MARIAN.component(name.removeprefix("model.")) for name in names} == {"head"}
