"""What methods put in: linears and tables whose weight follows from fewer, or other, parameters, attentions, blocks."""

from hf_freeze.layers.adaptive_embedding import AdaptiveEmbedding as AdaptiveEmbedding
from hf_freeze.layers.adaptive_embedding import AdaptiveSoftmax as AdaptiveSoftmax
from hf_freeze.layers.adaptive_embedding import BandedOutput as BandedOutput
from hf_freeze.layers.convolution import KernelConvolution as KernelConvolution
from hf_freeze.layers.define import DeFINEEmbedding as DeFINEEmbedding
from hf_freeze.layers.derived import DerivedLinear as DerivedLinear
from hf_freeze.layers.dextra import DExTraAttention as DExTraAttention
from hf_freeze.layers.dextra import DExTraEmbedding as DExTraEmbedding
from hf_freeze.layers.dextra import DExTraUnit as DExTraUnit
from hf_freeze.layers.factorized_embedding import LowRankEmbedding as LowRankEmbedding
from hf_freeze.layers.factorized_embedding import LowRankOutput as LowRankOutput
from hf_freeze.layers.fixed_heads import FixedHeads as FixedHeads
from hf_freeze.layers.gated import GatedConv1D as GatedConv1D
from hf_freeze.layers.gated import GatedLinear as GatedLinear
from hf_freeze.layers.group_linear import GroupLinear as GroupLinear
from hf_freeze.layers.long_short import LongShortAttention as LongShortAttention
from hf_freeze.layers.low_rank import LowRankLinear as LowRankLinear
from hf_freeze.layers.masked import MaskedConv1D as MaskedConv1D
from hf_freeze.layers.masked import MaskedLinear as MaskedLinear
from hf_freeze.layers.no_attention import NoAttention as NoAttention
from hf_freeze.layers.no_attention import NoHeads as NoHeads
from hf_freeze.layers.sparse import SparseLinear as SparseLinear
from hf_freeze.layers.tensor_train import TensorTrainLinear as TensorTrainLinear
from hf_freeze.layers.tucker import TuckerLinear as TuckerLinear
from hf_freeze.layers.variational import VariationalConv1D as VariationalConv1D
from hf_freeze.layers.variational import VariationalLinear as VariationalLinear
