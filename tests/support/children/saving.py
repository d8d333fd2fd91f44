"""python -m support.children.saving FOLDER: save one model over another in forked processes.

Each process ends before the n-th operation on files, for every n, or finds the disk full. Prints what was left, as JSON.
"""

import builtins
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import peft
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from support.cases import ALL

OPERATIONS = ("replace", "rename", "fsync", "link", "unlink", "remove", "mkdir", "rmdir")
WHOLE, SHARDS = ({"max_shard_size": size} for size in ("50GB", "6KB"))


def model_of(seed):
    """Other seeded values, other stored values and other settings for each seed."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model("gpt2", **ARCHITECTURES["gpt2"].tiny)
    model = make_variant(config, [methods.Freeze(ffn="random", seed=seed)], task="causal-lm", seed=seed)
    model.generation_config.max_new_tokens = seed
    return model


MODELS = {seed: model_of(seed) for seed in (1, 2, 3)}
EXPECTED = {seed: {name: value.clone() for name, value in model.state_dict().items()} for seed, model in MODELS.items()}


def loaded(folder):
    """The seed of the model that the folder holds; None where it holds none, and an error where it holds a mixture."""
    if not (folder / "config.json").exists():
        return None
    model = AutoModelForCausalLM.from_pretrained(folder)
    state, seed = model.state_dict(), model.generation_config.max_new_tokens
    assert [method["seed"] for method in model.config.methods] == [seed], "settings of another model"
    assert [name for name, value in EXPECTED[seed].items() if not torch.equal(state[name], value)] == []
    assert not hasattr(model.config, "transformers_weights")
    return seed


def forked(work, prepare):
    """The exit code of a process that calls `prepare()` and then `work()`."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def end_before(number):
    """Have this process end before its `number`-th operation on files; one that writes leaves half of the file."""
    count = 0

    def counted():
        nonlocal count
        count += 1
        return count == number

    def ending(operation):
        def call(*args, **kwargs):
            if counted():
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    def torn(save):
        def call(tensors, path, **kwargs):
            ends = counted()
            save(tensors, path, **kwargs)
            if ends:
                os.truncate(path, Path(path).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    def opening(file, mode="r", *args, **kwargs):
        opened = real_open(file, mode, *args, **kwargs)
        if "w" in mode and counted():
            os.kill(os.getpid(), signal.SIGKILL)
        return opened

    real_open = builtins.open
    for name in OPERATIONS:
        setattr(os, name, ending(getattr(os, name)))
    transformers.modeling_utils.safe_save_file = torn(transformers.modeling_utils.safe_save_file)
    builtins.open = opening


def save(seed, folder, options, number=0):
    """In a process of its own that ends before its `number`-th operation on files (0: never). Whether it was killed."""
    code = forked(lambda: MODELS[seed].save_pretrained(folder, **options), lambda: end_before(number))
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kills(folder):
    """At every second operation, of the second direction at every third one: the folder holds the old model or the new one. After
    some, more saves, the first of them ended somewhere as well. With HF_FREEZE_TESTS=all at all of both, and after all."""
    found = {"kills": 0, "old": 0, "new": 0}
    for old, new, step in ((SHARDS, WHOLE, 1 if ALL else 2), (WHOLE, SHARDS, 1 if ALL else 3)):
        start = folder / "start"
        shutil.rmtree(start, ignore_errors=True)
        save(1, start, old)
        (start / "tokenizer_config.json").write_text("{}")
        for number in itertools.count(step, step):
            at = folder / f"at-{number}"
            shutil.copytree(start, at)
            killed = save(2, at, new, number)
            seed = loaded(at)
            assert seed in ((1, 2) if killed else (2,))
            if not killed:
                break
            found["kills"] += 1
            found["old" if seed == 1 else "new"] += 1
            if number % (1 if ALL else 9) == 0:
                save(3, at, old, 5 * number % 37)
                assert loaded(at) in (seed, 3)
                save(3, at, old)
                assert loaded(at) == 3
                assert names(at) == names(start)
            shutil.rmtree(at)
        shutil.rmtree(at)
    return found


def adapters(folder):
    """The same of adapters of PEFT, which other settings are for, at every other operation."""

    def adapted(alpha):
        model = model_of(1)
        model.add_adapter(peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["c_attn"], init_lora_weights=False))
        return model

    def weights(model):
        return {name: value for name, value in model.state_dict().items() if "lora" in name}

    old, new = adapted(3), adapted(5)
    expected = {model.peft_config["default"].lora_alpha: weights(model) for model in (old, new)}
    old.save_pretrained(folder / "start")
    found = {"kills": 0, "old": 0, "new": 0}
    for number in itertools.count(1, 1 if ALL else 2):
        at = folder / f"at-{number}"
        shutil.copytree(folder / "start", at)
        code = forked(lambda at=at: new.save_pretrained(at), lambda n=number: end_before(n))
        model = model_of(1)
        model.load_adapter(at)
        alpha = model.peft_config["default"].lora_alpha
        state = weights(model)
        assert state.keys() == expected[alpha].keys()
        assert all(torch.equal(state[name], value) for name, value in expected[alpha].items())
        if code == 0:
            assert alpha == 5
            assert names(at) == names(folder / "start")
            break
        found["kills"] += 1
        found["old" if alpha == 3 else "new"] += 1
    return found


def full_disk(folder):
    """No file may grow beyond a limit: the save fails, and the old model is there."""
    MODELS[1].save_pretrained(folder)
    size = (folder / "model.safetensors").stat().st_size
    found = {"failed": 0}
    for limit in (0, 100, (folder / "config.json").stat().st_size - 1, size // 2, size - 1):

        def limited(limit=limit):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        found["failed"] += forked(lambda: MODELS[2].save_pretrained(folder), limited) == 1
        assert loaded(folder) == 1
        assert names(folder) == ["config.json", "generation_config.json", "model.safetensors"]
    return found


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: forks need not look through it for garbage, which would copy its pages
    found = {}
    for work in (kills, adapters, full_disk):
        folder = Path(sys.argv[1]) / work.__name__
        folder.mkdir()
        found[work.__name__] = work(folder)
    print(json.dumps(found))
