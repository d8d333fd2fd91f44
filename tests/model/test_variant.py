"""What `make_variant` accepts and refuses, what a variant's config may say, and what Freeze does to each tensor."""

import json
import math
import shutil

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from support.processes import printed_by
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    MarianConfig,
    MarianMTModel,
    MarianPreTrainedModel,
    SqueezeBertConfig,
)
from transformers.models.marian.modeling_marian import MarianForCausalLM

from hf_freeze import count_parameters, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import Freeze
from hf_freeze.methods.registry import method_from_dict, method_to_dict
from hf_freeze.seeded.tensor import SeededTensor, digest

MARIAN, BERT = ARCHITECTURES["marian"], ARCHITECTURES["bert"]
TABLE, FC1, QUERY = (
    "model.shared.weight",
    "model.encoder.layers.0.fc1.weight",
    "model.encoder.layers.0.self_attn.q_proj.weight",
)


def marian_config(**changes):
    return MarianConfig(**(MARIAN.tiny | changes))


def bert_config(**changes):
    return BertConfig(**(BERT.tiny | changes))


@torch.no_grad()
def shake(model):
    """Stand-in for training: every trainable value moves."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def fresh_marian(*methods, **arguments):
    return make_variant(marian_config(**arguments), list(methods), task="seq2seq-lm", init="marian", seed=1)


@torch.no_grad()
def logits(model, task="seq2seq-lm"):
    batch = (MARIAN if isinstance(model, MarianPreTrainedModel) else BERT).tiny_inputs(task)
    return model.eval()(**batch).logits


def trainable(model):
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def tensors(model):
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A variant with seeded tables and FFNs, and a trained output bias, on disk."""
    folder = tmp_path_factory.mktemp("variant")
    shake(fresh_marian(Freeze(embeddings="random", ffn="random", seed=13))).save_pretrained(folder)
    return folder


@pytest.fixture
def damaged(saved, tmp_path):
    """A function: a copy of `saved` whose config has changed fields."""

    def change(**fields):
        folder = tmp_path / "damaged"
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return change


# -- what make_variant refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [None, "translation", "seq2seq"])
def test_a_config_needs_a_known_task(task):
    with pytest.raises(ValueError, match=rf"task={task!r}: .*'seq2seq-lm'.*'feature-extraction'"):
        make_variant(marian_config(), [], task=task)


def test_a_name_needs_a_known_task(saved):
    with pytest.raises(ValueError, match="task=None"):
        make_variant(str(saved), [])


def test_a_task_of_another_family_is_refused():
    with pytest.raises(ValueError, match=r"no task 'causal-lm' for marian; choose from .*'seq2seq-lm'"):
        make_variant(marian_config(), [], task="causal-lm")
    with pytest.raises(ValueError, match="no task 'seq2seq-lm' for bert"):
        make_variant(bert_config(), [], task="seq2seq-lm")


def test_a_task_that_is_not_that_of_the_model_is_refused():
    model = make_variant(bert_config(), [], task="masked-lm")
    expected = (
        r"^task='sequence-classification', but the backbone is a BertForMaskedLM, of task 'masked-lm': leave task out$"
    )
    for backbone in (model, model.merge()):
        with pytest.raises(ValueError, match=expected):
            make_variant(backbone, [], task="sequence-classification")
        assert type(make_variant(backbone, [], task="masked-lm")) is type(model)


@pytest.mark.parametrize("init", ["glorot", "random", None])
def test_an_unknown_init_is_refused(init):
    with pytest.raises(ValueError, match=rf"unknown init {init!r}; choose from \['backbone', 'marian'\]"):
        make_variant(marian_config(), [], task="seq2seq-lm", init=init)


def test_init_draws_fresh_weights_only(saved):
    with pytest.raises(ValueError, match="init='marian' draws fresh weights, but the backbone is a model"):
        make_variant(MarianMTModel(marian_config()), [], init="marian")
    with pytest.raises(ValueError, match=r"init='marian' draws fresh weights, but .* names trained ones"):
        make_variant(str(saved), [], task="seq2seq-lm", init="marian")


@pytest.mark.parametrize("method", [{"method": "freeze", "ffn": "random"}, Freeze, "freeze", None])
def test_a_method_is_an_instance(method):
    with pytest.raises(ValueError, match=r"methods must be instances such as methods.Freeze\(ffn='random'\), not"):
        make_variant(marian_config(), [method], task="seq2seq-lm")


def test_unknown_architectures_are_refused():
    config = SqueezeBertConfig(vocab_size=9)
    with pytest.raises(ValueError, match=r"squeezebert: no list of layers with linears was found"):
        make_variant(config, [], task="masked-lm")


@pytest.mark.parametrize(
    ("made", "of_the_family"),
    [
        (lambda: BertForPreTraining(bert_config()), "BertForMaskedLM"),
        (lambda: MarianForCausalLM(marian_config()), "MarianMTModel"),
    ],
)
def test_unknown_classes_are_refused(made, of_the_family):
    model = made()
    with pytest.raises(ValueError, match=f"no variant of {type(model).__name__}; choose from .*'({of_the_family})'"):
        make_variant(model, [])


