"""JoeyNMT's contender of benchmarks/quality_peers.py: trains for some CPU seconds and scores held-out pairs.

    PEERS/bin/python benchmarks/peers/train_joeynmt.py SETUP.json

Runs in the peers' own interpreter and imports nothing of this package. Model, loss, optimizer, schedule, training loop
and beam search are JoeyNMT's. It has no batches of similar lengths, so this adds them.

Letters: B sentence, T target token, V vocabulary.
"""

import copy
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from budget import Budget, report
from joeynmt.config import parse_global_args
from joeynmt.datasets import BaseDataset
from joeynmt.helpers import set_seed
from joeynmt.model import build_model
from joeynmt.search import search
from joeynmt.training import TrainManager
from joeynmt.vocabulary import Vocabulary
from stepping import keep_memory

_POOL = 100  # batches whose pairs are sorted by length together
_USUAL_LENGTH = 16
_SCORED = 16  # pairs at once


class Finished(Exception):
    """The CPU seconds are used up."""


class Pairs(BaseDataset):
    """Pairs of lists of pieces, in batches of similar lengths.

    Args:
        pairs: sorted by language.
        split: "train" or "dev".
        encoders: from lists of pieces to ids, by side.
        languages: how many of the pairs each language has; needed to train.
        temperature: languages are drawn by n^(1/temperature), as by ours; needed to train.
    """

    def __init__(self, pairs, split, encoders, languages=(), temperature=1.0):
        super().__init__(
            path="",
            src_lang="source",
            trg_lang="target",
            split=split,
            has_trg=True,
            has_prompt={"source": False, "target": False},
            sequence_encoder=encoders,
        )
        self._pairs, self._languages, self._temperature = pairs, languages, temperature
        assert not languages or sum(languages) == len(pairs)
        self.reset_indices()

    def __len__(self):
        return len(self._pairs)

    def __getitem__(self, index):
        return (index, *self._pairs[index])

    def Drawn(self, generator):
        """Draws one index for each pair, at random. All pairs of a language are drawn before one comes again."""
        weights = torch.tensor(self._languages) ** (1 / self._temperature)
        chosen = torch.multinomial(weights, len(self), replacement=True, generator=generator)
        drawn, start = torch.empty_like(chosen), 0
        for language, count in enumerate(self._languages):
            places = (chosen == language).nonzero()[:, 0]
            own = [
                torch.randperm(count, generator=generator)
                for _ in range(0, len(places), count or 1)
            ]
            if own:
                drawn[places] = start + torch.cat(own)[: len(places)]
            start += count
        return drawn.tolist()

    def Length(self, index):
        """The tokens of the longer side, with the end of the sentence."""
        return 1 + max(map(len, self._pairs[index]))

    def Batch(self, indices):
        """JoeyNMT's batch of these pairs."""
        return self.collate_fn([self[i] for i in indices], pad_index=1, eos_index=3)

    def make_iter(self, batch_size, seed=0, **_kwargs):
        """The data loader from which TrainManager takes its batches."""
        return torch.utils.data.DataLoader(
            dataset=self,
            batch_sampler=Buckets(self, batch_size, seed),
            collate_fn=lambda items: self.collate_fn(items, pad_index=1, eos_index=3),
        )


class Buckets:
    """Batches of pairs of similar lengths, in another order and composition each epoch.

    Args:
        pairs: see Pairs.
        batch_tokens: of a batch at most: its pairs times the longest side.
        seed: of the first epoch.
    """

    def __init__(self, pairs, batch_tokens, seed):
        self._pairs, self._most = pairs, batch_tokens
        self._generator = torch.Generator()
        self.set_seed(seed)

    def set_seed(self, seed):
        """Called by TrainManager at each epoch."""
        self._generator.manual_seed(seed)

    def get_state(self):
        """The state that TrainManager writes into its checkpoint."""
        return self._generator.get_state()

    def _Shuffled(self, items):
        order = torch.randperm(len(items), generator=self._generator).tolist()
        return [items[i] for i in order]

    def __iter__(self):
        order = self._pairs.Drawn(self._generator)
        pool = _POOL * self._most // _USUAL_LENGTH
        for start in range(0, len(order), pool):
            by_length = sorted(order[start : start + pool], key=self._pairs.Length)
            yield from self._Shuffled(self._Cut(by_length))

    def _Cut(self, by_length):
        batches, batch = [], []
        for index in by_length:
            if batch and self._pairs.Length(index) * (len(batch) + 1) > self._most:
                batches.append(batch)
                batch = []
            batch.append(index)
        return [*batches, batch] if batch else batches


