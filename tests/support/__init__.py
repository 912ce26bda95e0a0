"""Helpers that the tests share; not part of the package."""
