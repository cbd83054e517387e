"""Batch sampling: the records of each step, and the privacy event of drawing them.

A sampler is a small frozen dataclass. `sampler.sample(t)` is a function of the seed and t only, so
a restored run continues with the same draws and any step can be replayed. Poisson and fixed-size
sampling take memory and time proportional to the batch size, for data sets of any size. Samplers
whose steps depend on each other keep about one number per record. All samples have the same shape,
`padded_size`, with a mask of valid entries, so a jitted step compiles once. Records and padding are
in random order. The bound on rounding errors requires that a record does not move the others.

Privacy: amplification by sampling holds if the adversary does not know which records were drawn.
The seed is as secret as the data: never publish it, log it, or reuse it. Its type selects the
generator:

- An integer: NumPy's PCG64, a statistical generator. It suffices against an adversary with access
  to the trained model, but not against the recovery of the generator's state. NumPy may change its
  streams between versions (NEP 19); a run is reproducible within one.
- 32 bytes, from `secrets.token_bytes(32)`: SHAKE-256, of the standard library. The draws are
  indistinguishable from random ones unless SHAKE-256 is broken. They follow the exact distribution,
  computed with integers. A step takes time and memory proportional to the size of the data set.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax.sampling._allocation import RandomAllocationSampler as RandomAllocationSampler
    from dpoptax.sampling._base import Sample as Sample
    from dpoptax.sampling._base import Sampler as Sampler
    from dpoptax.sampling._fixed_size import FixedSizeSampler as FixedSizeSampler
    from dpoptax.sampling._grouped import GroupedPoissonSampler as GroupedPoissonSampler
    from dpoptax.sampling._poisson import PoissonSampler as PoissonSampler
    from dpoptax.sampling._shuffled import ShuffledSampler as ShuffledSampler
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
