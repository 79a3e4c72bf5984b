r"""How a problem is put to the model: a text with {prompt} in it. All other braces are left alone: \boxed{}, LaTeX."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ..console import choose

PLACE = "{prompt}"
WRAPPED = "wrapped"  # the template of problems that say themselves how to answer: a run's own leaves them alone
TEMPLATES = {
    "plain": "{prompt}",
    # Qwen2.5-Math's instruction
    "boxed": "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    # as in the data of DAPO (arXiv:2503.14476)
    "answer": "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{prompt}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    # in the manner of DeepSeek-R1 (arXiv:2501.12948)
    "think": "{prompt}\n\nFirst think about the problem: begin with <think>, write down your reasoning, and close it "
    "with </think>. After that, state your final answer within \\boxed{}.",
}


def fill(template: str, prompt: str) -> str:
    """The prompt in a template, which is given as ``template_text`` takes it."""
    return template_text(template).replace(PLACE, prompt)


@lru_cache(maxsize=64)
def template_text(template: str) -> str:
    """By name, from a file (``@prompt.txt``), or the text itself."""
    if template == WRAPPED:
        return PLACE
    if template in TEMPLATES:
        return TEMPLATES[template]
    text = _read(template[1:]) if template.startswith("@") else template
    if PLACE in text:
        return text
    if template.startswith("@"):
        raise ValueError(f"task.template: {template[1:]} must have {PLACE} in it, where the problem goes")
    unknown = choose("template", template if len(template) <= 60 else f"{template[:59]}…", TEMPLATES)
    raise ValueError(f"{unknown}, a text with {PLACE} in it, or @file.txt")


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"task.template: {path} is not UTF-8 (byte {error.start + 1})") from None
    except OSError as error:
        raise ValueError(f"task.template: cannot read {path}: {error.strerror}") from error
