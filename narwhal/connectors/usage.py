"""How many tokens an engine says that an answer cost, found in its bytes without parsing them. Pure."""

PROMPT_TOKENS = b'"prompt_tokens":'
OUTPUT_TOKENS = b'"completion_tokens":'

# A count is at most so long, the blank before it included.
_LONGEST = 12


def tokens_said(answer: bytes, name: bytes) -> int:
    """The count of this name in the body of a 200; 0 where it has none.

    The last one counts: the usage follows the choices. A text that speaks of tokens has its quotes escaped.
    """
    at = answer.rfind(name)
    if at < 0:
        return 0
    start = at + len(name)
    digits = answer[start : start + _LONGEST].strip()
    end = 0
    while end < len(digits) and digits[end : end + 1].isdigit():
        end += 1
    return int(digits[:end] or b"0")
