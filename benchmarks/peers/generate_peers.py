"""Contenders of benchmarks/generate.py that run in the peers' environment: Hugging Face and llama.cpp.

PEERS/bin/python benchmarks/peers/generate_peers.py llama_q8_0 '{"model": "model.gguf", "batch": 8, ...}'
"""

import ctypes
import json
import sys
from pathlib import Path

from stepping import keep_memory, prompts, serve


def main():
    kind, size = sys.argv[1], json.loads(sys.argv[2])
    keep_memory()
    step, about = hugging_face(size) if kind == "hf" else llama_cpp(kind, size)
    serve(step, **about)


def hugging_face(size):
    import torch
    import transformers

    torch.set_num_threads(1)
    path = Path(size["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = torch.tensor(prompts(size)).long()
    count = {"max_new_tokens": size["tokens"], "min_new_tokens": size["tokens"]}

    def step():
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **count
            )
        new = found[:, size["prompt"] :]
        return {"tokens": new.numel(), "ids": new[0].tolist()}

    return step, {"version": transformers.__version__}


def llama_cpp(kind, size):
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    path = f"{size['scratch']}/{kind}.gguf".encode()
    how = lib.llama_model_quantize_default_params()
    how.allow_requantize, how.nthread = True, 1
    types = {"llama_f32": lib.LLAMA_FTYPE_ALL_F32, "llama_q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0}
    how.ftype = types[kind]
    if lib.llama_model_quantize(size["model"].encode(), path, ctypes.byref(how)):
        raise RuntimeError(f"{path} was not made")
    model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
    rows, first, count = size["batch"], prompts(size), size["tokens"]
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_seq_max = rows * 512, rows
    options.n_batch, options.n_threads, options.n_threads_batch = first.size, 1, 1
    context = lib.llama_init_from_model(model, options)
    tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(first.size, 0, 1)

    def decode(ids, begin):
        """The next token of each row [B,n], whose first is at the position `begin`."""
        last = []
        for row, line in enumerate(ids.tolist()):
            for at, token in enumerate(line):
                i = row * len(line) + at
                batch.token[i], batch.pos[i] = token, begin + at
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
                batch.logits[i] = at == len(line) - 1
            last.append(i)
        batch.n_tokens = ids.size
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = [lib.llama_get_logits_ith(context, i) for i in last]
        return np.array([[np.argmax(np.ctypeslib.as_array(x, (tokens,)))] for x in logits])

    def step():
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        new = [decode(first, 0)]
        while len(new) < count:
            new.append(decode(new[-1], first.shape[1] + len(new) - 1))
        ids = np.concatenate(new, 1)
        return {"tokens": ids.size, "ids": ids[0].tolist()}

    return step, {"version": lib.__version__}


if __name__ == "__main__":
    main()
