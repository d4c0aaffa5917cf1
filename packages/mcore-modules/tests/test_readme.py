import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(example, str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.split() == ["torch.bfloat16", "torch.float32", "layer.weight"]
