"""Flags behave as users of absl expect; a mistake is one line that names the flag, and status 2."""

import pytest
from absl import flags as absl_flags

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags, same_place


def _define() -> Flags:
    flags = Flags("python -m tools.paint", "Paints.\n\n    python -m tools.paint --house=H\n")
    flags.DEFINE_path("house", None, "what to paint", required=True, portable=True)
    flags.DEFINE_integer("coats", 2, "layers of paint", checks.SIZE)
    flags.DEFINE_float("share", None, "how much of it", checks.SHARE)
    flags.DEFINE_boolean("no_windows", False, "leave windows out")
    flags.DEFINE_boolean("quiet", True, "print nothing")
    flags.DEFINE_enum("colour", "red", ("red", "green"), "of the walls")
    flags.DEFINE_enum("finish", "", ("matt", "gloss"), "of the paint (default: what is in stock)")
    flags.DEFINE_list("rooms", ("hall",), "which rooms")
    flags.DEFINE_parsed("size", None, "of a brush", lambda text: int(text, 36), "base 36")
    with flags.Section("what to use"):
        flags.DEFINE_multi_path("brush", "a brush")
        flags.DEFINE_string("thinner", None, "a fluid")
        flags.DEFINE_string("water", None, "another")
    return flags


DEFAULTS = {
    "house": "H",
    "coats": 2,
    "share": None,
    "no_windows": False,
    "quiet": True,
    "colour": "red",
    "finish": "",
    "rooms": ("hall",),
    "size": None,
    "brush": [],
    "thinner": None,
    "water": None,
}


@pytest.mark.parametrize("argv, changed", [
    ([], {}),
    (["--coats", "5", "--share=0.25"], {"coats": 5, "share": 0.25}),
    (["--coats=5", "--coats=6"], {"coats": 6}),
    (["--no_windows", "--noquiet"], {"no_windows": True, "quiet": False}),
    (["--no_windows=true", "--quiet=false"], {"no_windows": True, "quiet": False}),
    (["--colour=green"], {"colour": "green"}),
    (["--finish=matt", "--finish="], {"finish": ""}),
    (["--rooms=a, b,,c"], {"rooms": ("a", "b", "c")}),
    (["--size=zz"], {"size": 35 * 37}),
    (["--brush=a", "--brush", "b"], {"brush": ["a", "b"]}),
    (["--thinner=--water=3"], {"thinner": "--water=3"}),
    (["--undefok=ladder", "--ladder=7"], {}),
])  # fmt: skip
def test_values(argv, changed):
    args = _define().Parse(["--house=H", *argv])
    assert args.Values() == {**DEFAULTS, **changed}
    assert args.coats == args.Values()["coats"]


def test_a_file_of_flags(tmp_path):
    """A flag file may have comments and include another; flags after it on the command line override it."""
    (tmp_path / "more").write_text("--noquiet\n")
    (tmp_path / "flags").write_text(
        f"# of the house\n--house=H 2\n\n--coats=7\n--flagfile={tmp_path}/more\n--share=0.5\n"
    )
    args = _define().Parse([f"--flagfile={tmp_path}/flags", "--coats=8"])
    changed = {"house": "H 2", "coats": 8, "quiet": False, "share": 0.5}
    assert args.Values() == {**DEFAULTS, **changed}


@pytest.mark.parametrize("argv, message", [
    ([], "--house is required"),
    (["--huose=H"], "no flag --huose (did you mean '--house' or"),
    (["--house=H", "K"], "unexpected argument 'K': values are given as --flag=value"),
    (["--house=H", "--quiet", "false"], "unexpected argument 'false': values are given as"),
    (["--coats=0"], "--coats=0: must be an integer of at least 1"),
    (["--coats=1e400"], "--coats=1e400: must be an integer of at least 1"),
    (["--coats"], "Missing value for flag --coats"),
    (["--share=1"], "--share=1: must be a number in [0, 1)"),
    (["--quiet=perhaps"], "--quiet=perhaps: must be true or false"),
    (["--noquiet=1"], "--noquiet=1 does not take an argument"),
    (["--colour=gren"], "--colour=gren: must be one of red, green (did you mean 'green'?)"),
    (["--finish=mat"], "--finish=mat: must be one of matt, gloss (did you mean 'matt'?)"),
    (["--house=s3://x"], "--house=s3://x: remote storage is not supported"),
    (["--house=x[1]"], "--house=x[1]: checkpoints and models could not be read"),
    (["--house=H", "--brush=a", "--brush=~/b"], "--brush=~/b: '~' is only replaced by"),
    (["--flagfile=/nowhere"], "Unable to open flagfile: [Errno 2] No such file or directory"),
    (["--flagfile=/bin/sh"], "--flagfile names a file that is no text"),
])  # fmt: skip
def test_mistakes(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        _define().Parse(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"paint: {message}")


@pytest.mark.parametrize("argv, why", [
    (["--coats=3"], ""),
    (["--coats=3", "--colour=green"], ""),
    (["--coats=2", "--quiet=false", "--finish=gloss"], ""),
    (["--rooms=a,b"], "--rooms=a,b goes with --water, which is not given: walls are dusty"),
    (["--rooms=a,b", "--water=w"], ""),
    (["--size=z"], "--size=35 goes with --finish=matt, not with --finish="),
    (["--size=z", "--finish=matt"], ""),
    (["--coats=3", "--noquiet"], "--coats=3 does not go with --noquiet"),
    (["--no_windows", "--thinner=x"], "--no_windows does not go with --thinner=x"),
    (["--thinner=a", "--water=./a"], "--thinner and --water are both ./a; name two places"),
    (["--thinner=a", "--water=b"], ""),
])  # fmt: skip
def test_flags_that_go_with_others(argv, why, capsys):
    flags = _define()
    flags.OnlyWith("coats", quiet=False)
    flags.OnlyWith("rooms brush", "walls are dusty", water=True)
    flags.OnlyWith("size", finish=(None, "matt"))
    flags.OnlyWith("no_windows", thinner=False)
    flags.Refuse(["thinner", "water"], same_place)
    if why:
        with pytest.raises(SystemExit):
            flags.Parse(["--house=H", *argv])
    else:
        flags.Parse(["--house=H", *argv])
    said = capsys.readouterr().err
    assert said == (f"paint: {why}\n" if why else "")


def test_a_validator_of_absl(capsys):
    flags = _define()
    absl_flags.register_validator("coats", lambda n: n < 9, "the paint peels", flag_values=flags)
    with pytest.raises(SystemExit):
        flags.Parse(["--house=H", "--coats=9"])
    assert capsys.readouterr().err == "paint: --coats=9: the paint peels\n"


@pytest.mark.parametrize("flag", ["--help", "--helpfull"])
def test_help(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        _define().Parse([flag])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert out.startswith("Paints.\n\n    python -m tools.paint --house=H\n")
    assert "--house: what to paint (required)" in out
    assert "--coats: layers of paint\n    (default: '2')\n    (an integer of at least 1)" in out
    assert "--[no]quiet: print nothing" in out and "(one of red, green)" in out
    assert out.index("flags:\n") < out.index("--coats") < out.index("what to use:\n  --brush")
    assert ("--undefok: " in out) == (flag == "--helpfull")


def test_tables_do_not_share_values():
    """No process-wide table of flags changes either."""
    before = set(absl_flags.FLAGS)
    first, second = _define(), _define()
    first.Parse(["--house=A", "--brush=a"])
    second.Parse(["--house=B"])
    assert (first.house, first.brush, second.house, second.brush) == ("A", ["a"], "B", [])
    assert set(absl_flags.FLAGS) == before
