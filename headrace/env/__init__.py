"""The environment SDK: what an author writes, and how it is served, attached and called."""
