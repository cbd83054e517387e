"""The papers' synthetic studies, as functions that return arrays; `dpoptax study` draws them.

Nothing here is private or needs to be: the gradients are made up, or the digits are public.
"""

from dpoptax.studies._correlated_noise import Arm as Arm
from dpoptax.studies._correlated_noise import ArmResult as ArmResult
from dpoptax.studies._correlated_noise import compare_correlated_noise as compare_correlated_noise
from dpoptax.studies._correlated_noise import digits_arms as digits_arms
from dpoptax.studies._correlated_noise import iterate_noise as iterate_noise
from dpoptax.studies._filter_responses import DOPPLER_TABLE_2 as DOPPLER_TABLE_2
from dpoptax.studies._filter_responses import DOPPLER_TABLE_4 as DOPPLER_TABLE_4
from dpoptax.studies._filter_responses import FilterResponses as FilterResponses
from dpoptax.studies._filter_responses import filter_responses as filter_responses
from dpoptax.studies._geodp_errors import GeoDPErrors as GeoDPErrors
from dpoptax.studies._geodp_errors import Sweep as Sweep
from dpoptax.studies._geodp_errors import break_even_beta as break_even_beta
from dpoptax.studies._geodp_errors import expected_geodp_errors as expected_geodp_errors
from dpoptax.studies._geodp_errors import geodp_errors as geodp_errors
from dpoptax.studies._geodp_errors import geodp_figure_3 as geodp_figure_3
from dpoptax.studies._geodp_errors import geodp_figure_4 as geodp_figure_4
from dpoptax.studies._geodp_errors import geodp_sweep as geodp_sweep
from dpoptax.studies._geodp_errors import random_mean_gradient as random_mean_gradient
from dpoptax.studies._kalman_convergence import KalmanConvergence as KalmanConvergence
from dpoptax.studies._kalman_convergence import kalman_convergence as kalman_convergence
from dpoptax.studies._noisy_regression import NoisyRegression as NoisyRegression
from dpoptax.studies._noisy_regression import noisy_regression as noisy_regression
from dpoptax.studies._noisy_regression import regression_methods as regression_methods
from dpoptax.studies._release_cosines import direction_clips as direction_clips
from dpoptax.studies._release_cosines import heterogeneous_gradients as heterogeneous_gradients
from dpoptax.studies._release_cosines import release_cosines as release_cosines
