"""The models, and how token sequences are laid out in rows for them."""
