"""The tokens of the project's tiny model, for tests that have its tokenizer alone."""

from headrace_services.trainer.data.model_tokens import ModelTokens
from headrace_services.trainer.demo_models import tiny

_TOKENIZER = tiny.make_tokenizer()
TINY = ModelTokens((_TOKENIZER.eos_token_id,), len(_TOKENIZER))
