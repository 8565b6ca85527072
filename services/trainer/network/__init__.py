"""The models, and the layout of their token sequences in rows."""
