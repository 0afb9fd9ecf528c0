# SPDX-License-Identifier: BSD-3-Clause
"""Show fused_ops at work: `python examples/demo.py [PART ...] [--device cpu] [--output DIR]`.

Without the names of parts it runs those that take seconds on a CPU; svgd_neural_network takes a
minute. Needs the `examples` extra and no network. Exits with 1 if a result is wrong.
"""

import argparse
import importlib
from pathlib import Path

import torch

SHORT = ("metric_learning", "batch_mining", "svgd_density", "svgd_logistic_regression")
PARTS = (*SHORT, "svgd_neural_network")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", type=torch.device, default=default_device)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return arguments


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

    written = []
    for name in arguments.parts or SHORT:
        written += importlib.import_module(name).run(arguments.device, arguments.output)

    print("\nWritten:")
    for path in written:
        print(f"  {path}")


if __name__ == "__main__":
    main()
