"""What a native class derives from the number of a layer, when methods give its layers other numbers."""

import copy
from typing import Any

import pytest
import torch
from support.cases import ALL
from support.models import add_noise, differences, outputs, perturbed
from support.small import small_config
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq, GPT2LMHeadModel

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods import (
    FFNPruning,
    Freeze,
    HeadMask,
    HeadPruning,
    LayerDrop,
    LayerSelection,
    LayerSharing,
    LowRank,
    Theseus,
)

GPT2 = ARCHITECTURES["gpt2"]
BATCH = GPT2.tiny_inputs("feature-extraction")
SECOND_HALF = LayerSelection(keep={"decoder": [2, 3]})
LISTS = {
    "selection": [LayerSelection(keep={"decoder": [1, 3]})],
    "selection by share": [LayerSelection(share=0.5)],
    "selection after LayerDrop": [LayerDrop(p=0.5), SECOND_HALF],
    "selection twice": [LayerSelection(keep={"decoder": [1, 2, 3]}), LayerSelection(keep={"decoder": [1, 2]})],
    "sharing of a deeper stack": [LayerSharing(depth={"decoder": 7})],
    "sharing of a shallower stack": [LayerSharing(groups=2, start="middle", depth={"decoder": 2})],
    "sharing after selection": [SECOND_HALF, LayerSharing(depth={"decoder": 3})],
    "Theseus": [Theseus(train="all")],
    "Theseus after selection": [LayerSelection(keep={"decoder": [1, 3]}), Theseus(init="alternate")],
    "head pruning": [SECOND_HALF, HeadPruning(heads={"decoder.0.self": [0], "decoder.1.self": [0, 1]})],
    "head mask": [SECOND_HALF, HeadMask(heads={"decoder.0.self": [1]})],
    "low rank": [SECOND_HALF, LowRank(components=["attention", "ffn"], rank=3)],
    "random attention": [SECOND_HALF, Freeze(attention="random", seed=3)],
    "pruned neurons": [FFNPruning(width=12), SECOND_HALF],
}


def inverse_scaled(**fields):
    """A GPT-2 of four layers, each of which divides its scores by its number."""
    config = AutoConfig.for_model(
        "gpt2", **GPT2.tiny | {"n_layer": 4, "scale_attn_by_inverse_layer_idx": True} | fields
    )
    torch.manual_seed(1)
    model = add_noise(AutoModelForCausalLM.from_config(config), GPT2)
    with torch.no_grad():  # large scores, so that their scale matters
        for name, parameter in model.named_parameters():
            if "attn.c_attn" in name:
                parameter *= 3
    return model.eval()


@pytest.mark.parametrize("name", LISTS)
def test_a_merged_model_computes_the_same_with_new_numbers(name, tmp_path):
    variant = make_variant(inverse_scaled(), LISTS[name]).eval()
    merged = variant.merge()
    assert type(merged) is GPT2LMHeadModel
    assert differences(outputs(merged, BATCH), outputs(variant, BATCH), 1e-5) == []
    merged.save_pretrained(tmp_path)
    reloaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert differences(outputs(reloaded, BATCH), outputs(merged, BATCH)) == []


@pytest.mark.parametrize("fields", [{}, {"scale_attn_weights": False}, {"add_cross_attention": True}], ids=str)
def test_selected_layers_compute_what_they_did(fields):
    model = inverse_scaled(use_cache=False, **fields)
    batch = BATCH | ({"encoder_hidden_states": torch.randn(2, 4, 16)} if "add_cross_attention" in fields else {})
    variant = make_variant(model, [LayerSelection(keep={"decoder": [1, 3]})])
    merged = variant.merge()
    model.transformer.h = nn.ModuleList([model.transformer.h[1], model.transformer.h[3]])
    expected = outputs(model, batch)
    assert differences(outputs(variant, batch), expected) == []
    assert differences(outputs(merged, batch), expected, 1e-5) == []


def test_reordered_attention_keeps_its_scale_too():
    model = inverse_scaled(reorder_and_upcast_attn=True)
    variant = make_variant(model, [SECOND_HALF]).eval()
    merged = variant.merge()
    for either in (variant, merged):
        either.set_attn_implementation("eager")
    assert differences(outputs(merged, BATCH), outputs(variant, BATCH), 1e-5) == []


