"""A folder that carries its code: `trust_remote_code=True` loads it in a program that never imports hf_freeze."""

import json

import pytest
import torch
from support.processes import new_process, printed_by
from support.small import small_config
from support.text import fast_tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertForSequenceClassification

from hf_freeze import make_variant, methods
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.model.build import VariantMixin

TEXT = "the dog sleeps"
CASES = {
    "marian": (
        "seq2seq-lm",
        "translation",
        [methods.HeadPruning(heads={"encoder.0.self": [1]}), methods.LowRank(rank=4)],
    ),
    "bert": (
        "sequence-classification",
        "text-classification",
        [methods.FFNPruning(width=8), methods.Freeze(attention="random", seed=3)],
    ),
    "gpt2": (
        "causal-lm",
        "text-generation",
        [methods.TensorTrain(rank=2), methods.Freeze(embeddings="random", seed=3)],
    ),
    "llama": ("causal-lm", "text-generation", [methods.FFNPruning(width=8), methods.Freeze(attention="frozen")]),
}
LOAD = """
import sys, torch, transformers
from transformers import pipeline
folder, auto, task, text, saved = sys.argv[1:]
pipe = pipeline(task, model=folder, trust_remote_code=True)
print(pipe(text, **({} if task == "text-classification" else {"max_new_tokens": 3})))
model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
inputs = torch.load(saved + ".inputs")
with torch.no_grad():
    logits = model(**inputs).logits
    torch.testing.assert_close(pipe.model(**inputs).logits, logits, rtol=1e-5, atol=1e-6)
torch.save((logits, {name: p.requires_grad for name, p in model.named_parameters()}), saved)
model.save_pretrained(saved + ".again")
"""
WITHOUT_HF_FREEZE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_freeze":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""
CODE = {"modeling_hf_freeze.py"}
NATIVE_CODE = CODE | {"hf_freeze_native.py", "hf_freeze_philox.py", "hf_freeze_rng.py", "hf_freeze_schemes.py"}


def sources(folder):
    return {path.name for path in folder.glob("*.py")}


def check_same(found, expected):
    """Outputs of the same weights in two processes. Files are mapped, and where tensors lie in memory decides in which order some
    CPUs add."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def classifier(*applied):
    torch.manual_seed(0)
    return make_variant(small_config("bert"), list(applied), task="sequence-classification").eval()


LAYERS = methods.LowRank(components=["attention"], rank=4)
SEEDED = methods.Freeze(ffn="random", embeddings="random", seed=5, scheme="orthogonal", gain=0.5)
BATCH = {"input_ids": torch.tensor([[1, 2, 3, 4]])}


@pytest.mark.parametrize("model_type", CASES)
def test_a_folder_with_its_code_is_the_variant_in_any_program(model_type, tmp_path):
    task, pipeline_task, applied = CASES[model_type]
    tokenizer = fast_tokenizer(tmp_path / "model")
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    if task == "seq2seq-lm":
        special |= {"decoder_start_token_id": special["pad_token_id"], "forced_eos_token_id": special["eos_token_id"]}
    variant = make_variant(small_config(model_type, vocab_size=len(tokenizer), **special), applied, task=task).eval()
    variant.save_pretrained(tmp_path / "model", remote_code=True)
    inputs = dict(tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False))
    if task == "seq2seq-lm":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    torch.save(inputs, tmp_path / "out.inputs")

    auto = AUTO_CLASSES[task].__name__
    printed = printed_by(LOAD, tmp_path / "model", auto, pipeline_task, TEXT, tmp_path / "out")

    key = {"translation": "translation_text", "text-generation": "generated_text"}.get(pipeline_task, "score")
    assert key in printed
    logits, trainable = torch.load(tmp_path / "out")
    with torch.no_grad():
        check_same(logits, variant(**inputs).logits)
    assert trainable == {name: parameter.requires_grad for name, parameter in variant.named_parameters()}
    # What that program saved has the code again, once, and opens with `import hf_freeze` as well.
    assert sources(tmp_path / "out.again") == sources(tmp_path / "model")
    again = AUTO_CLASSES[task].from_pretrained(tmp_path / "out.again").eval()
    with torch.no_grad():
        check_same(again(**inputs).logits, logits)
    expected = variant.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    for name in sources(tmp_path / "model"):
        assert (tmp_path / "out.again" / name).read_text() == (tmp_path / "model" / name).read_text()


def test_without_trust_it_is_refused_as_natively(tmp_path):
    classifier(LAYERS).save_pretrained(tmp_path, remote_code=True)
    code = "import sys; from transformers import AutoConfig; AutoConfig.from_pretrained(sys.argv[1])"
    assert "Please pass the argument `trust_remote_code=True`" in new_process(code, tmp_path).stderr


@pytest.mark.parametrize("opened", ["AutoConfig", "AutoModelForSequenceClassification", "pipeline"])
def test_without_hf_freeze_one_sentence_says_what_it_is_for(opened, tmp_path):
    fast_tokenizer(tmp_path)
    classifier(LAYERS, SEEDED).save_pretrained(tmp_path, remote_code=True)
    load = (
        "pipeline('text-classification', model=sys.argv[1],"
        if opened == "pipeline"
        else f"{opened}.from_pretrained(sys.argv[1],"
    )
    code = f"{WITHOUT_HF_FREEZE}\nfrom transformers import {opened}\n{load} trust_remote_code=True)"
    assert new_process(code, tmp_path).stderr.splitlines()[-1] == (
        "ImportError: this model needs the package hf_freeze, which is not installed: it computes the layers of this model "
        "(low_rank, freeze); install it from a clone: pip install -c constraints.txt -e ."
    )


def test_an_hf_freeze_that_cannot_be_imported_says_why(tmp_path):
    classifier(LAYERS).save_pretrained(tmp_path, remote_code=True)
    code = (
        "import sys; from transformers import AutoConfig; sys.modules['hf_freeze.model.classes'] = None;"
        "AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    assert "import of hf_freeze.model.classes halted" in new_process(code, tmp_path).stderr.splitlines()[-1]


NATIVELY = (
    WITHOUT_HF_FREEZE
    + """
