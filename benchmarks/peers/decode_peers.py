"""Contenders of benchmarks/decode.py that run in the peers' environment: CTranslate2 and Hugging Face.

    PEERS/bin/python benchmarks/peers/decode_peers.py ct2 '{"model_dim": 512, ..., "batch": 32, "beam": 4}'

Models of the same sizes, of random weights, made to give exactly `target_lengths` tokens.

    PEERS/bin/python benchmarks/peers/decode_peers.py make '{"checkpoint": DIR, "num_layers": 12, ...}'

writes such a model as `transformers` does, for --from of the benchmark: NLLB-MoE where there are "num_experts", else
M2M100. With a "checkpoint" contenders read that one.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nllb_moe
import numpy as np
from stepping import keep_memory, serve

VOCABULARY = Path(__file__).parents[2] / "tests/tasks/families/testdata/translators"
NAMES = ["<s>", "<pad>", "</s>", "<unk>"]  # of a checkpoint's first tokens
MARKS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}


def main():
    kind, size = sys.argv[1], json.loads(sys.argv[2])
    if kind in ("make", "convert"):
        return make(size) if kind == "make" else convert(size)
    keep_memory()
    step, about = (ctranslate2 if kind.startswith("ct2") else hugging_face)(kind, size)
    before = time.process_time()
    tokens = step()["tokens"]
    if tokens != sum(size["target_lengths"]):
        raise RuntimeError(f"{tokens} tokens came out")
    return serve(step, first_seconds=time.process_time() - before, **about)


def make(size):
    """Writes a checkpoint of random weights, with the vocabulary of tests."""
    import torch

    model = _random(size, "num_experts" in size, **MARKS)
    norm = model.model.decoder.layer_norm
    with torch.no_grad():
        norm.weight.copy_(torch.randint(2, norm.weight.shape) * 2 - 1)  # or a token follows itself
        norm.bias.fill_(0.3)
        model.model.shared.weight[2] = -0.1  # so the end never wins
    model.save_pretrained(size["checkpoint"])
    copies = {
        "sentencepiece.bpe.model": "sentencepiece.bpe.model",
        "nllb.json": "tokenizer_config.json",
    }
    for name, copy in copies.items():
        shutil.copy(VOCABULARY / name, Path(size["checkpoint"], copy))


def convert(size):
    """Writes a checkpoint as CTranslate2 reads it, in a process of its own: it takes the memory of several copies."""
    import transformers
    from ctranslate2.converters.transformers import M2M100Loader

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(size["checkpoint"])
    spec = M2M100Loader().get_model_spec(model)
    _register(spec, NAMES, size)
    spec.config.decoder_start_token = "</s>"
    spec.validate()
    spec.optimize()
    Path(size["converted"]).mkdir()
    spec.save(size["converted"])


def sources(size):
    """A list of B lists of token ids."""
    rng = np.random.default_rng(1)
    return [rng.integers(4, size["vocab_size"], n).tolist() for n in size["source_lengths"]]


def ctranslate2(kind, size):
    # Of its two libraries oneDNN is the faster here; read when the library is loaded.
    os.environ.setdefault("CT2_USE_MKL", "0")
    import ctranslate2

    lines = [[f"t{i}" for i in line] for line in sources(size)]
    with tempfile.TemporaryDirectory() as directory:
        if "checkpoint" in size:
            directory = size["converted"]
        else:
            _spec(size).save(directory)
        before = time.process_time()
        translator = ctranslate2.Translator(
            directory,
            device="cpu",
            compute_type="int8" if kind == "ct2_int8" else "float32",
            intra_threads=size["threads"],
        )
        load = time.process_time() - before

    (length,) = set(size["target_lengths"])  # it has one for a batch

    def step():
        found = translator.translate_batch(
            lines,
            beam_size=size["beam"],
            min_decoding_length=length,
            max_decoding_length=length,
            max_batch_size=0,
        )
        ids = [
            NAMES.index(token) if token in NAMES else int(token[1:])
            for token in found[0].hypotheses[0][:-1]
        ]
        return {"tokens": sum(len(one.hypotheses[0]) for one in found), "ids": ids}

    return step, {"version": ctranslate2.__version__, "load_seconds": load}


def _spec(size):
    """CTranslate2's own Transformer: pre-LN, relu, biases, shared embeddings."""
    from ctranslate2.specs import TransformerSpec

    m, h, v = size["model_dim"], size["hidden_dim"], size["vocab_size"]
    rng = np.random.default_rng(0)

    def matrix(outputs, inputs):
        return rng.standard_normal((outputs, inputs), np.float32) / np.float32(inputs**0.5)

    def linear(spec, outputs, inputs):
        spec.weight, spec.bias = matrix(outputs, inputs), np.zeros(outputs, np.float32)

    def norm(spec):
        spec.gamma, spec.beta = np.ones(m, np.float32), np.zeros(m, np.float32)

    def attention(spec, *outputs):
        norm(spec.layer_norm)
        for one, number in zip(spec.linear, outputs):
            linear(one, number, m)

    model = TransformerSpec.from_config((size["num_layers"],) * 2, size["num_heads"])
    table = matrix(v, m)
    for side in (model.encoder, model.decoder):
        norm(side.layer_norm)
        side.position_encodings.encodings = np.zeros((512, m), np.float32)
        for layer in side.layer:
            attention(layer.self_attention, 3 * m, m)
            if side is model.decoder:
                attention(layer.attention, m, 2 * m, m)
            norm(layer.ffn.layer_norm)
            linear(layer.ffn.linear_0, h, m)
            linear(layer.ffn.linear_1, m, h)
    model.encoder.embeddings[0].weight = model.decoder.embeddings.weight = table
    model.decoder.projection.weight = table
    _register(model, ["<pad>", "<s>", "</s>", "<unk>"], size)
    model.validate()
    model.optimize()
    return model


