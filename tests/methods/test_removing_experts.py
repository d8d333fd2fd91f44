"""FFNPruning(experts=): whole experts of mixtures go, with what their routers have for them."""

import copy
import functools
import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file
from support.experts import seen_by_experts
from support.models import differences, perturbed
from support.small import small_config
from transformers import AutoModelForCausalLM

from hf_freeze import make_variant
from hf_freeze.architectures.derive import derive
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.stored import from_data, to_data
from hf_freeze.methods import FFNPruning, Freeze, LayerSelection
from hf_freeze.methods.registry import method_from_dict, method_to_dict
from hf_freeze.model.calibrating import CalibrationPass, collect
from hf_freeze.model.calibration import Report
from hf_freeze.model.convert import convert

# The router of mixtral is a softmax; that of glm4_moe has a bias for the choice alone, a dense layer before it and a shared
# expert; ernie4_5_moe has such a bias of shape (1, experts); in jamba and lfm2_moe, other modules hold router and bias.
FAMILIES = {
    "mixtral": "num_local_experts",
    "glm4_moe": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts",
    "jamba": "num_experts",
    "lfm2_moe": "num_experts",
}
BIAS = "e_score_correction_bias"


@functools.cache
def model_of(model_type, **changes):
    torch.manual_seed(0)
    model = perturbed(AutoModelForCausalLM.from_config(small_config(model_type, **changes))).eval()
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):
            buffer.copy_(torch.rand(buffer.shape) / 4)
    return model


