"""The collective that carries weights, shared by trainer and rollout. It imports torch; code that doesn't need torch is in
`headrace.weights`."""