def test_a_successor_starts_as_the_layer_that_it_copies():
    variant = make_variant(inverse_scaled(), [Theseus(init="alternate")]).eval()
    hidden_states = torch.randn(2, 5, 16)
    for layer in variant.transformer.h:
        expected = layer.predecessor[0](hidden_states)
        torch.testing.assert_close(layer(hidden_states), expected, rtol=1e-5, atol=1e-5)


def test_a_finalized_successor_is_merged_as_it_is():
    variant = make_variant(inverse_scaled(), [Theseus(init="alternate")]).eval()
    expected = outputs(variant, BATCH)
    variant.finalize()
    assert differences(outputs(variant, BATCH), expected) == []
    assert differences(outputs(variant.merge(), BATCH), expected, 1e-5) == []


def test_a_successor_that_cannot_take_over_the_scale_is_refused():
    with pytest.raises(ValueError, match=r"'attn\.c_attn' is a LowRank.*; put Theseus first, or use init='first'"):
        make_variant(inverse_scaled(), [LowRank(components=["attention"], rank=3), Theseus(init="alternate")])


TINY = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 48}
TINY |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
ROUTED = TINY | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "head_dim": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
ERNIE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_interval": 2,
    "moe_layer_start_index": 2,
    "moe_layer_end_index": 5,
}
JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4}
KINDS = {  # families whose layers are of several kinds -> config fields of a model of eight
    "gpt_neo": {"vocab_size": 99, "hidden_size": 32, "num_layers": 8, "num_heads": 4, "window_size": 4}
    | {"attention_types": [[["global", "local", "local", "global"], 2]], "intermediate_size": 48, "pad_token_id": 0},
    "qwen2_moe": MIXTURE | {"decoder_sparse_step": 2, "mlp_only_layers": [5], "shared_expert_intermediate_size": 24},
    "recurrent_gemma": TINY | {"head_dim": 8, "lru_width": 32, "attention_window_size": 4},
    "jamba": TINY | JAMBA | {"num_experts": 2, "mamba_d_state": 4},
    "ernie4_5_moe": TINY | ERNIE | {"moe_intermediate_size": 24, "moe_num_shared_experts": 1},
    "qwen3_moe": MIXTURE | {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
    "qwen3_next": MIXTURE | LINEAR | {"decoder_sparse_step": 2, "shared_expert_intermediate_size": 24},
    "glm4_moe": ROUTED,
    "dots1": ROUTED,
    "afmoe": MIXTURE | {"num_dense_layers": 3, "sliding_window": 4, "global_attn_every_n_layers": 3},
}


SENTENCE = torch.tensor([[5, 9, 3, 7, 1, 8, 4]])


def of_kinds(model_type, **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **KINDS.get(model_type, TINY) | fields)
    return perturbed(AutoModelForCausalLM.from_config(config)).eval()


def without_layers(model, name, kept):
    """The native `model` with the layers `kept` alone, taken out by hand: their places in a cache are as before."""
    model = copy.deepcopy(model)
    layers = model.base_model.get_submodule(name)
    setattr(model.base_model, name, nn.ModuleList(layers[number] for number in kept))
    for field, value in vars(model.config).items():
        if field in ("num_hidden_layers", "num_layers"):
            setattr(model.config, field, len(kept))
        elif isinstance(value, list) and len(value) == len(layers):
            setattr(model.config, field, [value[number] for number in kept])
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=SENTENCE, use_cache=False).logits


