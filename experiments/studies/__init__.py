"""Computes the papers' synthetic studies, as functions that return arrays.

`python -m experiments study` compares them with the papers. Nothing here needs privacy: the
gradients are synthetic.
"""

from experiments.studies._filter_responses import DOPPLER_TABLE_2 as DOPPLER_TABLE_2
from experiments.studies._filter_responses import DOPPLER_TABLE_4 as DOPPLER_TABLE_4
from experiments.studies._filter_responses import FilterResponses as FilterResponses
from experiments.studies._filter_responses import filter_responses as filter_responses
from experiments.studies._geodp_errors import GeoDPErrors as GeoDPErrors
from experiments.studies._geodp_errors import Sweep as Sweep
from experiments.studies._geodp_errors import geodp_errors as geodp_errors
from experiments.studies._geodp_errors import geodp_figure_3 as geodp_figure_3
from experiments.studies._geodp_errors import geodp_figure_4 as geodp_figure_4
from experiments.studies._geodp_errors import geodp_sweep as geodp_sweep
from experiments.studies._geodp_errors import random_mean_gradient as random_mean_gradient
from experiments.studies._kalman_convergence import KalmanConvergence as KalmanConvergence
from experiments.studies._kalman_convergence import kalman_convergence as kalman_convergence
from experiments.studies._noisy_regression import NoisyRegression as NoisyRegression
from experiments.studies._noisy_regression import noisy_regression as noisy_regression
from experiments.studies._noisy_regression import regression_methods as regression_methods
from experiments.studies._release_cosines import direction_clips as direction_clips
from experiments.studies._release_cosines import heterogeneous_gradients as heterogeneous_gradients
from experiments.studies._release_cosines import release_cosines as release_cosines
