"""The random schemes of Freeze, and components that are drawn anew and trained."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case
from support.models import build, differences, native, outputs, reload, reload_problems, trainability
from support.parametrize import by_turns
from support.training import training_step

from hf_freeze import make_variant
from hf_freeze.architectures.base import base_name
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import FFNPruning, Freeze, HeadPruning, LowRank
from hf_freeze.methods.registry import method_from_dict
from hf_freeze.seeded import SeededTensor

MARIAN, GPT2 = ARCHITECTURES["marian"], ARCHITECTURES["gpt2"]
FC1 = "encoder.layers.0.fc1.weight"
TABLE = "shared.weight"
SCHEMES = {
    "normal": {"scheme": "glorot_normal", "gain": 0.5},
    "orthogonal": {"scheme": "orthogonal", "gain": 2.0},
    "sparse": {"scheme": "sparse", "density": 0.25},
    "blocks": {"scheme": "blocks", "blocks": 2},
}
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)


def case_of(architecture, *applied, source="trained"):
    return Case(architecture, architecture.tasks[0], source, applied)


@by_turns(pytest.mark.parametrize("scheme", SCHEMES), EVERY_ARCHITECTURE)
def test_schemes_reload_bit_equal_and_are_not_stored(architecture, scheme, tmp_path):
    embeddings = [] if scheme == "blocks" else [Freeze(embeddings="random", seed=8, **SCHEMES[scheme])]
    case = case_of(architecture, Freeze(attention="random", ffn="random", seed=7, **SCHEMES[scheme]), *embeddings)
    model = build(case)
    model.save_pretrained(tmp_path)
    assert not load_file(tmp_path / "model.safetensors").keys() & model.seeded_tensors.keys()
    reloaded, info = reload(case, tmp_path)
    assert reload_problems(reloaded, info, outputs(model, case.batch()), trainability(model), case.batch()) == []
    merged = model.merge()
    assert differences(outputs(merged, case.batch()), outputs(model, case.batch()), 1e-5) == []


def test_each_projection_of_a_fused_matrix_is_orthogonal():
    model = build(case_of(GPT2, Freeze(attention="random", scheme="orthogonal", gain=1.5)))
    name = next(name for name in model.seeded_tensors if name.endswith("c_attn.weight"))
    for projection in model.get_parameter(name).detach().double().chunk(3, dim=1):
        gram = projection @ projection.T
        torch.testing.assert_close(gram, 2.25 * torch.eye(len(gram)).double(), rtol=0, atol=1e-6)


def test_biases_stay_zero_and_norms_the_identity():
    model = build(case_of(ARCHITECTURES["bert"], Freeze(embeddings="random", ffn="random", scheme="sparse", gain=3)))
    for name in model.seeded_tensors:
        if "bias" in name or "LayerNorm" in name:
            assert (model.get_parameter(name) == float("LayerNorm.weight" in name)).all(), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_later_methods_keep_slices(scheme, tmp_path):
    freeze = Freeze(attention="random", ffn="random", seed=7, **SCHEMES[scheme])
    applied = [freeze, HeadPruning(share=0.5), FFNPruning(width=7)]  # 7 is no multiple of the blocks
    case = case_of(MARIAN, *applied)
    model = make_variant(native(case), applied)
    stored = make_variant(make_variant(native(case), [freeze]).merge(), applied[1:])
    assert all(torch.equal(model.get_parameter(name), stored.get_parameter(name)) for name in model.seeded_tensors)
    model.save_pretrained(tmp_path)
    reloaded, info = reload(case, tmp_path)
    assert reload_problems(reloaded, info, outputs(model, case.batch()), trainability(model), case.batch()) == []


def test_a_resized_orthogonal_table_keeps_its_rows(tmp_path):
    case = case_of(MARIAN, Freeze(embeddings="random", scheme="orthogonal"))
    model = build(case)
    before = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(len(before) + 5)
    assert torch.equal(model.get_input_embeddings().weight[: len(before)], before)
    model.save_pretrained(tmp_path)
    reloaded, _ = reload(case, tmp_path)
    assert torch.equal(reloaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scheme": "xavier"},
            r"Freeze\(scheme='xavier'\): choose from \['glorot_uniform', 'glorot_normal', 'orthogonal'",
        ),
        ({"gain": 0}, r"Freeze\(gain=0\): must be a number above 0"),
        ({"gain": "2"}, r"Freeze\(gain='2'\): must be a number above 0"),
        ({"gain": float("inf")}, r"Freeze\(gain=inf\): must be a number above 0"),
        ({"scheme": "sparse", "density": 0}, r"Freeze\(density=0\): must be a share in \(0, 1\]"),
        ({"density": 0.5}, r"Freeze\(density=0.5, scheme='glorot_uniform'\): density belongs to scheme='sparse'"),
        ({"blocks": 2}, r"Freeze\(blocks=2, scheme='glorot_uniform'\): blocks belongs to scheme='blocks'"),
        ({"scheme": "blocks"}, r"Freeze\(blocks=None\): must be an integer of at least 2"),
        ({"scheme": "blocks", "blocks": 1}, r"Freeze\(blocks=1\): must be an integer of at least 2"),
        ({"ffn": "diagonal", "gain": 2}, r"Freeze\(scheme='glorot_uniform', gain=2\): no component is 'random' or"),
        ({"embeddings": "random", "scheme": "blocks", "blocks": 2}, r"scheme='blocks'\): a table has no diagonal"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Freeze(**({"ffn": "random"} | settings))


def test_blocks_must_divide_the_matrices():
    case = case_of(MARIAN)
    with pytest.raises(ValueError, match=rf"'{FC1}' \(24 x 16\) cannot be divided into 5 diagonal blocks"):
        make_variant(native(case), [Freeze(ffn="random", scheme="blocks", blocks=5)])
    with pytest.raises(ValueError, match="cannot be divided into 5 diagonal blocks"):
        make_variant(native(case), [Freeze(ffn="redrawn", scheme="blocks", blocks=5)])


def test_a_config_of_an_earlier_release_has_the_schemes_of_then():
    data = {"method": "freeze", "ffn": "random", "seed": 3}
    assert method_from_dict(data) == Freeze(ffn="random", seed=3)
    model = make_variant(native(case_of(MARIAN)), [method_from_dict(data)])
    assert torch.equal(model.base_model.get_parameter(FC1), SeededTensor(3, FC1, (24, 16), "glorot").generate())


# -- redrawn -----------------------------------------------------------------------------------------------------------------


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("component", ["embeddings", "attention", "ffn"])
def test_redrawn_has_the_values_of_random_and_is_trained(architecture, component, tmp_path):
    settings = {"seed": 4, "scheme": "glorot_normal"}
    case = case_of(architecture, Freeze(**{component: "redrawn"}, **settings))
    source = native(case)
    before = copy.deepcopy(source.state_dict())
    model = make_variant(source, list(case.methods)).eval()
    assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())
    random = make_variant(source, [Freeze(**{component: "random"}, **settings)]).eval()
    assert differences(outputs(model, case.batch()), outputs(random, case.batch())) == []
    assert not model.seeded_tensors
    assert trainability(model) == trainability(make_variant(source, []))
    training_step(model, case.batch())
    assert differences(outputs(model, case.batch()), outputs(random, case.batch())) != []
    model.save_pretrained(tmp_path)
    reloaded, info = reload(case, tmp_path)
    assert reload_problems(reloaded, info, outputs(model, case.batch()), trainability(model), case.batch()) == []
    assert differences(outputs(model.merge(), case.batch()), outputs(model, case.batch())) == []


def test_parts_of_attentions_are_redrawn_and_random():
    source = native(case_of(MARIAN))
    freeze = Freeze(attention={"cross": "random", "self.q": "redrawn", "self.k": "frozen"}, scheme="orthogonal", seed=4)
    model = make_variant(source, [freeze])
    for name, value in model.named_parameters():
        kind = "cross" if "encoder_attn." in name else name.split(".")[-2] if "self_attn." in name else ""
        kept = torch.equal(value, source.get_parameter(name))
        assert kept == (kind not in ("cross", "q_proj")), name
        assert (name in model.seeded_tensors) == (kind == "cross"), name
        if kind in ("cross", "q_proj") and value.ndim == 2:
            torch.testing.assert_close(value.detach() @ value.detach().T, torch.eye(len(value)))


def test_redrawn_once_and_at_its_turn():
    source = native(case_of(MARIAN))
    redrawn = Freeze(ffn="redrawn", seed=4, layers={"encoder": [0]})
    model = make_variant(source, [redrawn])
    with torch.no_grad():
        model.base_model.get_parameter(FC1).zero_()  # stands for training
    # The methods of a variant that gets more of them are not applied again.
    again = make_variant(model, [Freeze(norm="frozen")])
    assert not again.base_model.get_parameter(FC1).any()
    # A selection by value sees the values that are there at its turn.
    pruned = make_variant(source, [redrawn, FFNPruning(width=7)])
    stored = make_variant(model := make_variant(source, [redrawn]).merge(), [FFNPruning(width=7)])
    assert torch.equal(pruned.base_model.get_parameter(FC1), stored.base_model.get_parameter(FC1))
    for name, value in model.named_parameters():
        if base_name(model, name).startswith("decoder."):
            assert torch.equal(value, source.get_parameter(name)), name


def test_redrawn_of_fresh_weights_and_of_a_head():
    bert = ARCHITECTURES["bert"]
    case = Case(bert, "sequence-classification", "trained", ())
    config = native(case).config
    model = make_variant(config, [Freeze(head="redrawn", scheme="orthogonal")], task=case.task)
    weight = model.classifier.weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)))
    assert not model.classifier.bias.any()
    with torch.device("meta"):
        make_variant(config, [Freeze(head="redrawn", ffn="random")], task=case.task)


@EVERY_ARCHITECTURE
def test_redrawn_norms_are_those_of_a_new_model(architecture):
    source = native(case_of(architecture))
    fresh = dict(type(source)(source.config).named_parameters())
    model = make_variant(source, [Freeze(norm="redrawn")])
    norms = [name for name in fresh if architecture.component(base_name(source, name)) == "norm"]
    assert norms
    for name, value in model.named_parameters():
        assert torch.equal(value, fresh[name] if name in norms else source.get_parameter(name)), name
    assert not any(torch.equal(source.get_parameter(name), fresh[name]) for name in norms)


def test_a_redrawn_head_of_marian_is_its_output_bias():
    model = make_variant(native(case_of(MARIAN)).config, [], task="seq2seq-lm", init="marian")
    with torch.no_grad():
        model.final_logits_bias.fill_(1)
    assert not make_variant(model, [Freeze(head="redrawn")]).final_logits_bias.any()


def test_what_another_method_has_replaced_cannot_be_redrawn():
    with pytest.raises(
        ValueError, match=r"Freeze\(ffn='redrawn'\): '.*' is a .*, and only the matrices of plain linears"
    ):
        make_variant(native(case_of(MARIAN)), [LowRank(components=["ffn"], rank=2), Freeze(ffn="redrawn")])
