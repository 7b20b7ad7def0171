import pytest

from lingvo_moe.tasks.text.corpus.clean import clean_text, usable
from lingvo_moe.tasks.text.data.tidying import sentence_key


@pytest.mark.parametrize("raw, clean", [
    ("&File", "File"),
    ("ファイル(&F)", "ファイル"),
    ("Save &amp; close", "Save & close"),
    ("R&D", "RD"),  # looks like a mnemonic; both sides lose it alike
    ("Salt & pepper", "Salt & pepper"),
    ('Read <a href="%s">the guide</a>.', "Read the guide."),
    ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
    ("[1:View] the log", "View the log"),
    (" two\n  lines\u00a0here ", "two lines here"),
    ("a\u200eb\ufeff", "ab"),
    ("می\u200cخواهم", "می\u200cخواهم"),
    ("%(name)s has {n} of %d", "%(name)s has {n} of %d"),
    ("e\u0301", "é"),
])  # fmt: skip
def test_clean_text(raw, clean):
    assert clean_text(raw) == clean
    assert clean_text(clean) == clean


def test_sentence_key_forgets_case_digits_and_punctuation():
    assert (
        sentence_key("In 5 days, (really)!")
        == sentence_key("in 17 days... REALLY")
        == "in days really"
    )
    assert sentence_key("In 5 days") != sentence_key("In 5 weeks")


@pytest.mark.parametrize("lang, source, english, good", [
    ("de", "Haus", "house", True),
    ("de", "House", "house", False),
    ("de", "", "house", False),
    ("zh", "是", "yes", True),
    ("de", "j", "yes", False),
    ("ru", "Server", "the server", False),  # not in Russian's script
    ("ru", "Сервер", "server", True),
    ("sr", "Drvo", "tree", True),  # written in both
    ("de", "%(a)s: %(b)s", "%(a)s, %(b)s", False),  # nothing to translate
    ("de", "ja " * 30, "yes", False),  # cannot be a translation
    ("de", "a" * 301, "b" * 301, False),
])  # fmt: skip
def test_usable(lang, source, english, good):
    assert usable(lang, source, english) is good
