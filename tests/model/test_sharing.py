"""Which memory a variant, or what it merges to, has: tensors taken over, copied once, or freed."""

import pytest
import torch
from support.cases import MODEL, Case, once, plain
from support.models import build, merge_or_none, native, outputs
from support.parametrize import over

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import FFNPruning, Freeze, HeadPruning, LayerSelection, LowRank, Quantize


def memory(model):
    return {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()}


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@over(once(lambda case: case.source == MODEL and case.methods and not case.finalized))
def test_a_backbone_is_left_as_it_is_or_used_up(case: Case):
    backbone = native(case)
    before = copied(backbone)
    variant = make_variant(backbone, list(case.methods))
    assert equal(copied(backbone), before)
    assert not memory(variant) & memory(backbone)
    unchanged = copied(variant)
    for parameter in backbone.parameters():
        parameter.data.fill_(float("nan"))
    assert equal(copied(variant), unchanged)

    used_up = native(case)
    assert equal(copied(make_variant(used_up, list(case.methods), copy=False)), unchanged)
    assert all(parameter.is_meta for parameter in used_up.parameters())
    assert not [name for name in vars(used_up) if "hf_freeze" in name], "marks of the conversion"


@over(once() + once(finalized=True))
def test_merging_leaves_a_variant_as_it_is_or_uses_it_up(case: Case):
    variant = build(case)
    before, settings, state = copied(variant), variant.config.to_dict(), torch.get_rng_state()
    merged = merge_or_none(variant)
    assert equal(copied(variant), before)
    assert variant.config.to_dict() == settings
    assert torch.equal(torch.get_rng_state(), state)
    if merged is None:
        with pytest.raises(ValueError, match="merge"):
            variant.merge(copy=False)
        assert equal(copied(variant), before)
        return
    assert not memory(merged) & memory(variant)
    tensors = {id(tensor): tensor for tensor in (*merged.parameters(), *merged.buffers()) if tensor.numel()}
    assert len(memory(merged)) == len(tensors)
    taken = variant.merge(copy=False)
    assert equal(copied(taken), copied(merged))
    assert all(parameter.is_meta for parameter in variant.parameters())


def test_merging_takes_over_what_is_native_already(backbone):
    variant = make_variant(backbone, [LowRank(rank=2, components=["attention"]), Freeze(embeddings="frozen")])
    before = {name: parameter.data_ptr() for name, parameter in variant.named_parameters()}
    merged = variant.merge(copy=False)
    moved = {name for name, parameter in merged.named_parameters() if parameter.data_ptr() != before.get(name)}
    assert moved
    assert all("_proj" in name and "attn" in name for name in moved)
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM was used up by merge\(copy=False\), .+ or copy=True$"):
        variant.merge()


@pytest.fixture
def backbone():
    return native(plain(ARCHITECTURES["llama"]))


@pytest.mark.parametrize("use", ["forward", "generate", "save_pretrained", "state_dict"])
def test_a_use_of_what_is_used_up_says_so(backbone, use):
    make_variant(backbone, [Freeze(ffn="frozen")], copy=False)
    with pytest.raises(
        RuntimeError, match=r"^this LlamaForCausalLM was used up by make_variant\(copy=False\), .+ copy=True$"
    ):
        getattr(backbone, use)()


def test_what_no_method_changes_is_taken_over(backbone):
    heads = {"decoder.0.self": [0, 1]}
    before = {name: parameter.data_ptr() for name, parameter in backbone.named_parameters()}
    methods = [HeadPruning(heads=heads), FFNPruning(width=8, layers={"decoder": [0]}), Freeze(embeddings="frozen")]
    variant = make_variant(backbone, methods, copy=False)
    moved = {name for name, parameter in variant.named_parameters() if parameter.data_ptr() != before[name]}
    assert moved
    assert all(".layers.0." in name and ("attn" in name or "mlp" in name) for name in moved)


def test_layers_that_are_kept_are_taken_over(backbone):
    last = backbone.model.layers[1].mlp.up_proj.weight.data_ptr()
    variant = make_variant(
        backbone, [LayerSelection(keep={"decoder": [1]}), LowRank(rank=2, components=["attention"])], copy=False
    )
    assert variant.model.layers[0].mlp.up_proj.weight.data_ptr() == last


def test_an_error_in_a_setting_uses_nothing_up(backbone):
    expected = outputs(backbone, {"input_ids": torch.arange(5)[None]})
    with pytest.raises(ValueError, match="width=1000"):
        make_variant(backbone, [FFNPruning(width=1000)], copy=False)
    assert outputs(backbone, {"input_ids": torch.arange(5)[None]}).keys() == expected.keys()


def test_an_error_while_converting_uses_it_up_only_without_a_copy(backbone):
    backbone.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    before = copied(backbone)
    for copy in (True, False):
        with pytest.raises(ValueError, match="cannot quantise"):
            make_variant(backbone, [Quantize(scheme="int8")], copy=copy)
        if copy:
            after = copied(backbone)
            assert all(torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in before)
    with pytest.raises(RuntimeError, match="was used up"):
        backbone.state_dict()


def test_the_dtype_of_the_backbone_stays(backbone):
    backbone = backbone.bfloat16()
    variant = make_variant(
        backbone, [FFNPruning(width=8), LowRank(rank=2, components=["attention"]), Freeze(norm="frozen")]
    )
    assert {parameter.dtype for parameter in variant.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