class Trainer(TrainManager):
    """JoeyNMT's trainer, which stops for scoring when CPU seconds have been used.

    Before each scoring its rate falls to nothing; then it goes on from where that began, at the rate of its schedule.
    """

    def Begin(self, budget, score):
        """Sets what happens between steps: `score(step, tokens)` when a point is due.

        budget: its points are the beginning and the end of each decay, in turns.
        """
        self._budget, self._score, self._kept = budget, score, None
        self._loss = math.nan
        # Its first step is taken at the full rate otherwise, before the schedule is asked for one.
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate / self.args.learning_rate_warmup

    def _train_step(self, batch):
        if self.stats.steps:  # then a step was completed before
            if self._budget.Due():
                self._Turn()
            if self._kept is not None:
                whole, left = self._length, self._began + self._length - self._budget.used
                # The schedule sets it again after the step.
                for group in self.optimizer.param_groups:
                    group["lr"] *= max(0.0, left / whole)
            self._budget.Note(self.stats.steps, lambda: self._loss)
        self._loss, right = super()._train_step(batch)
        return self._loss, right

    def _Turn(self):
        """Begins to decay; or scores, and takes the state back from which that began, unless it was the last time."""
        kinds = self.model, self.optimizer, self.scheduler
        decayed = self._kept is not None
        with self._budget.Scoring():
            if decayed:
                self._score(self.stats.steps, self.stats.total_tokens)
            else:
                self._began, self._length = self._budget.used, self._budget.to_next
                states = copy.deepcopy([kind.state_dict() for kind in kinds])
                self._kept = states, self.stats.steps, self.stats.total_tokens
        if self._budget.done:
            raise Finished
        if decayed:
            states, self.stats.steps, self.stats.total_tokens = self._kept
            for kind, state in zip(kinds, states, strict=True):
                kind.load_state_dict(state)
            self._kept = None
            self._budget.Return(self._began)

    def _save_checkpoint(self, new_best, score):
        """Saves nothing: nothing goes on from it."""


def config(setup):
    """JoeyNMT's configuration."""
    sizes, rate = setup["sizes"], setup["learning_rate"]
    side = {
        "type": "transformer",
        "num_heads": sizes["num_heads"],
        "embeddings": {"embedding_dim": sizes["model_dim"], "scale": True},
        "hidden_size": sizes["model_dim"],
        "ff_size": sizes["hidden_dim"],
        "dropout": setup["dropout"],
        "layer_norm": "pre",
    }
    return {
        "name": "joeynmt",
        "model_dir": setup["directory"],
        "use_cuda": False,
        "random_seed": setup["seed"],
        "data": {},
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "normal",
            "embed_init_weight": sizes["model_dim"] ** -0.5,
            "tied_softmax": True,
            "encoder": {**side, "num_layers": sizes["num_encoder_layers"]},
            "decoder": {**side, "num_layers": sizes["num_decoder_layers"]},
        },
        "training": {
            "optimizer": "adam",
            "adam_betas": [0.9, 0.98],
            "learning_rate": rate,
            "learning_rate_min": 0.0,
            "learning_rate_warmup": setup["warmup"],
            "scheduling": "warmupinversesquareroot",
            "normalization": "tokens",
            "label_smoothing": setup["label_smoothing"],
            "clip_grad_norm": 1.0,
            "batch_size": setup["batch_tokens"],
            "batch_type": "token",
            "epochs": 1_000_000,
            "logging_freq": 100,
            "validation_freq": 1_000_000_000,
        },
        "testing": {},
    }


