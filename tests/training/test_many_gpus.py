"""Two processes, for two GPUs: what is sent, and that they give what one does; the configs of accelerate; trackers."""

import functools
import json
import shlex
from inspect import signature

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, patch_environment, prepare_multi_gpu_env
from support import ROOT
from support.cases import native_config
from support.processes import two_processes
from support.schedules import STEPS, scheduled_model, trainer
from support.tensorboard import events, scalars
from torch.distributed.fsdp import fully_shard
from transformers import MarianMTModel

from hf_freeze import VariantCallback, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import Freeze

CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
README = (ROOT / "recipes" / "accelerate" / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif("ignored_params" not in signature(fully_shard).parameters, reason="needs torch 2.7")
def test_two_processes_send_what_is_trained_and_give_the_update_of_one(tmp_path):
    """Of frozen, seeded, dropped, replaced, pruned and shared parts, with real draws, over some steps."""
    for result in two_processes("many_gpus", tmp_path):
        assert result["problems"] == []
        assert len(result["checked"]) == 9 + 3


def test_a_seeded_tensor_that_was_thawed_is_sent():
    model = make_variant(
        native_config(ARCHITECTURES["marian"]), [Freeze(embeddings="random", ffn="random")], task="seq2seq-lm"
    )
    ignored = model._ddp_params_and_buffers_to_ignore
    assert "model.encoder.layers.0.fc1.weight" in ignored
    assert {"model.shared.weight", "model.encoder.embed_tokens.weight", "lm_head.weight"} <= set(ignored), (
        "and what is tied to it"
    )
    assert not [name for name in ignored if model.get_parameter(name).requires_grad]
    model.get_parameter("model.encoder.layers.0.fc1.weight").requires_grad_(True)
    assert set(ignored) - set(model._ddp_params_and_buffers_to_ignore) == {"model.encoder.layers.0.fc1.weight"}
    assert not hasattr(MarianMTModel, "_ddp_params_and_buffers_to_ignore"), "DDP asks for a name that is not native"


# -- the configs of accelerate -------------------------------------------------------------------------------------------------


def launched(*words):
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "script.py"]))
    return arguments


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_takes_the_configs(path):
    config = load_config_from_file(str(path))
    arguments = launched("--config_file", str(path))
    assert arguments.num_processes == 2
    assert path.name in README
    kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(path.stem, "DEEPSPEED")
    assert config.distributed_type == DistributedType(kind)
    assert (arguments.multi_gpu, arguments.use_fsdp, arguments.use_deepspeed) == tuple(
        kind == each for each in ("MULTI_GPU", "FSDP", "DEEPSPEED")
    )
    if kind == "DEEPSPEED":
        assert path.stem == f"deepspeed_zero{arguments.zero_stage}"


def test_all_configs_are_there():
    assert [path.stem for path in CONFIGS] == ["ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"]


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_fsdp2_finds_the_layers(architecture):
    """Marian names none itself: the README's command does."""
    words = ["--config_file", str(ROOT / "recipes" / "accelerate" / "fsdp2.yaml")]
    if architecture.model_type == "marian":
        option = "--fsdp_transformer_layer_cls_to_wrap"
        line = next(line for line in README.replace("\\\n", " ").splitlines() if option in line and "launch" in line)
        given = shlex.split(line)
        words += [option, given[given.index(option) + 1]]
    environment = prepare_multi_gpu_env(launched(*words))
    with torch.device("meta"):
        model = make_variant(native_config(architecture), [], task=architecture.tasks[0])
    with patch_environment(**{name: value for name, value in environment.items() if name.startswith("FSDP")}):
        plugin = FullyShardedDataParallelPlugin()
        plugin.set_auto_wrap_policy(model)
    assert plugin.fsdp_version == 2
    assert plugin.cpu_ram_efficient_loading is False
    assert isinstance(plugin.auto_wrap_policy, functools.partial)
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    layers = {type(model.base_model.get_submodule(stack.layers.format(0))) for stack in architecture.stacks.values()}
    assert layers <= wrapped


# -- trackers ------------------------------------------------------------------------------------------------------------------


def test_tensorboard_gets_the_losses_and_methods_of_a_variant(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "seen"))
    settings = {"report_to": ["tensorboard"], "logging_strategy": "steps", "logging_steps": 1}
    model = scheduled_model()
    running = trainer(model, tmp_path, **settings)
    assert any(isinstance(each, VariantCallback) for each in running.callback_handler.callbacks)
    running.train()
    seen, text = scalars(tmp_path / "seen")["train/loss"], ""
    for event in events(tmp_path / "seen"):
        for value in event.summary.value:
            if value.tag.startswith("model_config"):
                text += b"".join(value.tensor.string_val).decode()
    logged = {entry["step"]: entry["loss"] for entry in running.state.log_history if "loss" in entry}
    assert len(logged) == STEPS
    assert seen == pytest.approx(logged, rel=1e-6)
    assert json.loads(text)["methods"] == model.config.methods
