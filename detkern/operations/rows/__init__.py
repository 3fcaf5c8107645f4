"""Operations on rows: sums, means, softmax and their gradients."""
