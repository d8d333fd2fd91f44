"""Public names are documented, with types, shapes and errors, and are in the reference of the site. Docstrings' examples run."""

import ast
import importlib
import inspect
import re
import shutil
import sys
import textwrap
from types import ModuleType

import pytest
import torch
from support import ROOT
from transformers import BertConfig, BertForSequenceClassification, MarianConfig, MarianMTModel

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab import data

ROOMS = [
    "",
    "analysis",
    "data",
    "methods",
    "training",
    "lab.data",
    "lab.metrics",
    "lab.training",
    "compression",
    "publish.export",
    "runtime",
    "seeded",
    "layers",
    "surgery",
]
OF_TRANSFORMERS = {"methods", "layers"}  # whose classes have the methods of a base class, which says what they do
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))


def exported(room):
    """Names that a room gives to others: imported as themselves (`import a as a`), in __all__, or functions of one file."""
    path = ROOT / "hf_freeze" / room.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = {alias.name for alias in imports if alias.asname == alias.name}
    if path.name != "__init__.py":
        names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    return sorted(names or importlib.import_module(f"hf_freeze.{room}").__all__)


def public_names():
    """(name in words, object), with the methods of classes."""
    for room in ROOMS:
        module = importlib.import_module(f"hf_freeze.{room}".rstrip("."))
        for name in exported(room):
            value = getattr(module, name)
            if name.startswith("_") or isinstance(value, ModuleType):
                continue
            yield f"{room}.{name}".lstrip("."), value
            if inspect.isclass(value) and room not in OF_TRANSFORMERS:
                for attribute, member in vars(value).items():
                    if inspect.isfunction(member) and not attribute.startswith("_"):
                        yield f"{room}.{name}.{attribute}".lstrip("."), getattr(value, attribute)


PUBLIC = dict(public_names())
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}


def faults(name, value):
    """What its documentation lacks."""
    document = inspect.getdoc(value) or ""
    if not document:
        return ["a docstring"]
    tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    if inspect.isclass(value):
        constructors = [node for node in tree.body if getattr(node, "name", "") in ("__init__", "__post_init__")]
        raises = any(isinstance(node, ast.Raise) for made in constructors for node in ast.walk(made))
        return ["its errors"] * (raises and "aise" not in document)
    signature = inspect.signature(value)
    lacks = [
        f"the type of {p.name}" for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"
    ]
    if signature.return_annotation is inspect.Signature.empty:
        lacks.append("the type of its result")
    if any(isinstance(node, ast.Raise) for node in ast.walk(tree)) and "aise" not in document:
        lacks.append("its errors")
    legend = "Shapes:" in (sys.modules[value.__module__].__doc__ or "")
    if "torch.Tensor" in str(signature) and not legend and not re.search(r"\([^()]*,[^()]*\)|\bshape|scalar", document):
        lacks.append("shapes")
    return lacks


@pytest.mark.parametrize(
    "name", [name for name, value in PUBLIC.items() if inspect.isclass(value) or name in FUNCTIONS]
)
def test_a_public_name_is_documented(name):
    assert not faults(name, PUBLIC[name]), f"{name} lacks {faults(name, PUBLIC[name])}"


def test_faults_are_found():
    def undocumented(x):
        raise ValueError

    def vague(x: torch.Tensor) -> torch.Tensor:
        """Doubles it."""
        if x.isnan().any():
            raise ValueError
        return 2 * x

    assert faults("undocumented", undocumented) == ["a docstring"]
    assert faults("vague", vague) == ["its errors", "shapes"]


