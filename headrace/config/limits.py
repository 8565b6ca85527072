"""The largest size of a configuration, with all interpolations written out."""

# far beyond any configuration: the largest of NeMo RL's recipes has about 1,000 values on 12 levels
MAX_NODES = 100_000
MAX_DEPTH = 100
MAX_CHARACTERS = 1_000_000  # that interpolations make
