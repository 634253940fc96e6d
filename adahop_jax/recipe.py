"""Recipes: everything about a training precision that is not in the strategy table."""

import dataclasses
import difflib
from typing import Literal

import jax

from adahop_jax.backends import Quantizer, choose_backend
from adahop_jax.e2m1 import ScaleRule, check_scale_rule
from adahop_jax.hadamard import check_block_size
from adahop_jax.patterns import METHODS
from adahop_jax.strategy import DEFAULT_K, Level, MatmulStrategies, Strategy, StrategyTable

Policy = Literal["bf16", "plain", "iht", "lv1", "lv2"]
_UNIFORM = {"bf16": Strategy.BF16, "plain": Strategy.PLAIN, "iht": Strategy.IHT}
_LEVELS = {"lv1": Level.LV1, "lv2": Level.LV2}


@dataclasses.dataclass(frozen=True)
class OperandFormat:
    """How a kind of operand is quantized.

    Attributes:
      scale_rule: 'floor', 'even', 'ceil', 'rceil' or 'mse'.
      rounding: 'nearest', or 'stochastic' (which needs 'ceil' or 'rceil').
    """

    scale_rule: ScaleRule = "floor"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        """Refuses what cannot be quantized without bias."""
        check_scale_rule(self.scale_rule, self.rounding)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training precision: static, hashable, a pytree without leaves.

    Attributes:
      policy: where the strategies come from: 'bf16', 'plain' and 'iht' are uniform, 'lv1' and 'lv2'
        the published tables, filled in by calibration.
      activation: format of x.
      weight: format of W.
      gradient: format of g.
      block_size: of the Hadamard transform: 16, 32, 64 or 128.
      signs: 'none', or 'random': +1/-1 factors before the transform, drawn from the step's key.
      k: rows, columns or channels that a strategy with extraction takes out.
      classifier: method of `adahop_jax.classify`.
      calibration_steps: steps whose votes make the table.
      calibration_precision: what layers compute in meanwhile: 'bf16' or 'mxfp4' (plain).
      backend: 'auto' or the name of a backend.
    """

    policy: Policy = "lv2"
    activation: OperandFormat = OperandFormat()
    weight: OperandFormat = OperandFormat()
    gradient: OperandFormat = OperandFormat()
    block_size: int = 32
    signs: Literal["none", "random"] = "none"
    k: int = DEFAULT_K
    classifier: str = "published"
    calibration_steps: int = 30
    calibration_precision: Literal["bf16", "mxfp4"] = "bf16"
    backend: str = "auto"

    def __post_init__(self) -> None:
        """Checks every field."""
        _check_choice("policy", self.policy, (*_UNIFORM, *_LEVELS))
        _check_choice("signs", self.signs, ("none", "random"))
        _check_choice("classifier", self.classifier, METHODS)
        _check_choice("calibration_precision", self.calibration_precision, ("bf16", "mxfp4"))
        for name in ("activation", "weight", "gradient"):
            value = getattr(self, name)
            if not isinstance(value, OperandFormat):
                raise TypeError(f"{name} is {value!r}, but must be an OperandFormat.")
        check_block_size(self.block_size)
        choose_backend(self.backend)
        for name, least in (("k", 0), ("calibration_steps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} is {value!r}, but must be an integer of at least {least}."
                )

    @classmethod
    def named(cls, name: str, **changes: object) -> "Recipe":
        """A recipe by name: bf16, mxfp4, mxfp4-iht, adahop-lv1 or adahop-lv2.

        Args:
          name: one of `RECIPE_NAMES`.
          **changes: fields to replace.

        Raises:
          TypeError: for an unknown field.
          ValueError: for an unknown name.
        """
        if name not in _POLICIES:
            close = difflib.get_close_matches(str(name), _POLICIES, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                f"recipe is {name!r}, but must be one of {', '.join(_POLICIES)}{hint}."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for change in changes:
            if change not in known:
                raise TypeError(
                    f"recipe field is {change!r}, but must be one of {', '.join(known)}."
                )
        return dataclasses.replace(cls(policy=_POLICIES[name]), **changes)

    @property
    def level(self) -> Level | None:
        """The published level, or None for a uniform policy."""
        return _LEVELS.get(self.policy)

    @property
    def needs_key(self) -> bool:
        """Whether computing with this recipe draws random numbers."""
        formats = (self.activation, self.weight, self.gradient)
        return self.signs == "random" or any(f.rounding == "stochastic" for f in formats)

    def initial_table(self) -> StrategyTable:
        """The table to start with: final for a uniform policy, that of calibration otherwise."""
        if self.level is None:
            return StrategyTable.uniform(_UNIFORM[self.policy])
        calibrating = Strategy.BF16 if self.calibration_precision == "bf16" else Strategy.PLAIN
        return StrategyTable.uniform(MatmulStrategies.uniform(calibrating))

    def quantizer(self, operand: str, strategy: Strategy) -> Quantizer:
        """How 'activation', 'weight' or 'gradient' is quantized under a strategy."""
        form: OperandFormat = getattr(self, operand)
        block_size = self.block_size if strategy.transforms else None
        return Quantizer(form.scale_rule, form.rounding, block_size)


_POLICIES: dict[str, Policy] = {
    "bf16": "bf16",
    "mxfp4": "plain",
    "mxfp4-iht": "iht",
    "adahop-lv1": "lv1",
    "adahop-lv2": "lv2",
}
RECIPE_NAMES = tuple(_POLICIES)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(choices)}.")
