"""Claims about the file of clusters: what is refused, and that tokens stay where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, EnvironmentProblem, UserError
from penstock.lender import read_clusters

GOOD = """
[[cluster]]
name = "east"
url = "https://east:7337/"
token_env = "EAST"

[[cluster]]
name = "west"
url = "http://127.0.0.1:7337"
token_file = "west.token"
"""
VARIABLES = {"EAST": "pk_east"}


def a_file(folder: Path, text: str = GOOD, token: str = "pk_west\n") -> Path:
    (folder / "west.token").write_text(token)
    path = folder / "clusters.toml"
    path.write_text(text)
    return path


def test_a_file_names_clusters_and_where_their_tokens_are(tmp_path: Path):
    east, west = read_clusters(a_file(tmp_path), VARIABLES)
    assert (east.name, east.url, east.token) == ("east", "https://east:7337", "pk_east")
    assert (west.name, west.token) == ("west", "pk_west")
    assert "pk_" not in repr(east)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[cluster]]", "[[cluster", "is not TOML"),
        (GOOD, "", "is not a list of clusters"),
        (GOOD, 'cluster = "east"', "is not a list of clusters"),
        (GOOD, "[[cluster]]\nname = 'one'", "is not a list of clusters"),
        ('name = "east"', "name = 3", "has an invalid cluster"),
        ('name = "east"', 'name = "east"\ntoken = "pk_east"', "has an invalid cluster"),
        ('name = "east"', 'name = "../east"', "without a valid name and url"),
        ('name = "east"', "", "without a valid name and url"),
        ("https://east:7337/", "east:7337", "without a valid name and url"),
        ('name = "east"', 'name = "west"', "names a cluster twice"),
        ("https://east:7337/", "http://127.0.0.1:7337", "names a cluster twice"),
        ('token_env = "EAST"', "", "does not say where the token"),
        (
            'token_env = "EAST"',
            'token_env = "EAST"\ntoken_file = "west.token"',
            "does not say where the token",
        ),
        ('token_env = "EAST"', 'token_env = "NO_SUCH"', "there is no token for cluster east"),
        ("west.token", "no.token", "cannot read the token of cluster west"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(tmp_path: Path, old: str, new: str, said: str):
    with pytest.raises(UserError, match=said) as caught:
        read_clusters(a_file(tmp_path, GOOD.replace(old, new, 1)), VARIABLES)
    assert caught.value.why and caught.value.fix


def test_an_empty_or_odd_token_is_refused(tmp_path: Path):
    for token in ("", "\n", "pk_\x00x", "schlüssel"):
        with pytest.raises(EnvironmentProblem, match="no token for cluster west"):
            read_clusters(a_file(tmp_path, token=token), VARIABLES)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(EnvironmentProblem, match="cannot read"):
        read_clusters(tmp_path / "none.toml", {})
    (tmp_path / "latin").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match="is not TOML"):
        read_clusters(tmp_path / "latin", {})
