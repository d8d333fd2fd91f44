"""Every private name of another library that compat/ uses still exists and does what we use it for.

A failure names what a new version has moved, and the file to mend.
"""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel, Trainer, initialization
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2PreTrainedModel
from transformers.pipelines import PIPELINE_REGISTRY, TextGenerationPipeline
from transformers.utils import output_capturing

import hf_freeze
from hf_freeze.compat import registration
from hf_freeze.compat import transformers as compat
from hf_freeze.compat.transformers import is_initialized, mark_initialized, mark_uninitialized
from hf_freeze.model.classes import variant_class_of

PACKAGE = Path(inspect.getfile(hf_freeze)).parent
VERSION = f"transformers {transformers.__version__}"

ATTRIBUTES = [  # (owner, name, what we use it for)
    (PreTrainedModel, "_init_weights", "drawing fresh values of our modules"),
    (PreTrainedModel, "_get_resized_embeddings", "resizing tables of other forms"),
    (PreTrainedModel, "_get_resized_lm_head", "resizing output matrices of other forms"),
    (PreTrainedModel, "_adjust_bias", "resizing the bias of banded outputs"),
    (PreTrainedModel, "_tied_weights_keys", "declaring ties of methods"),
    (PreTrainedModel, "_keys_to_ignore_on_save", "leaving seeded tensors out of checkpoints"),
    (PreTrainedModel, "_keys_to_ignore_on_load_missing", "loading checkpoints without seeded tensors"),
    (PreTrainedModel, "initialize_weights", "regenerating seeded tensors at the end of from_pretrained"),
    (PreTrainedModel, "mark_tied_weights_as_initialized", "loading tied buffers"),
    (PreTrainedModel, "get_expanded_tied_weights_keys", "ties that a method has removed"),
    (PreTrainedModel, "_load_pretrained_model", "seeded tensors that device_map sends to the disk"),
    (PreTrainedModel, "_get_dtype_plan", "the weights that a family keeps in fp32"),
    (PreTrainedModel, "_keep_in_fp32_modules", "the modules that quantisers leave as they are"),
    (transformers.integrations.accelerate, "offload_weight", "writing seeded tensors where accelerate reads them"),
    (transformers.integrations.accelerate, "expand_device_map", "finding the tensors that go to the disk"),
    (AutoModel, "_model_mapping", "finding the class of a config"),
    (CONFIG_MAPPING, "_extra_content", "making the config class of a variant when AutoConfig asks for it"),
    (BertConfig(), "_attn_implementation", "copying the attention implementation"),
    (output_capturing, "_active_collector", "the weights of attentions without heads, in output_attentions"),
    (PreTrainedModel, "_can_record_outputs", "the modules whose weights are recorded, by their class"),
    (PreTrainedModel, "_is_stateful", "the searches that recurrent units cannot take part in"),
    (compat.convolution_layer(torch.zeros(1, 2, 3)), "conv_states", "exporting the convolutions of LFM2"),
    (PreTrainedModel, "_can_set_attn_implementation", "the attention that the native class would take"),
    (PreTrainedModel, "_can_set_experts_implementation", "the experts that the native class would take"),
    (MixtralExperts, "_apply_gate", "the neurons of an expert in calibrations"),
    (Wav2Vec2PreTrainedModel, "_get_feature_vector_attention_mask", "the padding of frames in distillation"),
    (Trainer, "_prepare_inputs", "putting batches on the Trainer's device"),
    (TextGenerationPipeline, "_default_generation_config", "the length of generated text in pipelines"),
    (PIPELINE_REGISTRY, "check_task", "tasks such as translation_tr_to_en"),
    (nn.Module, "_get_name", "label smoothing of causal language models"),
]


def test_the_state_of_a_convolution_is_the_one_it_was_given():
    state = torch.randn(1, 2, 3)
    layer = compat.convolution_layer(state)
    assert compat.has_states(layer)
    assert torch.equal(compat.state_of_convolution(layer), state)
    layer.update_recurrent_state(state)
    assert compat.state_of_convolution(layer) is None  # it keeps something else too


def test_a_scan_applies_its_step_to_each_token():
    def step(state, values):
        state = state + values[0]
        return state, state.clone()

    x = torch.randn(2, 5, 3)
    last, outputs = compat.scan(step, torch.zeros(2, 3), [x])
    torch.testing.assert_close(outputs, x.cumsum(1))
    assert torch.equal(last, outputs[:, -1])


@pytest.mark.parametrize(("owner", "name", "use"), ATTRIBUTES, ids=[name for _, name, _ in ATTRIBUTES])
def test_the_name_is_still_there(owner, name, use):
    label = getattr(owner, "__name__", type(owner).__name__)
    assert hasattr(owner, name), (
        f"{VERSION} has no {label}.{name}; hf_freeze needs it for {use}: mend hf_freeze/compat/"
    )


def test_the_mark_of_drawn_values_is_respected():
    marked, unmarked = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    mark_initialized([marked])
    assert is_initialized(marked)
    assert not is_initialized(unmarked)
    for parameter in (marked, unmarked):
        initialization.ones_(parameter)
    message = f"{VERSION} no longer reads _is_hf_initialized: mend hf_freeze/compat/transformers.py"
    assert (marked.sum().item(), unmarked.sum().item()) == (0, 4), message