@pytest.mark.parametrize("component", ["embeddings", "attention", "ffn", "norm", "head"])
@pytest.mark.parametrize("mode", ["frozn", None, True, ["random"]])
def test_unknown_modes_are_refused(component, mode):
    with pytest.raises(ValueError, match=rf"Freeze\({component}=.*\): choose from \['trainable', 'frozen'"):
        Freeze(**{component: mode})


@pytest.mark.parametrize(("component", "mode"), [("embeddings", "diagonal"), ("norm", "random"), ("head", "random")])
def test_modes_that_make_no_sense_are_refused(component, mode):
    with pytest.raises(ValueError, match=rf"Freeze\({component}='{mode}'\): choose from"):
        Freeze(**{component: mode})


@pytest.mark.parametrize("seed", [-1, 2**63, True, 1.0, "1", None])
def test_seeds_outside_the_range_are_refused(seed):
    with pytest.raises(ValueError, match=r"Freeze\(seed=.*\): must be an integer in 0\.\.2\^63-1"):
        Freeze(ffn="random", seed=seed)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_seeds_at_the_ends_of_the_range(seed):
    model = fresh_marian(Freeze(ffn="random", seed=seed))
    assert torch.equal(model.get_parameter(FC1), SeededTensor(seed, FC1[6:], (24, 16), "glorot").generate())


@pytest.mark.parametrize("layers", [[0], {"encoder": 0}, {"encoder": (0,)}, {"encoder": [True]}, {0: [0]}, "encoder"])
def test_layers_of_a_wrong_type_are_refused(layers):
    with pytest.raises(ValueError, match=r"layers=.*must be None or a dict such as \{'encoder': \[0, 1\]\}"):
        Freeze(ffn="random", layers=layers)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"middle": [0]}, r"no stack 'middle' in marian; choose from \['decoder', 'encoder'\]"),
        ({"encoder": [0, 2]}, r"no layer 2 in stack 'encoder' of marian: it has layers 0\.\.1"),
        ({"decoder": [-1]}, "no layer -1 in stack 'decoder'"),
    ],
)
def test_layers_the_backbone_does_not_have_are_refused(layers, message):
    for backbone in (marian_config(), MarianMTModel(marian_config())):
        with pytest.raises(ValueError, match=message):
            make_variant(backbone, [Freeze(ffn="random", layers=layers)], task="seq2seq-lm")


# -- what a config may say -------------------------------------------------------------------------------------------------------

