"""Tools that make a language model smaller, and how each is called (one_tool.py says with what).

An answer is what a text costs: nats, and the tokens that it is split into. Each text is asked alone, so that nothing is padded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import one_tool
from one_tool import Answer, Peer, compressed, one_thread

SAMPLES = 512  # texts that are calibrated with: what llm-compressor and ModelOpt take by default


def _costs(ids: list[int], logits: np.ndarray) -> tuple[float, int]:
    """Nats of all tokens but the first, and how many these are: ids (T), logits (T, V)."""
    scores = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    nats = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(scores)), ids[1:]]
    return float(nats.sum(dtype=np.float64)), len(nats)


def _answer(model: Any, tokenizer: Any) -> Answer:
    import torch

    @torch.no_grad()
    def answer(texts: list[str]) -> list[tuple[float, int]]:
        given = [tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in texts]
        return [_costs(each["input_ids"][0].tolist(), model(**each).logits[0].numpy()) for each in given]

    return answer


def _whole(model: str, texts: list[str], out: Path) -> Answer:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return _open_transformers(out)


def _open_transformers(folder: Path) -> Answer:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return _answer(AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder))


def _hf_freeze_int8(
    open_folder: Callable[[Path], Answer], format: str = "onnx"
) -> Callable[[str, list[str], Path], Answer]:
    def make(model: str, texts: list[str], out: Path) -> Answer:
        from hf_freeze.publish.export import export_model

        export_model(model, format, quantization="int8", out=out)
        return open_folder(out)

    return make


def _hf_freeze_cut(export_to: str | None, method: str, **settings: Any) -> Callable[[str, list[str], Path], Answer]:
    def make(model: str, texts: list[str], out: Path) -> Answer:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from hf_freeze import make_variant, methods
        from hf_freeze.publish.export import export_model

        whole, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        cut = [getattr(methods, method)(**settings)]
        variant = make_variant(whole, cut, calibration=texts[:SAMPLES], tokenizer=tokenizer)
        variant.save_pretrained(out.parent / "variant")
        tokenizer.save_pretrained(out.parent / "variant")
        export_model(out.parent / "variant", "onnx", quantization=export_to, out=out)  # integers stay as they are
        return _open_runtime(out)

    return make


def _open_runtime(folder: Path) -> Answer:
    from hf_freeze import runtime

    model = runtime.open(folder, threads=1)

    def answer(texts: list[str]) -> list[tuple[float, int]]:
        return [_costs(model.token_ids([text])[0], model.outputs([text])[0]["logits"]) for text in texts]

    return answer


def _open_written(folder: Path) -> Answer:
    """Costs each token as when the model writes it: inputs are then rounded for it alone, not by one range for the text."""
    from hf_freeze import runtime
    from hf_freeze.runtime.decoding import Decoder

    model = runtime.open(folder, threads=1)

    def answer(texts: list[str]) -> list[tuple[float, int]]:
        costs = []
        for ids in model.token_ids(texts):
            start = {"attention_mask": np.ones((1, 1), np.int64), "position_ids": np.zeros((1, 1), np.int64)}
            decoder = Decoder(model.parts.sessions["model"], start, rows=1)
            costs.append(_costs(ids, np.stack([decoder.scores(np.array([[token]]))[0] for token in ids])))
        return costs

    return answer


def _gptq(scheme: str) -> Callable[[str, list[str], Path], Answer]:
    def make(model: str, texts: list[str], out: Path) -> Answer:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier
        from transformers import AutoModelForCausalLM, AutoTokenizer

        whole, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        data = Dataset.from_dict(dict(tokenizer(texts[:SAMPLES], return_token_type_ids=False)))
        recipe = GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        oneshot(model=whole, dataset=data, recipe=recipe, num_calibration_samples=SAMPLES, max_seq_length=512)
        whole.save_pretrained(out, save_compressed=True)
        tokenizer.save_pretrained(out)
        return _answer(whole, tokenizer)

    return make


def _gptq_groups(model: str, texts: list[str], out: Path) -> Answer:
    """Groups that divide the columns, of which this model has 64 and 172; those of W4A16 have 128."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    data = Dataset.from_dict(dict(tokenizer(texts[:SAMPLES], return_token_type_ids=False)))
    groups = {}
    for size, names in {64: "re:.*(q|k|v|o|gate|up)_proj", 43: "re:.*down_proj"}.items():
        weights = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=size)
        groups[f"{size}"] = QuantizationScheme(targets=[names], weights=weights)
    recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"])
    oneshot(model=whole, dataset=data, recipe=recipe, num_calibration_samples=SAMPLES, max_seq_length=512)
    whole.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    return _answer(whole, tokenizer)


