"""The papers' claims, held against the numbers of the studies."""
