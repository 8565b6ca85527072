"""Types for the place of a value in a configuration."""

# the keys from the top down: `("policy", "model_name")`; an item of a list by its number as text
Keys = tuple[str, ...]
# the same in parsed YAML, where an item of a list is an integer: `("data", "train", 0)`
ItemPath = tuple[str | int, ...]
