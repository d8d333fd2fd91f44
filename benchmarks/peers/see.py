"""Tools that make a classifier of images smaller, and how each is called (one_tool.py says with what).

An image is its 28 x 28 pixels in base64; of those to learn from, a space and its class follow, which Torch-Pruning alone reads.
"""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import one_tool
from one_tool import Answer, Peer, one_thread

SAMPLES = 300  # images that are calibrated with: what NNCF takes by default


def scaled(images: np.ndarray) -> np.ndarray:
    """Pixels from -1 to 1, (N, 1, 28, 28), as an image processor of ViT gives them."""
    return (images.reshape(-1, 1, 28, 28) / 127.5 - 1).astype(np.float32)


def _pixels(images: list[str]) -> np.ndarray:
    decoded = (base64.b64decode(image.split()[0]) for image in images)
    return scaled(np.stack([np.frombuffer(pixels, np.uint8) for pixels in decoded]))


def _tensors(images: list[str]) -> list[Any]:
    """Batches of 20."""
    import torch

    return [*torch.from_numpy(_pixels(images)).split(20)]


def _logits(model: Any) -> Answer:
    import torch

    @torch.no_grad()
    def answer(images: list[str]) -> Any:
        return model(pixel_values=torch.from_numpy(_pixels(images))).logits.numpy()

    return answer


def _whole(model: str, images: list[str], out: Path) -> Answer:
    from transformers import AutoModelForImageClassification

    AutoModelForImageClassification.from_pretrained(model).save_pretrained(out)
    return _open_whole(out)


def _open_whole(folder: Path) -> Answer:
    from transformers import AutoModelForImageClassification

    return _logits(AutoModelForImageClassification.from_pretrained(folder))


def _hf_freeze_int8(model: str, images: list[str], out: Path) -> Answer:
    from hf_freeze.publish.export import export_model

    export_model(model, "onnx", quantization="int8", out=out)
    return _open_session(out)


def _hf_freeze_ffn(model: str, images: list[str], out: Path) -> Answer:
    from transformers import AutoModelForImageClassification

    from hf_freeze import make_variant, methods

    whole = AutoModelForImageClassification.from_pretrained(model)
    calibration = [{"pixel_values": pixels} for pixels in _tensors(images)]
    make_variant(whole, [methods.FFNPruning(share=0.5)], calibration=calibration).save_pretrained(out)
    return _open_variant(out)


def _hf_freeze_halves(*names: str) -> Callable[[str, list[str], Path], Answer]:
    """Half of what each method removes, then int8."""

    def make(model: str, images: list[str], out: Path) -> Answer:
        from transformers import AutoModelForImageClassification

        from hf_freeze import make_variant, methods
        from hf_freeze.publish.export import export_model

        whole = AutoModelForImageClassification.from_pretrained(model)
        calibration = [{"pixel_values": pixels} for pixels in _tensors(images)]
        halves = [getattr(methods, name)(share=0.5) for name in names]
        make_variant(whole, halves, calibration=calibration).save_pretrained(out.parent / "variant")
        export_model(out.parent / "variant", "onnx", quantization="int8", out=out)
        return _open_session(out)

    return make


def _open_variant(folder: Path) -> Answer:
    import hf_freeze  # noqa: F401

    return _open_whole(folder)


