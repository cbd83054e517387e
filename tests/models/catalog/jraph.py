"""A model of Jraph."""

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from tests.models.catalog import Model

NODES, EDGES = 16, 48


def graph_network() -> Model:
    """Returns `jraph.GraphNetwork` with MLPs from Haiku, on graphs of 16 nodes and 48 edges."""

    def update(width):
        return jraph.concatenated_args(lambda x: hk.nets.MLP([64, width])(x))

    def forward(graph):
        for _ in range(2):
            network = jraph.GraphNetwork(
                update_edge_fn=update(32), update_node_fn=update(32), update_global_fn=update(8)
            )
            graph = network(graph)
        return hk.Linear(1)(graph.globals)[0, 0]

    network = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params, example):
        graph, target = example
        return (network.apply(params, graph) - target) ** 2

    def make_batch(size):
        rng = np.random.default_rng(0)

        def features(*shape):
            return jnp.asarray(rng.normal(size=(size, *shape)).astype(np.float32))

        ends = [jnp.asarray(rng.integers(NODES, size=(size, EDGES))) for _ in range(2)]
        graphs = jraph.GraphsTuple(
            nodes=features(NODES, 8),
            edges=features(EDGES, 4),
            senders=ends[0],
            receivers=ends[1],
            globals=features(1, 4),
            n_node=jnp.full((size, 1), NODES),
            n_edge=jnp.full((size, 1), EDGES),
        )
        return graphs, features()

    graph = jax.tree.map(lambda x: x[0], make_batch(1)[0])
    return Model(loss_fn, jax.jit(network.init)(jax.random.key(0), graph), make_batch)
