"""Folders in OpenVINO, opened without PyTorch: the answers are those of the same model in ONNX Runtime."""

import subprocess
import sys

import numpy as np
import pytest

from hf_freeze import runtime
from hf_freeze.publish.export import export_model

pytest.importorskip("openvino")

TEXTS = ["the cat sat", "a dog", "the bird on the tree sat on a cat"]


def both(folder):
    """The model of a folder in ONNX, and of the same in OpenVINO."""
    source = folder.with_name(folder.name.removesuffix("-onnx"))
    other = source.with_name(f"{source.name}-openvino")
    if not other.exists():
        export_model(source, "openvino")
    return runtime.open(folder), runtime.open(other, threads=1)


def test_answers_about_texts_are_those_in_onnx(encoders):
    for task, folder in encoders.items():
        expected, found = (model.outputs(TEXTS, batch_size=2) for model in both(folder))
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                np.testing.assert_allclose(mine[name], value, atol=2e-5, err_msg=f"{task}: {name}")


@pytest.mark.parametrize(
    "settings", [{"num_beams": 1}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"]
)
def test_written_texts_are_those_in_onnx(translator, generator, settings):
    for folder in (translator, generator):
        expected, found = (model(TEXTS, max_new_tokens=10, **settings) for model in both(folder))
        assert found == expected


def test_torch_and_onnxruntime_stay_closed(encoders):
    folder = encoders["feature-extraction"]
    both(folder)
    code = (
        "import sys; from hf_freeze import runtime; print(runtime.open(sys.argv[1])(['a dog']).shape[0]); "
        "print(sorted({'torch', 'transformers', 'onnxruntime'} & set(sys.modules)))"
    )
    other = str(folder).removesuffix("-onnx") + "-openvino"
    done = subprocess.run([sys.executable, "-c", code, other], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["1", "[]"]


def test_wrong_settings_and_files_are_refused(encoders, tmp_path):
    model = both(encoders["feature-extraction"])[1]
    with pytest.raises(
        ValueError, match=r"openvino has no setting 'intra_op_num_threads'; choose from .*INFERENCE_NUM_THREADS"
    ):
        runtime.open(model.folder, intra_op_num_threads=1)
    (model.folder / "model.names.json").rename(tmp_path / "names")
    with pytest.raises(ValueError, match=r"model.xml cannot be opened \(FileNotFoundError\); export it again"):
        runtime.open(model.folder)
    (tmp_path / "names").rename(model.folder / "model.names.json")
