"""Training of variants: the callback, healing, schedules, optimizers, shards, and a fast label-smoothed loss.

Trainers of tasks are in `hf_freeze.lab.training`.
"""

from hf_freeze.training.callback import VariantCallback as VariantCallback
from hf_freeze.training.healing import Healed as Healed
from hf_freeze.training.healing import heal as heal
from hf_freeze.training.loss import label_smoothed_loss as label_smoothed_loss
from hf_freeze.training.optimizer import carried_optimizer as carried_optimizer
from hf_freeze.training.schedules import gradual_unfreezing as gradual_unfreezing
from hf_freeze.training.schedules import parameter_groups as parameter_groups
from hf_freeze.training.sharding import load_sharded as load_sharded