def _open_session(folder: Path) -> Answer:
    """`hf_freeze.runtime` reads texts alone."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx", one_thread())
    return lambda images: session.run(["logits"], {"pixel_values": _pixels(images)})[0]


def _onnx_int8(model: str, images: list[str], out: Path) -> Answer:
    from optimum.onnxruntime import ORTModelForImageClassification, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    ORTModelForImageClassification.from_pretrained(model, export=True).save_pretrained(out)
    int8 = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    ORTQuantizer.from_pretrained(out, file_name="model.onnx").quantize(save_dir=out, quantization_config=int8)
    (out / "model.onnx").unlink()
    return _open_onnx(out)


def _open_onnx(folder: Path) -> Answer:
    from optimum.onnxruntime import ORTModelForImageClassification

    names = {"file_name": "model_quantized.onnx", "session_options": one_thread()}
    return _logits(ORTModelForImageClassification.from_pretrained(folder, **names))


def _openvino_int8(model: str, images: list[str], out: Path) -> Answer:
    """Weights and activations in 8 bits by NNCF, calibrated."""
    from datasets import Dataset
    from optimum.intel import OVConfig, OVModelForImageClassification, OVQuantizationConfig, OVQuantizer

    whole = OVModelForImageClassification.from_pretrained(model, export=True)
    data = Dataset.from_dict({"pixel_values": list(_pixels(images[:SAMPLES]))}).with_format("torch")
    config = OVConfig(quantization_config=OVQuantizationConfig(num_samples=SAMPLES))
    OVQuantizer.from_pretrained(whole).quantize(data, save_directory=out, ov_config=config)
    return _open_openvino(out)


def _open_openvino(folder: Path) -> Answer:
    from optimum.intel import OVModelForImageClassification

    return _logits(OVModelForImageClassification.from_pretrained(folder, ov_config={"INFERENCE_NUM_THREADS": 1}))


def _torch_pruning(importance: str, over_layers: bool = False) -> Callable[[str, list[str], Path], Answer]:
    """Half of the FFN neurons; saved as its documentation says: the whole module."""

    def make(model: str, images: list[str], out: Path) -> Answer:
        import torch
        import torch_pruning as tp
        from transformers import AutoModelForImageClassification

        whole = AutoModelForImageClassification.from_pretrained(model).eval()
        roots = [module for name, module in whole.named_modules() if name.endswith("mlp.fc1")]
        pruner = tp.pruner.BasePruner(
            whole,
            example_inputs=_tensors(images)[0],
            importance=getattr(tp.importance, importance)(),
            pruning_ratio=0.5,
            global_pruning=over_layers,
            ignored_layers=[m for m in whole.modules() if not list(m.children()) and m not in roots],
            output_transform=lambda output: output.logits,
        )
        classes = torch.tensor([int(image.split()[1]) for image in images])
        for pixels, labels in zip(_tensors(images), classes.split(20), strict=True):
            whole(pixel_values=pixels, labels=labels).loss.backward()  # which GroupTaylorImportance reads
        pruner.step()
        whole.zero_grad()
        out.mkdir()
        torch.save(whole, out / "model.pt")
        return _logits(whole)

    return make


def _open_pickle(folder: Path) -> Answer:
    import torch

    return _logits(torch.load(folder / "model.pt", weights_only=False))


def _modelopt_int8(model: str, images: list[str], out: Path) -> Answer:
    import modelopt.torch.opt as mto
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForImageClassification

    mto.enable_huggingface_checkpointing()
    whole = AutoModelForImageClassification.from_pretrained(model)

    def read(module: Any) -> None:
        for pixels in _tensors(images):
            module(pixel_values=pixels)

    mtq.quantize(whole, mtq.INT8_DEFAULT_CFG, read)
    mtq.compress(
        whole, {"compress": {"*": True, "*patch_embeddings*": False}}
    )  # its convolutions do not compute in int8
    whole.save_pretrained(out)
    return _logits(whole)


def _open_modelopt(folder: Path) -> Answer:
    import modelopt.torch.opt as mto

    mto.enable_huggingface_checkpointing()
    return _open_whole(folder)


ENVIRONMENTS = {
    "modelopt": ["torch==2.13.0", "nvidia-modelopt[hf]==0.47.0", "transformers==5.14.1"],
    "onnx": one_tool.ONNX,
    "openvino": one_tool.OPENVINO,
    "torch_pruning": ["torch==2.13.0", "transformers==5.23.0", "torch-pruning==1.6.1"],
}
_TP = "torch_pruning"
PEERS = {
    "whole": Peer("the model, transformers", _whole, _open_whole),
    "hf_freeze-int8": Peer("hf_freeze, int8 in ONNX", _hf_freeze_int8, _open_session),
    "hf_freeze-ffn": Peer("hf_freeze, half of the FFN neurons, calibrated", _hf_freeze_ffn, _open_variant, "", True),
    "hf_freeze-ffn-int8": Peer(
        "hf_freeze, half of the FFN neurons, calibrated, int8 in ONNX",
        _hf_freeze_halves("FFNPruning"),
        _open_session,
        "",
        True,
    ),
    "hf_freeze-halves": Peer(
        "hf_freeze, half of the heads and FFN neurons, calibrated, int8 in ONNX",
        _hf_freeze_halves("HeadPruning", "FFNPruning"),
        _open_session,
        "",
        True,
    ),
    "onnx-int8": Peer("optimum and ONNX Runtime, int8", _onnx_int8, _open_onnx, "onnx"),
    "openvino-int8": Peer(
        "optimum-intel, OpenVINO and NNCF, int8, calibrated", _openvino_int8, _open_openvino, "openvino", True
    ),
    "modelopt-int8": Peer("ModelOpt, INT8_DEFAULT_CFG", _modelopt_int8, _open_modelopt, "modelopt", True),
    "torch_pruning-magnitude": Peer(
        "Torch-Pruning, half of the FFN neurons by magnitude",
        _torch_pruning("GroupMagnitudeImportance"),
        _open_pickle,
        _TP,
        True,
    ),
    "torch_pruning-taylor": Peer(
        "Torch-Pruning, half of the FFN neurons by Taylor, with labels",
        _torch_pruning("GroupTaylorImportance"),
        _open_pickle,
        _TP,
        True,
    ),
    "torch_pruning-global": Peer(
        "Torch-Pruning, the same over all layers",
        _torch_pruning("GroupTaylorImportance", over_layers=True),
        _open_pickle,
        _TP,
        True,
    ),
}


if __name__ == "__main__":
    one_tool.main(PEERS)
