"""PEFT on any variant: adapters go in with the default targets, train, are saved beside it, and are merged or refused."""

import itertools
import re
import warnings
from dataclasses import replace

import pytest
import torch
from support.cases import ALL, MODEL, PLAIN, Case
from support.models import build, differences, native, outputs, reload
from support.parametrize import by_turns

from hf_freeze import methods
from hf_freeze.architectures.registry import ARCHITECTURES

peft = pytest.importorskip("peft")

CONFIGS = {"lora": peft.LoraConfig, "vera": peft.VeraConfig}
ON_ATTENTION = [
    methods.LowRank(rank=2, components=["attention"]),
    methods.TensorTrain(rank=2, components=["attention"]),
    methods.MagnitudePruning(sparsity=0.5, components=["attention"]),
]
LORA_CASES = [case for case in PLAIN if not case.finalized]
LORA_CASES += [
    Case(architecture, architecture.tasks[0], MODEL, (method,))
    for method, architecture in zip(itertools.cycle(ON_ATTENTION), ARCHITECTURES.values(), strict=False)
]
# VeRA differs in its layers alone: each method once, the architectures by turns.
BY_METHODS: dict = {}
for each in LORA_CASES:
    BY_METHODS.setdefault(str(each.methods), []).append(each)
VERA_CASES = [cases[number % len(cases)] for number, cases in enumerate(BY_METHODS.values())]
# LoRA: on the next one.
ONE_EACH = [cases[(number + 1) % len(cases)] for number, cases in enumerate(BY_METHODS.values())]
PAIRS = [("lora", case) for case in (LORA_CASES if ALL else ONE_EACH)] + [("vera", case) for case in VERA_CASES]
assert len(VERA_CASES) > len(ON_ATTENTION)


@pytest.fixture(autouse=True)
def _no_card(monkeypatch):
    """PEFT's README beside each adapter takes nearly all of the time of a save."""
    monkeypatch.setattr(peft.PeftModel, "create_or_update_model_card", lambda *_: None)


