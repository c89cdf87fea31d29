"""Conversion: replace layers of any network in place, and take them out again."""

from lpbnn.convert.convert import Conversion, convert

__all__ = ["Conversion", "convert"]
