"""The page of Lightning's features is complete."""

import feature_table
from features import FEATURES
from test_capture_idioms import IDIOMS


def test_every_feature_has_a_line_on_the_page() -> None:
    lines = feature_table.PAGE.read_text(encoding="utf-8").splitlines()
    listed = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ") and "runs" not in line]
    assert sorted(listed) == sorted([*FEATURES, *(f"`{name}`" for name in IDIOMS)])
