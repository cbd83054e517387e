"""Defines the methods for configs."""

from dpoptax.training.methods.filters import PMLF as PMLF
from dpoptax.training.methods.filters import AdaptiveKalman as AdaptiveKalman
from dpoptax.training.methods.filters import Disk as Disk
from dpoptax.training.methods.filters import Doppler as Doppler
from dpoptax.training.methods.method import DPSGD as DPSGD
from dpoptax.training.methods.method import Method as Method
from dpoptax.training.methods.method import NonPrivate as NonPrivate
from dpoptax.training.methods.releases import AdaptiveClip as AdaptiveClip
from dpoptax.training.methods.releases import CorrelatedNoise as CorrelatedNoise
from dpoptax.training.methods.releases import LPAdam as LPAdam
