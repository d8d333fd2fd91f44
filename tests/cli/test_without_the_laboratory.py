"""The library works without the packages of the laboratory. What needs them says in one line how to install them."""

import gzip

import pytest
import torch
from support.processes import printed_by
from support.tokenizers_of_each_kind import wordpiece
from transformers import BertConfig, BertModel

PACKAGES = ("datasets", "evaluate", "pandas", "pyarrow", "sklearn")  # of the extra `lab`, and what comes with them
TEXTS = [f"the {dog} dog {runs} over the {field} field" for dog in "ab" for runs in "cde" for field in "fghi"]
WITHOUT = f"""
import sys
sys.modules |= dict.fromkeys({PACKAGES})
"""
COMMAND = f"""{WITHOUT}
from hf_freeze.cli import app
app(sys.argv[1:], prog_name="hf-freeze")
"""
REFUSED = f"""{WITHOUT}
from typer.testing import CliRunner
from hf_freeze.cli import app
result = CliRunner().invoke(app, sys.argv[1:])
assert result.exit_code == 2, (result.output, result.exception)
print(result.stderr, end="")
"""
HOW = r', which is missing; from a clone: pip install -c constraints.txt -e ".[lab]"'


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = wordpiece(TEXTS)
    torch.manual_seed(0)
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 512}
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, **config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "texts.txt.gz").write_bytes(gzip.compress("\n".join(TEXTS).encode()))
    return folder


def test_every_module_of_the_library_is_imported():
    code = f"""{WITHOUT}
import importlib, pkgutil
import hf_freeze
def rooms(path, name):
    for module in pkgutil.iter_modules(path, name):
        if module.name.split(".")[-1] in ("lab", "__main__", "fused_kernels", "fused_integers", "sentence_module"):
            continue  # which need triton and sentence-transformers
        imported = importlib.import_module(module.name)
        print(module.name)
        if module.ispkg:
            rooms(imported.__path__, module.name + ".")
rooms(hf_freeze.__path__, "hf_freeze.")
"""
    names = printed_by(code).split()
    assert {"hf_freeze.compression.run", "hf_freeze.training.healing", "hf_freeze.publish.export.onnx"} < set(names)


def test_a_model_is_compressed_and_healed(encoder, tmp_path):
    words = [
        "--texts",
        encoder / "texts.txt.gz",
        "--max-bytes",
        "60%",
        "--engine",
        "torch",
        "--native",
        "--heal",
        "1epoch",
    ]
    printed_by(COMMAND, "compress", encoder, *words, "--keep-vocabulary", "--out", tmp_path / "small")
    assert (tmp_path / "small" / "compressed.json").is_file()


@pytest.mark.parametrize(
    "arguments", [["run", "freeze_ablation"], ["search", "search"], ["report", "."], ["recipes"], ["init"]]
)
def test_commands_of_the_laboratory(arguments):
    printed = printed_by(REFUSED, *arguments)
    assert printed == f"Error: the laboratory, hf_freeze.lab, needs the package datasets{HOW}\n"


def test_files_that_the_laboratory_reads(encoder, tmp_path):
    table, packed = tmp_path / "texts.csv", tmp_path / "texts.txt.zst"
    table.write_text("text\na dog\n")
    packed.write_bytes(b"\x28\xb5\x2f\xfd")
    budget = ["--max-bytes", "50%", "--out", tmp_path / "small"]
    lab = f"Error: the laboratory, hf_freeze.lab, needs the package datasets{HOW}\n"
    assert printed_by(REFUSED, "compress", encoder, "--texts", table, *budget) == lab
    assert printed_by(REFUSED, "compress", encoder, "--data", table, *budget) == lab
    needs = f"Error: {packed}: a zstd file needs the package pyarrow{HOW}\n"
    assert printed_by(REFUSED, "trim", encoder, "--texts", packed, "--out", tmp_path / "small") == needs


def test_the_readers_and_metrics_say_so_in_python():
    code = f"""{WITHOUT}
import importlib
for module in ("data", "metrics", "training"):
    try:
        importlib.import_module(f"hf_freeze.lab.{{module}}")
    except ImportError as error:
        print(error)
"""
    message = f"the laboratory, hf_freeze.lab, needs the package datasets{HOW}"
    assert printed_by(code).splitlines() == [message] * 3
