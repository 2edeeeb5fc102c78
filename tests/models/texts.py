"""Texts that tokenizers find hard."""

from __future__ import annotations

TEXTS = [
    "",
    " ",
    "The capital of France is",
    "It's 12:30 o'clock, isn't it? WE'LL see... 1234567890",
    "  leading, trailing  and\ttabs \t\n\n\nlines\r\n \u00a0\u200b",
    "机器学习是人工智能的一个分支。",
    "مرحبا بالعالم، كيف حالك؟",
    "🫠👩‍👩‍👧‍👦 🇫🇷 e\u0301 ﷽ 𝔘𝔫𝔦",
    "def f(x):\n    return  [x] * 3  # \u2192\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a\x00b \ufffd ▁x <0x41> </s>",
    "naïve café — “quotes”",
]
