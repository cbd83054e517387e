"""Configures user-level privacy on digits: ε protects a writer with all images.

scikit-learn does not record the writers of the digits. Here a rule makes up a few dozen writers.
The run shows how to set up user-level privacy, and its accuracy has no meaning.
"""

import numpy as np
import optax

import dpoptax
from dpoptax.sampling import PoissonSampler
from dpoptax.training import MLP, Task, classification
from dpoptax.training.data import load_digits
from dpoptax.users import UserTable


def users(epsilon: float = 8.0, records_per_user: int = 16, learning_rate: float = 1.0) -> Task:
    """Returns the task.

    Args:
        epsilon: ε of the run, for a writer.
        records_per_user: Largest number of images of a writer in a step.
        learning_rate: Learning rate.
    """
    data = load_digits()
    writers = np.arange(data.train_size) ** 2 % 101 % 45
    table = UserTable(writers, records_per_user, seed=0)
    sampler = table.sampler(PoissonSampler, batch_size=20)
    plan = dpoptax.PrivacyPlan(sampler=sampler, steps=60, epsilon=epsilon, delta=1e-4)
    return classification(
        MLP(10), data, plan, optimizer=optax.sgd(learning_rate), clip=1.0, users=table
    )
