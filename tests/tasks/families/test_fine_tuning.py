"""A run of published weights is trained further in one command, and comes out as it came in."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from published import assert_same_tensors, logits_of, tensors_of, write_texts

from lingvo_moe import trainer
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.checkpoints.init_from import InitFromError, begin_from
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task import adapters
from lingvo_moe.tasks.families import adapter_files
from lingvo_moe.tasks.families.exporting import ExportOptions, export_checkpoint
from lingvo_moe.tasks.families.family import FAMILIES
from lingvo_moe.tasks.families.importing import import_checkpoint, open_published, params_of
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.training.flags import define_flags
from lingvo_moe.training.same_run import check_same_input, with_model_of_source

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt",
)
EXPERTS = "task.num_experts=4;task.moe_every=1;task.moe.router=top_k;task.moe.router.k=2;task.moe.dispatcher=dropless"
# A rate at which no weight changes.
SMALL = "input.batch_size=8;input.target_length=16;task.optimizer.learning_rate.value=1e-30"


def test_the_trainer_takes_model_and_vocabulary_from_an_import(checkpoint, tmp_path, capsys):
    directory, run, tuned = checkpoint("llama_tied"), tmp_path / "run", tmp_path / "tuned"
    (directory / "LICENSE").write_text("free")
    import_checkpoint(open_published(directory), run, lambda line: None)
    texts = write_texts(tmp_path / "texts")
    command = [f"--init_from={run}", f"--data_dir={texts}", f"--logdir={tuned}", "--max_steps=1"]
    command += ["--num_devices=8", f"--model_params_override={SMALL}"]
    assert trainer.main(command) == 0
    assert "began from" in capsys.readouterr().err
    tuned = TextRunDir(tuned)
    assert tuned.experiment["model"] == "lm.ImportedLlama" and tuned.steps == [0, 1]
    export_checkpoint(tuned, tmp_path / "out", NEWEST, ExportOptions(), lambda line: None)
    assert_same_tensors(tensors_of(directory), tensors_of(tmp_path / "out"))
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    config, before = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", directory)
    )
    assert config == before
    # To go on where it stands, with its optimizer, takes its data, too.
    args = define_flags().Parse([f"--init_from={tuned.path}", "--init_from_state"])
    args = with_model_of_source(args)
    check_same_input(tuned, registry.GetParams(args.model, args.model_params_override))
    (run / "experiment.hmac").unlink()
    assert trainer.main([*command[:2], f"--logdir={tmp_path / 'x'}"]) == 2
    assert "has no mark as a run of yours" in capsys.readouterr().err


def test_an_import_grows_into_experts_that_begin_with_its_logits(checkpoint, tmp_path, capsys):
    """Sparse upcycling (Komatsuzaki et al. 2022), of a model whose logits `transformers` computed."""
    run, grown = tmp_path / "run", tmp_path / "grown"
    import_checkpoint(open_published(checkpoint("llama_tied")), run, lambda line: None)
    command = [
        f"--init_from={run}",
        f"--data_dir={write_texts(tmp_path / 'texts')}",
        f"--logdir={grown}",
    ]
    command += ["--max_steps=1", "--num_devices=1", f"--model_params_override={SMALL};{EXPERTS}"]
    assert trainer.main(command) == 0
    assert "out of whose smaller model this one grew" in capsys.readouterr().err
    grown = TextRunDir(grown)
    model = grown.Task()
    theta, _ = load_theta(grown, model, Chosen(step=0))
    assert theta.decoder.blocks.body.layers[0].ffn.experts.wi.shape == (3, 4, 24, 20)
    expected = np.load(Path(__file__).parent / "testdata/llama_tied/expected.npz")
    logits = logits_of(model, theta, expected["ids"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=1e-4)


def test_adapters_of_an_import_come_out_in_its_weights_and_alone(checkpoint, tmp_path):
    run, tuned, directory = tmp_path / "run", tmp_path / "tuned", checkpoint("llama_tied")
    import_checkpoint(open_published(directory), run, lambda line: None)
    texts = write_texts(tmp_path / "texts")
    override = (
        SMALL.replace("1e-30", "0.1")
        + r";task.adapter_rank=2;task.adapter_weights=self_atten\.[ko]$"
    )
    override += ";task.optimizer.learning_rate=constant"
    command = [f"--init_from={run}", f"--data_dir={texts}", f"--logdir={tuned}", "--max_steps=2"]
    assert trainer.main([*command, "--num_devices=1", f"--model_params_override={override}"]) == 0
    tuned = TextRunDir(tuned)
    with pytest.raises(InitFromError, match=r"of all weights, and here of adapters alone"):
        begin_from(run, 0, tuned.Params().task, tuned.artifacts, keep_state=True)
    for name in ("whole", "alone"):
        options = ExportOptions(adapters=name == "alone")
        export_checkpoint(tuned, tmp_path / name, NEWEST, options, lambda line: None)
    before, whole = tensors_of(directory), tensors_of(tmp_path / "whole")
    alone = tensors_of(tmp_path / "alone")
    assert json.loads((tmp_path / "alone/adapter_config.json").read_text())["r"] == 2
    assert len(alone) == 3 * 2 * 2
    for name, tensor in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in alone:
            a, b = (alone[f"{module}.lora_{part}.weight"] for part in "AB")
            assert (b @ a).any()
            tensor = tensor + 16 / 2 * b @ a
        np.testing.assert_allclose(whole[name], tensor, atol=1e-6)
    theta = load_theta(tuned, tuned.Task())[0]
    np.testing.assert_allclose(
        theta.decoder.blocks.body.layers[0].self_atten.k[1].reshape(24, -1).T,
        whole["model.layers.1.self_attn.k_proj.weight"],
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("name", "refused"),
    [("deepseek_v2", ["self_attn.kv_b_proj"]), ("llama3", []), ("olmoe", [])],
)
def test_adapters_of_all_products_are_peft_s_or_refused(name, refused):
    """B A is what the adapter adds to the tensor, of the softmax's table and of turned heads too."""
    path = Path(__file__).parent / "testdata" / name / "config.json"
    config = json.loads(path.read_text())
    family = FAMILIES[config["model_type"]]
    params = params_of(family, config, "")
    specs = params.task.Instantiate().VariableSpecs()
    mapping, flat = family.Mapping(params.task, specs), dict(specs.FlattenItems())
    shapes = adapters.with_adapters(specs, 2, ".").adapters
    rng, without = np.random.RandomState(0), []
    for tensor, pairs in mapping.tensors.items():
        pair, of_pair = pairs[0], adapters.name_of(pairs[0].path)
        if ".1." in tensor or of_pair not in shapes:
            continue
        whole = {part: rng.normal(size=spec.shape) for part, spec in shapes[of_pair].items()}
        adapter = NestedMap({part: values[pair.index] for part, values in whole.items()})
        sizes = family.Sizes(params.task)
        parts = adapter_files._matrices(pair, adapter, sizes) if len(pairs) == 1 else {}
        if not parts:
            without.append(tensor)
            continue
        added = adapters.added(adapter, flat[pair.path].shape[len(pair.index) :], 1.0)
        want = mapping.Tensor(tensor, {pair: added}.get)
        np.testing.assert_allclose(parts["B"] @ parts["A"], want, atol=1e-6)
    refused = {f"model.layers.{i}.{part}.weight" for part in refused for i in (0, 2)}
    assert {*without} == {"model.embed_tokens.weight", *refused}
