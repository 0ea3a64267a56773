"""Matrices on several ranks: layouts, plans, exchanges and schemes."""
