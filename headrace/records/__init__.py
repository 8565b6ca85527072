"""The records that travel between services: groups, trajectories, scores, their origin, and the codec that writes them."""
