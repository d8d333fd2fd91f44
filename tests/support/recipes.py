"""Recipes of grids that take seconds, and the command line."""

import json
import re

import yaml
from typer.testing import CliRunner

from hf_freeze.cli import app
from hf_freeze.lab.recipes.load import load_recipe

TINY = {
    "name": "tiny",
    "task": "translation",
    "data": {"builtin": {"seed": 0, "train": 60, "dev": 10, "test": 8}, "limit": 60},
    "preset": "small",
    "presets": {
        "small": {
            "tokenizer": {"kind": "bpe", "vocab_size": 100},
            "backbone": {
                "model_type": "marian",
                "init": "marian",
                "config": {
                    "d_model": 16,
                    "encoder_layers": 1,
                    "decoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "decoder_attention_heads": 2,
                    "encoder_ffn_dim": 16,
                    "decoder_ffn_dim": 16,
                    "max_position_embeddings": 32,
                },
            },
            "training": {
                "epochs": 1,
                "max_tokens": 400,
                "learning_rate": 0.005,
                "warmup_steps": 2,
                "label_smoothing": 0.1,
                "bf16": False,
            },
        }
    },
    "seeds": [1],
    "rows": {
        "0": {"label": "✓✓✓ all", "methods": []},
        "2.1": {"label": "✓✗✓ attention", "methods": [{"method": "freeze", "attention": "random"}]},
    },
    "smoke": {"data": {"limit": 20}, "training": {"epochs": 0.5}},
}


def changed(base, changes):
    """A deep copy with dotted paths set, or removed where the value is `...`."""
    made = json.loads(json.dumps(base))
    for path, value in changes.items():
        *parents, last = path.split("/")
        inner = made
        for parent in parents:
            inner = inner[parent]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return made


def write_recipe(path, recipe=TINY, **changes):
    path.write_text(yaml.safe_dump(changed(recipe, changes), allow_unicode=True), encoding="utf-8")
    return path


def cli(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code == code, (result.output, result.exception)
    return result


def plain(text):
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def one_line_error(*arguments):
    """Exit code 2, nothing but one line, no traceback."""
    result = cli(*arguments, code=2)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: ")
    assert "Traceback" not in result.output
    return lines[0]


LM = {
    "task": "language-modelling",
    "presets/small/backbone": {
        "model_type": "gpt2",
        "init": "marian",
        "config": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_inner": 16, "n_positions": 17},
    },
    "presets/small/training/block_size": 16,
}

BERT = {
    "presets/small/tokenizer/kind": "wordpiece",
    "presets/small/backbone": {
        "model_type": "bert",
        "config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "max_position_embeddings": 32,
        },
    },
}

MASKED = BERT | {"task": "masked-lm", "presets/small/training/block_size": 16}

CLASSIFICATION = BERT | {"task": "sequence-classification"}


def encoder_recipe(path, task, data, *, epochs=1, **changes):
    """A checked recipe of one row: a BERT of seconds, on `data`."""
    recipe = {"name": "tiny", "task": task, "data": data, "seeds": [1], "rows": {"0": {"label": "all", "methods": []}}}
    recipe |= {"tokenizer": {"kind": "wordpiece", "vocab_size": 120}, "backbone": BERT["presets/small/backbone"]}
    recipe["training"] = {"max_tokens": 200, "learning_rate": 0.01, "warmup_steps": 1, "bf16": False, "epochs": epochs}
    return load_recipe(write_recipe(path, recipe, **changes))


# Less to decode: sentences of a translator that has hardly learnt end at the limit alone.
SHORT = {"presets/small/backbone/config/max_position_embeddings": 10}

EACH = {"translation": SHORT, "language-modelling": LM, "masked-lm": MASKED}  # a classifier has nothing more to resume

# Three epochs with two checkpoints each, of which one lies within an epoch; dropout has its random state restored.
LONGER = {"presets/small/training/epochs": 3, "presets/small/training/evaluations": 2}

# A row whose FFN thaws and whose attention freezes within an epoch, with a rate of its own for the embeddings.
SCHEDULED = {
    "rows/2.1/methods": [
        {"method": "freeze", "ffn": "frozen", "end": 0.4},
        {"method": "freeze", "attention": "frozen", "begin": 0.7},
        {"method": "freeze", "norm": "frozen"},
    ],
    "presets/small/training/learning_rates": {"embeddings": 0.001},
}


def figures(record):
    """What a run measured, without how long it took and where."""
    return {name: record[name] for name in record if name not in ("seconds", "resumed", "peak_memory_bytes")}
