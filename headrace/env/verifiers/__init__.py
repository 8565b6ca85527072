"""Environments of the library verifiers, played in the Python in which it is installed."""