FREEZE = {"method": "freeze", "ffn": "random"}
REFUSED = {
    "unknown method": ({"methods": [{"method": "evaluate"}]}, r"unknown method 'evaluate'; choose from \["),
    "unknown field": ({"methods": [FREEZE | {"code": "x"}]}, "unknown field 'code' of method 'freeze'"),
    "unknown mode": ({"methods": [FREEZE | {"ffn": "x"}]}, r"Freeze\(ffn='x'\)"),
    "seed": ({"methods": [FREEZE | {"seed": "0"}]}, r"Freeze\(seed='0'\)"),
    "layers": ({"methods": [FREEZE | {"layers": {"encoder": [99]}}]}, "no layer 99 in stack 'encoder'"),
    "layers type": ({"methods": [FREEZE | {"layers": [0]}]}, "must be None or a dict"),
    "method without name": ({"methods": [{"ffn": "random"}]}, "with its name under 'method'"),
    "method name type": ({"methods": [{"method": ["freeze"]}]}, "with its name under 'method'"),
    "method not a dict": ({"methods": ["freeze"]}, "methods must be a list of dicts"),
    "methods not a list": ({"methods": FREEZE}, "methods"),
    "methods null": ({"methods": None}, "methods"),
    "methods text": ({"methods": "freeze"}, "methods"),
    "newer version": ({"hf_freeze_version": "999.0"}, r"written by hf_freeze 999\.0, newer than .*: update hf_freeze"),
    "no version": ({"hf_freeze_version": "latest"}, "hf_freeze_version 'latest' is not a version number"),
    "version type": ({"hf_freeze_version": 1}, "hf_freeze_version"),
    "digests type": ({"digests": ["00"]}, "digests"),
    "digest type": ({"digests": {"shared.weight": 5}}, "digests must map tensor names to hexadecimal digits"),
    "init": ({"init": "pickle"}, "unknown init 'pickle'"),
    "init type": ({"init": ["marian"]}, "init"),
    "vocabulary": ({"vocab_size": 10**12}, "vocab_size=1000000000000 is outside 1..16777216"),
    "decoder vocabulary": ({"decoder_vocab_size": 10**12}, "decoder_vocab_size=1000000000000 is outside"),
    "width": ({"d_model": 2**17}, "d_model=131072 is outside 1..65536"),
    "encoder width": ({"encoder_ffn_dim": 2**40}, "encoder_ffn_dim=.* is outside"),
    "decoder width": ({"decoder_ffn_dim": 2**40}, "decoder_ffn_dim=.* is outside"),
    "depth": ({"encoder_layers": 10**6}, "encoder_layers=1000000 is outside 1..1024"),
    "decoder depth": ({"decoder_layers": 10**6}, "decoder_layers=1000000 is outside"),
    "positions": ({"max_position_embeddings": 10**10}, "max_position_embeddings=.* is outside"),
    "no width": ({"d_model": 0}, "d_model=0 is outside"),
    "negative depth": ({"decoder_layers": -1}, "decoder_layers=-1 is outside"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_config_is_refused_when_it_is_read(damaged, case):
    fields, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(damaged(**fields))


@pytest.mark.parametrize("fields", [{"vocab_size": "many"}, {"d_model": 16.5}, {"encoder_layers": [2]}], ids=str)
def test_native_fields_of_a_wrong_type_are_refused_by_transformers(damaged, fields):
    with pytest.raises((ValueError, StrictDataclassError), match=next(iter(fields))):
        AutoConfig.from_pretrained(damaged(**fields))


@pytest.mark.parametrize(
    "fields", [{"methods": [{"method": "evaluate"}]}, {"vocab_size": 10**12}], ids=["method", "size"]
)
def test_a_bad_config_is_refused_before_a_model_is_built(damaged, fields, monkeypatch):
    folder = damaged(**fields)
    built = []
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda self, *args, **kwargs: built.append(self))
    with pytest.raises(ValueError, match=r"unknown method|is outside"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert not built


def test_bert_sizes_are_checked_too():
    config = type(AutoConfig.for_model("hf_freeze_bert"))
    for field in ("vocab_size", "type_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        with pytest.raises(ValueError, match=f"{field}=.* is outside"):
            config(**(BERT.tiny | {field: 2**40}))


def test_an_older_or_unknown_version_is_read(damaged):
    for version in ("0.0.1", None):
        assert AutoConfig.from_pretrained(damaged(hf_freeze_version=version)).hf_freeze_version == version


def test_a_config_survives_json(saved):
    freeze = Freeze(attention="diagonal", ffn="random", layers={"decoder": [1]}, seed=2**63 - 1)
    assert method_from_dict(json.loads(json.dumps(method_to_dict(freeze)))) == freeze
    config = AutoConfig.from_pretrained(saved)
    again = type(config).from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict() | {"_name_or_path": ""}
    assert [method_from_dict(m) for m in again.methods] == [Freeze(embeddings="random", ffn="random", seed=13)]


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(damaged, part):
    folder = damaged()
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match="truncated or damaged"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_a_tensor_of_another_shape_is_refused(damaged):
    folder = damaged()
    state = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    state[QUERY] = torch.zeros(16, 17)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=r"mismatch"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_a_changed_seed_or_digest_is_refused(damaged):
    methods = [method_to_dict(Freeze(embeddings="random", ffn="random", seed=14))]
    with pytest.raises(ValueError, match="digest mismatch: the regenerated tensor"):
        AutoModelForSeq2SeqLM.from_pretrained(damaged(methods=methods))


# -- backbones and variants of variants ------------------------------------------------------------------------------------------


def test_the_backbone_is_never_modified():
    native = MarianMTModel(marian_config()).eval()
    native.generation_config.num_beams = 7
    before, config, grads = tensors(native), native.config.to_dict(), trainable(native)
    batch = MARIAN.tiny_inputs("seq2seq-lm")
    expected = native(**batch).logits
    variant = make_variant(native, [Freeze(embeddings="random", attention="diagonal", ffn="frozen", norm="frozen")])
    variant.resize_token_embeddings(44)
    shake(variant)
    assert type(native) is MarianMTModel
    assert native.config.to_dict() == config
    assert trainable(native) == grads
    assert all(torch.equal(p, before[name]) for name, p in tensors(native).items())
    assert torch.equal(native(**batch).logits, expected)
    assert variant.generation_config.num_beams == 7
    config = marian_config()
    before = config.to_dict()
    make_variant(config, [Freeze(ffn="random")], task="seq2seq-lm", init="marian")
    assert config.to_dict() == before


def test_a_variant_of_a_variant_appends():
    first = shake(fresh_marian(Freeze(ffn="random", seed=13)))
    old_methods, old = list(first.config.methods), tensors(first)
    second = make_variant(first, [Freeze(attention="frozen"), Freeze(norm="frozen")])
    assert type(second) is type(first)
    assert second.config.methods[:1] == old_methods == first.config.methods
    assert [m.get("attention") for m in second.config.methods] == ["trainable", "frozen", "trainable"]
    assert second.config.init == "marian"
    assert all(torch.equal(p, old[name]) for name, p in tensors(second).items())
    assert trainable(second) == {n for n in trainable(first) if "attn" not in n and "layer_norm" not in n}
    assert torch.equal(logits(first), logits(second))
    randomised = make_variant(second, [Freeze(attention="random", seed=2)])
    assert len(randomised.config.methods) == 4
    assert torch.equal(randomised.get_parameter(QUERY), SeededTensor(2, QUERY[6:], (16, 16), "glorot").generate())
    assert set(randomised.config.digests) == {d.name for d in randomised.seeded_tensors.values()}


def test_a_saved_variant_is_a_backbone(saved, tmp_path):
    variant = make_variant(str(saved), [Freeze(attention="frozen")], task="seq2seq-lm")
    assert [m["ffn"] for m in variant.config.methods] == ["random", "trainable"]
    variant.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert trainable(again) == trainable(variant)
    assert torch.equal(logits(again), logits(AutoModelForSeq2SeqLM.from_pretrained(saved)))


def test_a_variant_config_is_a_backbone():
    base = fresh_marian(Freeze(ffn="random", seed=13))
    model = make_variant(base.config, [Freeze(attention="frozen")], task="seq2seq-lm")
    assert len(model.config.methods) == 2
    assert model.config.init == "marian"
    assert len(base.config.methods) == 1


def test_a_backbone_on_meta():
    with torch.device("meta"):
        native = MarianMTModel(marian_config())
    variant = make_variant(native, [Freeze(ffn="random")])
    assert all(p.is_meta for p in variant.parameters())
    assert not variant.get_parameter(FC1).requires_grad
    assert variant.get_parameter(QUERY).requires_grad


# -- Freeze ----------------------------------------------------------------------------------------------------------------------


def test_each_mode_does_what_it_says():
    native = shake(MarianMTModel(marian_config()))
    old = tensors(native)
    model = make_variant(native, [Freeze(attention="zero_diagonal", ffn="diagonal", norm="frozen", seed=3)])
    eye = torch.eye(24, 16)
    for name, value in tensors(model).items():
        if ".fc1.weight" in name or ".fc2.weight" in name:
            assert torch.equal(value, eye if ".fc1." in name else eye.T), name
        elif "_attn." in name and name.endswith("weight"):
            random = SeededTensor(3, name.removeprefix("model."), (16, 16), "glorot").generate()
            assert torch.equal(value, random.fill_diagonal_(0)), name
        elif name.endswith("bias") and ("_attn." in name or ".fc" in name):
            assert not value.any(), name
        else:
            assert torch.equal(value, old[name]), name
    expected = {n for n in old if n == "final_logits_bias" or "shared" in n or "embed_tokens" in n or "lm_head" in n}
    assert trainable(model) == expected


def test_trainable_is_the_default_and_changes_nothing():
    native = shake(MarianMTModel(marian_config()))
    model = make_variant(native, [Freeze()])
    assert trainable(model) == trainable(native) - {n for n in trainable(native) if "embed_positions" in n}
    assert not model.seeded_tensors
    assert torch.equal(logits(model), logits(native))


def test_several_freezes_act_in_order():
    native = shake(MarianMTModel(marian_config()))

    def fc1(*methods):
        model = make_variant(native, list(methods))
        assert not model.get_parameter(FC1).requires_grad
        return model.get_parameter(FC1), model.seeded_tensors

    random, other = (SeededTensor(seed, FC1[6:], (24, 16), "glorot").generate() for seed in (1, 2))
    value, _ = fc1(Freeze(ffn="random", seed=1), Freeze(ffn="random", seed=2))
    assert torch.equal(value, other)
    value, _ = fc1(Freeze(ffn="diagonal"), Freeze(ffn="random", seed=1))
    assert torch.equal(value, random)
    value, _ = fc1(Freeze(ffn="frozen"), Freeze(ffn="random", seed=1))
    assert torch.equal(value, random)
    # "frozen" keeps the weights there are, which are the random ones; "trainable" names nothing.
    value, seeded = fc1(Freeze(ffn="random", seed=1), Freeze(ffn="frozen"))
    assert torch.equal(value, random)
    assert FC1 in seeded
    value, _ = fc1(Freeze(ffn="random", seed=1), Freeze(ffn="trainable", attention="frozen"))
    assert torch.equal(value, random)
    model = make_variant(
        native, [Freeze(ffn="random", layers={"encoder": [0]}), Freeze(ffn="diagonal", layers={"decoder": [0]})]
    )
    assert {d.scheme for n, d in model.seeded_tensors.items() if n.endswith("fc1.weight")} == {"glorot", "diagonal"}


def test_layers_limit_attention_ffn_and_norm_but_not_embeddings():
    layers = {"encoder": [1], "decoder": []}
    model = fresh_marian(Freeze(embeddings="frozen", attention="frozen", ffn="random", norm="frozen", layers=layers))
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad and "embed_positions" not in n}
    layer = {n for n, _ in model.named_parameters() if n.startswith("model.encoder.layers.1.")}
    assert frozen == layer | {TABLE}
    assert set(model.seeded_tensors) == {n for n in layer if ".fc" in n}
    assert not make_variant(marian_config(), [Freeze(ffn="random", layers={})], task="seq2seq-lm").seeded_tensors


def test_all_layers_by_number_are_all_layers():
    listed = fresh_marian(Freeze(ffn="random", attention="frozen", layers={"encoder": [0, 1], "decoder": [1, 0]}))
    plain = fresh_marian(Freeze(ffn="random", attention="frozen"))
    assert trainable(listed) == trainable(plain)
    assert listed.seeded_tensors == plain.seeded_tensors


def test_a_tied_table_freezes_with_its_output_matrix():
    model = fresh_marian(Freeze(embeddings="random", seed=4))
    table = model.model.shared.weight
    assert (
        table
        is model.lm_head.weight
        is model.model.encoder.embed_tokens.weight
        is model.model.decoder.embed_tokens.weight
    )
    assert not table.requires_grad
    assert list(model.seeded_tensors) == [TABLE]
    assert torch.equal(table, SeededTensor(4, "shared.weight", (40, 16), "embedding").generate())
    bert = make_variant(bert_config(), [Freeze(embeddings="frozen")], task="masked-lm")
    assert not bert.cls.predictions.decoder.weight.requires_grad
    assert bert.cls.predictions.bias.requires_grad


UNTIED = {
    "two tables": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30},
    "two tables, untied output": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 30,
        "tie_word_embeddings": False,
    },
    "untied output": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("init", ["backbone", "marian"])
@pytest.mark.parametrize("untied", UNTIED)
def test_untied_marian(untied, init, tmp_path):
    config = marian_config(**UNTIED[untied])
    model = make_variant(config, [Freeze(embeddings="random", seed=4)], task="seq2seq-lm", init=init)
    native = MarianMTModel(config)
    separate = "output" in untied
    assert model.lm_head.weight.requires_grad is separate
    sizes = {d.name: d.shape for d in model.seeded_tensors.values()}
    # Without any tie `shared` and both `embed_tokens` are tables of their own.
    assert sum(shape[0] for shape in sizes.values()) == (40 + 30 if "tables" in untied else 3 * 40), sizes
    assert not any(
        p.requires_grad for p in (model.get_input_embeddings().weight, model.model.decoder.embed_tokens.weight)
    )
    if init == "marian" and separate:
        assert model.lm_head.weight.abs().max() <= math.sqrt(6 / sum(model.lm_head.weight.shape))
    # What is tied natively is tied here, and as many parameters are counted.
    assert count_parameters(model).total == count_parameters(native).total + (
        model.final_logits_bias.numel() if init == "marian" else 0
    )
    shake(model).save_pretrained(tmp_path)
    torch.manual_seed(99)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert trainable(again) == trainable(model)
    merged = model.merge()
    assert type(merged) is MarianMTModel
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)


