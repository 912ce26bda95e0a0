"""The words of docs/parity.md: what was varied, and why figures differ. Figures in braces come from results.json."""

HEAD = """
# Parity with mergekit

The same inputs and settings, merged by mergekit 0.1.5 (its own entry point, `dtype: float32`, on the CPU, torch
2.13) and by mergepipe, compared element by element. `python -m benchmarks.parity --mergekit PYTHON --family FOLDER`
runs it and writes this page and `benchmarks/parity/results.json`; PYTHON is that of an environment with mergekit.
Small outputs of mergekit are kept as fixtures, and every test run compares with them
(`tests/parity/test_fixtures.py`).

Why float32 and not mergekit's default: there it rounds to the dtype of the checkpoints (bfloat16, mostly) after
every step. mergepipe widens once, computes in float32 with float64 sums, and rounds once.

**Inputs.** Checkpoints with the tensor names of a 2-layer Llama: a base and up to 8 experts, 21 tensors, shapes
from one element to 97 x 101, among them embeddings, 1-D tensors, single rows and columns, 3-D and 4-D tensors, and
one tensor of 1.1 million elements. Stored as float32, as bfloat16, and mixed with float16. Deltas as large as
weights, as small as 1e-6, zero in half of the elements or in whole tensors, and on a coarse grid, where many
magnitudes are equal. Parallel, opposite and orthogonal experts, and vectors of length zero. And a real family: a
base of 3.4 million parameters with four fine-tunes. Weights are equal, unequal, negative, gradients over the
layers; normalised and not; the base is among the experts or not.

**Columns.** *Units of the inputs*: the difference over the unit in the last place of float32 (or of the output's
dtype, where that is coarser) at the magnitude of the largest number that is added up for that element. The plain
ulp distance of an element that nearly cancels says little, and is large. *Off the exact value*: the same units,
against the method's formula evaluated in float64 by code that neither side shares. *Differs by choice*: elements
that differ where the formula leaves a choice, that is among equal magnitudes at a threshold, or where a sign or a
comparison hangs on the last bit of a sum. *By design*: elements that differ because mergepipe defines the method
otherwise, see below. *Unexplained*: elements that differ by more than 4 units, and for which ours is not the nearer
to the exact value.
"""

MASKS = """
mergekit was given the masks that mergepipe drew, so that the rest of the arithmetic could be compared exactly (table
above). Here is how often mergepipe keeps an element, against the probability that mergekit computed for it: della's
elements in five groups, from the lowest probability (the smallest magnitudes of a row) to the highest, those left out
that share their magnitude with another of the row. The last columns are in standard deviations: of the count, and of
the sum of what is kept of the deltas. Where all of a group are equally probable, it is the first.
""".strip()

PERPLEXITIES = """
A base and its four full fine-tunes (3.4 million parameters, five text domains) merged by both sides with the same
settings, written as float32, and scored on held-out text: nats per token, the mean over the domains; less is better.
Methods of one expert have the Python one, nuslerp the Python and C ones. For random masks each side drew its own: means
over three seeds. The last column is what is asked of each row: that ours is not worse than uniform averaging (`linear`)
by more than mergekit's is. A difference below 0.00001 nats counts as none, and for random masks one within the spread
over the seeds.
""".strip()

SPACES = {
    "linear": "1 to 8 experts, 4 sets of weights, normalised or not, base listed, 3 output dtypes",
    "slerp": "t from 0 to 1.25 and gradients, either order, 8 directions",
    "nuslerp": "flat, rows, columns; with and without a base; 3 sets of weights; 6 pairs of directions",
    "multislerp": "1 to 8 experts, with and without a base, weights normalised or not",
    "karcher": "1 to 8 experts, `max_iter`, `tol`, base averaged in",
    "passthrough": "no scale, positive, negative, zero, gradient",
    "task_arithmetic": "1 to 8 experts, 4 sets of weights, normalised or not, lambda, base listed",
    "ties": "1 to 8 experts, density 0.05 to 1 and gradients, weights, normalised or not, lambda, rescale",
    "dare_linear": "1 to 8 experts, density 0.05 to 1 and gradients, weights, normalised or not, lambda, rescale",
    "dare_ties": "as dare_linear",
    "breadcrumbs": "1 to 8 experts, density 0.05 to 1, gamma 0 to 0.3, weights, normalised or not, lambda, rescale",
    "breadcrumbs_ties": "as breadcrumbs",
    "della": "1 to 8 experts, density 0.2 to 1, epsilon 0 to 0.2, weights, normalised or not, lambda, rescale",
    "della_linear": "as della",
    "sce": "1 to 8 experts, select_topk 0.07 to 1 and gradients, base listed",
    "model_stock": "2 to 8 experts, whole tensors and rows, base listed, opposite deltas",
    "nearswap": "t from 0 to 3, at the grid of the deltas, gradients",
    "arcee_fusion": "4 experts per family, one tensor above a million elements",
    "ram": "1 to 8 experts, epsilon at and beside the grid of the deltas, base listed",
    "ramplus_tl": "as ram, r and alpha, alpha without effect",
}

