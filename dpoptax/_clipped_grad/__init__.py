"""Computes clipped sums in micro-batches, on one or many devices. `rewrites` serves XLA.

`clipped_grad(loss_fn, clip)(points, batch)` leads from data to a clipped sum by these functions:

    clipped_grad           sealed_sum                checks the batch, and seals the sum
    sharding               sum_over_devices          the part of each device, on a mesh
    microbatches           BatchSum.unjoined         traces the loss, and runs its micro-batches
    engines                choose_engine             what computes one micro-batch, by default:
    _ghost_clipping        ghost_clipped_sum         the loss as a program, with
      make_plan            make_plan                 how each parameter is measured and summed
      records              record_points             one forward and backward pass at each point
      sums                 collect_gradients         the factors of each example's gradient
                           make_pieces               bounds of its norm and of its terms
    _rounding.bounds       clip_coefficients         the scaling of each example: all clipping
    _ghost_clipping.sums   sum_each                  the weighted sums
    _clipped_sum           sealed                    the `ClippedSum` that noise stages accept
"""
