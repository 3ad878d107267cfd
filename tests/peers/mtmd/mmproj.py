#!/usr/bin/env python3
"""Write an mmproj GGUF of MiniCPM-V's vision tower at true size with random weights, for llama.cpp's mtmd.

Needs PyPI `gguf` and `numpy`. A tensor's values depend on its name only, so files of different types and modes hold
the same model. Types follow llama.cpp's converter: norms, biases and the position table f32; matrices of the given type,
f16 where a row is no whole number of blocks (4304 is not a multiple of 32); the patch kernel f16, or f32 beside others.
"""

import argparse
import zlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

WIDTH, INNER, LAYERS, HEADS, PATCH = 1152, 4304, 27, 16, 14
POSITIONS = 70 * 70
INSERT_LAYER = 6  # the window merger runs after this layer
CROP = 448
EPS = 1e-6
TYPES = {"f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0, "f32": Type.F32}
FILE_TYPES = {
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "f32": gguf.LlamaFileType.ALL_F32,
}


def shapes(mode, out):
    """Names and shapes (numpy order: rows first) of all tensors."""

    def linear(name, rows, cols):
        yield f"{name}.weight", (rows, cols)
        yield f"{name}.bias", (rows,)

    def norm(name, width):
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    def attention(name):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from linear(f"{name}.{part}", WIDTH, WIDTH)

    yield "v.patch_embd.weight", (WIDTH, 3, PATCH, PATCH)
    yield "v.patch_embd.bias", (WIDTH,)
    yield "v.position_embd.weight", (POSITIONS, WIDTH)
    for layer in range(LAYERS):
        block = f"v.blk.{layer}"
        yield from norm(f"{block}.ln1", WIDTH)
        yield from attention(block)
        yield from norm(f"{block}.ln2", WIDTH)
        yield from linear(f"{block}.ffn_up", INNER, WIDTH)
        yield from linear(f"{block}.ffn_down", WIDTH, INNER)
    yield from norm("v.post_ln", WIDTH)
    if mode == "16x":
        yield from norm("v.vit_merger.ln1", WIDTH)
        yield from attention("v.vit_merger")
        yield from norm("v.vit_merger.ds_ln", 4 * WIDTH)
        yield from linear("v.vit_merger.ds_ffn_up", 4 * INNER, 4 * WIDTH)
        yield from linear("v.vit_merger.ds_ffn_down", WIDTH, 4 * INNER)
    yield from norm("mm.input_norm", 4 * WIDTH)
    yield from linear("mm.up", 4 * WIDTH, 4 * WIDTH)
    yield from linear("mm.down", out, 4 * WIDTH)


def type_of(name, shape, wanted):
    if len(shape) == 1 or name == "v.position_embd.weight":
        return Type.F32
    if name == "v.patch_embd.weight":
        return Type.F16 if wanted == Type.F16 else Type.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else Type.F16


def values(name, shape):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    noise = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) > 1:
        return noise / np.sqrt(np.prod(shape[1:]), dtype=np.float32)
    is_norm = name.endswith(".weight")
    return np.float32(1.0 if is_norm else 0.0) + np.float32(0.02) * noise


def bytes_of(shape, tensor_type):
    block, size = gguf.GGML_QUANT_SIZES[tensor_type]
    return int(np.prod(shape)) // block * size


def write(path, type_name, mode, out):
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name(f"MiniCPM-V vision tower, random weights, {mode}")
    writer.add_file_type(FILE_TYPES[type_name])
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "minicpmv4_6")
    writer.add_bool("clip.use_gelu", True)
    writer.add_uint32("clip.vision.image_size", CROP)
    writer.add_uint32("clip.vision.patch_size", PATCH)
    writer.add_uint32("clip.vision.embedding_length", WIDTH)
    writer.add_uint32("clip.vision.feed_forward_length", INNER)
    writer.add_uint32("clip.vision.block_count", LAYERS)
    writer.add_uint32("clip.vision.attention.head_count", HEADS)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", EPS)
    writer.add_uint32("clip.vision.projection_dim", out)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    writer.add_uint32("clip.vision.projector.scale_factor", {"16x": 4, "4x": 2}[mode])
    writer.add_array("clip.vision.wa_layer_indexes", [INSERT_LAYER])

    tensors = [(name, shape, type_of(name, shape, TYPES[type_name])) for name, shape in shapes(mode, out)]
    for name, shape, tensor_type in tensors:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), bytes_of(shape, tensor_type), tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, tensor_type in tensors:
        writer.write_tensor_data(gguf.quants.quantize(values(name, shape), tensor_type))
    writer.close()
    parameters = sum(int(np.prod(shape)) for _, shape, _ in tensors)
    print(f"{path}: {len(tensors)} tensors, {parameters} parameters, {mode}, {type_name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path")
    parser.add_argument("--type", choices=TYPES, default="f16")
    parser.add_argument("--mode", choices=("16x", "4x"), default="16x")
    parser.add_argument("--out", type=int, default=2048, help="width of the text model (default: 2048)")
    arguments = parser.parse_args()
    write(arguments.path, arguments.type, arguments.mode, arguments.out)


if __name__ == "__main__":
    main()
