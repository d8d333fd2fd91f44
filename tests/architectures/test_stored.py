"""A derived description in the config of a variant: read as it was written, and refused if it was not written by hf_freeze."""

import copy
import hashlib
import json
from dataclasses import fields

import pytest
import torch
import transformers
from support.small import small_config
from transformers import AutoConfig, AutoModelForMaskedLM

import hf_freeze.model.config
from hf_freeze import make_variant
from hf_freeze.architectures.derive import derive
from hf_freeze.architectures.stored import from_data, to_data
from hf_freeze.methods import Freeze, HeadPruning, LowRank, Quantize

ROUND_TRIPS = ["roberta", "t5", "falcon", "modernbert", "albert", "mixtral", "vit"]
ONE_LINE = r"^the stored description of roberta cannot be read: [^\n]*"


@pytest.mark.parametrize("model_type", ROUND_TRIPS)
def test_a_description_survives_json(model_type):
    config = small_config(model_type)
    written = derive(config)
    text = json.dumps(to_data(written, transformers.__version__))
    found = from_data(json.loads(text), config)
    for field in fields(written):
        if field.name not in ("tiny", "tiny_inputs"):  # for tests alone
            assert getattr(found, field.name) == getattr(written, field.name), field.name
    assert to_data(found, transformers.__version__) == json.loads(text)
    assert len(text) < 4000


def with_digest(data):
    """The data with the digest that hf_freeze would write."""
    body = {name: value for name, value in data.items() if name not in ("transformers", "digest")}
    return data | {"digest": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]}


def stored(change=lambda data: None):
    data = to_data(derive(small_config("roberta")), transformers.__version__)
    data = copy.deepcopy(data)
    change(data)
    return data


def at(*path, value):
    """A change of one value."""

    def change(data):
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = value

    return change


STACK = ("stacks", "encoder")
SELF = (*STACK, "attentions", "self")


def test_the_digest_is_recomputed_here_as_there():
    assert with_digest(stored()) == stored()


@pytest.mark.parametrize("path", [(*STACK, "depth"), (*SELF, "q"), ("refusals", "heads"), ("tasks",)], ids=".".join)
def test_a_description_changed_by_hand_is_refused(path):
    with pytest.raises(ValueError, match=ONE_LINE + "its digest does not match: it was changed by hand$"):
        from_data(stored(at(*path, value="num_attention_heads")), small_config("roberta"))


def test_a_description_without_a_digest_is_refused():
    with pytest.raises(ValueError, match=ONE_LINE + "it has no 'digest'$"):
        from_data(stored(lambda data: data.pop("digest")), small_config("roberta"))


