"""Matrices that lie on several ranks: where they lie, the plan of a step, what is exchanged, and how it is computed."""
