"""Task names and the Auto class of each task."""

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
}


def native_class(task: str, config_class: type) -> type[transformers.PreTrainedModel]:
    """The model class that the Auto class of `task` maps a config class to, native or a variant's. Raises ValueError if there is
    none."""
    model_class = mapped_class(AUTO_CLASSES[task], config_class)
    if model_class is None:
        raise ValueError(f"no {task!r} model for {config_class.__name__}")
    return model_class
