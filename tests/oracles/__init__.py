"""What results are held against: arithmetic that shares no code with the package.

tensor_core: mmasim, a model of tensor cores by others.
rational:    fractions.Fraction, rounded step by step.
tree:        the trees' recursive definition over either of the two.
cases:       operands that reach the corners.
"""