def wrapped(model, kind, **settings):
    """With adapters that are not zero, in the default targets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a Conv1D that it is one, and that some layers are none
        found = peft.get_peft_model(model, CONFIGS[kind](r=2, **settings))
    trained = [p for _, p in found.named_parameters() if p.requires_grad]
    assert trained
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return found.eval()


@pytest.mark.parametrize(("kind", "case"), PAIRS, ids=[f"{kind}-{case.id}" for kind, case in PAIRS])
def test_an_adapter_goes_into_any_variant_and_is_merged_or_refused(kind, case, tmp_path):
    model, batch = build(case), case.batch()
    expected, seeded = outputs(model, batch), {name: model.get_parameter(name).clone() for name in model.seeded_tensors}
    adapted = wrapped(model, kind)
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert all(kind in name for name in names)
    tuned = outputs(adapted, batch)
    assert differences(tuned, expected, 1e-4) != []
    with adapted.disable_adapter():
        assert differences(outputs(adapted, batch), expected) == []
    with pytest.raises(ValueError, match=r"\Amerge\(\) with adapters of PEFT in the model: .*\Z"):
        model.merge()
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build(case), tmp_path)
    assert differences(outputs(again, batch), tuned) == []
    refusal = None
    try:
        merged = adapted.merge_and_unload()
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert case.methods
        assert re.fullmatch("cannot merge the adapter of '.+': .+; merge\\(\\) the variant without it, .+", refusal)
        merged = peft.PeftModel.from_pretrained(build(case).merge(), tmp_path).merge_and_unload()  # what it advises
    else:
        assert type(merged) is type(model)
        assert not hasattr(merged, "peft_config")
        assert all(torch.equal(merged.get_parameter(name), value) for name, value in seeded.items())
    assert differences(outputs(merged, batch), tuned, 1e-4) == []


@by_turns(
    pytest.mark.parametrize("scheme", ["int8", "nf4", "fp4"]),
    pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES),
)
def test_an_adapter_trains_on_a_quantised_base(architecture, scheme, tmp_path):
    quantize = methods.Quantize(scheme=scheme, components=["attention", "ffn", "embeddings"])
    case = Case(architecture, architecture.tasks[0], MODEL, (quantize,))
    model, batch = build(case), case.batch()
    model.save_pretrained(tmp_path / "base")
    packed = {name: value.clone() for name, value in model.named_buffers() if name.endswith(("packed", "scales"))}
    model = wrapped(model, "lora")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(6):
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    held = {name.replace(".base_layer", ""): buffer for name, buffer in model.get_base_model().named_buffers()}
    assert all(torch.equal(value, held[name]) for name, value in packed.items())
    model.save_pretrained(tmp_path / "adapter")
    base, _ = reload(case, tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    tuned = outputs(model, batch)
    assert differences(outputs(again, batch), tuned) == []
    with pytest.warns(UserWarning, match=f"merging an adapter into {scheme} weights rounds it"):
        rounded = model.merge_and_unload()
    assert type(rounded) is type(base)
    rounded.save_pretrained(tmp_path / "rounded")
    reloaded, _ = reload(case, tmp_path / "rounded")
    assert differences(outputs(reloaded, batch), outputs(rounded, batch)) == []
    if scheme == "int8":
        assert differences(outputs(rounded, batch), tuned, 0.2) == []
    base, _ = reload(case, tmp_path / "base")
    exact = peft.PeftModel.from_pretrained(
        base.merge(), tmp_path / "adapter"
    ).merge_and_unload()  # what the warning advises
    assert differences(outputs(exact, batch), tuned, 1e-4) == []


TIED = Case(ARCHITECTURES["llama"], "causal-lm", MODEL, (), config="tied")


def in_tokens(model, case, **settings):
    """`model` after two steps of training of rows 7 and 8 of its tied tables."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[7, 8], **settings)
    model = peft.get_peft_model(model, config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    torch.manual_seed(0)
    for _ in range(2):
        model.train()(**case.batch()).loss.backward()
        optimizer.step()
    return model.eval()


def test_trainable_tokens_of_tied_tables_are_merged_as_natively(tmp_path):
    tuned = {}
    for name, base in {"native": native(TIED), "variant": build(TIED)}.items():
        torch.manual_seed(5)  # of the adapters
        tuned[name] = in_tokens(base, TIED, init_lora_weights=False).merge_and_unload()
    assert differences(outputs(tuned["variant"], TIED.batch()), outputs(tuned["native"], TIED.batch())) == []
    tuned["variant"].save_pretrained(tmp_path)
    again, _ = reload(TIED, tmp_path)
    assert differences(outputs(again, TIED.batch()), outputs(tuned["native"], TIED.batch())) == []
    quantized = replace(TIED, methods=(methods.Quantize(scheme="int8", components=["embeddings"]),))
    model = in_tokens(build(quantized), quantized)
    with pytest.raises(
        ValueError, match=r"embed_tokens.token_adapter': other modules share its weight, and have other adapters"
    ):
        model.merge_and_unload()  # PEFT does not know that the output matrix has these integers


def test_trainable_tokens_need_a_table_with_a_row_for_each_token():
    factorized = build(replace(TIED, methods=(methods.FactorizedEmbedding(rank=4),)))
    message = r"\Atrainable tokens of 'model.embed_tokens\S*': a LowRankEmbedding is no matrix with a row for each token; .+\Z"
    with pytest.raises(ValueError, match=message):
        in_tokens(factorized, TIED)


@pytest.mark.parametrize("method", [methods.FactorizedEmbedding(rank=4), methods.Freeze(embeddings="random")])
def test_a_table_that_was_trained_apart_from_its_tied_one_is_not_lost(method, tmp_path):
    case = replace(TIED, methods=(method,))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(build(case), config)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1)
    expected = outputs(model, case.batch())
    merged = model.merge_and_unload()
    assert differences(outputs(merged, case.batch()), expected, 1e-4) == []
    with pytest.raises(ValueError, match=r"\A'lm_head.\w+' shares the values of .+: merge\(\) stores both\Z"):
        merged.save_pretrained(tmp_path)
    merged.merge().save_pretrained(tmp_path)
    assert differences(outputs(type(native(TIED)).from_pretrained(tmp_path), case.batch()), expected, 1e-4) == []
