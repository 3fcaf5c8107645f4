"""What everything is said in: types, contracts, exact arithmetic, operands for tests."""