def test_bert_freezes_words_positions_and_types(tmp_path):
    model = make_variant(bert_config(), [Freeze(embeddings="random", seed=6)], task="masked-lm", init="marian")
    assert set(model.seeded_tensors) == {
        f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    }
    for name, definition in model.seeded_tensors.items():
        assert torch.equal(model.get_parameter(name), definition.generate())
        assert definition.scheme == "embedding"
    assert model.bert.embeddings.LayerNorm.weight.requires_grad
    shake(model).save_pretrained(tmp_path)
    assert not any("_embeddings.weight" in key for key in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(AutoModelForMaskedLM.from_pretrained(tmp_path), "masked-lm"), logits(model, "masked-lm"))


def test_the_head_and_the_output_bias_can_be_frozen():
    model = fresh_marian(Freeze(head="frozen"))
    assert not model.final_logits_bias.requires_grad
    bert = make_variant(bert_config(), [Freeze(head="frozen")], task="sequence-classification")
    assert trainable(bert) == {n for n, _ in bert.named_parameters() if not n.startswith(("classifier", "bert.pooler"))}


# -- one set of weights, several classes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    model = make_variant(bert_config(), [Freeze(embeddings="random", ffn="random", seed=6)], task="masked-lm")
    shake(model).save_pretrained(folder)
    return folder, model


