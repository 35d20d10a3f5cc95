"""Shipped test kits: conformance suites and in-memory doubles for authors of plug-ins.

Nothing here is imported by the library itself. pytest is needed only to run the suites.
"""