CAUSES = """
Four causes are shared by several methods, and named below.

- **Order of sums.** torch sums five or more stacked tensors from left to right, except for the last (elements mod 32)
  elements of a tensor, which it sums through four partial sums. mergepipe sums from left to right everywhere. Apart
  from that, and where no sum over a tensor is involved, both sides do the same operations in the same order. The
  emulation of torch's order (`emulate.py`) says for how many of the elements that differ in such cases, outside ties,
  it gives mergekit's bits.
- **Rescaling.** With `rescale` a delta is multiplied by a ratio of two sums over a tensor: float32 trees in mergekit,
  exact sums here. The factors differ by a few units in the last place, and so do the elements.
- **Ties.** Among equal magnitudes at a threshold mergepipe keeps those of the lowest index. mergekit sorts with an
  unstable sort (torch's, on CPUs with AVX-512 or AVX2): it keeps any of them, and not the same ones on every machine.
  Where kept elements can be counted (one expert, and the selections of sce), both sides must have kept equally many.
- **Angles.** Norms and inner products over a tensor are float32 trees in mergekit and float64 here, so the
  coefficients of the inputs differ in their last bits. The distances from the exact values in the table say whose.
"""

_ORDER = "- Order of sums: {reproduced:,} of {emulated:,} elements that differ are emulated.\n"
_TIES = "- Ties: {undecided:,} elements; {other_counts:,} of {counts:,} tensors have another count.\n"
_RESCALE = "- Rescaling.\n"
_ANGLES = "- Angles.\n"
_DIVISORS = """\
- *By design.* Where the agreeing weights of both signs cancel to within 1e-6 of their magnitudes, mergepipe divides by
  1; mergekit does so only where the sum is exactly zero, and divides by what is left of it elsewhere.
"""

