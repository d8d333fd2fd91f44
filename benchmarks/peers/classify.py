"""Tools that make a classifier of texts, or of pairs of texts, smaller, and how each is called (one_tool.py says with what)."""

from pathlib import Path
from typing import Any

import one_tool
from one_tool import Answer, Peer, compressed, one_thread

SAMPLES = 300  # texts that are calibrated with: what NNCF takes by default


def _tokens(tokenizer: Any, texts: list[Any], **options: Any) -> Any:
    columns = [texts] if isinstance(texts[0], str) else map(list, zip(*texts, strict=True))
    return tokenizer(*columns, **options)


def _logits(model: Any, tokenizer: Any) -> Answer:
    import torch

    @torch.no_grad()
    def answer(texts: list[str]) -> Any:
        return model(**_tokens(tokenizer, texts, return_tensors="pt", padding=True)).logits.numpy()

    return answer


def _whole(model: str, texts: list[str], out: Path) -> Answer:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    AutoModelForSequenceClassification.from_pretrained(model).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return _open_whole(out)


def _open_whole(folder: Path) -> Answer:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    return _logits(AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


def _hf_freeze_int8(model: str, texts: list[str], out: Path) -> Answer:
    from hf_freeze.publish.export import export_model

    export_model(model, "onnx", quantization="int8", out=out)
    return _open_runtime(out)


def _hf_freeze_int4(model: str, texts: list[str], out: Path) -> Answer:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from hf_freeze import make_variant, methods
    from hf_freeze.publish.export import export_model

    whole, tokenizer = AutoModelForSequenceClassification.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    parts = ["attention", "ffn", "embeddings"]
    int4 = methods.Quantize(weights="int4", granularity="group-64", components=parts)
    seen = [dict(_tokens(tokenizer, [text], return_tensors="pt")) for text in texts[:SAMPLES]]
    variant = make_variant(whole, [int4], calibration=seen)
    variant.save_pretrained(out.parent / "variant")
    tokenizer.save_pretrained(out.parent / "variant")
    export_model(out.parent / "variant", "onnx", quantization="int8", out=out)  # what has 4 bits keeps them
    return _open_runtime(out)


def _hf_freeze_trimmed(model: str, texts: list[str], out: Path) -> Answer:
    from hf_freeze.publish.trimming import trim_model

    trim_model(model, texts, coverage=1.0, out=out)
    return _open_whole(out)


def _vocabtrimmer(model: str, texts: list[str], out: Path) -> Answer:
    """Every token that occurs, as by ours."""
    import vocabtrimmer
    from datasets import Dataset

    (data := out.parent / "data").mkdir()
    Dataset.from_dict({"text": texts}).to_json(data / "train.jsonl")
    trimmer = vocabtrimmer.VocabTrimmer(model)
    trimmer.trim_vocab(path_to_save=str(out), language="en", dataset=str(data), dataset_split="train", min_frequency=1)
    return _open_whole(out)


def _open_runtime(folder: Path) -> Answer:
    from hf_freeze import runtime

    model = runtime.open(folder, threads=1)

    def answer(texts: list[Any]) -> list[Any]:
        if isinstance(texts[0], str):
            return [found["logits"] for found in model.outputs(texts)]
        pairs = [{"text": first, "text_pair": second} for first, second in texts]
        found = [{one["label"]: one["score"] for one in classes} for classes in model(pairs, top_k=None)]
        return [[scores[model.labels[number]] for number in sorted(model.labels)] for scores in found]

    return answer


def _onnx_int8(model: str, texts: list[str], out: Path) -> Answer:
    from optimum.onnxruntime import ORTModelForSequenceClassification, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig
    from transformers import AutoTokenizer

    ORTModelForSequenceClassification.from_pretrained(model, export=True).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    int8 = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    ORTQuantizer.from_pretrained(out, file_name="model.onnx").quantize(save_dir=out, quantization_config=int8)
    (out / "model.onnx").unlink()
    return _open_onnx(out)


def _open_onnx(folder: Path) -> Answer:
    from optimum.onnxruntime import ORTModelForSequenceClassification
    from transformers import AutoTokenizer

    names = {"file_name": "model_quantized.onnx", "session_options": one_thread()}
    model = ORTModelForSequenceClassification.from_pretrained(folder, **names)
    return _logits(model, AutoTokenizer.from_pretrained(folder))


def _openvino_weights(model: str, texts: list[str], out: Path) -> Answer:
    from optimum.intel import OVModelForSequenceClassification
    from transformers import AutoTokenizer

    OVModelForSequenceClassification.from_pretrained(model, export=True, load_in_8bit=True).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return _open_openvino(out)


def _openvino_int8(model: str, texts: list[str], out: Path) -> Answer:
    """Weights and activations in 8 bits by NNCF, calibrated."""
    from datasets import Dataset
    from optimum.intel import OVConfig, OVModelForSequenceClassification, OVQuantizationConfig, OVQuantizer
    from transformers import AutoTokenizer

    whole, tokenizer = (
        OVModelForSequenceClassification.from_pretrained(model, export=True),
        AutoTokenizer.from_pretrained(model),
    )
    tokenizer.save_pretrained(out)
    data = Dataset.from_dict(dict(_tokens(tokenizer, texts[:SAMPLES])))
    config = OVConfig(quantization_config=OVQuantizationConfig(num_samples=SAMPLES))
    OVQuantizer.from_pretrained(whole).quantize(data, save_directory=out, ov_config=config)
    return _open_openvino(out)


def _open_openvino(folder: Path) -> Answer:
    from optimum.intel import OVModelForSequenceClassification
    from transformers import AutoTokenizer

    model = OVModelForSequenceClassification.from_pretrained(folder, ov_config={"INFERENCE_NUM_THREADS": 1})
    return _logits(model, AutoTokenizer.from_pretrained(folder))


ENVIRONMENTS = {
    "onnx": one_tool.ONNX,
    "vocabtrimmer": ["torch==2.13.0", "vocabtrimmer==0.0.2", "transformers==4.57.6", "datasets<5"],
    "openvino": one_tool.OPENVINO,
}
_OV = "openvino"
PEERS = {
    "whole": Peer("the model, transformers", _whole, _open_whole),
    "hf_freeze-int8": Peer("hf_freeze, int8 in ONNX", _hf_freeze_int8, _open_runtime),
    "hf_freeze-int4": Peer("hf_freeze, `Quantize` int4, calibrated, in ONNX", _hf_freeze_int4, _open_runtime, "", True),
    "hf_freeze-20": Peer(
        "hf_freeze, `compress --max-bytes 20%`", compressed("20%", _open_runtime), _open_runtime, "", True
    ),
    "hf_freeze-trimmed": Peer("hf_freeze, tokens that occur", _hf_freeze_trimmed, _open_whole, "", True),
    "vocabtrimmer": Peer("vocabtrimmer, tokens that occur", _vocabtrimmer, _open_whole, "vocabtrimmer", True),
    "onnx-int8": Peer("optimum and ONNX Runtime, int8", _onnx_int8, _open_onnx, "onnx"),
    "openvino-weights": Peer("optimum-intel, OpenVINO and NNCF, int8 weights", _openvino_weights, _open_openvino, _OV),
    "openvino-int8": Peer(
        "optimum-intel, OpenVINO and NNCF, int8, calibrated", _openvino_int8, _open_openvino, _OV, True
    ),
}


if __name__ == "__main__":
    one_tool.main(PEERS)
