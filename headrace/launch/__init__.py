"""Starts the processes of a run on this machine and watches them, for `headrace up` and `headrace eval`."""
