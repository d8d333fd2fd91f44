"""What code that knows only transformers expects of a model, for methods that tie, factorise and regenerate.

transformers' own model tests (`transformers_suite/`) found each of these; these tests need no download.
"""

import copy
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
SHARED = {"layers": methods.LayerSharing(start="middle"), "embeddings": methods.FactorizedEmbedding(rank=4)}


def fresh(architecture, *applied, **changes):
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny | changes)
    return make_variant(config, list(applied), task=architecture.tasks[0])


@every_architecture
def test_a_state_dict_in_memory_needs_no_digests(architecture):
    model = fresh(architecture, methods.Freeze(ffn="random", embeddings="random"))
    assert model.seeded_tensors
    config = copy.deepcopy(model.config)
    config.digests = {}
    again = type(model).from_pretrained(None, config=config, state_dict=model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)


@every_architecture
def test_a_seeded_tensor_that_was_changed_in_a_state_dict_is_refused(architecture):
    model = fresh(architecture, methods.Freeze(ffn="random"))
    name, *others = model.seeded_tensors
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state[name] += 1
    with pytest.raises(ValueError, match=re.escape(f"{name!r} of the state dict is not what its seed regenerates")):
        type(model).from_pretrained(None, config=model.config, state_dict=state)
    config = copy.deepcopy(model.config)
    config.digests = {}
    del state[name], state[others[0]]
    with pytest.raises(ValueError, match="has no digest of"):
        type(model).from_pretrained(None, config=config, state_dict=state)


@pytest.mark.parametrize("method", SHARED.values(), ids=list(SHARED))
@every_architecture
def test_every_tie_is_declared(architecture, method, tmp_path):
    model = fresh(architecture, method)
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        assert len([name for name in tied if name not in model._tied_weights_keys]) == 1, tied
    model.base_model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not [name for name in info["missing_keys"] if name.startswith(f"{model.base_model_prefix}.")]
    for name, value in model.base_model.state_dict().items():
        torch.testing.assert_close(again.base_model.state_dict()[name], value, rtol=0, atol=0)


@every_architecture
def test_untied_embeddings_are_not_declared_tied(architecture, tmp_path):
    model = fresh(architecture, methods.Freeze(ffn="random"), tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    lacking = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False).missing_keys
    assert set(lacking) == set(model._keys_to_ignore_on_save) | set(model._tied_weights_keys)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "marian"])
def test_output_embeddings_of_low_rank_are_a_linear(model_type, tied):
    model = fresh(ARCHITECTURES[model_type], SHARED["embeddings"], tie_word_embeddings=tied)
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear)
    assert (output.in_features, output.out_features) == (model.config.hidden_size, model.config.vocab_size)
    table = nn.Embedding(10, 10)
    model.set_input_embeddings(table)
    assert model.get_input_embeddings() is table


def test_a_size_mismatch_is_a_runtime_error_too(tmp_path):
    config = AutoConfig.for_model("gpt2", **ARCHITECTURES["gpt2"].tiny)
    make_variant(config, [], task="sequence-classification").save_pretrained(tmp_path)
    for error in (RuntimeError, ValueError):
        with pytest.raises(error, match="size mismatch"):
            AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=42)


@every_architecture
def test_a_config_may_ask_for_attentions(architecture, tmp_path):
    """With eager attention, through making, saving, loading, merging and adding a method."""
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny)
    config._attn_implementation = "eager"
    config.output_attentions = True
    task, batch = architecture.tasks[0], architecture.tiny_inputs(architecture.tasks[0])
    model = make_variant(config, [methods.HeadMask()], task=task)
    model.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES[task].from_pretrained(tmp_path)
    renewed = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    for each in (model, loaded, renewed, model.merge(), make_variant(model, [methods.Freeze(ffn="random")])):
        found = {name for name in each(**batch) if name.endswith("attentions")}
        assert found


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "marian"])
def test_initialising_twice_leaves_balanced_factors_alone(model_type):
    model = fresh(ARCHITECTURES[model_type], SHARED["embeddings"], tie_word_embeddings=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.post_init()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
