"""Models that the project makes itself, because a model hub is not always within reach."""
