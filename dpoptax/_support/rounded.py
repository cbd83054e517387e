"""Numbers for people, rounded against the claim: ε and δ up, noise and lower bounds down."""

import decimal
import fractions
import math


def to_decimals(value: float, decimals: int = 3, *, lower: bool = False) -> str:
    """Formats a number with some decimals, rounded up, or down if it is a `lower` bound."""
    if not math.isfinite(value):
        return f"{value:g}"
    with decimal.localcontext(rounding=decimal.ROUND_FLOOR if lower else decimal.ROUND_CEILING):
        return f"{decimal.Decimal(repr(float(value))):.{decimals}f}"


def to_digits(value: float, digits: int = 3, *, lower: bool = False) -> str:
    """Formats a number with some digits, rounded up, or down if it is a `lower` bound."""
    rounding = decimal.ROUND_FLOOR if lower else decimal.ROUND_CEILING
    with decimal.localcontext(prec=digits, rounding=rounding):
        return f"{float(+decimal.Decimal(repr(float(value)))):g}"


def round_up(value: float) -> str:
    """Formats a number of at least 0 with three digits, rounded up."""
    exact = decimal.Decimal(repr(float(value)))
    if not exact.is_finite() or not exact:
        return f"{value:g}"
    unit = decimal.Decimal(1).scaleb(exact.adjusted() - 2)
    rounded = exact.quantize(min(unit, decimal.Decimal(1)), rounding=decimal.ROUND_CEILING)
    return f"{rounded.normalize():f}"


def one_in(probability: float) -> str:
    """Formats a probability as "1 in N", with N rounded down."""
    return f"1 in {int(1 / fractions.Fraction(repr(float(probability)))):,}"
