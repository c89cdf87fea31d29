"""Conversion: replace layers of any network in place, and take them out again."""

from lpbnn.convert.convert import Conversion, convert
from lpbnn.convert.recurrent import split_recurrent

__all__ = ["Conversion", "convert", "split_recurrent"]