@pytest.mark.parametrize("model_type", KINDS if ALL else ["gpt_neo", "qwen2_moe"])
def test_layers_of_several_kinds_stay_what_they_are(model_type, tmp_path):
    native, kept = of_kinds(model_type), [0, 2, 3, 5, 7]
    variant = make_variant(native, [LayerSelection(keep={"decoder": kept})]).eval()
    expected = logits(without_layers(native, "h" if model_type == "gpt_neo" else "layers", kept))
    if model_type not in ("recurrent_gemma", "jamba"):  # by hand, their forward would take layers for others
        assert torch.equal(logits(variant), expected)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached, plain = (variant.generate(SENTENCE, use_cache=cache, **settings) for cache in (True, False))
    assert torch.equal(cached, plain)
    variant.save_pretrained(tmp_path / "variant")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "variant").eval()
    assert torch.equal(logits(loaded), logits(variant))
    if model_type == "jamba":  # every second layer has experts, of those left the last three
        with pytest.raises(
            ValueError, match=r"this jamba cannot be merged: layer 1 of stack 'decoder' of a native model"
        ):
            variant.merge()
        return
    variant.merge().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(logits(merged), logits(variant), atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "setting"),
    [("diffllama", "self_attn.lambda_init=0.35"), *[("beam", "attn_residual_add_idx=4")] * ALL],
)
def test_a_native_layer_that_would_compute_something_else_at_its_new_number_is_not_merged(model_type, setting):
    variant = make_variant(of_kinds(model_type, num_hidden_layers=4), [LayerSelection(keep={"decoder": [0, 2, 3]})])
    with pytest.raises(
        ValueError, match=rf"cannot be merged: layer \d of stack 'decoder' of a native model .*{setting}"
    ):
        variant.merge()
    whole = make_variant(of_kinds(model_type, num_hidden_layers=4), [LayerSelection(keep={"decoder": [0, 1, 2]})])
    assert torch.equal(logits(whole.eval().merge().eval()), logits(whole))


def test_types_of_layers_that_no_config_gives_to_a_cache_are_refused():
    with pytest.raises(
        ValueError, match=r"no config of transformers makes a jamba of layers of the types \['linear_att"
    ):
        make_variant(of_kinds("jamba"), [LayerSelection(keep={"decoder": [0, 1, 2, 3, 4, 5, 7]})])


def test_layers_do_not_run_in_the_place_of_successors_that_get_other_masks():
    types = r"\['linear_attention', 'linear_attention', 'sliding_attention', 'linear"
    with pytest.raises(ValueError, match=rf"Theseus\(successor=.*instead of successors of another type.*{types}"):
        make_variant(of_kinds("recurrent_gemma"), [Theseus()])


SWITCHES = [{"scale_attn_by_inverse_layer_idx": True}, {"reorder_and_upcast_attn": True}, {"add_cross_attention": True}]
DERIVED = {"layer_idx", "scaling"}  # what surgery and merge() look after


@pytest.mark.parametrize("fields", [{}, *SWITCHES, {"is_decoder": True, "add_cross_attention": True}], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda architecture: architecture.model_type)
def test_nothing_else_depends_on_the_number_of_a_layer(architecture, fields):
    config = AutoConfig.for_model(architecture.model_type)
    if not all(hasattr(config, name) for name in fields) or (
        "is_decoder" not in fields and config.model_type == "bert"
    ):
        fields = {}
    deep = {stack.depth: 3 for stack in architecture.stacks.values()}
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny | deep | fields)
    base = AUTO_CLASSES[architecture.tasks[0]].from_config(config).base_model
    for stack in architecture.stacks.values():
        first, *others = (dict(base.get_submodule(stack.layers.format(n)).named_modules()) for n in range(3))
        for other in others:
            assert first.keys() == other.keys()
            differ = {
                field
                for name, module in first.items()
                for field, value in vars(module).items()
                if isinstance(value, int | float | str | None) and value != vars(other[name])[field]
            }
            assert differ <= DERIVED


SPEECH = {"d_model": 16, "decoder_layers": 6, "decoder_attention_heads": 4, "median_filter_width": 3}
ALIGNMENT = [[2, 0], [4, 1], [5, 3]]  # (layer, head) of the cross-attentions that tell when tokens are spoken


def times(model):
    """The tokens and their times; the tokens 0 to 2 are special, and 99 stands for "no times"."""
    audio, frames = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(3)), torch.tensor([100])
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "return_timestamps": False}
    result = model.generate(audio, return_token_timestamps=True, num_frames=frames, **settings)
    return result["sequences"].tolist(), result["token_timestamps"].tolist()


