"""Tools that make a translator smaller, and how each is called (one_tool.py says with what). All search greedily."""

from pathlib import Path
from typing import Any

import one_tool
from one_tool import Answer, Peer, compressed, one_thread

LONGEST = 100  # tokens of a translation


def _generate(model: Any, tokenizer: Any) -> Answer:
    def answer(texts: list[str]) -> list[str]:
        given = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = model.generate(**given, num_beams=1, max_new_tokens=LONGEST)
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    return answer


def _whole(model: str, texts: list[str], out: Path) -> Answer:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    AutoModelForSeq2SeqLM.from_pretrained(model).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return _open_whole(out)


def _open_whole(folder: Path) -> Answer:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    return _generate(AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


def _hf_freeze_onnx(model: str, texts: list[str], out: Path) -> Answer:
    from hf_freeze.publish.export import export_model

    export_model(model, "onnx", quantization="int8", out=out)
    return _open_runtime(out)


def _open_runtime(folder: Path) -> Answer:
    from hf_freeze import runtime

    translate = runtime.open(folder, threads=1)
    return lambda texts: translate(texts, num_beams=1, max_new_tokens=LONGEST, batch_size=len(texts))


def _hf_freeze_ctranslate2(model: str, texts: list[str], out: Path) -> Answer:
    from hf_freeze.publish.export import export_model

    export_model(model, "ctranslate2", quantization="int8", out=out)
    return _open_ours(out)


def _open_ours(folder: Path) -> Answer:
    from hf_freeze.publish.export import CTranslate2Translator

    translate = CTranslate2Translator(folder)
    return lambda texts: [
        found["translation_text"]
        for found in translate(texts, num_beams=1, max_new_tokens=LONGEST, batch_size=len(texts))
    ]


def _ctranslate2(model: str, texts: list[str], out: Path) -> Answer:
    import ctranslate2
    from transformers import AutoTokenizer

    ctranslate2.converters.TransformersConverter(model).convert(str(out), quantization="int8")
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return _open_ctranslate2(out)


def _open_ctranslate2(folder: Path) -> Answer:
    import ctranslate2
    from transformers import AutoTokenizer

    translator, tokenizer = ctranslate2.Translator(str(folder)), AutoTokenizer.from_pretrained(folder)

    def answer(texts: list[str]) -> list[str]:
        tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(texts).input_ids]
        found = translator.translate_batch(tokens, beam_size=1, max_decoding_length=LONGEST)
        ids = [tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    return answer


def _optimum(model: str, texts: list[str], out: Path) -> Answer:
    from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig
    from transformers import AutoTokenizer

    whole = ORTModelForSeq2SeqLM.from_pretrained(model, export=True)
    whole.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    int8 = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    for file in sorted(out.glob("*.onnx")):
        ORTQuantizer.from_pretrained(out, file_name=file.name).quantize(save_dir=out, quantization_config=int8)
        file.unlink()
    return _open_optimum(out)


def _open_optimum(folder: Path) -> Answer:
    from optimum.onnxruntime import ORTModelForSeq2SeqLM
    from transformers import AutoTokenizer

    names = {
        f"{part}_file_name": f"{part}_model_quantized.onnx"
        for part in ("encoder", "decoder", "decoder_with_past")
        if (folder / f"{part}_model_quantized.onnx").exists()
    }
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, session_options=one_thread(), **names)
    return _generate(model, AutoTokenizer.from_pretrained(folder))


def _openvino(model: str, texts: list[str], out: Path) -> Answer:
    from optimum.intel import OVModelForSeq2SeqLM
    from transformers import AutoTokenizer

    OVModelForSeq2SeqLM.from_pretrained(model, export=True, load_in_8bit=True).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return _open_openvino(out)


def _open_openvino(folder: Path) -> Answer:
    from optimum.intel import OVModelForSeq2SeqLM
    from transformers import AutoTokenizer

    model = OVModelForSeq2SeqLM.from_pretrained(folder, ov_config={"INFERENCE_NUM_THREADS": 1})
    return _generate(model, AutoTokenizer.from_pretrained(folder))


ENVIRONMENTS = {
    "onnx": one_tool.ONNX,
    "openvino": one_tool.OPENVINO,
    "ctranslate2": ["torch==2.13.0", "ctranslate2==4.8.5", "transformers==4.57.6"],
}
PEERS = {
    "whole": Peer("the model, transformers", _whole, _open_whole),
    "hf_freeze-onnx": Peer("hf_freeze, int8 in ONNX", _hf_freeze_onnx, _open_runtime),
    "hf_freeze-ct2": Peer("hf_freeze, int8 in CTranslate2", _hf_freeze_ctranslate2, _open_ours),
    "hf_freeze-20": Peer(
        "hf_freeze, `compress --max-bytes 20%`", compressed("20%", _open_ours), _open_ours, learns=True
    ),
    "hf_freeze-12": Peer(
        "hf_freeze, `compress --max-bytes 12% --heal 1epoch`",
        compressed("12%", _open_ours, "1epoch"),
        _open_ours,
        learns=True,
    ),
    "ctranslate2": Peer("CTranslate2's own converter, int8", _ctranslate2, _open_ctranslate2, "ctranslate2"),
    "optimum": Peer("optimum and ONNX Runtime, int8", _optimum, _open_optimum, "onnx"),
    "openvino": Peer("optimum-intel, OpenVINO and NNCF, int8 weights", _openvino, _open_openvino, "openvino"),
}


if __name__ == "__main__":
    one_tool.main(PEERS)
