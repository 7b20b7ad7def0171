"""A translation model whose router is chosen by name: what its data must have, and a run that routes by language."""

import numpy as np
import pytest
import tensorflow as tf
import toy_translation as toy

from lingvo_moe.core.config import registry
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.runs.artifacts import task_numbers
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

V = 30
SMALL = (
    f"task.source_vocab_size={V};task.target_vocab_size={V};task.model_dim=8;task.hidden_dim=8;"
    "task.num_heads=2;task.key_dim=4;task.num_encoder_layers=2;task.num_decoder_layers=2;"
    "task.num_experts=4;task.num_groups=2;task.repeat=False;"
)
BY_LANGUAGE = "task.moe.router=top_k;task.moe.router.level=task;task.moe.router.num_tasks=3"


def test_a_model_by_language_needs_it_in_its_batches():
    params = registry.GetParams("mt.M4Tiny", SMALL + BY_LANGUAGE)
    model, batch = params.task.Instantiate(), toy.batch(params.input.Instantiate().BatchSpec(), V)
    del batch.src["task_ids"]
    with use_mesh(single_device()), pytest.raises(ValueError, match=r"\.ffn routes by task_ids"):
        model.FProp(model.InitTheta(tf.constant([1, 2])), batch.Transform(tf.constant))


class _OfLanguages(MtInput):
    """An input whose data has these languages."""

    def __init__(self, languages):
        super().__init__(MtInput.Params())
        self._found = languages

    def Artifacts(self):
        return RunArtifacts(about={"languages": list(self._found)})


def test_tasks_are_languages_by_number():
    assert task_numbers(["sw", "de"], None) == [1, 0]
    assert task_numbers(["sw", "de"], ["af", "de", "sw"]) == [2, 1]
    with pytest.raises(DataError, match=r"'dee' is none of the 2 .*did you mean 'de'"):
        task_numbers(["dee"], ["de", "sw"])
    model = registry.GetParams("mt.M4Tiny", SMALL + BY_LANGUAGE).task.Instantiate()
    model.CheckData(_OfLanguages("abc"))
    with pytest.raises(TaskError, match="num_tasks=3, but the data has 4 languages"):
        model.CheckData(_OfLanguages("abcd"))


@pytest.mark.slow
def test_a_run_is_read_back_and_asked_for_languages(tmp_path):
    vocab = toy.train_vocab(toy.sentences(200), bytes_too=False)
    small = "task.num_encoder_layers=2;task.num_decoder_layers=2;"
    languages = ["af", "de", "sw"]
    toy.save_run(tmp_path, vocab, more=small + BY_LANGUAGE, languages=languages)
    run = TextRunDir(tmp_path)
    params = run.Params()
    assert params.task.moe.router.cls is TopKRouter and run.languages == languages
    text = (tmp_path / "params.txt").read_text()
    assert registry.GetParams("mt.M4Tiny").FromText(text) == params

    options = TranslateOptions(beam_size=2, max_source_length=8, max_length=6, rows=2)
    translator, _ = load_translator(tmp_path, options)
    line = toy.sentences(1, seed=5, longest=5)[0]
    out = translator.Translate([line] * 3, languages)
    alone = [translator.Translate([line], lang).scores[0, 0] for lang in languages]
    np.testing.assert_allclose(out.scores[:, 0], alone, rtol=1e-5)
    assert len(set(np.round(alone, 4).tolist())) > 1, "the language decides nothing"
    with pytest.raises(ValueError, match="needs the language of each line: give it"):
        translator.Translate([line])
    with pytest.raises(ValueError, match=r"unknown source language.*knows af, de, sw"):
        translator.Translate([line], "xx")
    inputs = translator.translate.get_concrete_function().structured_input_signature[0]
    assert [spec.name for spec in inputs] == ["text", "language"]