def _half(modifier: str) -> Callable[[str, list[str], Path], Answer]:
    """Half of the weights of every linear to zero."""

    def make(model: str, texts: list[str], out: Path) -> Answer:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers import pruning
        from transformers import AutoModelForCausalLM, AutoTokenizer

        whole, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        data = Dataset.from_dict(dict(tokenizer(texts[:SAMPLES], return_token_type_ids=False)))
        recipe = getattr(pruning, modifier)(sparsity=0.5, mask_structure="0:0", targets=["re:.*_proj"])
        oneshot(model=whole, dataset=data, recipe=recipe, num_calibration_samples=SAMPLES, max_seq_length=512)
        whole.save_pretrained(out, save_compressed=True)
        tokenizer.save_pretrained(out)
        return _answer(whole, tokenizer)

    return make


def _modelopt(config: str) -> Callable[[str, list[str], Path], Answer]:
    def make(model: str, texts: list[str], out: Path) -> Answer:
        import modelopt.torch.opt as mto
        import modelopt.torch.quantization as mtq
        from transformers import AutoModelForCausalLM, AutoTokenizer

        mto.enable_huggingface_checkpointing()
        whole, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)

        def read(module: Any) -> None:
            for text in texts[:SAMPLES]:
                module(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))

        mtq.quantize(whole, getattr(mtq, config), read)
        mtq.compress(whole)
        whole.save_pretrained(out)
        tokenizer.save_pretrained(out)
        return _answer(whole, tokenizer)

    return make


def _open_modelopt(folder: Path) -> Answer:
    import modelopt.torch.opt as mto

    mto.enable_huggingface_checkpointing()
    return _open_transformers(folder)


def _onnx_int8(model: str, texts: list[str], out: Path) -> Answer:
    from optimum.onnxruntime import ORTModelForCausalLM, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig
    from transformers import AutoTokenizer

    ORTModelForCausalLM.from_pretrained(model, export=True).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    int8 = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    ORTQuantizer.from_pretrained(out, file_name="model.onnx").quantize(save_dir=out, quantization_config=int8)
    (out / "model.onnx").unlink()
    return _open_onnx(out)


def _onnx_int4(model: str, texts: list[str], out: Path) -> Answer:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoTokenizer

    ORTModelForCausalLM.from_pretrained(model, export=True).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    int4 = MatMulNBitsQuantizer(onnx.load(out / "model.onnx"), bits=4, block_size=32, is_symmetric=True)
    int4.process()
    int4.model.save_model_to_file(str(out / "model_quantized.onnx"))
    (out / "model.onnx").unlink()
    return _open_onnx(out)


def _open_onnx(folder: Path) -> Answer:
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoTokenizer

    names = {"file_name": "model_quantized.onnx", "session_options": one_thread()}
    return _answer(ORTModelForCausalLM.from_pretrained(folder, **names), AutoTokenizer.from_pretrained(folder))


def _openvino(**settings: Any) -> Callable[[str, list[str], Path], Answer]:
    def make(model: str, texts: list[str], out: Path) -> Answer:
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
        from transformers import AutoTokenizer

        learnt = (
            {"dataset": texts[:SAMPLES], "num_samples": SAMPLES, "tokenizer": model} if settings["bits"] == 4 else {}
        )
        config = OVWeightQuantizationConfig(**settings, **learnt)
        whole = OVModelForCausalLM.from_pretrained(model, export=True, quantization_config=config)
        whole.save_pretrained(out)
        AutoTokenizer.from_pretrained(model).save_pretrained(out)
        return _open_openvino(out)

    return make


def _open_openvino(folder: Path) -> Answer:
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    model = OVModelForCausalLM.from_pretrained(folder, ov_config={"INFERENCE_NUM_THREADS": 1})
    return _answer(model, AutoTokenizer.from_pretrained(folder))


