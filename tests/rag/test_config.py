"""Settings of the whole pipeline: a file, then the environment, then flags; one line for whatever names nothing."""

from pathlib import Path
from typing import Annotated

import pytest
import typer
import yaml

from kvfoundry.cli.rag.config import Settings, read_assignments, read_config, read_environment, template
from kvfoundry.cli.rag.steps import Step
from kvfoundry.errors import DataError


def gather(
    data: Annotated[Path | None, typer.Option(help="The file.")] = None,
    k: Annotated[int, typer.Option(help="How many.")] = 5,
    words: Annotated[list[str] | None, typer.Option(help="Some words.")] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("results/gathered"),
    as_json: Annotated[bool, typer.Option(help="JSON.")] = False,
) -> dict[str, Path]:
    """A first step."""
    return {"gathered": out / "file.json"}


def tell(
    gathered: Annotated[Path | None, typer.Option(help="What the first step wrote.")] = None,
    k: Annotated[int, typer.Option(help="How many.")] = 5,
    loud: Annotated[bool, typer.Option(help="In capitals.")] = False,
    pages: Annotated[Path, typer.Option(help="Where the pages go.")] = Path("results/told/pages"),
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("results/told"),
    as_json: Annotated[bool, typer.Option(help="JSON.")] = False,
) -> None:
    """A second step."""


GATHER, TELL = Step("gather", gather), Step("tell", tell)


@pytest.fixture
def settings():
    return Settings((GATHER, TELL))


def written(tmp_path, text):
    path = tmp_path / "rag.yaml"
    path.write_text(text)
    return path


def test_what_nobody_sets_is_the_default_of_the_command(settings):
    assert settings.of(GATHER, {}) == {"data": None, "k": 5, "words": None, "out": Path("results/gathered")}


def test_the_later_source_wins_and_a_section_wins_over_all_steps(settings, tmp_path):
    read_config(settings, written(tmp_path, "k: 3\ntell:\n  k: 4\n  loud: true\ngather:\n  words: [a, b]\n"))
    assert settings.of(GATHER, {})["k"] == 3 and settings.of(TELL, {})["k"] == 4
    assert settings.of(TELL, {})["loud"] is True and settings.of(GATHER, {})["words"] == ["a", "b"]
    read_environment(
        settings, {"KVFOUNDRY_RAG_K": "6", "KVFOUNDRY_RAG_TELL_K": "7", "HOME": "x", "KVFOUNDRY_CACHE": "y"}
    )
    assert settings.of(GATHER, {})["k"] == 6 and settings.of(TELL, {})["k"] == 7
    read_assignments(settings, ["tell.k=8", "k=9", "tell.loud=no", "gather.words=c, d"])
    assert settings.of(GATHER, {})["k"] == 9 and settings.of(TELL, {}) | {"gathered": None} == {
        "gathered": None, "k": 8, "loud": False, "pages": Path("results/told/pages"), "out": Path("results/told"),
    }  # fmt: skip
    assert settings.of(GATHER, {})["words"] == ["c", "d"]


def test_steps_hand_on_what_they_made_unless_another_is_named(settings, tmp_path):
    made = {"gathered": Path("made.json")}
    assert settings.of(TELL, made)["gathered"] == Path("made.json")
    read_assignments(settings, [f"tell.gathered={tmp_path}/other.json"])
    assert settings.of(TELL, made)["gathered"] == tmp_path / "other.json"


def test_one_folder_holds_a_folder_of_each_step(settings):
    settings.set(None, "out", "elsewhere", "--out")
    assert settings.of(GATHER, {})["out"] == Path("elsewhere/gathered")
    told = settings.of(TELL, {})
    assert told["out"] == Path("elsewhere/told") and told["pages"] == Path("elsewhere/told/pages")
    settings.set("tell", "pages", "here", "--set")
    assert settings.of(TELL, {})["pages"] == Path("here")


def test_the_template_explains_every_setting_and_reads_back(settings, tmp_path):
    read_assignments(settings, ["k=2", "tell.loud=yes"])
    text = template(settings)
    assert all(option.text in text for step in settings.steps for option in step.options.values())
    again = Settings((GATHER, TELL))
    read_config(again, written(tmp_path, text))
    assert (again.common, again.own) == (settings.common, settings.own)
    assert yaml.safe_load(text)["k"] == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tel:\n  k: 3\n", "unknown step 'tel'; did you mean 'tell'?"),
        ("tell:\n  lout: true\n", "unknown setting 'lout'"),
        ("loud: true\n", "unknown setting 'loud'"),
        ("k: many\n", "k='many': input should be a valid integer"),
        ("tell:\n  loud: 7\n", "tell.loud=7"),
        ("tell: 3\n", "tell is a step"),
        ("- a\n", "holds no settings"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_a_bad_file_is_told_in_one_line(text, says, settings, tmp_path):
    with pytest.raises(DataError) as error:
        read_config(settings, written(tmp_path, text))
    assert says in str(error.value) and "\n" not in str(error.value) and "rag.yaml" in str(error.value)


def test_a_missing_file_a_bad_variable_and_a_bad_assignment_are_told(settings, tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_config(settings, tmp_path / "none.yaml")
    with pytest.raises(DataError, match="KVFOUNDRY_RAG_TELL_KK: unknown setting 'kk'"):
        read_environment(settings, {"KVFOUNDRY_RAG_TELL_KK": "1"})
    with pytest.raises(DataError, match=r"--set 'k' is not of the form"):
        read_assignments(settings, ["k"])
