"""Whether this environment's transformers is one that hf_clover works with: `python tests/try_version.py`.

Contract: asks `hf-clover env`, then lets the stand-in complete three functions with its heads and trees of 24 nodes.
It must write plain generate's text, with more than 4 tokens per forward, and nothing may be said on stderr of a name
that transformers has given up. The exit code is 1 where one of these fails. The nightly job runs it with the newest
versions.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "examples" / "stand_in"
PROMPTS = ("def days_in_month(year, month):", "def quantile(data, n=4):", "def parse_header(line):")
ENV = "import sys; sys.argv = ['hf-clover', 'env']; from hf_clover.cli import main; main()"
COMPLETE = f"""
import torch, transformers, hf_clover
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(STAND_IN / "target")!r})
target = AutoModelForCausalLM.from_pretrained({str(STAND_IN / "target")!r}, dtype="float32")
heads = AutoModel.from_pretrained({str(STAND_IN / "heads")!r}, dtype="float32")
tokens = forwards = 0
for prompt in {PROMPTS!r}:
    inputs = tokenizer(prompt, return_tensors="pt")
    options = dict(max_new_tokens=128, return_dict_in_generate=True)
    plain = target.generate(**inputs, **options).sequences
    out = target.generate(**inputs, **options, assistant_model=heads, num_assistant_tokens=24)
    assert torch.equal(out.sequences, plain), "another text than plain generate's"
    assert out.speculation.method == "tree", out.speculation.reason
    tokens += out.speculation.new_tokens
    forwards += out.speculation.target_forwards
print(f"transformers {{transformers.__version__}}: the stand-in has {{tokens / forwards:.2f}} tokens per forward")
assert tokens > 4 * forwards
"""


def main() -> int:
    failed = 0
    for name, code in (("env", ENV), ("the stand-in", COMPLETE)):
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        shown = [line for line in ran.stdout.splitlines() if "tokens" in line or "transformers" in line]
        print(*shown, sep="\n")
        complaints = [line for line in ran.stderr.splitlines() if "deprecated" in line or "past_key_values" in line]
        if ran.returncode or complaints:
            failed = 1
            print(f"{name} failed:", *complaints, *ran.stderr.splitlines()[-5:], sep="\n", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