ENVIRONMENTS = {
    "llm-compressor": ["torch==2.13.0", "llmcompressor==0.14.0.1", "transformers==5.17.0"],
    "modelopt": ["torch==2.13.0", "nvidia-modelopt[hf]==0.47.0", "transformers==5.14.1"],
    "onnx": [*one_tool.ONNX, "onnx-ir"],
    "openvino": one_tool.OPENVINO,
}
_LC, _MO, _OV = "llm-compressor", "modelopt", "openvino"
_ALL = ["attention", "ffn", "embeddings"]
_INT4 = {"bits": 4, "group_size": 64, "group_size_fallback": "adjust", "gptq": True}
PEERS = {
    "whole": Peer("the model, transformers", _whole, _open_transformers),
    "hf_freeze-int8": Peer("hf_freeze, int8 in ONNX", _hf_freeze_int8(_open_runtime), _open_runtime),
    "hf_freeze-int8-written": Peer(
        "hf_freeze, int8 in ONNX, a token at a time", _hf_freeze_int8(_open_written), _open_written
    ),
    "hf_freeze-openvino": Peer(
        "hf_freeze, int8 in OpenVINO", _hf_freeze_int8(_open_runtime, "openvino"), _open_runtime
    ),
    "hf_freeze-w8": Peer(
        "hf_freeze, `Quantize` int8 weights, calibrated, in ONNX",
        _hf_freeze_cut(None, "Quantize", weights="int8", components=_ALL),
        _open_runtime,
        learns=True,
    ),
    "hf_freeze-w8a8": Peer(
        "hf_freeze, `Quantize` int8 weights and inputs, calibrated, in ONNX",
        _hf_freeze_cut(None, "Quantize", weights="int8", activations="int8", components=_ALL),
        _open_runtime,
        learns=True,
    ),
    "hf_freeze-int4": Peer(
        "hf_freeze, `Quantize` int4, calibrated, int8 tables, in ONNX",
        _hf_freeze_cut("int8", "Quantize", weights="int4", granularity="group-64", components=["attention", "ffn"]),
        _open_runtime,
        learns=True,
    ),
    "hf_freeze-int4-tables": Peer(
        "hf_freeze, `Quantize` int4, calibrated, with the tables, in ONNX",
        _hf_freeze_cut("int8", "Quantize", weights="int4", granularity="group-64", components=_ALL),
        _open_runtime,
        learns=True,
    ),
    "hf_freeze-sparse": Peer(
        "hf_freeze, `MagnitudePruning` 50 %, calibrated (obs), in ONNX",
        _hf_freeze_cut(None, "MagnitudePruning", sparsity=0.5, criterion="obs", components=["attention", "ffn"]),
        _open_runtime,
        learns=True,
    ),
    "hf_freeze-13": Peer(
        "hf_freeze, `compress --max-bytes 13% --heal 0 --samples 96`",
        compressed("13%", _open_runtime, "0", 96),
        _open_runtime,
        learns=True,
    ),
    "hf_freeze-15": Peer(
        "hf_freeze, `compress --max-bytes 15% --heal 1epoch --samples 64`",
        compressed("15%", _open_runtime, "1epoch", 64),
        _open_runtime,
        learns=True,
    ),
    "gptq-preset": Peer("llm-compressor, GPTQ W4A16", _gptq("W4A16"), _open_transformers, _LC, True),
    "gptq": Peer("llm-compressor, GPTQ W4A16, groups of 64 and 43", _gptq_groups, _open_transformers, _LC, True),
    "w8a8": Peer("llm-compressor, GPTQ W8A8", _gptq("W8A8"), _open_transformers, _LC, True),
    "sparsegpt": Peer("llm-compressor, SparseGPT 50 %", _half("SparseGPTModifier"), _open_transformers, _LC, True),
    "wanda": Peer("llm-compressor, Wanda 50 %", _half("WandaPruningModifier"), _open_transformers, _LC, True),
    "modelopt-int8": Peer(
        "ModelOpt, INT8_SMOOTHQUANT_CFG", _modelopt("INT8_SMOOTHQUANT_CFG"), _open_modelopt, _MO, True
    ),
    "modelopt-int4": Peer("ModelOpt, INT4_AWQ_CFG", _modelopt("INT4_AWQ_CFG"), _open_modelopt, _MO, True),
    "modelopt-nvfp4": Peer("ModelOpt, NVFP4_DEFAULT_CFG", _modelopt("NVFP4_DEFAULT_CFG"), _open_modelopt, _MO, True),
    "onnx-int8": Peer("optimum and ONNX Runtime, int8", _onnx_int8, _open_onnx, "onnx"),
    "onnx-int4": Peer("optimum and ONNX Runtime, 4 bits (MatMulNBits)", _onnx_int4, _open_onnx, "onnx"),
    "openvino-int8": Peer("optimum-intel, OpenVINO and NNCF, int8 weights", _openvino(bits=8), _open_openvino, _OV),
    "openvino-int4": Peer(
        "optimum-intel, OpenVINO and NNCF, int4, GPTQ", _openvino(**_INT4), _open_openvino, _OV, True
    ),
}


if __name__ == "__main__":
    one_tool.main(PEERS)