def test_the_base_model_holds_the_same_random_weights(saved_bert):
    folder, model = saved_bert
    torch.manual_seed(77)
    base = AutoModel.from_pretrained(folder)
    whole = tensors(model)
    for name, value in tensors(base).items():
        if not name.startswith("pooler"):  # a masked-lm model has none
            assert torch.equal(value, whole[f"bert.{name}"]), name
    assert {f"bert.{name}" for name in base.seeded_tensors} == set(model.seeded_tensors)
    assert not any(base.get_parameter(name).requires_grad for name in base.seeded_tensors)


def test_another_task_gets_a_fresh_head(saved_bert):
    folder, model = saved_bert
    heads = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        heads.append(classifier.classifier.weight.detach())
        assert isinstance(classifier, type(make_variant(bert_config(), [], task="sequence-classification")))
        whole = tensors(model)
        assert all(torch.equal(p, whole[n]) for n, p in tensors(classifier).items() if n in whole)
        assert {n for n in trainable(classifier) if n not in whole} == {
            "classifier.weight",
            "classifier.bias",
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
        }
    assert heads[0].shape == (3, 16)
    assert torch.isfinite(heads[0]).all()
    assert 0.005 < heads[0].std() < 0.05  # N(0, 0.02)
    assert not torch.equal(*heads)


