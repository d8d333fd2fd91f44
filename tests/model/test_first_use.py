"""The classes of a family are made when they are first asked for, in any process, and for families that are understood alone."""

import pickle
import sys

import pytest
import torch
from support.processes import new_process, printed_by
from support.small import small_config
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_freeze import make_variant
from hf_freeze.methods import Freeze, HeadPruning
from hf_freeze.model import classes

MODELING = "transformers.models.roberta.modeling_roberta"
BATCH = {"input_ids": torch.tensor([[5, 9, 3, 7, 6], [8, 4, 6, 0, 0]])}
METHODS = [Freeze(ffn="random"), HeadPruning(heads={"encoder.0.self": [1], "encoder.1.self": [0, 3]})]


def variant(model_type="roberta"):
    return make_variant(small_config(model_type), METHODS, task="masked-lm").eval()


@pytest.fixture
def saved(tmp_path):
    model = variant()
    model.save_pretrained(tmp_path / "model")
    torch.save({"batch": BATCH, "logits": model(**BATCH).logits}, tmp_path / "expected.pt")
    return tmp_path


def test_auto_classes_open_a_variant_of_a_family_not_used_before(saved):
    code = """
import sys
import torch
import hf_freeze
from transformers import AutoConfig, AutoModelForMaskedLM
config = AutoConfig.from_pretrained(sys.argv[1] + "/model")
print(type(config).__name__, config.model_type)
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1] + "/model").eval()
expected = torch.load(sys.argv[1] + "/expected.pt")
print(type(model).__name__, torch.equal(model(**expected["batch"]).logits, expected["logits"]))
"""
    expected = "VariantRobertaConfig hf_freeze_roberta\nVariantRobertaForMaskedLM True\n"
    assert printed_by(code, saved).endswith(expected)


def test_another_task_opens_it_too(saved):
    model, info = AutoModelForSequenceClassification.from_pretrained(saved / "model", output_loading_info=True)
    assert type(model).__name__ == "VariantRobertaForSequenceClassification"
    assert {name.split(".")[0] for name in info["missing_keys"]} == {"classifier"}


@pytest.mark.parametrize("model_type", ["roberta", "mpnet"])
def test_a_pickled_variant_opens_in_another_process(model_type, tmp_path):
    model = variant(model_type)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    torch.save({"batch": BATCH, "logits": model(**BATCH).logits}, tmp_path / "expected.pt")
    code = """
import pickle, sys
import torch
model = pickle.load(open(sys.argv[1] + "/model.pickle", "rb"))
expected = torch.load(sys.argv[1] + "/expected.pt")
print(type(model).__name__, torch.equal(model(**expected["batch"]).logits, expected["logits"]))
"""
    assert printed_by(code, tmp_path).split() == [type(model).__name__, "True"]


def test_importing_makes_no_class_and_imports_no_family():
    code = """
import sys
before = {name for name in sys.modules if name.startswith("transformers.models.")}
import hf_freeze
from hf_freeze import methods, analysis
after = {name for name in sys.modules if name.startswith("transformers.models.")}
print(sorted(name for name in after - before if ".modeling_" in name and ".auto." not in name))
print(sys.argv[1] in sys.modules)
from hf_freeze.model import classes
print(sorted(native.__name__ for native in classes.VARIANT_CLASSES))
from transformers import AutoConfig
AutoConfig.for_model("hf_freeze_mpnet", vocab_size=99, hidden_size=32, num_attention_heads=4, intermediate_size=48)
print("VariantMPNetForMaskedLM" in vars(classes), "VariantRobertaForMaskedLM" in vars(classes), sys.argv[1] in sys.modules)
"""
    assert printed_by(code, MODELING).splitlines() == ["[]", "False", "[]", "True False False"]


def test_an_unknown_type_gives_the_error_of_transformers(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "hf_freeze_nonsense"}')
    with pytest.raises(ValueError, match="does not recognize this architecture"):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized model identifier: hf_freeze_nonsense"):
        AutoConfig.for_model("hf_freeze_nonsense")
    assert "hf_freeze_nonsense" not in CONFIG_MAPPING
    with pytest.raises(KeyError, match="hf_freeze_nonsense"):
        CONFIG_MAPPING["hf_freeze_nonsense"]


@pytest.mark.parametrize("name", ["VariantNonsense", "Variant", "RobertaForMaskedLM", "VariantAutoConfig"])
def test_names_of_no_variant_are_no_attributes(name):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'"):
        getattr(classes, name)


def test_a_family_that_is_refused_leaves_nothing_behind():
    config = small_config("squeezebert")
    with pytest.raises(ValueError, match="squeezebert: no list of layers with linears was found"):
        make_variant(config, [], task="masked-lm")
    model = AutoModelForMaskedLM.from_config(config)
    with pytest.raises(ValueError, match="squeezebert: no list of layers with linears was found"):
        make_variant(model, [])
    assert not dict.__contains__(CONFIG_MAPPING._extra_content, "hf_freeze_squeezebert")
    assert type(model) not in classes.VARIANT_CLASSES
    assert type(config) not in classes._CONFIGS
    assert not [name for name in vars(classes) if "SqueezeBert" in name]


def test_a_config_of_a_refused_family_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "hf_freeze_squeezebert", "methods": []}')
    done = new_process(
        "import sys, hf_freeze\nfrom transformers import AutoConfig\nAutoConfig.from_pretrained(sys.argv[1])", tmp_path
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "squeezebert: no list of layers with linears was found" in last


def test_a_class_is_made_once():
    first, second = variant(), variant()
    assert type(first) is type(second) is classes.VARIANT_CLASSES[type(first).native_class]
    assert getattr(sys.modules[classes.__name__], type(first).__name__) is type(first)
    assert type(first.config) is CONFIG_MAPPING["hf_freeze_roberta"]
