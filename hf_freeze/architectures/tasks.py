"""Task names and the Auto class of each task."""

from typing import Any

import transformers

from hf_freeze.compat.transformers import mapped_class

AUTO_CLASSES = {
    "seq2seq-lm": transformers.AutoModelForSeq2SeqLM,
    "causal-lm": transformers.AutoModelForCausalLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "feature-extraction": transformers.AutoModel,
    "multiple-choice": transformers.AutoModelForMultipleChoice,
    "image-classification": transformers.AutoModelForImageClassification,
    "audio-classification": transformers.AutoModelForAudioClassification,
    "speech-seq2seq": transformers.AutoModelForSpeechSeq2Seq,
    "ctc": transformers.AutoModelForCTC,
}


def native_classes(config_class: type) -> dict[str, type[transformers.PreTrainedModel]]:
    """Task -> native model class, for the tasks that transformers has a model of this native config class for."""
    found = {task: mapped_class(auto, config_class) for task, auto in AUTO_CLASSES.items()}
    return {task: model_class for task, model_class in found.items() if isinstance(model_class, type)}


def native_class(task: str, config_class: type) -> type[transformers.PreTrainedModel]:
    """The model class that the Auto class of `task` maps a config class to, native or a variant's. Raises ValueError if there is
    none."""
    model_class = mapped_class(AUTO_CLASSES[task], config_class)
    if model_class is None:
        raise ValueError(f"no {task!r} model for {config_class.__name__}")
    return model_class


def task_of(model: Any) -> str:
    """The task in `AUTO_CLASSES` to which the class of `model` belongs. Raises ValueError if there is none."""
    for task, auto in AUTO_CLASSES.items():
        if mapped_class(auto, type(model.config)) is type(model):
            return task
    raise ValueError(f"{type(model).__name__} belongs to none of the tasks {list(AUTO_CLASSES)}")


def tasks_of(model: Any) -> set[str]:
    """The tasks that the class of `model`, native or a variant's, serves; empty for a class of no task."""
    return {
        task
        for task, auto in AUTO_CLASSES.items()
        if (model_class := mapped_class(auto, type(model.config))) is not None and isinstance(model, model_class)
    }
