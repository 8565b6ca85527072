"""The collective that carries weights, shared by trainer and rollout. It imports torch; `headrace.weights` holds what needs none."""