# -- resizing --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [55, 31])
def test_resizing_a_seeded_tied_table(size, tmp_path):
    model = shake(fresh_marian(Freeze(embeddings="random", seed=4)))
    table, bias = model.get_parameter(TABLE).clone(), model.final_logits_bias.clone()
    kept = min(size, 40)
    returned = model.resize_token_embeddings(size)
    assert returned is model.get_input_embeddings()
    assert torch.equal(model.get_parameter(TABLE), SeededTensor(4, "shared.weight", (size, 16), "embedding").generate())
    assert torch.equal(model.get_parameter(TABLE)[:kept], table[:kept])
    assert model.lm_head.weight is model.get_parameter(TABLE)
    assert not model.lm_head.weight.requires_grad
    assert isinstance(model.final_logits_bias, torch.nn.Parameter)
    assert model.final_logits_bias.requires_grad
    assert torch.equal(model.final_logits_bias[:, :kept], bias[:, :kept])
    assert not model.final_logits_bias[:, kept:].any()
    assert model.config.vocab_size == size
    found = logits(model)
    assert found.shape[-1] == size
    model.save_pretrained(tmp_path)
    assert not {TABLE, "lm_head.weight"} & set(load_file(tmp_path / "model.safetensors"))
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), found)
    assert trainable(again) == trainable(model)
    # Back again: what was cut off returns, for it is a function of the seed.
    model.resize_token_embeddings(40)
    assert torch.equal(model.get_parameter(TABLE), table)


@pytest.mark.parametrize("mode", ["trainable", "frozen"])
def test_resizing_a_table_with_weights_of_its_own(mode, tmp_path):
    model = shake(make_variant(MarianMTModel(marian_config()), [Freeze(embeddings=mode, ffn="random")]))
    table = model.get_parameter(TABLE).clone()
    model.resize_token_embeddings(50, mean_resizing=False)
    assert torch.equal(model.get_parameter(TABLE)[:40], table)
    assert model.get_parameter(TABLE).requires_grad is (mode == "trainable")
    assert model.lm_head.weight.requires_grad is (mode == "trainable")
    assert not isinstance(model.final_logits_bias, torch.nn.Parameter)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)), logits(model))


def test_resizing_bert(tmp_path):
    model = shake(make_variant(bert_config(), [Freeze(embeddings="random", seed=4)], task="masked-lm"))
    positions = model.bert.embeddings.position_embeddings.weight.clone()
    model.resize_token_embeddings(41, pad_to_multiple_of=8)
    definition = SeededTensor(4, "embeddings.word_embeddings.weight", (48, 16), "embedding")
    assert torch.equal(model.get_input_embeddings().weight, definition.generate())
    assert torch.equal(model.bert.embeddings.position_embeddings.weight, positions)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert logits(again, "masked-lm").shape[-1] == 48
    assert torch.equal(logits(again, "masked-lm"), logits(model, "masked-lm"))


# -- values ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_opening_in_half_precision_casts_once(saved, dtype, tmp_path):
    full = AutoModelForSeq2SeqLM.from_pretrained(saved)
    half = AutoModelForSeq2SeqLM.from_pretrained(saved, dtype=dtype)
    for name, value in tensors(half).items():
        assert value.dtype == dtype, name
        assert torch.equal(value, tensors(full)[name].to(dtype)), name
    for name, definition in half.seeded_tensors.items():
        assert torch.equal(half.get_parameter(name), definition.generate().to(dtype)), name
    assert half.config.digests == full.config.digests
    half.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert again.config.digests == full.config.digests  # of the fp32 values, before any cast
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)), logits(half))


def test_marian_initialisation_has_its_bounds():
    model = make_variant(
        marian_config(vocab_size=300, decoder_vocab_size=300, d_model=48, encoder_ffn_dim=96, decoder_ffn_dim=80),
        [],
        task="seq2seq-lm",
        init="marian",
    )
    checked = 0
    for name, parameter in model.named_parameters():
        if "embed_positions" in name:
            continue
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("layer_norm.weight")))), name
        elif name == "final_logits_bias":
            assert not parameter.any()
        else:
            bound = math.sqrt(3 / 48) if name == TABLE else math.sqrt(6 / sum(parameter.shape))
            scaled = parameter / bound
            assert 0.99 < scaled.abs().max() <= 1, name
            assert scaled.mean().abs() < 0.07, name
            assert scaled.var().item() == pytest.approx(1 / 3, rel=0.12), name
            checked += 1
    assert checked == 1 + 2 * (4 + 2) + 2 * (8 + 2)
    assert model.get_parameter(TABLE).pow(2).sum(1).mean().item() == pytest.approx(1, abs=0.02)