import torch
from transformers import AutoModelForSequenceClassification as Auto, pipeline
torch.manual_seed(1)
model = Auto.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
print(type(model).__name__, all(parameter.requires_grad for parameter in model.parameters()))
torch.save(model(torch.tensor([[1, 2, 3, 4]])).logits, sys.argv[2])
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1)
torch.save(model(torch.tensor([[1, 2, 3, 4]])).logits, sys.argv[2] + ".trained")
model.save_pretrained(sys.argv[2] + ".again")
print(pipeline("text-classification", model=sys.argv[1], trust_remote_code=True)("the dog"))
assert not any(name.split(".")[0] == "hf_freeze" for name in sys.modules)
"""
)


@pytest.mark.parametrize(
    "applied", [SEEDED, methods.LayerSelection(keep={"encoder": [1]})], ids=["seeded", "fewer layers"]
)
def test_what_needs_no_layer_of_ours_loads_even_then(applied, tmp_path):
    fast_tokenizer(tmp_path / "model")
    variant = classifier(applied)
    variant.save_pretrained(tmp_path / "model", remote_code=True)
    assert sources(tmp_path / "model") == NATIVE_CODE

    printed = printed_by(NATIVELY, tmp_path / "model", tmp_path / "out")

    assert printed.startswith("BertForSequenceClassification True\n")
    check_same(torch.load(tmp_path / "out"), variant(**BATCH).logits)
    # It was trained there: what it saved is a native model with all tensors, and nothing regenerates them.
    native = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out.again").eval()
    assert type(native) is BertForSequenceClassification
    check_same(native(**BATCH).logits, torch.load(tmp_path / "out.trained"))
    assert sources(tmp_path / "out.again") == set()
    assert "methods" not in json.loads((tmp_path / "out.again" / "config.json").read_text())


def test_a_merged_model_needs_no_code(tmp_path):
    variant = classifier(LAYERS)
    variant.save_pretrained(tmp_path / "variant", remote_code=True)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "variant").merge().save_pretrained(
        tmp_path / "merged"
    )
    assert sources(tmp_path / "merged") == set()
    assert "auto_map" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_the_code_is_kept_replaced_and_left_out(tmp_path):
    variant = classifier(SEEDED)
    variant.save_pretrained(tmp_path)
    assert sources(tmp_path) == set()
    variant.save_pretrained(tmp_path, remote_code=True)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)  # no trust needed: hf_freeze is imported
    assert isinstance(loaded, VariantMixin)
    loaded.save_pretrained(tmp_path, variant="other")
    assert sources(tmp_path) == NATIVE_CODE
    (tmp_path / "model.other.safetensors").unlink()
    # A variant made of it has layers of its own: its code is another.
    changed = make_variant(loaded, [LAYERS])
    changed.save_pretrained(tmp_path / "changed")
    assert sources(tmp_path / "changed") == set()
    changed.save_pretrained(tmp_path, remote_code=True)
    assert sources(tmp_path) == CODE
    changed.save_pretrained(tmp_path, remote_code=False)
    assert sources(tmp_path) == set()
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_a_config_alone_is_saved_with_its_code(tmp_path):
    classifier(LAYERS).save_pretrained(tmp_path / "model", remote_code=True)
    AutoConfig.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "config")
    code = (
        "import sys; from transformers import AutoConfig;"
        "print(AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True).methods)"
    )
    assert "low_rank" in printed_by(code, tmp_path / "config")
    classifier(SEEDED).save_pretrained(tmp_path / "model", remote_code=True)
    AutoConfig.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    assert "hf_freeze_native" in (tmp_path / "model" / "modeling_hf_freeze.py").read_text()


def test_other_auto_classes_open_the_same_folder(tmp_path):
    classifier(LAYERS).save_pretrained(tmp_path, remote_code=True)
    code = (
        "import sys, torch; from transformers import AutoModel as A;"
        "model = A.from_pretrained(sys.argv[1], trust_remote_code=True).eval();"
        "torch.save(model(torch.tensor([[1, 2, 3, 4]])).last_hidden_state, sys.argv[1] + '/out')"
    )
    printed_by(code, tmp_path)
    check_same(torch.load(tmp_path / "out"), AutoModel.from_pretrained(tmp_path).eval()(**BATCH).last_hidden_state)
