"""``lcjax bench restores`` on a tiny run."""

import json

import pytest

from lcjax import cli


def test_killed_runs_end_where_uninterrupted_ones_do(tmp_path):
    target = tmp_path / "rows.json"
    command = ["bench", "restores", "--quick", "--kills", "3", "--orders", "2"]
    command += ["--presets", "lossless,extreme", "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--json", str(target)]) == 0
    lossless, extreme = json.loads(target.read_text())
    assert lossless["kills"] == extreme["kills"] == 3
    assert lossless["repeated_steps"] > 0 and extreme["repeated_steps"] > 0
    assert lossless["loss"] == lossless["loss_uninterrupted"] == extreme["loss_uninterrupted"]
    assert lossless["difference"] == 0 and lossless["within"] and lossless["spread"] > 0
    # What an extreme restore lost shows: it did not resume from something exact.
    assert extreme["difference"] != 0


@pytest.mark.parametrize("arguments", [["--presets", "best"], ["--orders", "1"], ["--kills", "0"]])
def test_arguments_that_make_no_sense(arguments, tmp_path, capsys):
    command = ["bench", "restores", "--quick", "--out", str(tmp_path / "out"), *arguments]
    assert cli.main(command) == 2
    assert "lcjax bench restores:" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "order0").mkdir()
    (tmp_path / "order0" / "thesis.txt").write_text("mine")
    command = ["bench", "restores", "--quick", "--out", str(tmp_path)]
    assert cli.main(command) == 2
    assert (tmp_path / "order0" / "thesis.txt").read_text() == "mine"
    assert "in the way" in capsys.readouterr().err
