"""The README says what is true: every setting has its row, and no row has no setting."""

import re
from pathlib import Path

import pytest

from app.cli import flag
from app.settings import Settings

README = (Path(__file__).parents[1] / "README.md").read_text()


def row(name: str) -> str:
    field = Settings.model_fields[name]
    default = "the user's cache directory" if field.default_factory else field.default
    shown = ",".join(default) if isinstance(default, tuple) else default
    return f"| `{flag(name)}` | `STENO_{name.upper()}` | `{shown}` | {field.description} |"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_its_row(name: str):
    assert row(name) in README.splitlines()


def test_no_row_is_about_a_setting_that_is_gone():
    documented = re.findall(r"^\| `--([a-z-]+)` \|", README, flags=re.MULTILINE)
    assert [name.replace("-", "_") for name in documented] == list(Settings.model_fields)


def test_the_readme_names_commands_that_exist():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", README, flags=re.MULTILINE)):
        name = next(filter(None, target))
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), f"make {name}"