DIFFERENCES = {
    "linear": """
- *Rounding.* mergekit's products are not rounded before they are added (`addcmul_` is a fused multiply-add on the CPU);
  in mergepipe every product is, so that all machines give the same bits. An emulation of the fused order gives
  mergekit's bits at {reproduced:,} of the {emulated:,} elements that differ.
- *By design.* A base that is set and not listed is one more input in mergekit, with the global weight. mergepipe takes
  a base into the average only where it is listed.
""",
    "slerp": _ANGLES
    + """\
- *By design.* Where one vector is zero, mergepipe interpolates linearly. mergekit 0.1.5 takes the angle for a right
  one, so that t = 0.3 gives sin(0.3 pi / 2) = 0.45 of the other vector instead of 0.3. {deliberate:,} elements.
- *Choice.* A cosine within 1e-6 of the threshold of 0.9995 may fall on either side of it. {undecided:,} elements.
""",
    "nuslerp": _ANGLES
    + """\
- *mergekit's rounding.* Next to opposite vectors an error of the cosine is divided by the square of a small sine: its
  float32 cosines move mergekit's result by thousands of units there.
- *Choice.* Where cosines are within 1e-6 of 1, mergekit's float32 decides between arc and chord by the last bit.
  {undecided:,} elements.
""",
    "multislerp": _ANGLES
    + """\
- *mergekit's rounding.* Its last step turns the mean direction by a sum of tangent vectors. That sum is zero whatever
  the inputs, as the mean is the sum of the same vectors; what float32 leaves of it is rounding, and is added. It is
  largest where weights nearly cancel or vectors are nearly parallel.
""",
    "karcher": _ANGLES
    + """\
- *mergekit's bug.* Its angles are `arccos` of float32 cosines, which cannot tell angles below 3.5e-4 from zero. Of two
  experts that near, as light fine-tunes are, one counts as reached and is left out of the step, and the iteration ends
  near the other one, not between them: the largest distances in the table are half of that between the experts, in
  units of elements near zero. mergepipe iterates in float64 and stays within {ours_off:g} units of the exact mean.
- *By design.* A base that is set is one more input in mergekit. mergepipe averages a base in only where it is listed.
""",
    "passthrough": "- None.\n",
    "task_arithmetic": _ORDER,
    "ties": _TIES + _RESCALE + _ORDER + _DIVISORS,
    "dare_linear": _RESCALE
    + _ORDER
    + """\
- *By design.* The masks are others: mergepipe draws from a counter generator keyed by seed, tensor and expert, mergekit
  from torch's global generator, in the order in which tensors come up. Here mergekit was given our masks.
- *By design.* mergepipe's default for `rescale` is the paper's division by the density; this page compares `"l1"`,
  which is what mergekit does.
""",
    "dare_ties": _RESCALE
    + _ORDER
    + _DIVISORS
    + """\
- *By design.* Masks and `rescale` as in `dare_linear`.
""",
    "breadcrumbs": _TIES
    + _RESCALE
    + _ORDER
    + """\
- *By design.* Where density times the number of elements is below 1, mergekit keeps nothing and mergepipe one element,
  as `ties` does on both sides. {deliberate:,} elements.
""",
    "breadcrumbs_ties": _TIES
    + _RESCALE
    + _ORDER
    + _DIVISORS
    + """\
- *By design.* At least one element is kept, as in `breadcrumbs`. {deliberate:,} elements.
""",
    "della": _RESCALE
    + _ORDER
    + _DIVISORS
    + """\
- *By design.* The masks are others, as in `dare_linear`; the probabilities are the same (table above). Among equal
  magnitudes of a row mergekit's ranks are arbitrary (an unstable sort), ours go by index. Tensors of more than two
  dimensions have their rows along the last dimension here, along the second in mergekit; they were not compared.
""",
    "della_linear": _RESCALE
    + _ORDER
    + """\
- *By design.* Masks and ranks as in `della`.
""",
    "sce": """
- *Rounding.* The experts' weights are means of squares over a tensor: float32 trees in mergekit, float64 here.
- Ties, among the variances: {other_counts:,} of {counts:,} tensors have another count of changed elements. The weights
  depend on everything that is selected, so that a tie moves every element of its tensor a little: {undecided:,}
  elements differ by that. At each of them both sides are within 4 units of the exact value for their own selection, and
  the selections differ only among equal variances.
""",
    "model_stock": _ANGLES
    + """\
- *mergekit's rounding.* The interpolation factor is a ratio of sums; where a cosine is near zero, float32 has lost
  digits of it.
- *Choice.* Where 1 + (N - 1) cos is within 1e-3 of zero (opposite deltas), the result is as large as one likes, and
  mergekit cuts it off at 1e-6. {undecided:,} elements.
""",
    "nearswap": """
- *Rounding.* mergekit multiplies t by the rounded reciprocal of the distance (that is what torch makes of a number over
  a tensor); mergepipe divides. And where both checkpoints have the same element, mergekit's `w b + (1 - w) a` may be
  one rounding off it; ours is that element. An emulation gives mergekit's bits at {reproduced:,} of the {emulated:,}
  elements that differ.
""",
    "arcee_fusion": """
- *mergekit's rounding decides.* The importance of an element is its change times a divergence of two softmax vectors,
  which is a sum of terms of either sign; in float32 it was off by up to 4e-7, as much as the divergence itself where
  deltas are small. So elements near the threshold fall on either side of it, whole rows with them. mergepipe computes
  it without that error: its choice is another than that of the formula in float64 at {ours_elsewhere:,} elements,
  mergekit's at {theirs_elsewhere:,}. {undecided:,} elements differ, all of them near enough to the threshold (or, above
  a million elements, to where a sample may put it); all others are equal to the bit.
- *By design.* Above a million elements mergekit takes its quartiles from a random sample (with replacement); mergepipe
  takes all elements, so its threshold is the exact one.
""",
    "ram": _ORDER,
    "ramplus_tl": _ORDER,
}
