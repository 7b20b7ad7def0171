"""Pages show what commands print."""

import re

import pytest

from lingvo_moe import trainer
from tools import goodput
from tools.import_graph import ROOT

COMMANDS = [
    ("goodput.md", "tools.goodput --predict", goodput.main),
    ("language_models.md", "lingvo_moe.trainer --model=lm.DeepSeekV3", trainer.main),
]


@pytest.mark.parametrize("page, command, main", COMMANDS, ids=[page for page, *_ in COMMANDS])
def test_the_block_after_a_command_is_of_its_output(page, command, main, capsys):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    pattern = rf"python -m ({re.escape(command)}.*)\n```\n(?:[^`]*\n)?```(?:text)?\n([^`]*)```"
    typed, shown = re.search(pattern, text).groups()
    assert main(typed.split()[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown.splitlines() == [line for line in printed if line in shown.splitlines()]
    assert shown.strip()
