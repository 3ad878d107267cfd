"""Time of one 448 x 448 crop in transformers' own vision tower of MiniCPM-V 4.7 at its true size, random weights.

    pip install torch transformers==5.24.0
    python vision.py [--threads 2] [--rounds 5]

Beside it: `forerun bench --vision --threads 2 --rounds 5 --model FILE`, with a FILE of the true shape
(`forerun-quant synth --shape 35b-a3b --layers 4 ...`). Prints medians and every round, in milliseconds.
"""

import argparse
import statistics
import time

import torch
from transformers.models.minicpmv4_7 import configuration_minicpmv4_7 as configuration
from transformers.models.minicpmv4_7 import modeling_minicpmv4_7 as modeling

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
args = parser.parse_args()
torch.set_num_threads(args.threads)
torch.manual_seed(0)

vision = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=980,
              patch_size=14, insert_layer_id=6)
config = configuration.MiniCPMV4_7Config(vision_config=vision, text_config={"hidden_size": 2048})
vision_config = config.vision_config
vision_config._attn_implementation = "sdpa"
tower = modeling.MiniCPMV4_7VisionModel(vision_config).eval()
merger = modeling.MiniCPMV4_7Merger(config).eval()
side = 448 // 14
target = torch.tensor([[side, side]], dtype=torch.int32)
small = torch.tensor([[side // 2, side // 2]], dtype=torch.int32)
# Patches side by side, as the processor lays them out.
pixels = torch.rand(1, 3, 14, 14 * side * side) * 2 - 1

for dtype in (torch.float32, torch.bfloat16):
    tower.to(dtype)
    merger.to(dtype)
    for name, x16 in (("16x", True), ("4x", False)):
        times = []
        with torch.inference_mode():
            for _ in range(args.rounds + 1):
                start = time.perf_counter()
                hidden = tower(pixels.to(dtype), target_sizes=target, use_vit_merger=x16).last_hidden_state
                merger(hidden, small if x16 else target)
                times.append((time.perf_counter() - start) * 1e3)
        times = times[1:]
        rounds = ", ".join(f"{t:.0f}" for t in times)
        print(f"{name} {str(dtype).removeprefix('torch.')}: median {statistics.median(times):.0f} ms, rounds {rounds}", flush=True)