def _register(spec, marks, size):
    tokens = [*marks, *(f"t{i}" for i in range(4, size["vocab_size"]))]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)


def hugging_face(kind, size):
    import torch
    import transformers

    torch.set_num_threads(size["threads"])
    if "checkpoint" in size:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(size["checkpoint"])
    else:
        marks = {**MARKS, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}
        model = _random(size, kind == "hf_nllb_moe", **marks, moe_token_dropout=0.0)
    if kind == "hf_nllb_moe":
        nllb_moe.mend()
    model.eval()
    lines = sources(size)
    ids = torch.zeros(len(lines), max(map(len, lines)), dtype=torch.long)
    for row, line in zip(ids, lines):
        row[: len(line)] = torch.tensor(line)
    ending = _Ending(size["target_lengths"], size["beam"])

    def step():
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids,
                attention_mask=(ids > 0).long(),
                num_beams=size["beam"],
                max_new_tokens=max(size["target_lengths"]),
                do_sample=False,
                logits_processor=[ending],
            )
        new = found[:, 1:]
        ids_of_first = new[0, : size["target_lengths"][0] - 1].tolist()
        return {"tokens": _lengths(new), "ids": ids_of_first}

    return step, {"version": transformers.__version__}


def _random(size, experts, **more):
    """A model of random weights, M2M100 or NLLB-MoE."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": size["vocab_size"], "d_model": size["model_dim"], **more}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = size["num_layers"]
        sizes[f"{side}_ffn_dim"] = size["hidden_dim"]
        sizes[f"{side}_attention_heads"] = size["num_heads"]
    if not experts:
        return transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**sizes))
    steps = {f"{side}_sparse_step": size.get("moe_every", 2) for side in ("encoder", "decoder")}
    config = transformers.NllbMoeConfig(**sizes, **steps, num_experts=size["num_experts"])
    return transformers.NllbMoeForConditionalGeneration(config)


class _Ending:
    """Has each line end with its own number of tokens, EOS being the last."""

    def __init__(self, lengths, beams):
        import torch

        self._lengths = torch.tensor(lengths).repeat_interleave(beams)

    def __call__(self, ids, scores):
        over = self._lengths <= ids.shape[1]  # the first of ids is what decoding starts with
        scores[:, 2] = float("-inf")
        scores[over] = float("-inf")
        scores[over, 2] = 0.0
        return scores


def _lengths(found):
    """The number of tokens, EOS included, of rows [B,T] that end with one each."""
    return int(((found == 2).int().argmax(1) + 1).sum())


if __name__ == "__main__":
    main()
