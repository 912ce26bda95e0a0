"""Signatures of the operators that can be declared and not run yet.

A Mergefile that uses one is checked in full and then told that the operator is not supported yet. Names, defaults and
ranges are those of the published methods as this project defines them; an operator leaves this list when it arrives.
"""

from __future__ import annotations

from mergepipe.signatures import OperatorSignature

UPCOMING: tuple[OperatorSignature, ...] = ()
