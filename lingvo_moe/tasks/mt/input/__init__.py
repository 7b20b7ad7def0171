"""The input of translation: corpus, TSV files, vocabularies, tokenised records, packing, the pipeline."""
