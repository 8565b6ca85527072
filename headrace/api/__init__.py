"""Runs from Python: start one, follow it in a notebook, and read what it left (`headrace.Run`, `headrace.train`)."""
