"""The methods a config can name."""

from dpoptax.training.filter_methods import PMLF as PMLF
from dpoptax.training.filter_methods import AdaptiveFir as AdaptiveFir
from dpoptax.training.filter_methods import AdaptiveKalman as AdaptiveKalman
from dpoptax.training.filter_methods import Disk as Disk
from dpoptax.training.filter_methods import Doppler as Doppler
from dpoptax.training.filter_methods import InnerOuter as InnerOuter
from dpoptax.training.method import DPSGD as DPSGD
from dpoptax.training.method import Method as Method
from dpoptax.training.method import NonPrivate as NonPrivate
from dpoptax.training.release_methods import AdamBC as AdamBC
from dpoptax.training.release_methods import AdaptiveClip as AdaptiveClip
from dpoptax.training.release_methods import Augmented as Augmented
from dpoptax.training.release_methods import CorrelatedNoise as CorrelatedNoise
from dpoptax.training.release_methods import GeoDP as GeoDP
from dpoptax.training.release_methods import HypersphericalClip as HypersphericalClip
from dpoptax.training.release_methods import LPAdam as LPAdam
