"""Folders in OpenVINO, opened without PyTorch: the answers are those of the same model in ONNX Runtime. Each is written and
opened in processes of their own: beside all that a process of the tests had loaded, OpenVINO ended it three times (signal 11).
"""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from support.processes import printed_by

from hf_freeze import runtime

pytest.importorskip("openvino")

TEXTS = ["the cat sat", "a dog", "the bird on the tree sat on a cat"]
CODE = """
import pickle, sys
from hf_freeze import runtime
texts, options = pickle.loads(sys.stdin.buffer.read())
try:
    model = runtime.open(sys.argv[1], **options)
    found = {}
except ValueError as error:
    found = str(error)
pickle.dump((found, sorted({{"torch", "transformers", "onnxruntime"}} & set(sys.modules))), sys.stdout.buffer)
"""


def in_openvino(folder, call, **options):
    """What a new process answers with the model of a folder in ONNX, exported to OpenVINO; the other packages that it loaded."""
    source = folder.with_name(folder.name.removesuffix("-onnx"))
    other = source.with_name(f"{source.name}-openvino")
    if not other.exists():
        printed_by(f"from hf_freeze.publish import export; export.export_model({str(source)!r}, 'openvino')")
    command = [sys.executable, "-c", CODE.format(call), str(other)]
    done = subprocess.run(command, input=pickle.dumps((TEXTS, options)), capture_output=True, check=True)
    return pickle.loads(done.stdout)


def test_answers_about_texts_are_those_in_onnx(encoders):
    for task, folder in encoders.items():
        expected = runtime.open(folder).outputs(TEXTS, batch_size=2)
        found, loaded = in_openvino(folder, "model.outputs(texts, batch_size=2)", threads=1)
        assert loaded == []
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                np.testing.assert_allclose(mine[name], value, atol=2e-5, err_msg=f"{task}: {name}")


@pytest.mark.parametrize(
    "settings", [{"num_beams": 1}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"]
)
def test_written_texts_are_those_in_onnx(translator, generator, settings):
    for folder in (translator, generator):
        found, _ = in_openvino(folder, f"model(texts, max_new_tokens=10, **{settings})", threads=1)
        assert found == runtime.open(folder)(TEXTS, max_new_tokens=10, **settings)


def test_wrong_settings_and_files_are_refused(encoders, tmp_path):
    folder = encoders["feature-extraction"]
    said, _ = in_openvino(folder, "model(texts)", intra_op_num_threads=1)
    assert said.startswith("openvino has no setting 'intra_op_num_threads'; choose from ")
    assert "INFERENCE_NUM_THREADS" in said
    names = folder.with_name(folder.name.removesuffix("-onnx") + "-openvino") / "model.names.json"
    names.rename(tmp_path / "names")
    said, _ = in_openvino(folder, "model(texts)")
    (tmp_path / "names").rename(names)
    assert "model.xml cannot be opened (FileNotFoundError); export it again" in said
