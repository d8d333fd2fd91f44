"""Which families of transformers read sizes of a layer from `per_layer_config`: the day on which one more does, this fails.

A merge that leaves layers unequal needs a family that reads the number of neurons or heads of a layer. With transformers 5.23
there is none that hf_freeze describes, so `merge()` fills such layers up with zeros. The files below read `head_dim`,
`num_key_value_heads` or a window of each layer; `step3p7` and `dots3_note` read numbers of query heads as well, but hf_freeze
cannot describe these two.
"""

import copy
import re
from pathlib import Path

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from support.cases import ALL
from transformers.configuration_utils import PreTrainedConfig

from hf_freeze.architectures.derive import base_model
from hf_freeze.architectures.families import model_types
from hf_freeze.architectures.published import default_config
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.shrink import head_fields, shrink, sizes_in
from hf_freeze.compat.transformers import quiet

pytestmark = pytest.mark.skipif(
    not hasattr(PreTrainedConfig, "per_layer_config"), reason="transformers has no such setting yet"
)
MODELS = Path(transformers.__file__).parent / "models"
READERS = {  # folders of the modeling files that name it
    "diffusion_gemma",
    "dots3_note",
    "embedding_gemma2",
    "gemma4",
    "gemma4_unified",
    "neomme",
    "step3p7",
}
UNEVEN: set[str] = set()  # model types, of those that hf_freeze describes, whose layers may differ in neurons or heads
NEWS = (
    "transformers {} has changed what it reads from per_layer_config: {}. See whether merge() can leave layers unequal "
    "there, instead of filling them up with zeros, and change the list in tests/families/test_per_layer_config.py"
)


def readers(folder):
    """Names of the subfolders whose modeling files name the setting. Those that transformers generates from are left out."""
    files = list(folder.glob("*/modeling_*.py"))
    assert files
    return {file.parent.name for file in files if re.search(r"\bper_layer_config\b", file.read_text(encoding="utf-8"))}


def test_no_further_modeling_file_reads_it():
    changed = sorted(readers(MODELS) ^ READERS)
    assert not changed, NEWS.format(transformers.__version__, ", ".join(changed))


def test_a_further_file_is_found(tmp_path):
    for name, code in (("new", "layer = config.per_layer_config[layer_idx]"), ("old", "my_per_layer_config = 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"modeling_{name}.py").write_text(code)
    assert readers(tmp_path) == {"new"}


def sizes_by_kind(config):
    """Kind -> {field: another size}, of the neurons and of the heads of a layer, by the names of the fields."""
    sizes = config.to_dict()  # reading a field fails if layers differ in it already
    kinds = {field: {field: 2 * sizes[field]} for field in sizes_in(config).get("FFN width", ())}
    heads = {field: 2 * sizes[field] for field in head_fields(config) if field is not None}
    return kinds | ({"heads": heads} if heads else {})


def reads(config, sizes):
    """Whether the first layer, and no other, of a model of `config` has these sizes."""
    uneven = copy.deepcopy(config)
    text = uneven.get_text_config()
    layers = {int(number): own for number, own in text.to_dict().get("per_layer_config", {}).items()}
    text.per_layer_config = layers | {0: layers.get(0, {}) | sizes}
    try:
        with quiet():
            shapes, before = (
                {name: parameter.shape for name, parameter in base_model(each).named_parameters()}
                for each in (uneven, config)
            )
    except ValueError:  # AmbiguousGlobalPerLayerAttributeError, as NotDerived
        return False
    changed = [name for name in shapes if shapes[name] != before.get(name)]
    return bool(changed) and all(re.search(r"\.0\.", name) for name in changed)


def described():
    """The model types that the probe builds: with HF_FREEZE_TESTS=all every one that hf_freeze knows."""
    if ALL:
        return model_types()
    near = [name for name in model_types() if name.removesuffix("_text") in READERS]
    return [*ARCHITECTURES, *near]


def test_no_further_family_has_layers_of_unequal_sizes():
    found, probed = set(), 0
    for model_type in described():
        try:
            with quiet():
                config = shrink(default_config(model_type))
                base_model(config)
                kinds = sizes_by_kind(config.get_text_config())
        except (ValueError, StrictDataclassError):  # hf_freeze does not describe this family, or it has several texts
            continue
        probed += bool(kinds)
        if any(reads(config, sizes) for sizes in kinds.values()):
            found.add(model_type)
    assert probed >= len(ARCHITECTURES)
    changed = sorted(found ^ UNEVEN)
    assert not changed, NEWS.format(transformers.__version__, ", ".join(changed))


def test_the_probe_sees_a_family_that_reads_it(monkeypatch):
    """A Llama whose layers get the config of their own."""
    from transformers.models.llama import modeling_llama

    class Layer(modeling_llama.LlamaDecoderLayer):
        def __init__(self, config, layer_idx):
            super().__init__(config.per_layer_config[layer_idx], layer_idx)

    config = shrink(default_config("llama"))
    kinds = sizes_by_kind(config)
    assert set(kinds) == {"intermediate_size", "heads"}
    assert not any(reads(config, sizes) for sizes in kinds.values())
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Layer)
    assert all(reads(config, sizes) for sizes in kinds.values())