def test_marian_initialisation_of_bert():
    model = make_variant(bert_config(num_labels=40), [], task="sequence-classification", init="marian")
    weights = {n: p for n, p in model.named_parameters() if p.ndim == 2}
    for name, weight in weights.items():
        bound = math.sqrt(3 / 16) if "embeddings" in name else math.sqrt(6 / sum(weight.shape))
        assert 0.9 < (weight / bound).abs().max() <= 1, name
    assert {"classifier.weight", "bert.pooler.dense.weight"} < weights.keys()


def test_the_native_initialisation_is_the_native_one():
    model = make_variant(marian_config(d_model=64, encoder_ffn_dim=128), [], task="seq2seq-lm", seed=5)
    assert model.get_parameter(FC1).std().item() == pytest.approx(0.02, rel=0.1)
    torch.manual_seed(5)
    native = MarianMTModel(marian_config(d_model=64, encoder_ffn_dim=128))
    assert all(torch.equal(p, tensors(native)[name]) for name, p in tensors(model).items())


def test_the_output_bias_is_trained_and_keeps_its_key(tmp_path):
    model = fresh_marian()
    assert dict(model.named_parameters())["final_logits_bias"].shape == (1, 40)
    assert "final_logits_bias" not in dict(model.named_buffers())
    outputs = model.eval()(**MARIAN.tiny_inputs("seq2seq-lm"))
    outputs.logits.retain_grad()
    outputs.loss.backward()
    assert model.final_logits_bias.grad.abs().max() > 1e-3
    torch.testing.assert_close(model.final_logits_bias.grad[0], outputs.logits.grad.sum((0, 1)))
    shake(model).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["final_logits_bias"].abs().max() > 0
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(again.final_logits_bias, model.final_logits_bias)
    assert isinstance(again.final_logits_bias, torch.nn.Parameter)
    merged = model.merge()
    assert isinstance(merged.get_buffer("final_logits_bias"), torch.Tensor)
    assert torch.equal(merged.final_logits_bias, model.final_logits_bias)
    native = make_variant(marian_config(), [], task="seq2seq-lm")
    assert "final_logits_bias" in dict(native.named_buffers())


@pytest.mark.parametrize("init", ["backbone", "marian"])
def test_the_global_random_state_does_not_matter(init):
    def make(global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        model = make_variant(marian_config(), [Freeze(ffn="random", seed=3)], task="seq2seq-lm", init=init, seed=8)
        assert torch.equal(torch.get_rng_state(), before), "make_variant must not touch the global state"
        return tensors(model)

    first, second = make(1), make(2)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other = make_variant(marian_config(), [Freeze(ffn="random", seed=3)], task="seq2seq-lm", init=init, seed=9)
    assert not torch.equal(other.get_parameter(QUERY), first[QUERY])
    assert torch.equal(other.get_parameter(FC1), first[FC1])


def test_a_model_as_backbone_draws_nothing_from_the_global_state():
    native = MarianMTModel(marian_config())
    before = torch.get_rng_state()
    make_variant(native, [Freeze(ffn="random")])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("init", ["backbone", "marian"])
def test_rows_of_an_ablation_begin_with_the_same_trainable_weights(init):
    def make(**modes):
        return make_variant(marian_config(), [Freeze(**modes, seed=1)], task="seq2seq-lm", init=init, seed=1)

    full = tensors(make())
    for modes in (
        {"embeddings": "random"},
        {"attention": "diagonal"},
        {"ffn": "random"},
        {"attention": "random", "ffn": "random"},
    ):
        row = make(**modes)
        names = trainable(row)
        assert names
        assert all(torch.equal(row.get_parameter(name), full[name]) for name in names), modes


# -- saving ----------------------------------------------------------------------------------------------------------------------


def test_a_changed_seeded_weight_cannot_be_saved_silently(tmp_path):
    model = fresh_marian(Freeze(ffn="random"))
    with torch.no_grad():
        model.get_parameter(FC1)[3, 5] += 1e-6
    with pytest.raises(
        ValueError, match=rf"'{FC1}' is frozen at random values that are not stored, but it was changed"
    ):
        model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(model.merge().get_parameter(FC1), model.get_parameter(FC1))


def test_a_changed_state_dict_cannot_be_saved_silently(tmp_path):
    model = fresh_marian(Freeze(ffn="random"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state[FC1][0, 0] = 5
    with pytest.raises(ValueError, match="but it was changed"):
        model.save_pretrained(tmp_path, state_dict=state)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)), logits(model))


