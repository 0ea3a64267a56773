"""Factors of matrices: those of rows and columns that precondition updates, with their bases, and low-rank ones."""
