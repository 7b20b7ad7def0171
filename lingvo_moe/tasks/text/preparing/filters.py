"""Decides which pairs are dropped, and why."""

from dataclasses import dataclass

from lingvo_moe.tasks.text.corpus.clean import MAX_LENGTH_RATIO
from lingvo_moe.tasks.text.preparing.scripts import in_script, scripts_of

# Below so many characters lengths differ by chance.
_SHORT = 20

# By the order in which they are looked for; those of lines, those of pairs, and what is decided about good pairs.
REASONS = {
    "header": "a first line that names the columns",
    "no_tab": "a TSV line with too few columns",
    "bad_json": "a line that is no JSON object",
    "no_field": "an object, row or unit without source or target",
    "no_language": "a line that names no language, or no code of one",
    "invalid_utf8": "bytes that are no UTF-8",
    "too_long_line": "a line of more than 20,000 bytes",
    "empty": "a side without text",
    "no_letters": "a side without a letter",
    "too_long": "a side of more than --max_chars characters",
    "length_ratio": "a side more than --max_ratio times as long as the other",
    "equal_sides": "source and target are the same",
    "wrong_script": "the source is not in its language's script",
    "wrong_target_script": "the target is not in its language's script",
    "held_out": "the target is a held-out sentence",
    "duplicate": "the pair was there before",
    "no_tokens": "a side that the tokeniser makes nothing of",
}


@dataclass(frozen=True)
class Rules:
    """The conditions that a pair must meet."""

    max_chars: int = 1000  # the longest side, in characters
    # Of the longer side's length to the shorter's, in characters and in bytes of UTF-8, where the longer has more than
    # 20 characters.
    max_ratio: float = MAX_LENGTH_RATIO
    check_script: bool = True  # whether sides must be in the script of their language
    target_lang: str = "en"  # the code of the target language

    def Reason(self, lang: str, source: str, target: str, one_text: bool = False) -> str:
        """The reason to drop a pair of cleaned texts: a key of REASONS; '' for a good pair.

        `one_text` says that both sides are the same text without a translation.
        """
        if not source or not target:
            return "empty"
        if not any(map(str.isalpha, source)) or not any(map(str.isalpha, target)):
            return "no_letters"
        shorter, longer = sorted((len(source), len(target)))
        if longer > self.max_chars:
            return "too_long"
        if longer > _SHORT and longer > self.max_ratio * shorter:
            # A Chinese character says as much as several letters, and has as many bytes.
            shorter, longer = sorted((len(source.encode()), len(target.encode())))
            if longer > self.max_ratio * shorter:
                return "length_ratio"
        if not one_text and source.casefold() == target.casefold():
            return "equal_sides"
        if self.check_script:
            if not in_script(source, scripts_of(lang)):
                return "wrong_script"
            if not one_text and not in_script(target, scripts_of(self.target_lang)):
                return "wrong_target_script"
        return ""