def test_a_module_that_is_marked_for_redrawing_is_drawn_again():
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    model = BertModel(config)
    linear = model.encoder.layer[0].intermediate.dense
    linear.weight = nn.Parameter(torch.zeros(8, 8))
    for name in (
        "encoder.layer.0.intermediate.dense",
        "encoder.layer.0.intermediate",
        "encoder.layer.0",
        "encoder",
        "",
    ):
        mark_uninitialized(model.get_submodule(name))
    mark_uninitialized(model.encoder.layer)
    model.initialize_weights()
    assert linear.weight.any(), f"{VERSION} no longer redraws such modules: mend hf_freeze/compat/transformers.py"


def test_the_mapping_of_configs_still_asks_its_further_entries():
    """On a new mapping: AutoConfig's own keeps what it has."""
    moved = f"{VERSION} asks in another way for registered configs: mend hf_freeze/compat/registration.py"
    mapping, asked = type(CONFIG_MAPPING)({"bert": "BertConfig"}), []
    assert mapping._extra_content == {}, moved
    mapping.register("registered", BertConfig)
    assert mapping._extra_content == {"registered": BertConfig}, moved

    def make(model_type):
        asked.append(model_type)
        mapping.register(model_type, BertConfig, exist_ok=True)
        return BertConfig

    registration.make_configs_late(mapping, {"late_": make, "whole": make})
    assert "late_bert" in mapping, moved
    assert "whole" in mapping, moved
    for unknown in ("late_nonsense", "late_", "whole_bert", "bert_late_", 3):
        assert unknown not in mapping, moved
    assert "late_registered" not in mapping, "only native types have variants"
    assert list(mapping.keys()) == ["bert", "registered"], "nothing is made until it is asked for"
    assert asked == []
    for name in ("late_bert", "whole"):
        assert mapping[name] is BertConfig, moved
        assert mapping[name] is BertConfig
    assert asked == ["late_bert", "whole"], "it is made once"
    assert mapping["registered"] is BertConfig, moved
    with pytest.raises(KeyError):
        mapping["late_nonsense"]


def test_the_mapping_of_configs_has_our_entries():
    assert isinstance(CONFIG_MAPPING._extra_content, registration._LateConfigs)
    assert "hf_freeze_roberta" in CONFIG_MAPPING
    assert "hf_freeze_nonsense" not in CONFIG_MAPPING
    assert "exported_by_hf_freeze" in CONFIG_MAPPING


def test_distributed_training_still_asks_which_tensors_to_leave_out():
    source = inspect.getsource(nn.parallel.DistributedDataParallel)
    assert "_ddp_params_and_buffers_to_ignore" in source, f"torch {torch.__version__} asks by another name"


def test_saving_adapters_alone_is_still_told_by_the_same_mark():
    source = inspect.getsource(PreTrainedModel.save_pretrained)
    assert "_hf_peft_config_loaded" in source, f"{VERSION} marks models with PEFT adapters by another name"


@pytest.mark.parametrize("native", ["MixtralForCausalLM", "LlamaForCausalLM", "BloomForCausalLM"])
@pytest.mark.parametrize("switch", ["_can_set_attn_implementation", "_can_set_experts_implementation"])
def test_a_variant_computes_as_its_native_class_would(native, switch, monkeypatch):
    """Also in a process that has made no native model, whose class would have the answer cached."""
    native = getattr(transformers, native)
    expected = getattr(native, switch)()
    for cls in native.__mro__:
        if f"{switch}_cached_value" in vars(cls):
            monkeypatch.delattr(cls, f"{switch}_cached_value")
    assert getattr(variant_class_of(native), switch)() == expected


def test_nested_configs_keep_an_attention_of_their_own():
    old, new = transformers.CLIPConfig(), transformers.CLIPConfig()
    old._attn_implementation = "eager"
    old.text_config._attn_implementation = "sdpa"
    compat.copy_attention_implementation(old, new)
    parts = (new, new.text_config, new.vision_config)
    assert [part._attn_implementation for part in parts] == ["eager", "sdpa", "eager"]


def test_the_cache_of_a_decoder_is_sized_by_decoder_layers():
    """T5's native configs call it `num_decoder_layers`; `merge` adds the name that the sizing of caches reads."""
    depths = {"num_layers": 1, "num_decoder_layers": 3}
    for added, expected in (({}, 1), ({"decoder_layers": 3}, 3)):
        depth = transformers.T5Config(**depths, **added).get_text_config(decoder=True).num_hidden_layers
        assert depth == expected, f"{VERSION} sizes caches otherwise: mend cache_fields in hf_freeze/model/config.py"


def test_default_targets_of_peft_are_still_tables_by_model_type():
    constants = importlib.import_module("peft.utils.constants")
    tables = [table for table in vars(constants).values() if isinstance(table, dict) and "llama" in table]
    assert tables, "peft.utils.constants has no table of default targets by model type: mend hf_freeze/compat/peft.py"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_stand_in_compat_alone(path):
    if path.parent == PACKAGE / "compat":
        return
    private = {name for _, name, _ in ATTRIBUTES if name.startswith("_")}
    private |= {"_is_hf_initialized", "_hf_peft_config_loaded", "_ddp_params_and_buffers_to_ignore", "REMOVED_TASKS"}
    named, text = set(), path.read_text(encoding="utf-8")
    if not any(name in text for name in private):  # most files: parsing takes longest
        return
    for node in ast.walk(ast.parse(text)):
        named |= {getattr(node, "attr", None), getattr(node, "name", None)}
        if isinstance(node, ast.Constant):
            named.add(node.value if isinstance(node.value, str) else None)
    assert not named & private, f"{path.name} names {sorted(named & private)}: move this to hf_freeze/compat/"
