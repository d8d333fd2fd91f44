"""What the Trainer needs besides a variant: batches by tokens, an honest perplexity, a fast smoothed loss."""

from hf_freeze.training.loss import label_smoothed_loss as label_smoothed_loss
from hf_freeze.training.trainer import TokenBatchTrainer as TokenBatchTrainer
