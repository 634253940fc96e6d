"""AdaHOP in JAX: MXFP4 training of Flax models with outlier-pattern-aware strategies.

The method is arXiv:2604.02525. Quantization and its arithmetic: `quantize`, `MXFP4Array`,
`hadamard_transform`, `matmul`. Training: `Dense` (or `dot`), `Recipe`, `StrategyTable`.
Calibration: `profile_tensor`, `classify`, `calibrate`, `table_from_votes`, `bind`.
"""

from adahop_jax.calibration import (
    calibrate,
    observe,
    patterns_from_votes,
    table_from_votes,
    votes_by_layer,
)
from adahop_jax.contraction import matmul
from adahop_jax.hadamard import hadamard_matrix, hadamard_transform
from adahop_jax.linear import RESIDUAL_NAME, dot
from adahop_jax.linen import Dense, bind
from adahop_jax.mxfp4 import MXFP4Array
from adahop_jax.outliers import top_outliers
from adahop_jax.patterns import Pattern, TensorProfile, classify, profile_tensor
from adahop_jax.quantization import quantize
from adahop_jax.recipe import RECIPE_NAMES, OperandFormat, Recipe
from adahop_jax.strategy import Level, MatmulStrategies, Strategy, StrategyTable

__all__ = [
    "RECIPE_NAMES",
    "RESIDUAL_NAME",
    "Dense",
    "Level",
    "MXFP4Array",
    "MatmulStrategies",
    "OperandFormat",
    "Pattern",
    "Recipe",
    "Strategy",
    "StrategyTable",
    "TensorProfile",
    "bind",
    "calibrate",
    "classify",
    "dot",
    "hadamard_matrix",
    "hadamard_transform",
    "matmul",
    "observe",
    "patterns_from_votes",
    "profile_tensor",
    "quantize",
    "table_from_votes",
    "top_outliers",
    "votes_by_layer",
]
