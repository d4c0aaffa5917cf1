import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    text = README.read_text()
    [example], [printed] = (
        re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL) for kind in ("python", "text")
    )
    exec(compile(example, str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == printed
