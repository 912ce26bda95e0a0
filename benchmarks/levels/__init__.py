"""Budgets that buy precision: what they come to on a real family, on real shapes, and what the code itself costs."""