def texts(seed=1):
    """Three texts of 12 tokens, with padding on the right in the first."""
    ids = torch.randint(1, 60, (3, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return [{"input_ids": ids, "attention_mask": mask}]


def alone(batches):
    """The same texts, each without padding."""
    return [
        {"input_ids": ids[mask.bool()][None]}
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def logits(model, batch=None):
    with torch.no_grad():
        return model.eval()(**(batch or texts(seed=2)[0])).logits


def mixtures(model):
    return architecture_for(model).experts(model.config)


def without(model, kept):
    """A native model with a router bias, by which no token gets an expert that is not kept."""
    model = copy.deepcopy(model)
    for block, module in mixtures(model).items():
        bias = model.base_model.get_submodule(module.replace("experts", "gate")).get_buffer(BIAS)
        bias[[number for number in range(len(bias)) if number not in kept[block]]] = -1e9
    return model


# -- what remains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_smaller_native_mixture(model_type, tmp_path):
    model = model_of(model_type)
    variant = make_variant(model, [FFNPruning(experts=3)], calibration=texts())
    before = logits(variant)
    variant.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(reloaded), before)
    native = variant.merge()
    assert type(native) is type(model)
    assert torch.equal(logits(native), before)
    assert getattr(native.config, FAMILIES[model_type]) == 3
    again = AutoModelForCausalLM.from_config(native.config)
    again.load_state_dict(native.state_dict())
    assert torch.equal(logits(again), before)


def test_the_router_chooses_among_those_that_remain():
    model = model_of("glm4_moe")
    kept = {block: [0, 2, 3] for block in mixtures(model)}
    variant = make_variant(model, [FFNPruning(experts=kept)])
    torch.testing.assert_close(logits(variant), logits(without(model, kept)))
    assert not torch.allclose(logits(variant), logits(model), atol=1e-3)


@pytest.mark.parametrize("calibrated", [False, True])
def test_an_expert_without_tokens_goes_and_nothing_changes(calibrated):
    """A token gets one expert, and expert 2 is never the one; it has the largest matrices."""
    model = copy.deepcopy(model_of("mixtral", num_experts_per_tok=1))
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.mlp.gate.weight[2] = layer.mlp.gate.weight[:2].mean(0)
            layer.mlp.experts.down_proj[2] *= 5
    variant = make_variant(model, [FFNPruning(experts=3)], calibration=texts() if calibrated else None)
    dead_alone = variant.methods[0].experts == {block: [0, 1, 3] for block in mixtures(model)}
    assert dead_alone == calibrated
    assert torch.equal(logits(variant), logits(model)) == calibrated


def test_training_balances_the_experts_that_remain():
    variant = make_variant(model_of("mixtral"), [FFNPruning(experts=3)])
    ids = texts()[0]["input_ids"]
    variant.train()(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
    gate = variant.base_model.layers[0].mlp.gate.weight
    assert gate.shape[0] == 3
    assert gate.grad.abs().sum() > 0


# -- which remain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe"])
def test_what_experts_add_is_counted_as_by_hand(model_type):
    model, batches = model_of(model_type), texts()
    names = list(mixtures(model).values())
    with CalibrationPass(model, model, batches, Report(), lambda *_: model).running() as statistics:
        found = statistics.routed(names)
    variant = make_variant(model, [FFNPruning(experts=2)], calibration=batches)
    for block, name in mixtures(model).items():
        by_hand = [
            (each.factors[:, None] * each.y).square().sum() if len(each.factors) else torch.tensor(0.0)
            for each in seen_by_experts(model, alone(batches), name)
        ]
        torch.testing.assert_close(found[name], torch.stack(by_hand).double(), rtol=1e-4, atol=1e-6)
        assert variant.methods[0].experts[block] == sorted(torch.stack(by_hand).topk(2).indices.tolist())


def test_without_texts_the_smallest_goes():
    model = copy.deepcopy(model_of("mixtral"))
    with torch.no_grad():
        for number, layer in enumerate(model.base_model.layers):
            layer.mlp.experts.gate_up_proj[number] *= 0.1
    variant = make_variant(model, [FFNPruning(experts=3)])
    assert variant.methods[0].experts == {"decoder.0.experts": [1, 2, 3], "decoder.1.experts": [0, 2, 3]}


def test_each_group_loses_as_many():
    model = copy.deepcopy(model_of("glm4_moe", n_routed_experts=8, n_group=2, topk_group=1))
    (module,) = mixtures(model).values()
    with torch.no_grad():
        model.base_model.get_submodule(module).down_proj[:2] *= 0.1  # both are of the first group
        model.base_model.get_submodule(module).down_proj[6] *= 0.1
    variant = make_variant(model, [FFNPruning(experts=6)])
    (kept,) = variant.methods[0].experts.values()
    assert len(set(kept) & {0, 1}) == 1
    assert kept[1:] == [2, 3, 4, 5, 7]
    torch.testing.assert_close(logits(variant), logits(without(model, variant.methods[0].experts)))
    for wrong, message in (
        (5, "5 experts of each mixture: must be a multiple of 2"),
        (2, r"must be in 4\.\.8: a token gets 2 from 1 of 2 groups"),
        (
            {next(iter(mixtures(model))): [0, 1, 2, 3, 4, 5]},
            r"numbers in 0..7, as many of each mixture and of each of its 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_variant(model, [FFNPruning(experts=wrong)])


def test_a_saved_calibration_knows_no_factors():
    model = model_of("mixtral")
    variant = make_variant(model, [FFNPruning(experts=3)], calibration=collect(model, texts()))
    assert variant.methods == make_variant(model, [FFNPruning(experts=3)]).methods
    assert any("magnitudes choose the experts" in note for note in variant.calibration_report.notes)


# -- with other methods ------------------------------------------------------------------------------------------------------


def test_random_experts_stay_out_of_the_file(tmp_path):
    model = model_of("mixtral")
    variant = make_variant(model, [Freeze(ffn="random", seed=3), FFNPruning(experts=3)])
    random = make_variant(model, [Freeze(ffn="random", seed=3)])
    kept = variant.methods[1].experts["decoder.1.experts"]
    one, other = (each.base_model.layers[1].mlp.experts.down_proj for each in (variant, random))
    assert torch.equal(one, other[kept])
    variant.save_pretrained(tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert differences(reloaded.state_dict(), variant.state_dict()) == []


def test_neurons_and_layers_may_go_too():
    model = model_of("mixtral")
    methods = [FFNPruning(experts=3), FFNPruning(expert_width=8), LayerSelection(keep={"decoder": [1]})]
    variant = make_variant(model, methods, calibration=texts())
    assert [tuple(each.shape) for each in variant.base_model.layers[0].mlp.experts.parameters()] == [
        (3, 16, 32),
        (3, 32, 8),
    ]
    torch.testing.assert_close(logits(variant.merge()), logits(variant))


def test_a_config_makes_a_smaller_mixture():
    variant = make_variant(small_config("mixtral"), [FFNPruning(experts=2)], task="causal-lm")
    assert variant.config.num_local_experts == 2
    assert logits(variant.merge()).shape == logits(variant).shape
    method = FFNPruning(experts={"decoder.0.experts": [0, 2]})
    assert method_from_dict(method_to_dict(method)) == method


def test_convert_writes_what_make_variant_makes(tmp_path):
    model = model_of("glm4_moe")
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", [FFNPruning(experts=3)], calibration=texts(), max_shard_size="20KB")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = make_variant(model, [FFNPruning(experts=3)], calibration=texts())
    assert differences(written.state_dict(), expected.state_dict()) == []


# -- bad input ---------------------------------------------------------------------------------------------------------------

WRONG = {
    "too few": ({"experts": 1}, r"experts=1\): 1 experts of each mixture: must be in 2\.\.4: a token gets 2"),
    "too many": ({"experts": 5}, r"5 experts of each mixture: must be in 2\.\.4"),
    "none": ({"experts": 0}, r"experts=0\): must be an integer of at least 1"),
    "one mixture": ({"experts": {"decoder.1.experts": [0, 1]}}, r"of \['decoder.1.experts'\]: must name all of \['decoder.0"),
    "uneven": (
        {"experts": {"decoder.0.experts": [0, 1], "decoder.1.experts": [0, 1, 2]}},
        r"must be numbers in 0\.\.3, as many of each mixture",
    ),
    "far": ({"experts": {"decoder.0.experts": [0, 4], "decoder.1.experts": [0, 1]}}, r"must be numbers in 0\.\.3"),
    "width": ({"experts": 3, "expert_width": 8}, r"expert_width=8\): experts go from all mixtures, and neurons by a second"),
    "layers": ({"experts": 3, "layers": {"decoder": [0]}}, r"layers=.*\): experts go from all mixtures"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=list(WRONG))
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        make_variant(model_of("mixtral"), [FFNPruning(**settings)])


# The routers of deepseek_v4 look up the numbers of experts in a table.
@pytest.mark.parametrize("model_type", ["deepseek_v4", "llama"])
def test_families_whose_config_cannot_hold_it(model_type):
    with pytest.raises(ValueError, match=rf"experts of this {model_type} cannot be removed: no field of its config"):
        make_variant(small_config(model_type), [FFNPruning(experts=3)], task="causal-lm")


def test_a_stored_axis_is_checked():
    config = small_config("mixtral")
    data = to_data(derive(config), "5")
    data["stacks"]["decoder"]["expert_axes"]["mlp.gate.weight"] = 7
    body = {name: value for name, value in data.items() if name not in ("transformers", "digest")}
    data["digest"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    with pytest.raises(ValueError, match=r"expert_axes of 'mlp.gate.weight': 7 is outside 0\.\.2"):
        from_data(data, config)
