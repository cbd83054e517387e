"""Runs of a plan, and what their releases rest on: building blocks for trainers.

A training loop needs `PrivacyPlan.new_run` only. A trainer that repeats steps, resumes runs or
shares one over hosts compares a `RunIdentity`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Type checkers read these imports. A program imports a name when it uses it.
    from dpoptax.runs._batches import check_rows as check_rows
    from dpoptax.runs._batches import draw as draw
    from dpoptax.runs._batches import read_batch as read_batch
    from dpoptax.runs._identity import Hidden as Hidden
    from dpoptax.runs._identity import RunIdentity as RunIdentity
    from dpoptax.runs._identity import data_of as data_of
    from dpoptax.runs._identity import draws_of as draws_of
    from dpoptax.runs._identity import noise_of as noise_of
    from dpoptax.runs._identity import settings as settings
    from dpoptax.runs._private_run import PrivateRun as PrivateRun
    from dpoptax.runs._private_run import noise_key_of as noise_key_of
    from dpoptax.runs._private_run import noise_stage as noise_stage
    from dpoptax.runs._private_run import sampler_of_run as sampler_of_run
    from dpoptax.runs._private_run import seeded as seeded
    from dpoptax.runs._private_run import shared_key as shared_key

    # isort: split
    # From other folders, public here since `training` and `integrations` use public names only:
    from dpoptax._random.keys import Generator as Generator
    from dpoptax._random.keys import generator_of as generator_of
    from dpoptax._random.keys import key_of_words as key_of_words
    from dpoptax._random.keys import number_of_words as number_of_words
    from dpoptax._random.keys import words_of as words_of
    from dpoptax._rounding.block_sums import FLOAT_TOTALS as FLOAT_TOTALS
    from dpoptax._rounding.bounds import LARGEST_NUMBER as LARGEST_NUMBER
    from dpoptax._support.digests import digest_of as digest_of
    from dpoptax._support.digests import rows_digest as rows_digest
    from dpoptax._support.digests import sampled_rows as sampled_rows
    from dpoptax._support.digests import traced as traced
    from dpoptax._support.digests import tree_digest as tree_digest
    from dpoptax._support.host_communication import OtherRunError as OtherRunError
    from dpoptax._support.host_communication import check_same_on_hosts as check_same_on_hosts
    from dpoptax._support.host_communication import differing as differing
    from dpoptax._support.lazy import lazy_names as lazy_names
    from dpoptax._support.rounded import to_decimals as to_decimals
    from dpoptax._support.rounded import to_digits as to_digits
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
