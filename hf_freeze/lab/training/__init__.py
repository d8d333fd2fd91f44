"""Trainers of tasks, with token batches and exact perplexity, and the translations of a teacher."""

from hf_freeze.lab.training.classification import ClassificationTrainer as ClassificationTrainer
from hf_freeze.lab.training.decoding import teacher_translations as teacher_translations
from hf_freeze.lab.training.masked_lm import MaskedTokenTrainer as MaskedTokenTrainer
from hf_freeze.lab.training.regression import RegressionTrainer as RegressionTrainer
from hf_freeze.lab.training.trainer import TokenBatchTrainer as TokenBatchTrainer
