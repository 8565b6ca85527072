"""Tools for authors of environments: the conformance checks, samples, and a policy with scripted answers."""
