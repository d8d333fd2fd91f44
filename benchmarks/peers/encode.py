"""One tool, one sentence encoder: `python encode.py PEER make|use MODEL TEXTS FOLDER`, with the Python of its environment.

It needs that tool alone. `make` writes a smaller encoder to FOLDER/model from MODEL and, where the tool learns, from the texts of
TEXTS/learnt.json; `use` opens it in a new process and encodes those of TEXTS/asked.json. Both write make.json or use.json
there. `encoders.py` calls this.
"""

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")

import numpy as np

Encode = Callable[[list[str]], Any]
ONE_BY_ONE, FIRST = 300, 64  # texts that are timed, each alone; texts encoded before and after saving


def _whole(model: str, texts: list[str], out: Path) -> Encode:
    from sentence_transformers import SentenceTransformer

    whole = SentenceTransformer(model, device="cpu")
    whole.save_pretrained(str(out))
    return whole.encode


def _hf_freeze_int8(model: str, texts: list[str], out: Path) -> Encode:
    from hf_freeze import runtime
    from hf_freeze.publish.export import export_model

    export_model(model, "onnx", quantization="int8", out=out)
    return runtime.open(out)


def _hf_freeze(share: str) -> Callable[[str, list[str], Path], Encode]:
    def make(model: str, texts: list[str], out: Path) -> Encode:
        from hf_freeze import runtime
        from hf_freeze.compression import Budget, compress

        made = compress(model, texts=texts, budget=Budget(max_bytes=share), heal=0, out=out.parent / "work")
        made.after.folder.rename(out)
        (out.parent / "seconds").write_text(f"{made.seconds}")  # those before a stop, too
        return runtime.open(out)

    return make


def _onnx_int8(model: str, texts: list[str], out: Path) -> Encode:
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    whole = SentenceTransformer(model, device="cpu", backend="onnx")
    whole.save_pretrained(str(out))
    export_dynamic_quantized_onnx_model(whole, "avx512_vnni", str(out), file_suffix="int8")
    (out / "onnx" / "model.onnx").unlink()
    return _open_onnx(out)


def _three_layers(model: str, texts: list[str], out: Path) -> Encode:
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


def _model2vec(dims: int, stored: str) -> Callable[[str, list[str], Path], Encode]:
    def make(model: str, texts: list[str], out: Path) -> Encode:
        from model2vec.distill import distill

        static = distill(model, pca_dims=dims, quantize_to=stored)
        static.save_pretrained(str(out))
        return static.encode

    return make


def _open_sentences(folder: Path) -> Encode:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode


def _open_onnx(folder: Path) -> Encode:
    from sentence_transformers import SentenceTransformer

    names = {"file_name": "onnx/model_int8.onnx", "provider": "CPUExecutionProvider"}
    return SentenceTransformer(str(folder), device="cpu", backend="onnx", model_kwargs=names).encode


def _open_runtime(folder: Path) -> Encode:
    from hf_freeze import runtime

    return runtime.open(folder)


def _open_static(folder: Path) -> Encode:
    from model2vec import StaticModel

    return StaticModel.from_pretrained(str(folder)).encode


@dataclass(frozen=True)
class Peer:
    title: str
    make: Callable[[str, list[str], Path], Encode]
    open: Callable[[Path], Encode]
    environment: str = ""  # none: the environment that runs encoders.py
    learns: bool = False


ENVIRONMENTS = {
    "sentence-transformers": ["torch==2.13.0", "sentence-transformers[onnx]==6.2.0", "datasets", "accelerate"],
    "model2vec": ["torch==2.13.0", "model2vec[distill,quantization]"],
}
_ST, _M2V = "sentence-transformers", "model2vec"
PEERS = {
    "whole": Peer("the model, sentence-transformers", _whole, _open_sentences, _ST),
    "hf_freeze-int8": Peer("hf_freeze, int8 in ONNX", _hf_freeze_int8, _open_runtime),
    "hf_freeze-12": Peer("hf_freeze, `compress --max-bytes 12%`", _hf_freeze("12%"), _open_runtime, learns=True),
    "hf_freeze-8": Peer("hf_freeze, `compress --max-bytes 8%`", _hf_freeze("8%"), _open_runtime, learns=True),
    "hf_freeze-5": Peer("hf_freeze, `compress --max-bytes 5%`", _hf_freeze("5%"), _open_runtime, learns=True),
    "onnx-int8": Peer("sentence-transformers, int8 by optimum and ONNX Runtime", _onnx_int8, _open_onnx, _ST),
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


def made(peer: Peer, model: str, texts: Path, folder: Path) -> dict[str, Any]:
    learnt = json.loads((texts / "learnt.json").read_text()) if peer.learns else []
    begun = time.perf_counter()
    encode = peer.make(model, learnt, folder / "model")
    counted = folder / "seconds"
    seconds = float(counted.read_text()) if counted.exists() else time.perf_counter() - begun
    np.save(folder / "first.npy", np.asarray(encode(json.loads((texts / "asked.json").read_text())[:FIRST])))
    return {"seconds": seconds}


def used(peer: Peer, model: str, texts: Path, folder: Path) -> dict[str, Any]:
    asked = json.loads((texts / "asked.json").read_text())
    encode = peer.open(folder / "model")
    encode(asked[:1])
    times = []
    for text in asked[:ONE_BY_ONE]:
        begun = time.perf_counter()
        encode([text])
        times.append(time.perf_counter() - begun)
    facts = {"ms": 1000 * statistics.median(times), "memory": peak_memory()}
    same = np.array_equal(np.asarray(encode(asked[:FIRST])), np.load(folder / "first.npy"))
    found = [np.asarray(encode(asked[at : at + FIRST])) for at in range(0, len(asked), FIRST)]
    np.save(folder / "vectors.npy", np.concatenate(found).astype(np.float32))
    return facts | {"same": bool(same)}


def peak_memory() -> int:
    """Bytes, of this process alone: `getrusage` would count the one that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main(name: str, step: str, model: str, texts: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = {"make": made, "use": used}[step](PEERS[name], model, texts, folder)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]}
    (folder / f"{step}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
