"""From a config to the description of its family, found in the model that transformers builds of it on `meta`.

Roles come from names (`roles.py`), numbers from shapes, and config fields from probes: one integer of the config is changed, and
what moves in the model tells what the field means. Nothing here is about one family. `verify.py` proves what is derived.
"""

import copy
import functools
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModel, initialization

from hf_freeze.architectures.base import Architecture, Stack, read
from hf_freeze.architectures.channels import NotFound
from hf_freeze.architectures.contradictions import check_contradictions
from hf_freeze.architectures.describe import NotDerived, describe, first_line
from hf_freeze.architectures.examples import example_batch
from hf_freeze.architectures.fields import per_layer_fields, with_fields
from hf_freeze.architectures.hidden import prove
from hf_freeze.architectures.probe import Probe, on_cpu
from hf_freeze.architectures.roles import stacks_of
from hf_freeze.architectures.shrink import config_key, shrink, sizes_in
from hf_freeze.architectures.tasks import native_class, native_classes
from hf_freeze.architectures.verify import sees_the_future, verify, verify_layers
from hf_freeze.compat.transformers import quiet


def derive(config: Any) -> Architecture:
    """The description of the model of a native `config`, proved on a small model of the same class.

    Derived once for each config within a process. Raises NotDerived if nothing is understood, ValueError if fields of the config
    contradict each other.
    """
    check_contradictions(config)
    key = config_key(config)
    if key not in _DERIVED:
        with quiet(), torch.random.fork_rng(devices=[]):  # the first call leaves the random state as the later ones do
            with on_cpu():
                small, unused = _derived_small(config)
            _DERIVED[key] = _adopt(describe(base_model(config), config, unused), small, config)
    return _DERIVED[key]


_DERIVED: dict[str, Architecture] = {}
# Model type -> what is refused although a small model proves it, and why: the contract of all families has found it
# (`make families`).
_REFUSED = {"big_bird": {"heads": "for short sentences, native code makes its attentions again with all heads"}}
_OF_LANGUAGE = ("causal-lm", "masked-lm", "seq2seq-lm")
_SMALL: dict[str, tuple[Architecture, list[str]]] = {}


def _derived_small(config: Any) -> tuple[Architecture, list[str]]:
    """The description of the small model, with layouts, fields and refusals; and the lists of layers that it leaves out."""
    try:
        small = shrink(config)
    except Exception as error:  # whatever the config class raises for values that it refuses
        raise NotDerived(f"{config.model_type}: no small config for its proofs: {first_line(error)}") from error
    key = config_key(small)
    if key not in _SMALL:
        try:
            probe = Probe(small)
        except NotImplementedError as error:
            raise NotDerived(f"{config.model_type}: {first_line(error)}") from error
        except Exception as error:  # whatever the native forward raises for inputs that it does not take
            raise NotDerived(f"{config.model_type}: its small model does not run: {first_line(error)}") from error
        unused = _unused(probe)
        architecture = describe(probe.model, small, unused)
        if list(architecture.stacks) == ["encoder"] and not sees_the_future(probe):
            architecture = replace(architecture, stacks={"decoder": architecture.stacks["encoder"]})
        architecture = replace(with_fields(verify(architecture, probe), small), tasks=_tasks(architecture, small))
        if (reason := _output(architecture, small)) is not None:
            architecture = replace(architecture, refusals={"vocabulary": reason} | architecture.refusals)
        architecture = replace(
            architecture,
            tiny_inputs=functools.partial(example_batch, small, pixels="pixel_values" in probe.inputs),
        )
        try:
            architecture = replace(architecture, hidden=prove(probe, small))
        except NotFound as error:
            architecture = replace(architecture, refusals=architecture.refusals | {"hidden": str(error)})
        if not all(stack.depth for stack in architecture.stacks.values()):
            raise NotDerived(f"{config.model_type}: {architecture.refusals['layers']}")
        _SMALL[key] = verify_layers(architecture, probe), unused
    return _SMALL[key]


def _tasks(architecture: Architecture, config: Any) -> tuple[str, ...]:
    """The tasks whose model has all stacks; BART's causal language model is a decoder alone."""
    tasks = []
    for task, model_class in native_classes(type(config)).items():
        try:
            with torch.device("meta"), initialization.no_init_weights():
                model: Any = model_class(copy.deepcopy(config))  # some classes change it
        except Exception:  # whatever the native class raises, such as for a config without the fields of this task
            continue
        names = {name for name, _ in model.base_model.named_modules()}
        if all(stack.layers.format(0) in names for stack in architecture.stacks.values()):
            tasks.append(task)
    return tuple(tasks)


