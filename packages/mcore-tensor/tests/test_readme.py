import re
from pathlib import Path


def test_the_example_of_the_readme_runs_and_prints_what_it_says(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    expected = re.findall(r"print\(.*\)  # (.*)", example)
    assert expected
    assert capsys.readouterr().out.splitlines() == expected
