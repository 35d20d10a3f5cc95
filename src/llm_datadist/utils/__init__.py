"""Older import paths of logging and argument checks."""