def test_the_config_holds_the_digests_of_what_is_not_stored(saved):
    config = json.loads((saved / "config.json").read_text())
    assert set(config["digests"]) == {"shared.weight"} | {
        f"{stack}.layers.{i}.{linear}.{part}"
        for stack in ("encoder", "decoder")
        for i in range(2)
        for linear in ("fc1", "fc2")
        for part in ("weight", "bias")
    }
    assert config["digests"]["shared.weight"] == digest(
        SeededTensor(13, "shared.weight", (40, 16), "embedding").generate()
    )
    assert config["architectures"] == ["VariantMarianMTModel"]
    assert config["model_type"] == "hf_freeze_marian"


def test_merged_bert_opens_without_the_package(tmp_path, saved_bert):
    _, model = saved_bert
    model.merge().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert config["architectures"] == ["BertForMaskedLM"]
    assert not {"methods", "init", "digests", "hf_freeze_version"} & set(config)
    plain, info = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(logits(plain, "masked-lm"), logits(model, "masked-lm"))


# -- other processes -------------------------------------------------------------------------------------------------------------


def test_importing_costs_little():
    classes = "pipeline, MarianMTModel, BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM"
    # Time of this process, not of the clock: the machine may be busy.
    code = f"import time; from transformers import {classes}; started = time.process_time(); import hf_freeze; "
    code += "print(time.process_time() - started)"
    seconds = sorted(float(printed_by(code)) for _ in range(3))
    assert seconds[1] < 0.3, f"import hf_freeze took {seconds} s"


# The server that starts processes has imported PEFT with transformers.
PEFT = """
import json, sys
for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
    del sys.modules[name]
{imports}
import torch
if True:
    from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM
    for auto_class, folder, targets in (
        (AutoModelForMaskedLM, {bert!r}, None),
        (AutoModelForSeq2SeqLM, {marian!r}, ["q_proj", "v_proj"]),  # PEFT has no default for the native Marian either
    ):
        model = auto_class.from_pretrained(folder).eval()
        batch = model.architecture.tiny_inputs(model.architecture.tasks[0])
        frozen = {{name: model.get_parameter(name).clone() for name in model.seeded_tensors}}
        expected = model(**batch).logits
        wrapped = get_peft_model(model, LoraConfig(target_modules=targets))
        trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
        start = torch.equal(wrapped(**batch).logits, expected)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.3)
        tuned = wrapped(**batch).logits
        merged = wrapped.merge_and_unload()
        print(json.dumps({{
            "class": type(merged).__name__,
            "starts equal": start,
            "only lora": all("lora" in name for name in trained),
            "targets": sorted({{name.split(".lora")[0].split(".")[-1] for name in trained}}),
            "changed": (tuned - expected).abs().max().item(),
            "merged": (merged(**batch).logits - tuned).abs().max().item(),
            "seeded": all(torch.equal(merged.get_parameter(name), value) for name, value in frozen.items()),
            "lora left": any("lora" in name for name, _ in merged.named_modules()),
        }}))
        merged.save_pretrained({out!r})
        assert torch.equal(auto_class.from_pretrained({out!r})(**batch).logits, merged(**batch).logits)
"""


def test_peft_wraps_and_merges_a_variant(saved, saved_bert, tmp_path):
    """Its default targets are those of the native model type, whichever package is imported first."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    imports = ("from peft import LoraConfig, get_peft_model", "import hf_freeze")
    folders = {"bert": str(saved_bert[0]), "marian": str(saved), "out": str(tmp_path / "merged")}
    printed = [printed_by(PEFT.format(imports="\n".join(order), **folders)) for order in (imports, imports[::-1])]
    results = [json.loads(line) for lines in printed for line in lines.splitlines()]
    assert len(results) == 4
    for number, result in enumerate(results):
        assert result.pop("changed") > 1e-2
        assert result.pop("merged") < 1e-4
        assert result == {
            "class": ("VariantBertForMaskedLM", "VariantMarianMTModel")[number % 2],
            "starts equal": True,
            "only lora": True,
            "targets": (["query", "value"], ["q_proj", "v_proj"])[number % 2],
            "seeded": True,
            "lora left": False,
        }


def test_a_size_absurd_only_as_a_whole_is_refused(tmp_path):
    """Each field is in its range, but tensors that are not stored would be terabytes."""
    folder = tmp_path / "saved"
    make_variant(marian_config(), [Freeze(embeddings="random")], task="seq2seq-lm").save_pretrained(folder)
    data = json.loads((folder / "config.json").read_text())
    data |= {"vocab_size": 2**24, "decoder_vocab_size": 2**24, "d_model": 2**16}
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"4\.5e\+12 parameters; the limit is 1\.1e\+12"):
        AutoConfig.from_pretrained(folder)


def test_loading_draws_no_weights_for_seeded_tensors(tmp_path):
    states = []
    for frozen in ([], [Freeze(embeddings="random", ffn="random")]):
        make_variant(MarianConfig(**MARIAN.tiny), frozen, task="seq2seq-lm", init="marian").save_pretrained(tmp_path)
        torch.manual_seed(0)
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
