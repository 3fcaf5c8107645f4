"""Sums of rows by the destination that an index names for each."""
