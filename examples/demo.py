# SPDX-License-Identifier: BSD-3-Clause
"""Show fused_ops at work beside PyTorch: `python examples/demo.py [--device cpu] [--output DIR]`.

Needs the `examples` extra and no network. Exits with 1 if a result is wrong.
"""

import argparse
from pathlib import Path

import metric_learning
import svgd_density
import svgd_logistic_regression
import torch

PARTS = (metric_learning, svgd_density, svgd_logistic_regression)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default_device)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    return parser.parse_args()


def describe(device: torch.device) -> str:
    """The device in words, with what else decides the times."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type}, {torch.get_num_threads()} threads"
    return f"{name}, PyTorch {torch.__version__}"


def main() -> None:
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(f"Device: {describe(arguments.device)}")

    written = [path for part in PARTS for path in part.run(arguments.device, arguments.output)]

    print("\nWritten:")
    for path in written:
        print(f"  {path}")


if __name__ == "__main__":
    main()
