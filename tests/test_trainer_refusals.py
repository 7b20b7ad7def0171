"""The trainer's refusals: one line with flag or parameter, value and remedy, status 2, and nothing started."""

import re

import pytest
import trainer_testing

from lingvo_moe.core.job.job_flags import MOST_DEVICES

_BASE = ["--model=mt.M4Tiny", "--data_dir=nowhere", "--logdir=RUN"]

# Flags and overrides that are added to these => a part of the error. One that begins with ':' is its end, and follows
# the row's own text.
_REFUSED = rf"""
--model=mt.M4Tinny => --model='mt.M4Tinny': no such experiment (did you mean 'mt.M4Tiny
--model=M4Tiny => --model='M4Tiny': expected task.Experiment
--model=mp.M4Tiny => no task 'mp' in lingvo_moe.params (known: image, lm, mt)
--modle=mt.M4Tiny => no flag --modle (did you mean '--mode' or '--model' or
--mode=snyc => : must be one of sync, eval, inspect_model, inspect_params (did you mean 'sync'?)
--engine=pjr => : must be one of pjrt, tf, tf_graph, tpu_strategy (did you mean 'pjrt'?)
--learning_rate=0.1 => no flag --learning_rate; a parameter
--logdir= => --logdir is needed
--data_dir= => --data_dir is needed to train: a directory of
--mesh=expert => expert
--mesh=experts:8 => experts
--mesh=expert:16 => needs 16 devices, but there are 8 (cpu); a mesh that fits: expert:8; or make virtual CPU
--model=mt.T96L --mode=inspect_model --logdir= --data_dir= --num_devices=12 => data:256,model:8 cannot be laid over 12
--mode=inspect_model --logdir= --data_dir= --num_devices=3 => does not divide over the 3 devices
--engine=tf --num_devices=8 => --engine=tf runs on one device
--engine=tf --num_processes=2 => --num_processes=2 goes with --engine=pjrt, not with --engine=tf
--engine=tf_graph --known_faults=warn => --known_faults=warn goes with --engine=pjrt, not with --engine=tf_graph
--process_id=1 => --process_id=1, --num_processes=1
--coordinator_address=here:80 => --coordinator_address=here:80: goes with --num_processes and --process_id, or with
--num_processes=2 --coordinator_address=here => --coordinator_address='here': expected host:port
--num_processes=2 --coordinator_address=here:80 --model_params_override=train.max_cpu_seconds=5 => is the time of one
--num_devices=100000 => : must be an integer from 0 to {MOST_DEVICES}
--init_from_step=6 => --init_from_step=6 goes with --init_from, which is not given
--trust_run => --trust_run goes with --init_from, which is not given
--known_faults=of => --known_faults=of: must be one of error, warn, off
--strategy=auto --mesh=expert:8 => chooses the mesh
--strategy=auto --engine=tf => goes with --engine=pjrt
--strategy=auto --mode=inspect_model => goes with --mode=sync
--strategy=auto task.remat=dots => task.remat is what the search chooses
--strategy=auto --logdir= => --logdir is needed
--max_steps=-1 => : must be an integer of at least 0
--once => --once goes with --mode=eval, not with --mode=sync
--eval_lines=5 => --eval_lines=5 goes with --mode=eval
--model=image.ResNet50 --mode=eval --eval_lines=5 => --eval_lines=5: image.ResNet50 translates nothing
--mode=eval --max_minutes=5 => --max_minutes=5.0 goes with --mode=sync
--mode=eval --once => holds no run with a checkpoint
--logdir=az://bucket/run => --logdir=az://bucket/run: no storage is known as az://
--logdir=runs[1]/run => --logdir=runs[1]/run: checkpoints and models could not be read
--logdir=~/run => --logdir=~/run: '~' is only replaced by a shell
--data_dir=az://bucket/data => --data_dir=az://bucket/data: no storage is known
--logdir=s3://bucket/run --restart => --logdir=s3://bucket/run: --restart and --mode=eval work on
--init_from=az://bucket/run => --init_from=az://bucket/run: no storage is known
task.num_expert=8 => task.num_expert=8: no parameter 'task.num_expert' (did you mean 'num_experts'
task.dropout => is not of the form path=value
task.num_experts=many => task.num_experts=many: does not read as int
task.num_experts=100000000000 => : must be an integer of at least 0 and at most 2147483647
task.num_experts=9 => task.num_experts=9 does not divide over the 8 devices
task.num_groups=6 => task.num_groups=6 does not divide over the 8 devices
task.num_groups=128 => task.num_groups=128: a batch of input.batch_size=8 rows of input.source_length=24
task.num_encoder_layers=3 => num_encoder_layers=3: must be a multiple of 2, after which task.moe_every
task.model_dim=1e9 => : is of type float, expected int
task.dropout=1 => : must be a number in [0, 1)
task.fprop_dtype=bf16 => : must be one of float32, bfloat16, float16, float64, or None (did you mean 'bfloat16'?)
task.fprop_dtype=auto => task.fprop_dtype=auto: is chosen for --engine=tf_graph on a CPU
task.repeat=atuo => : must be True, False or auto (did you mean 'auto'?)
task.moe.router.level=word => : must be one of token, sentence, task, id
task.moe.router=None => must be one of expert_choice, hash, lsh, noisy_top_k, random, soft, top2, top_k, or Params of a
task.weight_split={{'Q': 'expert'}} => task.weight_split={{'Q': 'expert'}}: must be a map from letters
task.weight_split={{'Q': 'expert'}} => unknown letter 'Q' (known: A,
task.weight_split={{'H': 'experts'}} => task.weight_split: 'H' is sharded along 'experts', and mesh expert:8 has no axis
input.languages=[1,2] => : must be a list of strings
input.batch_size=12 => input.batch_size=12 does not divide over the 8 devices
input.batch_size=1000000000 => activations; reduce input.batch_size=1000000000, input.source_length=24, input.target_len
input.target_vocab_size=500 => input.target_vocab_size=500 is more than task.target_vocab_size=300
train.mesh=expert => train.mesh='expert': 'expert' is not of the form axis:size
train.max_steps=None => : is of type NoneType, expected int
train.early_stopping_evals=2;train.eval_interval_steps=0 => nothing is evaluated
train.eval_decode_every=3;train.eval_interval_steps=2 => must be a multiple of train.eval_interval_steps=2
"""


def _refusal(capfd, *flags: str) -> str:
    """The one line of error."""
    assert trainer_testing.status(*flags) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: "), err
    return err.rstrip("\n")


@pytest.mark.parametrize("row", _REFUSED.strip().splitlines())
def test_a_mistake_is_one_line(row, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, expected = row.split(" => ")
    words = re.split(r" (?=--|[a-z]+\.)", given)
    more = [w if w.startswith("--") else f"--model_params_override={w}" for w in words]
    line = _refusal(capfd, *_BASE, *more)
    assert line.endswith(given + expected) if expected[0] == ":" else expected in line, line
    assert list(tmp_path.iterdir()) == []


def test_words_that_are_no_flags(capfd):
    assert "--model is required" in _refusal(capfd)
    assert _refusal(capfd, *_BASE, "extra").startswith("error: unexpected argument 'extra'")
