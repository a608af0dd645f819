"""Between tokens and text: prompts in a model's chat template, end tokens, and text that grows with its tokens.

It knows what transformers' tokenizers offer, and where finished text is written to. It knows neither models nor caches nor how
tokens are chosen, and imports no jax and nothing of jaxkv.
"""

from jaxkv.text.chat import encode, end_tokens
from jaxkv.text.detokenizer import Detokenizer
from jaxkv.text.history import ChatHistory
from jaxkv.text.text_stream import Answers, Terminal, TextStream

__all__ = ["Answers", "ChatHistory", "Detokenizer", "Terminal", "TextStream", "encode", "end_tokens"]
