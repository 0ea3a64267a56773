"""Preconditioners: factors of the rows and of the columns of matrices, their bases, and what they make of updates."""
