"""Tests how the scaling table reads program texts; tests/multidevice compiles the programs."""

from benchmarks.scaling import compiled_collectives, count, lowered_collectives, sent

COMPILED = """
  %all-reduce.1 = (f32[3,4]{1,0}, f32[5]{0}) all-reduce(%a, %b), channel_id=1
  ROOT %ag = bf16[8,2]{1,0} all-gather(%p), dimensions={0}
"""
LOWERED = """
  %2 = "stablehlo.all_reduce"(%1) <{channel_handle = #stablehlo.channel_handle<handle = 1>}> ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      stablehlo.return %x : tensor<f32>
  }) : (tensor<3x4xf32>) -> tensor<3x4xf32>
"""


def test_finds_collectives_and_their_sizes():
    assert compiled_collectives(COMPILED) == [("all-reduce", 68), ("all-gather", 32)]
    assert lowered_collectives(LOWERED) == [("all-reduce", 48)]
    assert count(compiled_collectives(COMPILED)) == {"all-reduce": 1, "all-gather": 1}


def test_bytes_sent_by_ring_collectives():
    assert sent([("all-reduce", 100)], 4) == 150
    assert sent([("all-gather", 100), ("reduce-scatter", 25)], 4) == 150
