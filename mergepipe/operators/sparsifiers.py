"""How the elements of a delta are chosen that are kept: by magnitude, at random, or at random by rank.

These are the choices as planning knows them, without arrays; `sparsify` carries them out. A share of 1 or more keeps
everything, and nothing is made up for then.
"""

from __future__ import annotations

from mergepipe.errors import OperatorError
from mergepipe.operators.contract import TensorFacts
from mergepipe.values import dataclass

# A 1-D tensor in several blocks is ranked in memory, with 4 bytes an element; norms and biases are far smaller.
LONGEST_SPLIT_ROW = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsifier:
    """Keeps a share of the elements of a delta.

    Attributes
    ----------
    density
        The share, in (0, 1].
    """

    density: float

    def keeps_all(self, facts: TensorFacts) -> bool:
        """Return whether every element of the tensor is kept, as it is."""
        return self.density >= 1 or not facts.elements

    def needs_statistics(self, facts: TensorFacts) -> bool:
        """Return whether statistics of the whole tensor decide what is kept."""
        del facts
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ByMagnitude(Sparsifier):
    """Drops a share `gamma` of the largest magnitudes, then keeps a share `density` of what comes next."""

    gamma: float = 0.0

    def counts(self, elements: int) -> tuple[int, int]:
        """Return how many of the largest magnitudes are dropped, and how many after them are kept.

        With ``k = max(1, int(density n))`` kept and ``int(gamma n)`` dropped at the top; where both together are more
        than there are, fewer are dropped.
        """
        kept = max(1, int(self.density * elements))
        return min(int(self.gamma * elements), elements - kept), kept

    def keeps_all(self, facts: TensorFacts) -> bool:
        """See `Sparsifier.keeps_all`."""
        return self.density >= 1 or self.counts(facts.elements)[1] >= facts.elements

    def needs_statistics(self, facts: TensorFacts) -> bool:
        """See `Sparsifier.needs_statistics`."""
        return not self.keeps_all(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRandom(Sparsifier):
    """Keeps each element with probability `density`; `key` is that of its random stream (`masks`)."""

    key: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRank(Sparsifier):
    """Keeps each element with a probability that grows with the rank of its magnitude within its row.

    Rows are those of the last dimension, of ``m`` elements; a 1-D tensor is one row. The smallest magnitude has rank 1,
    equal ones are ranked by their index, and the probability is
    ``(density - epsilon) + 2 epsilon (rank - 1) / (m - 1)``, calculated in float64; it is `density` where m = 1.
    """

    epsilon: float
    key: tuple[int, int]

    def __post_init__(self) -> None:
        if self.density < 1 and not 0 < self.density - self.epsilon <= self.density + self.epsilon < 1:
            raise OperatorError(
                f"density {self.density:g} and epsilon {self.epsilon:g} give keep probabilities from "
                f"{self.density - self.epsilon:g} to {self.density + self.epsilon:g}, which must lie between 0 and 1",
                hint="lower `epsilon` for this expert below both `density` and `1 - density`",
                density=self.density,
                epsilon=self.epsilon,
            )

    def needs_statistics(self, facts: TensorFacts) -> bool:
        """See `Sparsifier.needs_statistics`."""
        return facts.splits_row and not self.keeps_all(facts)

    def check(self, facts: TensorFacts) -> None:
        """Raise `OperatorError` if the tensor has a row that is too long to be ranked."""
        if self.needs_statistics(facts) and facts.elements > LONGEST_SPLIT_ROW:
            raise OperatorError(
                f"a tensor of one dimension with {facts.elements} elements is one row, too long to be ranked "
                f"(at most {LONGEST_SPLIT_ROW})",
                hint="keep it whole: add a rule that matches this tensor, with `density = 1`",
                elements=facts.elements,
            )
