"""Tools that make a sentence encoder smaller, and how each is called (one_tool.py says with what)."""

from collections.abc import Callable
from pathlib import Path

import one_tool
from one_tool import Answer, Peer, compressed, one_thread


def _whole(model: str, texts: list[str], out: Path) -> Answer:
    from sentence_transformers import SentenceTransformer

    whole = SentenceTransformer(model, device="cpu")
    whole.save_pretrained(str(out))
    return whole.encode


def _hf_freeze_int8(model: str, texts: list[str], out: Path) -> Answer:
    from hf_freeze import runtime
    from hf_freeze.publish.export import export_model

    export_model(model, "onnx", quantization="int8", out=out)
    return runtime.open(out)


def _hf_freeze_static(model: str, texts: list[str], out: Path) -> Answer:
    from hf_freeze import runtime
    from hf_freeze.publish.export import export_model
    from hf_freeze.publish.trimming import trim_model

    trimmed = trim_model(model, texts, size=8000, out=out.parent / "trimmed")
    export_model(trimmed, "static", quantization="float16", texts=texts, out=out)
    return runtime.open(out)


def _onnx_int8(model: str, texts: list[str], out: Path) -> Answer:
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    whole = SentenceTransformer(model, device="cpu", backend="onnx")
    whole.save_pretrained(str(out))
    export_dynamic_quantized_onnx_model(whole, "avx512_vnni", str(out), file_suffix="int8")
    (out / "onnx" / "model.onnx").unlink()
    return _open_onnx(out)


def _openvino_int8(model: str, texts: list[str], out: Path) -> Answer:
    """Weights and activations in 8 bits by NNCF, calibrated on as many texts as it takes by default."""
    from sentence_transformers import SentenceTransformer, export_static_quantized_openvino_model

    whole = SentenceTransformer(model, device="cpu", backend="openvino")
    whole.save_pretrained(str(out))
    (some := out.parent / "some").mkdir()
    (some / "train.txt").write_text("\n".join(texts))
    export_static_quantized_openvino_model(whole, None, str(out), str(some), "default", "train", "text")
    for file in (out / "openvino").glob("openvino_model.*"):
        file.unlink()
    return _open_openvino(out)


def _three_layers(model: str, texts: list[str], out: Path) -> Answer:
    """Layer removal as the documentation has it (layers 1, 3, 5 of 6), then distillation on every sixth text."""
    import torch
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MSELoss

    teacher, student = SentenceTransformer(model, device="cpu"), SentenceTransformer(model, device="cpu")
    backbone = student[0].auto_model
    backbone.encoder.layer = torch.nn.ModuleList([backbone.encoder.layer[number] for number in (1, 3, 5)])
    backbone.config.num_hidden_layers = 3
    texts = texts[::6]
    data = Dataset.from_dict({"sentence": texts, "label": list(teacher.encode(texts, batch_size=64))})
    settings = SentenceTransformerTrainingArguments(
        str(out.parent / "training"),
        num_train_epochs=1,
        per_device_train_batch_size=64,
        learning_rate=1e-4,
        warmup_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    SentenceTransformerTrainer(student, settings, data, loss=MSELoss(student)).train()
    student.save_pretrained(str(out))
    return student.encode


def _model2vec(dims: int, stored: str) -> Callable[[str, list[str], Path], Answer]:
    def make(model: str, texts: list[str], out: Path) -> Answer:
        from model2vec.distill import distill

        static = distill(model, pca_dims=dims, quantize_to=stored)
        static.save_pretrained(str(out))
        return static.encode

    return make


def _open_sentences(folder: Path) -> Answer:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode


def _open_onnx(folder: Path) -> Answer:
    from sentence_transformers import SentenceTransformer

    names = {"file_name": "onnx/model_int8.onnx", "provider": "CPUExecutionProvider", "session_options": one_thread()}
    return SentenceTransformer(str(folder), device="cpu", backend="onnx", model_kwargs=names).encode


def _open_openvino(folder: Path) -> Answer:
    from sentence_transformers import SentenceTransformer

    names = {
        "file_name": "openvino/openvino_model_qint8_quantized.xml",
        "ov_config": {"INFERENCE_NUM_THREADS": 1},
    }
    return SentenceTransformer(str(folder), device="cpu", backend="openvino", model_kwargs=names).encode


def _open_runtime(folder: Path) -> Answer:
    from hf_freeze import runtime

    return runtime.open(folder, threads=1)


def _open_static(folder: Path) -> Answer:
    from model2vec import StaticModel

    return StaticModel.from_pretrained(str(folder)).encode


ENVIRONMENTS = {
    "sentence-transformers": [*one_tool.ONNX, "sentence-transformers==5.7.0", "datasets<5", "accelerate"],
    "openvino": [
        *("torch==2.13.0", "sentence-transformers==5.7.0", "datasets<5"),
        *("optimum-intel[openvino]==2.2.0", "nncf==3.4.0", "transformers==4.57.6"),
    ],
    "model2vec": ["torch==2.13.0", "model2vec[distill,quantization]"],
}
_ST, _M2V = "sentence-transformers", "model2vec"
PEERS = {
    "whole": Peer("the model, sentence-transformers", _whole, _open_sentences, _ST),
    "hf_freeze-int8": Peer("hf_freeze, int8 in ONNX", _hf_freeze_int8, _open_runtime),
    "hf_freeze-12": Peer(
        "hf_freeze, `compress --max-bytes 12%`", compressed("12%", _open_runtime), _open_runtime, learns=True
    ),
    "hf_freeze-8": Peer(
        "hf_freeze, `compress --max-bytes 8%`", compressed("8%", _open_runtime), _open_runtime, learns=True
    ),
    "hf_freeze-5": Peer(
        "hf_freeze, `compress --max-bytes 5%`", compressed("5%", _open_runtime), _open_runtime, learns=True
    ),
    "hf_freeze-static": Peer(
        "hf_freeze, a vector for each of 8,000 tokens", _hf_freeze_static, _open_runtime, learns=True
    ),
    "onnx-int8": Peer("sentence-transformers, int8 by optimum and ONNX Runtime", _onnx_int8, _open_onnx, _ST),
    "openvino-int8": Peer(
        "sentence-transformers, int8 by NNCF and OpenVINO", _openvino_int8, _open_openvino, "openvino", learns=True
    ),
    "three-layers": Peer(
        "sentence-transformers, 3 of 6 layers, distilled on a sixth of the texts",
        _three_layers,
        _open_sentences,
        _ST,
        True,
    ),
    "model2vec-256": Peer("Model2Vec, 256 numbers a token", _model2vec(256, "float16"), _open_static, _M2V),
    "model2vec-int8": Peer("Model2Vec, 256 numbers a token, int8", _model2vec(256, "int8"), _open_static, _M2V),
}


if __name__ == "__main__":
    one_tool.main(PEERS)
