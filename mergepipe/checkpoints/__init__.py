"""Checkpoints as they lie on disk: which files hold the weights, their headers, layers and block geometry.

Nothing here reads weights: opening a checkpoint reads the headers of its files and its ``config.json``.
"""
