"""BLEU's tokenizer follows the target language, by its code or by the script of the references."""

import pytest
import sacrebleu
from sacrebleu.metrics import BLEU

from lingvo_moe.tasks.mt.quality import bleu
from lingvo_moe.tasks.mt.quality.bleu import make_bleu
from lingvo_moe.tasks.mt.quality.intervals import margin
from lingvo_moe.tasks.mt.quality.scoring import EvalOptions, evaluate

_TEXTS = {
    "zh": "我们今天去公园里看很多漂亮的花和树木，大家都觉得非常开心快乐。",
    "ja": "私たちは今日、公園へ行ってたくさんのきれいな花と木を見ました。",
    "ko": "우리는오늘공원에가서아름다운꽃과나무를많이보았습니다모두즐거웠습니다",
    "th": "วันนี้เราไปสวนสาธารณะเพื่อดูดอกไม้และต้นไม้สวยงามมากมาย",
    "km": "ថ្ងៃនេះយើងទៅសួនច្បារដើម្បីមើលផ្កានិងដើមឈើស្អាតៗជាច្រើន",
    "lo": "ມື້ນີ້ພວກເຮົາໄປສວນສາທາລະນະເພື່ອເບິ່ງດອກໄມ້ແລະຕົ້ນໄມ້ທີ່ສວຍງາມ",
    "my": "ဒီနေ့ကျွန်တော်တို့ပန်းခြံကိုသွားပြီးလှပသောပန်းများနှင့်သစ်ပင်များကိုကြည့်ခဲ့ကြသည်",
    "bo": "དེ་རིང་ང་ཚོ་སྤྱི་གླིང་ལ་ཕྱིན་ནས་མེ་ཏོག་དང་ཤིང་སྡོང་མཛེས་པོ་མང་པོ་བལྟས་པ་ཡིན།",
}


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(bleu, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr(bleu.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("by_code", [True, False])
@pytest.mark.parametrize("lang", _TEXTS)
def test_one_wrong_character_is_one_wrong_character(lang, by_code):
    reference = _TEXTS[lang]
    wrong = [f"{reference[:15]}x{reference[16:]}"]
    expected = sacrebleu.corpus_bleu(
        wrong, [[reference]], tokenize="zh" if lang == "zh" else "char"
    ).score
    assert expected > 80 and sacrebleu.corpus_bleu(wrong, [[reference]]).score < 30
    pairs = {"en": [("source", reference)]}
    options = EvalOptions(language=lang if by_code else "")
    report = evaluate(lambda lines, _: wrong, pairs.items(), None, options)
    assert report.languages["en"].scores["bleu"] == expected
    assert f"|tok:{'zh' if lang == 'zh' else 'char'}|" in report.signatures["bleu"]


def test_margins_take_the_same_tokenizer():
    references = [_TEXTS["zh"][i:] + _TEXTS["zh"][:i] for i in range(20)]
    wrong = [line.replace("花", "草") if i % 2 else line for i, line in enumerate(references)]
    theirs = BLEU(tokenize="zh").corpus_score(wrong, [references], n_bootstrap=1000)
    assert margin(make_bleu(None, "zh", ()), wrong, references) == pytest.approx(theirs._ci)
    assert theirs._ci > 0.5


@pytest.mark.parametrize(
    ("language", "text", "tokenizer"),
    [
        ("zh-TW", "", "zh"),
        ("yue", "", "zh"),
        ("dz", "", "char"),
        ("en", "a 花 of 30 letters in English text", "13a"),
        ("", "File a 花 of 30 letters in English text", "13a"),
        ("xx", _TEXTS["th"], "char"),
        ("de", _TEXTS["zh"], "13a"),  # what is said comes first
        ("hi", "हम आज पार्क गए", "13a"),
        ("", "", "13a"),
    ],
)
def test_codes_and_scripts(language, text, tokenizer):
    assert make_bleu(None, language, [text]).tokenizer_signature == tokenizer


def test_what_is_installed_comes_first_and_nothing_is_downloaded(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(bleu, "BLEU", lambda tokenize: made.append(tokenize))
    with pytest.raises(
        ValueError, match=r"flores200: there is no .*flores200sacrebleuspm; put http"
    ):
        make_bleu("flores200", "", ())
    with pytest.raises(ValueError, match=r"needs MeCab and ipadic: pip install 'sacrebleu\[ja\]'"):
        make_bleu("ja-mecab", "", ())
    (tmp_path / "models").mkdir()
    (tmp_path / "models/flores200sacrebleuspm").touch()
    monkeypatch.setattr(bleu.importlib.util, "find_spec", lambda name: name)
    for language, tokenizer in {"th": "flores200", "ja": "ja-mecab", "ko": "ko-mecab"}.items():
        make_bleu(None, language, ())
        assert made.pop() == tokenizer


def test_a_damaged_model_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models/flores200sacrebleuspm").write_bytes(b"no model")
    with pytest.raises(ValueError, match="--bleu_tokenizer=flores200: it cannot be loaded"):
        make_bleu("flores200", "", ())
