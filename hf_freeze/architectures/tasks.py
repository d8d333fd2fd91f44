"""Tasks, by the names that users give them, and the Auto class of each."""

import transformers

AUTO_CLASSES = {
    "seq2seq-lm": transformers.AutoModelForSeq2SeqLM,
    "causal-lm": transformers.AutoModelForCausalLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "feature-extraction": transformers.AutoModel,
}