HOSTILE = {
    "a long name": (at(*STACK, "layers", value="x" * 301), "a name of 301 characters; the limit is 300"),
    "a long key": (at("token_tables", "x" * 301, value="vocab_size"), "a name of 301 characters; the limit is 300"),
    "too many names": (at("norms", value=["a"] * 20_001), "it is too large"),
    "too deep": (at("tasks", value=[[[[[[[["a"]]]]]]]]), "it is too large"),
    "no heads": (at(*SELF, "heads", value=0), "heads=0 is outside"),
    "absurd heads": (at(*SELF, "heads", value=1 << 40), "heads=1099511627776 is outside"),
    "negative groups": (at(*SELF, "groups", value=-2), "groups=-2 is outside"),
    "an absurd size": (at(*SELF, "size", value=1 << 40), "size=1099511627776 is outside"),
    "heads in words": (at(*SELF, "heads", value="many"), "heads='many' is outside"),
    "true heads": (at(*SELF, "heads", value=True), "attention: heads has a value of a wrong type"),
    "an unknown layout": (at(*SELF, "layout", value="spiral"), r"layout='spiral': choose from \['blocks', "),
    "an unknown field": (at(*STACK, "colour", value="red"), "stack: unknown field 'colour'$"),
    "an unknown field of an attention": (at(*SELF, "colour", value="red"), "attention: unknown field 'colour'$"),
    "an attention without queries": (
        lambda data: data["stacks"]["encoder"]["attentions"]["self"].pop("q"),
        "attention: it has no 'q'$",
    ),
    "a stack without a depth": (lambda data: data["stacks"]["encoder"].pop("depth"), "stack: it has no 'depth'$"),
    "no refusals": (lambda data: data.pop("refusals"), "it has no 'refusals'$"),
    "a list of wrong names": (at("tasks", value=[1]), "architecture: tasks has a value of a wrong type"),
    "a word for a list": (at(*STACK, "ffn", value="fc1"), "stack: ffn has a value of a wrong type"),
    "a list for a word": (at(*SELF, "q", value=["query"]), "attention: q has a value of a wrong type"),
    "no stacks": (at("stacks", value=None), "stacks"),
    "a number for a stack": (at("stacks", "encoder", value=5), "a value of a wrong type"),
    "a number for an attention": (at(*SELF, value=5), "a value of a wrong type"),
    "a format that allocates": (at(*STACK, "layers", value="{:999999999999}"), "must have one {}, for the number"),
    "a format that looks inside": (at(*STACK, "layers", value="{0.real}"), "must have one {}, for the number"),
    "a field that is not there": (at(*STACK, "depth", value="n_layer"), "the config field 'n_layer', which the config"),
    "a field of words": (at(*STACK, "depth", value="hidden_act"), "takes the config field 'hidden_act' for a number"),
    "a switch that is not there": (
        at(*SELF, "switch", value="nonsense"),
        "the config field 'nonsense', which the config",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_descriptions_are_refused_in_one_line(name):
    change, expected = HOSTILE[name]
    with pytest.raises(ValueError, match=ONE_LINE + expected) as caught:
        from_data(with_digest(stored(change)), small_config("roberta"))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("data", [5, "text", [1], True], ids=repr)
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError, match=ONE_LINE + f"it is a {type(data).__name__}, not a dict$"):
        from_data(data, small_config("roberta"))


# -- of a saved variant ----------------------------------------------------------------------------------------------------------

BATCH = {"input_ids": torch.tensor([[5, 9, 3, 7, 6], [8, 4, 6, 0, 0]])}
METHODS = [Freeze(ffn="random"), HeadPruning(heads={"encoder.0.self": [1], "encoder.1.self": [0, 3]})]


@pytest.fixture
def saved(tmp_path):
    model = make_variant(small_config("roberta"), METHODS, task="masked-lm").eval()
    model.save_pretrained(tmp_path)
    return tmp_path, model(**BATCH).logits


def rewrite(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["description"])
    config["description"] = with_digest(config["description"])
    file.write_text(json.dumps(config))


MISSING = {
    "a linear": (at(*STACK, "ffn", value=["intermediate.dense", "output.missing"]), "encoder.layer.0.output.missing"),
    "an attention": (at(*SELF, "q", value="attention.gone"), "encoder.layer.0.attention.gone"),
    "all layers": (at(*STACK, "layers", value="decoder.layers.{}"), "decoder.layers.0"),
    "a table": (at("token_tables", "embeddings.tokens", value="vocab_size"), "embeddings.tokens"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_module_that_the_model_lacks_is_refused_before_weights_are_read(name, saved):
    folder, _ = saved
    change, module = MISSING[name]
    rewrite(folder, change)
    (folder / "model.safetensors").write_bytes(b"these are no weights")
    with pytest.raises(
        ValueError, match=rf"^the description of roberta names '{module}[^\n]*which this model does not"
    ):
        AutoModelForMaskedLM.from_pretrained(folder)


def test_another_number_of_heads_is_refused_before_weights_are_read(saved):
    folder, _ = saved
    rewrite(folder, at(*SELF, "heads", value=8))
    (folder / "model.safetensors").write_bytes(b"these are no weights")
    with pytest.raises(ValueError, match=r"encoder\.0\.self 8 heads of 8, but its output projection has 32 inputs"):
        AutoModelForMaskedLM.from_pretrained(folder)


def test_a_config_whose_description_was_changed_is_refused(saved):
    folder, _ = saved
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"intermediate.dense"', '"output.dense"'))
    with pytest.raises(ValueError, match=ONE_LINE + "it was changed by hand"):
        AutoConfig.from_pretrained(folder)


def test_a_description_of_another_version_that_fits_is_followed(saved, monkeypatch):
    folder, expected = saved
    rewrite(folder, at("transformers", value="4.0.0"))

    def never(config):
        raise AssertionError("it was derived again")

    monkeypatch.setattr(hf_freeze.model.config, "derive", never)
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert torch.equal(model.eval()(**BATCH).logits, expected)
    assert model.config.description["transformers"] == "4.0.0"


def test_families_described_by_hand_store_no_description(tmp_path):
    make_variant(small_config("bert"), [Freeze(ffn="random")], task="masked-lm").save_pretrained(tmp_path)
    assert "description" not in json.loads((tmp_path / "config.json").read_text())


def test_a_config_that_lies_about_its_heads_is_refused(tmp_path):
    """The weights fit any number of heads, and the scale of the scores would silently be another."""
    make_variant(small_config("roberta"), [HeadPruning(share=0.5)], task="masked-lm").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 8}))
    with pytest.raises(ValueError, match=r"gives encoder\.0\.self 4 heads of 8, but the config makes a .* with 4"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_linears_that_a_mixture_of_experts_lacks_are_refused():
    with pytest.raises(
        ValueError, match=r"LowRank\(components=\['ffn'\]\): this mixtral .* choose from \['attention'\]$"
    ):
        make_variant(small_config("mixtral"), [LowRank(rank=4)], task="causal-lm")
    with pytest.raises(
        ValueError, match=r"Quantize\(.*this mixtral .* choose from \['attention', 'embeddings', 'experts'\]$"
    ):
        make_variant(small_config("mixtral"), [Quantize(scheme="int8", components=["ffn"])], task="causal-lm")
