"""What measurements need: shapes and draws, operands, timing, peers, records. Nothing in detkern imports it."""
