"""Files of NVIDIA NeMo RL, read as they are: `is_nemo_rl` knows one, `translate` gives it in Headrace's keys, `lines` say how."""

from headrace.config.nemo.report import lines, summary
from headrace.config.nemo.translate import Translation, is_nemo_rl, translate

__all__ = ["Translation", "is_nemo_rl", "lines", "summary", "translate"]
