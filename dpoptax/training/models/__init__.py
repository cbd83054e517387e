"""Models by name, and their losses."""

from dpoptax.training.models.models import register_model as register_model
