"""Methods that keep part of the model, after a Freeze that made it random: what they keep is a slice of its definition."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from support.cases import ALL, Case
from support.models import differences, native, outputs, reload, reload_problems, seeded_names, trainability
from transformers import AutoConfig, AutoModel

from hf_freeze import make_variant, methods
from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import (
    FFNPruning,
    FixedAttention,
    Freeze,
    HeadPruning,
    LayerSelection,
    Theseus,
    VocabularyTrimming,
)
from hf_freeze.seeded import SeededTensor

ALL_RANDOM = Freeze(embeddings="random", attention="random", ffn="random", seed=5)
OTHER_SCHEMES = Freeze(attention="diagonal", ffn="zero_diagonal", seed=9)
KEPT_TOKENS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 20, 31, 39]
SELECTING = {
    "heads": HeadPruning(share=0.5),
    "neurons": FFNPruning(width=7),
    "tokens": VocabularyTrimming(keep=KEPT_TOKENS),
    "layers": LayerSelection(share=0.5),
    "theseus": Theseus(init="alternate", train="all"),
    "fixed": FixedAttention(patterns=[2]),
}
CELLS = [
    pytest.param(architecture, method, id=f"{architecture.model_type}-{name}")
    for architecture in ARCHITECTURES.values()
    for name, method in SELECTING.items()
    if method.refusal(architecture) is None
]


def case_of(architecture, *applied, task=None):
    return Case(architecture, task or architecture.tasks[0], "weights", applied)


def saved_and_reloaded(model, case, folder):
    model.save_pretrained(folder)
    assert not load_file(folder / "model.safetensors").keys() & seeded_names(model)
    reloaded, info = reload(case, folder)
    assert reload_problems(reloaded, info, outputs(model, case.batch()), trainability(model), case.batch()) == []
    digests = json.loads((folder / "config.json").read_text())["digests"]
    assert digests.keys() == {base_name(model, name) for name in model.seeded_tensors}
    return reloaded


@functools.cache
def random_and_merged(model_type, all_random):
    """Which `make_variant` leaves as they are."""
    freeze = ALL_RANDOM if all_random else OTHER_SCHEMES
    random = make_variant(native(case_of(ARCHITECTURES[model_type], freeze)), [freeze])
    return random, random.merge()


# Other schemes: each method once, the architectures by turns.
WITH_FREEZE = [pytest.param(ALL_RANDOM, *cell.values, id=f"random-{cell.id}") for cell in CELLS]
WITH_FREEZE += [
    pytest.param(OTHER_SCHEMES, *cell.values, id=f"other schemes-{cell.id}") for cell in (CELLS if ALL else CELLS[::5])
]


@pytest.mark.parametrize(("freeze", "architecture", "method"), WITH_FREEZE)
def test_what_is_kept_is_a_slice_of_what_was_random(freeze, architecture, method, tmp_path):
    case = case_of(architecture, freeze, method)
    model = make_variant(native(case), [freeze, method])
    random, merged = random_and_merged(architecture.model_type, freeze is ALL_RANDOM)
    # The same selection among the same values, in a plain model that stores them.
    stored = make_variant(merged, [method])
    assert model.seeded_tensors
    assert all(torch.equal(model.get_parameter(name), stored.get_parameter(name)) for name in model.seeded_tensors)
    in_turn = make_variant(random, [method])
    assert in_turn.config.methods == model.config.methods
    assert in_turn.seeded_tensors == model.seeded_tensors
    assert differences(outputs(in_turn, case.batch()), outputs(model, case.batch())) == []
    saved_and_reloaded(model, case, tmp_path / "made")
    if method.facts.finalizable:
        model.finalize()
        saved_and_reloaded(model, case, tmp_path / "finalized")


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_several_selections_and_a_second_freeze(architecture, tmp_path):
    applied = [
        ALL_RANDOM,
        LayerSelection(share=0.5),
        HeadPruning(share=0.5),
        Freeze(ffn="random", seed=6),
        FFNPruning(width=11),
        FFNPruning(width=7),
        VocabularyTrimming(keep=KEPT_TOKENS),
    ]
    case = case_of(architecture, *applied)
    model = make_variant(native(case), applied)
    reloaded = saved_and_reloaded(model, case, tmp_path)
    assert reloaded.seeded_tensors == model.seeded_tensors
    stored = make_variant(native(case), applied[:1]).merge()
    for method in applied[1:]:
        stored = make_variant(stored, [method])
        if isinstance(method, Freeze):
            stored = stored.merge()
    expected = stored.merge().state_dict()
    merged = model.merge().state_dict()
    assert merged.keys() == expected.keys()
    assert [name for name, value in merged.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize(("architecture", "method"), CELLS)
def test_of_fresh_weights_it_loads_as_well(architecture, method, tmp_path):
    case = case_of(architecture, ALL_RANDOM, method)
    model = make_variant(native(case).config, [ALL_RANDOM, method], task=case.task)
    if method.facts.finalizable:
        model.finalize()
    saved_and_reloaded(model, case, tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_automodel_regenerates_the_same_slices(architecture, tmp_path):
    applied = [ALL_RANDOM, LayerSelection(share=0.5), HeadPruning(share=0.5), VocabularyTrimming(keep=KEPT_TOKENS)]
    model = make_variant(native(case_of(architecture)), applied)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert base.seeded_tensors
    for name in base.seeded_tensors:
        full_name = name if type(base) is type(model) else f"{model.base_model_prefix}.{name}"
        assert torch.equal(base.get_parameter(name), model.get_parameter(full_name)), name


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("size", [len(KEPT_TOKENS) + 4, len(KEPT_TOKENS) - 2])
def test_a_trimmed_random_table_is_resized(architecture, size, tmp_path):
    case = case_of(architecture, ALL_RANDOM, VocabularyTrimming(keep=KEPT_TOKENS))
    source = native(case)
    vocabulary = source.get_input_embeddings().num_embeddings
    model = make_variant(source, case.methods)
    before = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(size)
    table = model.get_input_embeddings().weight
    rows = min(size, len(before))
    assert torch.equal(table[:rows], before[:rows])
    kept = [*KEPT_TOKENS, *range(vocabulary, vocabulary + 4)][:size]
    [definition] = [d for n, d in model.seeded_tensors.items() if model.get_parameter(n) is table]
    whole = SeededTensor(5, definition.name, (vocabulary + 4, table.shape[1]), "embedding").generate()
    assert torch.equal(table, whole[kept])
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(reloaded.get_input_embeddings().weight, table)
    assert reloaded.seeded_tensors == model.seeded_tensors


def test_the_config_names_what_was_selected_by_value():
    source = native(case_of(ARCHITECTURES["marian"]))
    random = Freeze(attention="random", ffn="random", seed=3)
    model = make_variant(source, [random, HeadPruning(share=0.5), FFNPruning(width=7)])
    heads, neurons = model.config.methods[1:]
    assert heads["share"] is neurons["width"] is None
    assert {len(removed) for removed in heads["heads"].values()} == {1}
    assert {len(kept) for kept in neurons["keep"].values()} == {7}
    assert neurons["keep"]["encoder.0.ffn"] != list(range(7))
    # What is not random is selected as before: the config says the rule.
    trained = make_variant(source, [Freeze(ffn="random"), HeadPruning(share=0.5)]).config.methods
    assert trained[1]["share"] == 0.5


def test_pruned_neurons_of_a_frozen_ffn_stay_frozen():
    model = make_variant(native(case_of(ARCHITECTURES["marian"])), [Freeze(ffn="frozen"), FFNPruning(width=7)])
    assert not any(trainability(model)[name] for name in trainability(model) if ".fc" in name)


def test_a_changed_slice_is_refused(tmp_path):
    source = native(case_of(ARCHITECTURES["marian"]))
    make_variant(source, [methods.Freeze(ffn="random"), FFNPruning(width=7)]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    kept = config["methods"][1]["keep"]["encoder.0.ffn"]
    config["methods"][1]["keep"]["encoder.0.ffn"] = [n for n in range(24) if n not in kept][:7]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"digest mismatch: the regenerated tensor 'encoder\.layers\.0\.fc1\.weight'"):
        type(make_variant(source, [])).from_pretrained(tmp_path)


def test_kept_layers_have_digests_of_their_own(tmp_path):
    """Layers 1 and 2 become 0 and 1: layer 1 has one digest as a place, and another as an origin."""
    config = AutoConfig.for_model("marian", **ARCHITECTURES["marian"].tiny | {"encoder_layers": 4})
    model = make_variant(config, [methods.Freeze(ffn="random", seed=3)], task="seq2seq-lm")
    model = make_variant(model, [methods.LayerSelection(keep={"encoder": [1, 2]})])
    assert set(model.config.digests) == {base_name(model, name) for name in model.seeded_tensors}
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path)
    for name in model.seeded_tensors:
        assert torch.equal(reloaded.get_parameter(name), model.get_parameter(name))
