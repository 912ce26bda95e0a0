"""Signatures for the parser's tests: those of the built-in operators."""

from __future__ import annotations

from mergepipe.operators.registry import signatures

SIGNATURES = signatures()
LINEAR, TASK_ARITHMETIC, PASSTHROUGH = (SIGNATURES[name] for name in ("linear", "task_arithmetic", "passthrough"))
