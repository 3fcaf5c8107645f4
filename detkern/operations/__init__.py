"""Operations: each has a home with its problem and its replay, which backends read, and what the record of it needs."""
