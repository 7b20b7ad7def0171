import pytest

from lingvo_moe.tasks.text.preparing.scripts import in_script, scripts_of


@pytest.mark.parametrize("lang, scripts", [
    ("de", {"LATIN"}),
    ("ru", {"CYRILLIC"}),
    ("bn", {"BENGALI"}),
    ("or", {"ORIYA"}),
    ("zh", {"CJK", "BOPOMOFO"}),
    ("zh-TW", {"CJK", "BOPOMOFO"}),
    ("ja", {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"}),
    ("sr", {"CYRILLIC", "LATIN"}),
    ("sr_Latn", {"LATIN"}),
    ("pa", {"GURMUKHI", "ARABIC"}),
    ("qqq", None),
])  # fmt: skip
def test_the_scripts_of_languages(lang, scripts):
    assert scripts_of(lang) == scripts


@pytest.mark.parametrize("lang, text, fits", [
    ("de", "Straße der Öfen", True),
    ("de", "Это по-русски", False),
    ("de", "Das heißt λόγος", True),  # a foreign word
    ("vi", "Tiếng Việt ở đây", True),
    ("ru", "Это Windows", True),
    ("ru", "This is English", False),
    ("ru", "Αυτό είναι ελληνικά", False),
    ("ru", "Україна", True),
    ("ja", "ウィンドウを閉じる", True),
    ("ja", "Ｗｉｎｄｏｗを閉じる", True),
    ("zh", "not translated", False),
    ("sr", "Ово је српски", True),
    ("sr", "Ovo je srpski", True),
    ("hi", "हिन्दी में", True),
    ("qqq", "שלום", True),  # an unknown language
    ("ru", "12:30", True),  # no letters at all
])  # fmt: skip
def test_a_text_in_the_wrong_script_is_told(lang, text, fits):
    assert in_script(text, scripts_of(lang)) is fits
