"""
Distil Clover heads from a target. The same program as `hf-clover train`:

    python examples/train.py --config examples/configs/qwen3-0.6b.yaml
    accelerate launch --config_file examples/accelerate/multi_gpu.yaml examples/train.py --config FILE
"""

from hf_clover.training.script import main

if __name__ == "__main__":
    main()
