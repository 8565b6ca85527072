"""Configuration files of NVIDIA NeMo RL: `translate` converts one to Headrace's keys, and a `Translation` describes how.

Imported only when such a file is loaded.
"""

from headrace.config.nemo_rl.translate import Translation, translate

__all__ = ["Translation", "translate"]
