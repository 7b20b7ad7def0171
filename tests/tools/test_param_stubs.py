"""The stubs of param_stubs: what a type checker, and so an editor, knows of the Params of each class."""

import re

import pytest
from mypy import api

from tools import param_stubs

_CODE = """
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.moe.routers.base import LearnedRouter
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.optimizers.schedules import InverseSqrt
from lingvo_moe.params.mt.demo import M4Demo
from lingvo_moe.params.mt.m4 import M4Base
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.text_input import LmInput

reveal_type(MultiHeadAttention.Params().score_scale)  # float | None | Any
reveal_type(InverseSqrt.Params().warmup_steps)  # int | Any
reveal_type(LmInput.Params().Set(batch_size=3, **{"weights": {}}).languages)  # Sequence[str] | Any
reveal_type(registry.TrainParams().max_steps)  # int
p = LmModel.Params()
reveal_type(p.repeat)  # bool | Literal['auto'] | Any
reveal_type(p.moe.router)  # Top2RouterParams | Any
reveal_type(p.pipeline.stages)  # int | Any
p.optimizer = Adam.Params().Set(beta1=0.5)
reveal_type(M4Base().Task().num_encoder_layers)  # int | Any


class Router(LearnedRouter):
    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        reveal_type(p.num_experts)  # int | Any
        return p


class Mine(M4Demo):
    def Train(self) -> Params:
        return super().Train().Set(max_steps=3)

    def Task(self):
        return super().Task().Set(num_experts=4)
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_parameters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert param_stubs.main([]) == 0
    assert param_stubs.main([]) == 1
    assert "--output=typings: there is typings/lingvo_moe" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text(_CODE)
    monkeypatch.setenv("MYPYPATH", "typings")
    flags = "--ignore-missing-imports", "--no-site-packages", "--cache-dir=/dev/null"
    out, err, _ = api.run([*flags, "mine.py"])
    types = [
        re.sub(r"[a-z_.]+\.(?=[A-Z])", "", t) for t in re.findall(r'Revealed type is "(.*)"', out)
    ]
    assert types == re.findall(r"# (.*)", _CODE), out + err
    assert out.count("\n") == len(types) + 1 and "Success" in out
