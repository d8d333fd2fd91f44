"""What a process of the runtime imports, tokenizers, and the words for folders and inputs that it cannot use."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support import ROOT
from support.text import SOURCE, marian_tokenizer
from transformers import AutoTokenizer

from hf_freeze import runtime
from hf_freeze.runtime import tokenizing
from hf_freeze.runtime.folders import MARK
from hf_freeze.runtime.tokenizing import open_tokenizer

FORBIDDEN = ["torch", "transformers", "scipy", "matplotlib", "safetensors", "sentencepiece", "huggingface_hub"]


def test_a_process_imports_numpy_tokenizers_and_onnxruntime_alone(encoders, translator):
    """As where nothing else is installed: what is forbidden cannot be imported."""
    code = f"""
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {[*FORBIDDEN, "wrapt", "typer"]}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else known(name, *rest)
import hf_freeze
from hf_freeze import runtime
assert runtime.open({str(encoders["feature-extraction"])!r})(["katze"]).shape[0] == 1
print(runtime.open({str(translator)!r})("katze", num_beams=2))
try:
    hf_freeze.make_variant
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == runtime.open(translator, threads=1)("katze", num_beams=2)
    assert "hf_freeze.make_variant needs torch, which is missing; from a clone: pip install" in lines[1]


def test_a_process_imports_no_pytorch_where_it_is_installed(encoders):
    code = f"""
import sys
from hf_freeze import runtime
runtime.open({str(encoders["masked-lm"])!r})("der [MASK]")
import hf_freeze.publish.latency_worker
print([name for name in {FORBIDDEN} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout == "[]\n", done.stderr


TEXTS = [
    *SOURCE,
    "",
    " katze  wir ",
    "Über 3 Äpfel?",
    "</s> hund",
    "der<pad> hund</s>",
    ">>fr<< wir gehen",
    ">>xx<< wir",
]


def check_tokenizer(folder, ids_of_texts):
    expected, found = AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    assert (found.pad, found.eos) == (expected.pad_token_id, expected.eos_token_id)
    for text in TEXTS:
        assert found.encode(text).ids == expected(text).input_ids, text
    for ids in ids_of_texts:
        assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True)
        if not isinstance(found, tokenizing.MarianTokenizer):  # which has no mask, for which this is needed
            assert found.decode(ids, skip_special=False) == expected.decode(ids)


def test_tokens_and_texts_are_those_of_the_tokenizer(encoders, translator):
    check_tokenizer(encoders["masked-lm"], [[2, 7, 9, 60, 3, 0, 0], [5, 6, 61, 62, 4], []])
    check_tokenizer(translator, [[0, 5, 6, 7, 30, 1, 1], [9, 8, 2, 3], []])


@pytest.mark.parametrize("codes", [(), (">>fr<<",)])
def test_marian_tokenizers_of_the_hub_are_read(tmp_path, codes):
    tokenizer = marian_tokenizer(tmp_path, codes)
    pad = tokenizer.pad_token_id
    check_tokenizer(tmp_path, [[pad, 5, 6, 7, 30, 0, pad], [9, 1, 2, 3], [*range(40)], []])
    found = open_tokenizer(tmp_path)
    for text in TEXTS[-2:]:
        assert found.encode(text).ids == tokenizer(text).input_ids
    assert (
        tokenizing.cut(found, SOURCE[0], 4, True).ids == tokenizer(SOURCE[0], truncation=True, max_length=4).input_ids
    )


def test_spaces_are_cleaned_where_the_tokenizer_does_it(encoders, tmp_path):
    folder = shutil.copytree(encoders["masked-lm"], tmp_path / "cleaned")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": True}))
    ids = AutoTokenizer.from_pretrained(folder)("guten morgen , wie geht es dir ?").input_ids
    check_tokenizer(folder, [ids])
    assert open_tokenizer(folder).decode(ids) == "guten morgen, wie geht es dir?"


def test_folders_that_cannot_be_opened_are_named(encoders, translator, tmp_path):
    (tmp_path / "empty").mkdir()
    weights = (translator / "weights.data").read_bytes()
    mark = json.loads((translator / MARK).read_text())
    undigested = json.dumps({name: value for name, value in mark.items() if name != "files"}).encode()
    generation = json.dumps({"eos_token_id": 1, "penalty_alpha": 0.6}).encode()
    config = json.loads((translator / "config.json").read_text())
    assert config["exported"]["model_type"] == "marian"
    for changes, message in (
        ({MARK: None}, "is no exported folder: it has no hf_freeze_export.json; create one with hf-freeze export"),
        ({MARK: b"{"}, "hf_freeze_export.json cannot be read; export the model again"),
        (
            {MARK: json.dumps(mark | {"format": "torch"}).encode()},
            "holds a model for seq2seq-lm in torch, and this opens .* in onnx or openvino or static",
        ),
        (
            {MARK: json.dumps(mark | {"task": "speech-seq2seq"}).encode()},
            "holds a model for speech-seq2seq in onnx, and this opens feature-",
        ),
        ({"decoder.onnx": None}, "lacks the part decoder; export it again"),
        ({"weights.data": weights[:-9]}, "weights.data has changed since the export: copy it again"),
        ({"weights.data": weights[:-9], MARK: undigested}, "coder.onnx cannot be opened .*; export it again"),
        ({"encoder.onnx": b"x", MARK: undigested}, "encoder.onnx cannot be opened .*; export it again"),
        ({"tokenizer.json": None}, "has neither a tokenizer.json nor a source.spm: open it with transformers"),
        ({"tokenizer.json": b"{}"}, "the tokenizer of .* cannot be read .*; export the model again"),
        (
            {"generation_config.json": generation},
            "generation_config.json sets penalty_alpha=0.6, which this runtime does not",
        ),
    ):
        copy = shutil.copytree(translator, tmp_path / "changed")
        for name, content in changes.items():
            (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            runtime.open(copy)
        assert "\n" not in str(error.value)
        shutil.rmtree(copy)
    with pytest.raises(ValueError, match=r"onnxruntime has no setting 'thread'; choose from .*intra_op_num_threads"):
        runtime.open(translator, thread=1)


def test_missing_packages_are_named(translator, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(ValueError, match=r"onnx needs onnxruntime, which is missing; from a clone: .*serve"):
            runtime.open(translator)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ValueError, match=r"tokenizer.json needs tokenizers, which is missing"):
            runtime.open(translator)
    marian_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        ValueError, match=r"source.spm needs sentencepiece, which is missing; pip install sentencepiece"
    ):
        open_tokenizer(tmp_path)


def test_inputs_of_another_kind_or_length_are_named(encoders, translator):
    long = " ".join(SOURCE * 6)
    for folder in (*encoders.values(), translator):
        found = runtime.open(folder, threads=1)
        if folder == encoders["question-answering"]:
            with pytest.raises(ValueError, match=r"input 1 must be text \(str\), not int: 3"):
                found("wer ?", 3)
            continue
        for given in (3, ["katze [MASK]", None], [b"katze"], {"a": 1}):
            with pytest.raises(ValueError, match=r"input \d must be text \(str\), not (int|NoneType|bytes|dict)"):
                found(given)
        if folder != encoders["feature-extraction"]:
            with pytest.raises(
                ValueError, match=r"a text of \d+ tokens is longer than the (40|64) positions of the model"
            ):
                found(f"[MASK] {long}")
            found(f"[MASK] {long}", truncation=True)
    assert len(runtime.open(translator).token_ids([long], truncation=True)[0]) == 64


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores on Linux"
)
def test_an_engine_starts_no_more_threads_than_there_are_cores_for_it(translator):
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from hf_freeze import runtime; "
        "sessions = runtime.open(sys.argv[1]).parts.sessions.values(); "
        "print([each._session.get_session_options().intra_op_num_threads for each in sessions])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(translator)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1, 1]"