def read(directory, name):
    """The pairs of a file of pieces, each a pair of lists."""
    sides = []
    for side in ("source", "target"):
        text = (directory / f"{name}.{side}").read_bytes().decode()
        sides.append([line.split(" ") for line in text.split("\n")[:-1]])
    return list(zip(*sides, strict=True))


def held_out(model, pairs):
    """(the log-probability of each target in nats, the tokens of all, ends of sentences included).

    Without label smoothing, which JoeyNMT's own perplexity has.
    """
    log_probs, tokens = [0.0] * len(pairs), 0
    model.eval()
    order = sorted(range(len(pairs)), key=pairs.Length)
    for start in range(0, len(order), _SCORED):
        batch = pairs.Batch(order[start : start + _SCORED])
        with torch.no_grad():
            _, log_probs_BTV, _, _ = model(return_type="loss", **vars(batch))
        found_BT = log_probs_BTV.gather(-1, batch.trg[..., None])[..., 0]
        sums_B = (found_BT.double() * batch.trg_mask[:, 0]).sum(-1)
        for index, log_prob in zip(batch.indices.tolist(), sums_B.tolist(), strict=True):
            log_probs[index] = log_prob
        tokens += batch.ntokens
    return log_probs, tokens


def translations(model, pairs, setup):
    """The pieces of each source's translation, in the order of the pairs."""
    found = {}
    model.eval()
    order = sorted(range(len(pairs)), key=pairs.Length)
    for start in range(0, len(order), _SCORED):
        batch = pairs.Batch(order[start : start + _SCORED])
        batch.sort_by_src_length()
        ids, _, _ = search(
            model=model,
            batch=batch,
            max_output_length=setup["max_length"],
            beam_size=setup["beam_size"],
            beam_alpha=setup["length_alpha"],
            generate_unk=False,
        )
        lines = model.trg_vocab.arrays_to_sentences(ids, cut_at_eos=True)
        for index, line in zip(batch.indices.tolist(), lines, strict=True):
            found[index] = [piece for piece in line if piece not in ("</s>", "<pad>")]
    return [found[i] for i in range(len(pairs))]


def main():
    setup = json.loads(Path(sys.argv[1]).read_text())
    keep_memory()
    torch.set_num_threads(1)
    set_seed(setup["seed"])
    data = Path(setup["data"])
    args = parse_global_args(config(setup))
    special = args.data["special_symbols"]
    assert isinstance(special, SimpleNamespace)
    pieces = json.loads((data / "vocabularies.json").read_text())
    vocabs = {side: Vocabulary(pieces[side], special) for side in ("source", "target")}
    for side, vocab in vocabs.items():
        assert len(vocab) == len(pieces[side]), side
    encoders = {side: vocab.sentences_to_ids for side, vocab in vocabs.items()}
    model = build_model(args.model, vocabs["source"], vocabs["target"])
    model.loss_function = args.train.loss, args.train.label_smoothing
    languages = list(setup["train_pairs"].values())
    pairs = Pairs(read(data, "train"), "train", encoders, languages, setup["temperature"])
    dev = Pairs(read(data, "dev"), "dev", encoders)
    trainer = Trainer(
        rank=0,
        model=model,
        model_dir=args.model_dir,
        device=args.device,
        autocast=args.autocast,
        seed=args.seed,
        train_args=args.train,
        dev_args=args.test,
    )
    share = 1 - setup["decay_share"]
    budget = Budget([moment for point in setup["points"] for moment in (share * point, point)])

    def score(step, seen):
        used = budget.used
        log_probs, tokens = held_out(model, dev)
        point = {"step": step, "cpu_seconds": used, "trained_tokens": seen}
        report("point", **point, log_probs=log_probs, tokens=tokens)

    trainer.Begin(budget, score)
    try:
        trainer.train_and_validate(pairs, dev)
    except Finished:
        parameters = sum(p.numel() for p in model.parameters())
        hypotheses = [" ".join(line) for line in translations(model, dev, setup)]
        version = f"JoeyNMT {args.joeynmt_version}, PyTorch {torch.__version__}"
        report("end", parameters=parameters, version=version, pieces=hypotheses)


if __name__ == "__main__":
    main()
