"""transformers knows the models and pipelines of hf_freeze, whichever is imported first, at no cost until it is asked."""

import json
import pickle
import subprocess
import sys

import pytest
from support import TESTS
from support.processes import printed_by
from support.small import small_config
from support.text import fast_tokenizer

from hf_freeze import make_variant
from hf_freeze.methods import LowRank

# Everything that a program may ask of a saved variant; argument 1 is the folder of its model. Prints what differs.
ASKS = """
import json, pickle, sys
folder = sys.argv[1]
def ask():
    import hf_freeze, torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline
    from transformers.pipelines import PIPELINE_REGISTRY
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    pickled = pickle.load(open(folder + "/model.pickle", "rb"))
    one = model(**tokenizer("the dog", return_tensors="pt")).logits
    return {
        "config": AutoConfig.from_pretrained(folder).model_type,
        "exported": AutoConfig.for_model("exported_by_hf_freeze").model_type,
        "base": type(AutoModel.from_pretrained(folder)).__name__,
        "pickled": torch.allclose(one, pickled(**tokenizer("the dog", return_tensors="pt")).logits, atol=1e-6),
        "pipeline": len(pipeline("text-classification", model=folder)("the dog")),
        "tasks": sorted({"translation", "text2text-generation"} & PIPELINE_REGISTRY.supported_tasks.keys()),
        "pair": PIPELINE_REGISTRY.check_task("translation_tr_to_en")[2],
        "speech": PIPELINE_REGISTRY.supported_tasks["automatic-speech-recognition"]["impl"].__module__,
    }
"""
ANSWERS = {
    "config": "hf_freeze_bert",
    "exported": "exported_by_hf_freeze",
    "base": "VariantBertModel",
    "pickled": True,
    "pipeline": 1,
    "tasks": ["text2text-generation", "translation"],
    "pair": ["tr", "en"],
    "speech": "hf_freeze.compat.pipelines",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variant")
    fast_tokenizer(folder)
    model = make_variant(small_config("bert"), [LowRank(rank=2)], task="sequence-classification").eval()
    model.save_pretrained(folder)
    (folder / "model.pickle").write_bytes(pickle.dumps(model))
    return folder


FIRST = {  # all of it in the fork of a server that has imported transformers.pipelines
    "transformers": "from transformers import AutoModel, pipeline\nfrom transformers.pipelines import PIPELINE_REGISTRY",
    "the module of the pipelines": "import hf_freeze.compat.pipelines",
    "a pickle": "pickle.load(open(folder + '/model.pickle', 'rb'))",
}


@pytest.mark.parametrize("first", FIRST)
def test_after_transformers(first, folder):
    assert (
        json.loads(printed_by(f"{ASKS}\n{FIRST[first]}\nprint(json.dumps(ask()))", folder).splitlines()[-1]) == ANSWERS
    )


def test_before_transformers(folder):
    """In a process that has imported nothing."""
    code = f"""{ASKS}
import hf_freeze
heavy = {{"torch", "transformers", "numpy", "datasets", "evaluate", "matplotlib", "transformers.pipelines"}}
print(sorted(heavy & sys.modules.keys()))
from hf_freeze import make_variant, methods
assert hf_freeze.methods.LowRank is methods.LowRank
print(sorted(heavy & sys.modules.keys()))
print(json.dumps(ask()))
"""
    command = [sys.executable, "-c", code, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    at_first, with_methods, answers = done.stdout.splitlines()
    assert at_first == "[]"
    assert with_methods == "['numpy', 'torch', 'transformers']"
    assert json.loads(answers) == ANSWERS


def test_importing_in_a_thread_that_is_not_the_first():
    """Both modules import each other; neither waits for the other for ever."""
    code = """
import threading, sys
for name in [name for name in sys.modules if name.startswith("transformers.pipelines")]:
    del sys.modules[name]
import hf_freeze
def one(): import hf_freeze.compat.pipelines
def other(): import transformers.pipelines
threads = [threading.Thread(target=work) for work in (one, other)]
for thread in threads: thread.start()
for thread in threads: thread.join()
from transformers.pipelines import PIPELINE_REGISTRY
print("translation" in PIPELINE_REGISTRY.supported_tasks)
"""
    assert printed_by(code).split() == ["True"]
