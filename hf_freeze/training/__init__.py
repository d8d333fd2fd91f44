"""Training of variants: Trainers with token batches, exact perplexity, schedules, and a fast label-smoothed loss."""

from hf_freeze.training.callback import VariantCallback as VariantCallback
from hf_freeze.training.classification import ClassificationTrainer as ClassificationTrainer
from hf_freeze.training.decoding import teacher_translations as teacher_translations
from hf_freeze.training.healing import Healed as Healed
from hf_freeze.training.healing import heal as heal
from hf_freeze.training.loss import label_smoothed_loss as label_smoothed_loss
from hf_freeze.training.masked_lm import MaskedTokenTrainer as MaskedTokenTrainer
from hf_freeze.training.optimizer import carried_optimizer as carried_optimizer
from hf_freeze.training.regression import RegressionTrainer as RegressionTrainer
from hf_freeze.training.schedules import gradual_unfreezing as gradual_unfreezing
from hf_freeze.training.schedules import parameter_groups as parameter_groups
from hf_freeze.training.sharding import load_sharded as load_sharded
from hf_freeze.training.trainer import TokenBatchTrainer as TokenBatchTrainer
