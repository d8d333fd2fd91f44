"""What `make_variant` refuses, and what the config of a variant may say."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from support.tiny_variants import BERT, FC1, QUERY, bert_config, fresh_marian, marian_config
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    BertForPreTraining,
    MarianMTModel,
    SqueezeBertConfig,
)
from transformers.models.marian.modeling_marian import MarianForCausalLM

from hf_freeze import make_variant
from hf_freeze.methods import Freeze
from hf_freeze.methods.registry import method_from_dict, method_to_dict
from hf_freeze.seeded.tensor import SeededTensor

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


def test_a_size_absurd_only_as_a_whole_is_refused(tmp_path):
    """Each field is in its range, but tensors that are not stored would be terabytes."""
    folder = tmp_path / "saved"
    make_variant(marian_config(), [Freeze(embeddings="random")], task="seq2seq-lm").save_pretrained(folder)
    data = json.loads((folder / "config.json").read_text())
    data |= {"vocab_size": 2**24, "decoder_vocab_size": 2**24, "d_model": 2**16}
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"4\.5e\+12 parameters; the limit is 1\.1e\+12"):
        AutoConfig.from_pretrained(folder)
