"""The tasks by the names that recipes use."""

import importlib

from hf_freeze.lab.tasks.base import OwnTask, Task

TASK_MODULES = {  # name in a recipe -> module of this room that defines TASK, imported when it is used: it imports much
    "translation": "translation",
    "language-modelling": "language_modelling",
    "image-classification": "image_classification",
    "masked-lm": "masked_lm",
    "sequence-classification": "sequence_classification",
    "regression": "regression",
    "token-classification": "token_classification",
    "question-answering": "question_answering",
    "multiple-choice": "multiple_choice",
}


def task_of(name: str) -> Task | OwnTask:
    """The task of that name in a recipe."""
    return importlib.import_module(f"hf_freeze.lab.tasks.{TASK_MODULES[name]}").TASK
