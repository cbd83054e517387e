"""The papers' algorithms in NumPy, line by line, with the noise given from outside.

Comments give the line numbers of the paper. Arrays are float64; `noise` arguments have the noise's
final standard deviation already. Where a paper has a slip, the comment at the line says what stands
there.
"""