def _output(architecture: Architecture, config: Any) -> str | None:
    """What is wrong with the output matrices of its tasks, which should be linears with the rows of the token table; None if
    nothing is."""
    rows = {read(config, field) for field in architecture.token_tables.values()}
    for task in set(architecture.tasks) & set(_OF_LANGUAGE):
        with torch.device("meta"):
            model: Any = native_class(task, type(config))(copy.deepcopy(config))
        output = model.get_output_embeddings()
        if output is None:
            return f"its {task} model does not tell its output matrix"
        if type(output) is not torch.nn.Linear or output.out_features not in rows:
            return f"the output of its {task} model, a {type(output).__name__}, is no matrix with a row for each token"
        if output.in_features != model.get_input_embeddings().embedding_dim and model.all_tied_weights_keys:
            return f"the output of its {task} model is tied to a table of another width"
    return None


def _unused(probe: Probe) -> list[str]:
    """The lists of layers that the probe's inputs do not reach, such as the audio tower of a model that gets text."""
    called: set[str] = set()
    stacks = stacks_of(probe.model)
    layers = {f"{path}.{number}": layer for path, stack in stacks.items() for number, layer in enumerate(stack)}
    probe.watch(layers, lambda name, _, __: called.add(name.rpartition(".")[0]))
    return [path for path in stacks if path not in called]


def _adopt(full: Architecture, small: Architecture, config: Any) -> Architecture:
    """The description of the full model, with what the small one has shown."""
    refusals = {"blocks": "it puts in blocks of its own, which need a description by hand"} | small.refusals
    refusals |= _REFUSED.get(config.model_type, {})
    if list(full.stacks) == ["encoder"] and list(small.stacks) == ["decoder"]:
        full = replace(full, stacks={"decoder": full.stacks["encoder"]})
    if full.stacks.keys() != small.stacks.keys():
        raise NotDerived(
            f"{config.model_type}: its stacks {list(full.stacks)} are not those of a small model of its kind"
        )
    stacks = {name: _adopted(name, stack, small.stacks[name], config, refusals) for name, stack in full.stacks.items()}
    return replace(
        full,
        tasks=small.tasks,
        stacks=stacks,
        # In the full model, tables of two vocabularies differ in their rows.
        hidden=small.hidden,
        token_tables={t: field for t, field in small.token_tables.items() if f"{t}.*" in full.embeddings},
        sizes=sizes_in(config),
        tiny=shrink(config).to_dict(),
        tiny_inputs=small.tiny_inputs,
        refusals=refusals,
    )


def _adopted(name: str, stack: Stack, shown: Stack, config: Any, refusals: dict[str, str]) -> Stack:
    """A stack of the full model with what that of the small one has `shown`; adds to `refusals` what is not in it."""
    attentions = {}
    for kind, attention in stack.attentions.items():
        roles = (attention.q, attention.k, attention.v, attention.o)
        like = next((a for a in shown.attentions.values() if (a.q, a.k, a.v, a.o) == roles), None)
        if like is None:
            refusals.setdefault("heads", f"{name}: {kind} is not in a small model of its kind")
        else:
            proved = {field: getattr(like, field) for field in ("layout", "reads_config", "resizes", "thins")}
            attention = replace(attention, **proved)
        attentions[kind] = replace(attention, bidirectional=kind.startswith("self") and name != "decoder")
    # Where a width is the hidden size, shapes do not tell the gate of an expert from its linears; the small model does.
    routers = {name: f"{name}.*" for name in stack.ffn if name not in shown.ffn}
    if routers and set(routers.values()) <= set(shown.others):
        neurons = {name: count for name, count in stack.neurons.items() if name not in routers}
        stack = replace(stack, ffn=shown.ffn, others=(*routers.values(), *stack.others), neurons=neurons)
    if not set(stack.ffn) <= set(shown.ffn):
        refusals.setdefault("neurons", f"{name}: its FFN is not that of a small model of its kind")
    lists = per_layer_fields(config, shown.depth) if shown.depth else ()
    own = ("layers", "ffn", "projections", "apart", "ends", "others", "absent", "differ")
    return replace(
        shown,
        **{field: getattr(stack, field) for field in own},
        attentions=attentions,
        experts=stack.experts if shown.experts.keys() >= stack.experts.keys() else {},
        per_layer=tuple(name for name in lists if name in shown.per_layer),
        reads=name if f"{name}." in stack.layers and getattr(config, "is_encoder_decoder", False) else "",
        neurons={} if shown.width else stack.neurons,
    )


def base_model(config: Any) -> Any:
    """The native model without a head, on `meta`: nothing is allocated. Raises NotDerived if transformers has none."""
    try:
        with torch.device("meta"):
            return AutoModel.from_config(copy.deepcopy(config))  # some classes change it
    except Exception as error:  # whatever the native class raises for a config that it cannot build
        raise NotDerived(f"{config.model_type}: transformers cannot build it: {first_line(error)}") from error
