"""Records small translators as the `transformers` library writes them, with its logits and translations, for tests.

Weights are random, sizes odd. Each directory in tests/tasks/families/testdata/ has config.json, the weights, and
expected.npz: source ids [N,S], a code's, 4, text and the end; target ids [N,T], logits [N,T,V]; the code that each
translation begins with [N]; greedy and best of five hypotheses [N,L], without the start token, filled up with -1; of
the dense one the losses of pairs [N,T], too.
To record again: NLLB-MoE with transformers 4.57.6, since 5.0 to 5.24 run two of its experts; the dense one with 5.24.0:

    pip install torch==2.13.0 transformers==5.24.0
    python benchmarks/peers/record_translators.py m2m100 tokenizer_json
    pip install transformers==4.57.6 sentencepiece==0.2.3 tiktoken protobuf
    python benchmarks/peers/record_translators.py nllb_moe nllb_moe_before tokenizers

With --many=DIR as the first argument it is 500 lines in 20 languages instead of 8 in 11, below DIR: too much for a test
of every day (docs/importing.md).

tokenizers writes, in translators/, pieces of lines.txt (names of countries and languages by Babel 2.18, in 40
languages), the settings that the tokenizers of NLLB and M2M-100 save, and the ids that they give: of each line, with a
code as its source, one after the other.
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import transformers
from transformers.models.m2m_100 import tokenization_m2m_100

OUT = Path(__file__).parents[2] / "tests/tasks/families/testdata"
SIZES = {
    "d_model": 24,
    "encoder_layers": 4,
    "decoder_layers": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "num_experts": 5,
    "moe_token_dropout": 0.2,
}
# <pad> and <unk>, which no translation of ours has.
NEVER = [1, 3]
FIRST, LENGTH = 30, 12
# A checkpoint as it is published lists them; the library's class does not.
M2M100_CODES = [f"__{code}__" for code in tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]]


def model_of(name: str, languages: int) -> torch.nn.Module:
    sizes = {**SIZES, "vocab_size": FIRST + languages}
    if name == "m2m100":
        config = transformers.M2M100Config(**sizes)
        return transformers.M2M100ForConditionalGeneration(config)
    before = name == "nllb_moe_before"
    config = transformers.NllbMoeConfig(
        **sizes, **EXPERTS, normalize_router_prob_before_dropping=before, scale_embedding=not before
    )
    return transformers.NllbMoeForConditionalGeneration(config)


def record(name: str, below: Path = OUT, lines: int = 8, languages: int = 11) -> None:
    """Draws the weights of a model, and writes its directory."""
    model, generator = model_of(name, languages), torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            scale = 0.3 if "shared" in path or "norm" in path else 0.5
            weight.copy_(scale * noise + ("norm.weight" in path))
        # So that translations end.
        model.model.shared.weight[2] += model.model.decoder.layer_norm.bias
    model.eval()
    source, target = (torch.randint(5, FIRST, (lines, n), generator=generator) for n in (8, 9))
    source[:, 1] = 4
    source[:, -1], target[:, 0] = 2, 2
    codes = torch.randint(FIRST, FIRST + languages, (2, lines), generator=generator)
    firsts, source[:, 0] = codes
    arrays = {"source": source, "target": target, "firsts": firsts}
    for beams in (1, 5):
        arrays[f"beam{beams}"] = translations(model, source, firsts, beams)
    out = below / name
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    if name == "m2m100":  # as old files are: with copies of the table, and the sinusoids
        (out / "model.safetensors").unlink()
        weights = dict(model.state_dict())
        for stack in ("encoder", "decoder"):
            part = getattr(model.model, stack)
            weights[f"model.{stack}.embed_positions.weights"] = part.embed_positions.weights[:6]
        torch.save({n: x.clone() for n, x in weights.items()}, out / "pytorch_model.bin")
    with torch.no_grad():
        arrays["logits"] = model(input_ids=source, decoder_input_ids=target).logits
    np.savez_compressed(out / "expected.npz", **{n: x.numpy() for n, x in arrays.items()})


def record_losses(name: str) -> None:
    """Adds to expected.npz the losses of pairs, [N,T], from the first language to the second.

    The texts are those of source and target, and the end is a token, too.
    """
    out = OUT / name
    arrays = dict(np.load(out / "expected.npz"))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    source, target = (torch.tensor(arrays[side]) for side in ("source", "target"))
    source[:, 0] = FIRST
    marks = torch.tensor([[2, FIRST + 1, 4, 2]]).repeat(len(target), 1)  # 4 begins a word
    whole = torch.cat([marks[:, :3], target[:, 1:], marks[:, 3:]], 1)
    labels = whole[:, 1:].contiguous()
    with torch.no_grad():
        found = model(input_ids=source, decoder_input_ids=whole[:, :-1], labels=labels)
    losses = torch.nn.functional.cross_entropy(
        found.logits.transpose(1, 2), labels, reduction="none"
    )
    torch.testing.assert_close(losses.mean(), found.loss)
    np.savez_compressed(out / "expected.npz", **{**arrays, "losses": losses.numpy()})


def translations(
    model: torch.nn.Module, source: torch.Tensor, firsts: torch.Tensor, beams: int
) -> torch.Tensor:
    """The best of a beam, one source at a time; as in our search, none but the end may come last."""

    def end_at_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] < LENGTH:
            return scores
        return torch.where(torch.arange(scores.shape[1]) == 2, scores, float("-inf"))

    out = torch.full((len(source), LENGTH), -1)
    for row, ids, first in zip(out, source, firsts):
        tokens = model.generate(
            ids[None],
            num_beams=beams,
            length_penalty=0.0,
            early_stopping=beams > 1,
            do_sample=False,
            max_length=LENGTH + 1,
            logits_processor=[end_at_last],
            forced_bos_token_id=int(first),
            suppress_tokens=NEVER,
            use_cache=False,
        )[0, 1:]
        row[: len(tokens)] = tokens
    return out


def record_tokenizers() -> None:
    out, rng = OUT / "translators", random.Random(0)
    lines = (out / "lines.txt").read_text().splitlines()
    pieces, ids = out / "sentencepiece.bpe.model", {}
    sentencepiece.SentencePieceTrainer.Train(
        input=out / "lines.txt",
        model_prefix=pieces.with_suffix(""),
        vocab_size=900,
        model_type="bpe",
        character_coverage=0.99,
        normalization_rule_name="identity",
        num_threads=1,
    )
    pieces.with_suffix(".vocab").unlink()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    names = [processor.IdToPiece(i) for i in range(3, len(processor))]
    rng.shuffle(names)  # as in M2M-100, where ids are not those of SentencePiece
    names = ["<s>", "<pad>", "</s>", "<unk>", *names]
    (out / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    nllb = transformers.NllbTokenizer(pieces)
    m2m100 = transformers.M2M100Tokenizer(
        out / "vocab.json", pieces, additional_special_tokens=M2M100_CODES
    )
    for name, tokenizer in {"nllb": nllb, "m2m100": m2m100}.items():
        with tempfile.TemporaryDirectory() as saved:
            tokenizer.save_pretrained(saved)
            settings = json.loads(Path(saved, "special_tokens_map.json").read_text())
            config = json.loads(Path(saved, "tokenizer_config.json").read_text())
        if name == "nllb":  # as newer files are; those that were published are as M2M-100's
            places = config["added_tokens_decoder"].items()
            settings["added_tokens_decoder"] = {i: {"content": x["content"]} for i, x in places}
        (out / f"{name}.json").write_text(json.dumps(settings))
        codes = [c.strip("_") for c in settings["additional_special_tokens"] if c != "<mask>"]
        of_lines = [rng.choice(codes) for _ in lines]
        ids[f"{name}_codes"] = np.array(of_lines)
        encoded = []
        for code, line in zip(of_lines, lines):
            tokenizer.src_lang = code
            encoded += tokenizer(line).input_ids
        ids[name] = np.array(encoded, np.int32)
    np.savez_compressed(out / "expected.npz", **ids)


def record_tokenizer_json() -> None:
    """Writes translators/tokenizer.json as the library makes it of the pieces, with the codes at their places."""
    out = OUT / "translators"
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(out / "sentencepiece.bpe.model", directory)
        Path(directory, "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizer"}')
        transformers.NllbTokenizer.from_pretrained(directory).save_pretrained(directory)
        content = json.loads(Path(directory, "tokenizer.json").read_text())
    places = json.loads((out / "nllb.json").read_text())["added_tokens_decoder"]
    content["added_tokens"] = [{"id": int(i), **token} for i, token in places.items()]
    (out / "tokenizer.json").write_text(json.dumps(content))


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    many = sys.argv[1].removeprefix("--many=") if sys.argv[1].startswith("--many=") else ""
    if many:
        for name in sys.argv[2:]:
            record(name, Path(many), 500, 20)
        sys.exit()
    for name in sys.argv[1:]:
        others = {"tokenizers": record_tokenizers, "tokenizer_json": record_tokenizer_json}
        others[name]() if name in others else record(name)
        if name == "m2m100":
            record_losses(name)
