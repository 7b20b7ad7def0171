"""Characters that are missing from the vocabularies' sample become pieces too, however many they are."""

import random

from lingvo_moe.tasks.text.data.scan import Scan
from lingvo_moe.tasks.text.preparing import token_stages
from lingvo_moe.tasks.text.vocabulary.vocab_cache import VocabOptions
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary


def test_more_characters_than_a_sentence_may_hold(tmp_path, monkeypatch):
    rng = random.Random(0)
    parts = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(rng.choices(parts, k=3)) for _ in range(1500)]
    sample = [" ".join(rng.choices(words, k=6)) for _ in range(1500)]
    unseen = [chr(0x4E00 + i) for i in range(1060)]
    # SentencePiece skips so long a line, and characters that occur only there.
    sample.append(" ".join(unseen[:1050]))
    monkeypatch.setattr(token_stages, "sample_pairs", lambda *_: {"target": sample})
    job = token_stages.VocabularyJob(
        "target",
        Scan({}, {}, {}, ""),
        VocabOptions(2600, 2600),
        "".join(unseen),
        str(tmp_path / "target.model"),
    )
    vocab = Vocabulary.Load(token_stages.vocabulary_stage(job, lambda n: None))
    spelt_in_bytes = [c for c in unseen if any(4 <= i < 260 for i in vocab.Encode(c))]
    assert not spelt_in_bytes