@pytest.fixture
def speech():
    config = small_config("whisper", **SPEECH, num_mel_bins=8, max_source_positions=50, decoder_start_token_id=3)
    torch.manual_seed(0)
    model = perturbed(AutoModelForSpeechSeq2Seq.from_config(config)).eval()
    fields = {"alignment_heads": ALIGNMENT, "no_timestamps_token_id": 98, "is_multilingual": False, "bos_token_id": 1}
    fields |= {"suppress_tokens": None, "begin_suppress_tokens": None, "forced_decoder_ids": None}
    fields |= {"_from_model_config": False}  # as in a published one, which is not made again of the config
    vars(model.generation_config).update(fields)
    return model


@pytest.mark.parametrize(
    ("method", "pairs"),
    [
        (LayerSelection(keep={"decoder": [0, 2, 4, 5]}), [[1, 0], [2, 1], [3, 3]]),
        (LayerSelection(keep={"decoder": [1, 5]}), [[1, 3]]),
        (HeadPruning(heads={"decoder.4.cross": [0], "decoder.5.cross": [3]}), [[2, 0], [4, 0]]),
        (LayerSharing(depth={"decoder": 3}, start="middle"), [[1, 0], [2, 1]]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_heads_that_tell_when_tokens_are_spoken_keep_their_meaning(speech, method, pairs, tmp_path):
    variant = make_variant(speech, [method]).eval()
    assert variant.generation_config.alignment_heads == pairs
    assert speech.generation_config.alignment_heads == ALIGNMENT
    expected = times(variant)
    assert times(variant.merge().eval()) == expected
    variant.save_pretrained(tmp_path)
    assert times(AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path).eval()) == expected


def test_the_times_are_those_of_the_native_model_without_the_other_layers(speech):
    by_hand, kept = copy.deepcopy(speech), [0, 2, 4, 5]
    by_hand.model.decoder.layers = nn.ModuleList(by_hand.model.decoder.layers[number] for number in kept)
    for place, layer in enumerate(by_hand.model.decoder.layers):
        layer.self_attn.layer_idx = layer.encoder_attn.layer_idx = place
    by_hand.config.decoder_layers = 4
    by_hand.generation_config.alignment_heads = [[1, 0], [2, 1], [3, 3]]
    assert times(make_variant(speech, [LayerSelection(keep={"decoder": kept})]).eval()) == times(by_hand)


def test_without_its_heads_a_model_says_that_it_tells_no_times(speech):
    pruned = make_variant(speech, [HeadPruning(penalty=0.1)])
    pruned.finalize()
    assert pruned.generation_config.alignment_heads == ALIGNMENT, "no gate is closed yet"
    variant = make_variant(speech, [LayerSelection(keep={"decoder": [0, 1]})]).eval()
    with pytest.raises(ValueError, match="has no `alignment_heads`"):
        times(variant)


def mllama():
    """Its layer 3 attends to an image; where there is none, the model passes over the layers of a list that it has copied."""
    config = small_config("mllama")
    config.text_config.num_hidden_layers, config.text_config.cross_attention_layers = 6, [3]
    torch.manual_seed(1)
    return AutoModel.from_config(config).eval()


def test_lists_of_layers_that_a_module_has_copied_follow():
    batch = {"input_ids": torch.tensor([[4, 5, 6, 7]])}
    model: Any = mllama()
    variant = make_variant(model, [LayerSelection(keep={"decoder": [0, 2, 3, 5]})]).eval()
    assert variant.config.text_config.cross_attention_layers == variant.language_model.cross_attention_layers == [2]
    del model.language_model.layers[4], model.language_model.layers[1]
    for number, layer in enumerate(model.language_model.layers):
        for module in layer.modules():
            module.layer_idx = number
    model.language_model.cross_attention_layers = [2]
    assert differences(outputs(variant, batch), outputs(model, batch), 1e-6) == []


def test_theseus_runs_no_layer_in_place_of_one_of_another_class():
    with pytest.raises(ValueError, match=r"of another type, with their masks; the types are .*MllamaCrossAttention"):
        make_variant(mllama(), [Theseus(successor={"decoder": 3})])
