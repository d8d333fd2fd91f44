"""Make a trained model small enough for a budget, from the model, some texts and a limit."""

from hf_freeze.compression.budget import Budget as Budget
from hf_freeze.compression.labels import Labels as Labels
from hf_freeze.compression.progress import Step as Step
from hf_freeze.compression.progress import Stopped as Stopped
from hf_freeze.compression.results import Compressed as Compressed
from hf_freeze.compression.run import compress as compress
from hf_freeze.compression.run import front as front