def test_the_reference_names_every_public_name():
    listed = re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE)
    assert len(listed) == len(set(listed))
    for path in listed:
        parts = path.split(".")
        module, attributes = ".".join(parts[:-1]), parts[-1:]
        while (
            not (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
            and not (ROOT / module.replace(".", "/")).is_dir()
        ):
            module, _, attribute = module.rpartition(".")
            attributes.insert(0, attribute)
        value = importlib.import_module(module)
        for attribute in attributes:  # the last may be a module that nothing has imported
            value = getattr(value, attribute, None) or importlib.import_module(path)
    ends = {path.rpartition(".")[2] for path in listed}
    assert {name for room in ROOMS for name in exported(room) if f"{room}.{name}".lstrip(".") in PUBLIC} <= ends


# -- examples ----------------------------------------------------------------------------------------------------------------


def definitions(node):
    """A module, and the classes and functions in it and in these."""
    yield node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from definitions(child)


def examples():
    """(place, code) of each indented block of a docstring that is Python with a call."""
    for path in sorted((ROOT / "hf_freeze").rglob("*.py")):
        if path.parent.name == "publish" and path.stem == "latency":
            continue  # it starts processes, which takes 15 s; tests/publish/test_latency.py does the same
        for node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            for block in re.findall(r"(?<=\n\n)(?: {4}.*\n)+", (ast.get_docstring(node) or "") + "\n"):
                code = textwrap.dedent(block)
                try:
                    tree = ast.parse(code)
                except SyntaxError:
                    continue  # a table, or words of the built-in corpus
                if any(isinstance(part, ast.Call) for part in ast.walk(tree)):
                    yield f"{path.stem}-{getattr(node, 'name', 'module')}", code


EXAMPLES = dict(examples())


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the examples take for granted: a small translator, its tokenizer, text, and folders under the names that they use."""
    folder = tmp_path_factory.mktemp("examples")
    corpus = data.builtin_corpus(train=60, dev=1, test=1)["train"]
    texts = [*corpus["source"], *corpus["target"]]
    tokenizer = data.train_tokenizer(texts, 300)
    sizes = {
        "vocab_size": len(tokenizer),
        "decoder_vocab_size": len(tokenizer),
        "encoder_layers": 3,
        "decoder_layers": 3,
    }
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": 0,
    }
    model = MarianMTModel(MarianConfig(**ARCHITECTURES["marian"].tiny | sizes | special | {"max_length": 8}))
    for place in (folder / "model", folder / "runs/theseus/row-0-seed-1/model"):
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    classifier = BertConfig(**ARCHITECTURES["bert"].tiny | {"num_hidden_layers": 4})
    BertForSequenceClassification(classifier).save_pretrained(folder / "bert-base-uncased")
    imported = {}
    for line in (
        "from hf_freeze import VariantCallback, analysis, make_variant, methods\n",
        "from hf_freeze.lab import data",
        "from hf_freeze.lab.data import read_idx",
        "from hf_freeze.lab.metrics import load",
        "from hf_freeze.training import carried_optimizer, gradual_unfreezing, parameter_groups",
        "from transformers import BertConfig, Trainer, pipeline",
        "import torch",
    ):
        exec(line, imported)
    scores = {
        name: torch.rand(heads)
        for name, heads in (("encoder.0.self", 2), ("decoder.0.self", 2), ("decoder.0.cross", 2))
    }
    return folder, imported | {
        "model": model,
        "tokenizer": tokenizer,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "folder": str(folder / "model"),
        "texts": texts,
        "generator": iter(["a"]),
        "dataset": [],
        "labelled": [{"input_ids": [1, 2], "labels": 0}] * 8,
        "scores": scores,
        "batches": [{name: torch.tensor([[5, 9, 3]]) for name in ("input_ids", "labels")}],
    }


@pytest.mark.parametrize("place", EXAMPLES)
def test_an_example_of_a_docstring_runs(place, names, monkeypatch):
    folder, values = names
    monkeypatch.chdir(folder)
    if place == "idx-module":
        for kind in ("images", "labels"):
            (folder / f"train-{kind}-idx{3 if kind == 'images' else 1}-ubyte.gz").write_bytes(
                b"\0\0\x08\x01\0\0\0\x01\x05"
            )
    exec(EXAMPLES[place], dict(values))
    shutil.rmtree(folder / "trainer_output", ignore_errors=True)
