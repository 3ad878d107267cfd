#!/usr/bin/env python3
"""Writes the small pictures of this folder, and what Pillow makes of them, with Pillow 13.0 and numpy.

Usage: make.py. Every NAME.{png,jpg,webp} gets a NAME.rgb: ImageOps.exif_transpose(picture).convert("RGB"), raw bytes after
a line "WIDTH HEIGHT". The exception is grey16.png: Pillow clamps 16-bit grey to 255 unscaled, so its .rgb is the upper byte.
Deterministic but for the encoders of the Pillow in use.
"""
import pathlib, struct, zlib
import numpy as np
from PIL import Image, ImageOps

here = pathlib.Path(__file__).parent
W, H = 23, 17  # odd, so that rows of 1, 2 and 4 bits end inside a byte
y, x = np.mgrid[0:H, 0:W]
rng = np.random.default_rng(7)


def png(name, depth, kind, samples, extra=b"", palette=None):
    """Pillow writes no 2-bit grey or 16-bit colour: chunks by hand. `samples` is (H, W, channels)."""
    def chunk(tag, data):
        return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))
    rows = b""
    for row in samples.reshape(H, -1):
        if depth == 16:
            rows += b"\0" + row.astype(">u2").tobytes()
        else:
            bits = "".join(format(int(v), f"0{depth}b") for v in row)
            bits += "0" * (-len(bits) % 8)
            rows += b"\0" + bytes(int(bits[i:i + 8], 2) for i in range(0, len(bits), 8))
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", W, H, depth, kind, 0, 0, 0))
    if palette is not None:
        data += chunk(b"PLTE", palette.astype(np.uint8).tobytes())
    data += extra and chunk(b"tRNS", extra)
    (here / name).write_bytes(data + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


for depth in (1, 2, 4, 8):
    png(f"grey{depth}.png", depth, 0, rng.integers(0, 1 << depth, (H, W)))
png("grey8_key.png", 8, 0, rng.integers(0, 256, (H, W)), extra=b"\0\x80")
grey16 = rng.integers(0, 65536, (H, W))
png("grey16.png", 16, 0, grey16)
for depth in (1, 2, 4, 8):
    n = 1 << depth
    png(f"palette{depth}.png", depth, 3, rng.integers(0, n, (H, W)), extra=bytes(range(0, 256, 256 // n)),
        palette=rng.integers(0, 256, (n, 3)))
png("rgb8_key.png", 8, 2, rng.integers(0, 256, (H, W, 3)), extra=b"\0\x01\0\x02\0\x03")
png("rgb16.png", 16, 2, rng.integers(0, 65536, (H, W, 3)))
png("grey8_alpha.png", 8, 4, rng.integers(0, 256, (H, W, 2)))
png("grey16_alpha.png", 16, 4, rng.integers(0, 65536, (H, W, 2)))
png("rgb8_alpha.png", 8, 6, rng.integers(0, 256, (H, W, 4)))
png("rgb16_alpha.png", 16, 6, rng.integers(0, 65536, (H, W, 4)))

rgb = Image.fromarray(rng.integers(0, 256, (H, W, 3)).astype(np.uint8))
exif = Image.Exif()
exif[0x0112] = 6
rgb.save(here / "exif6.png", exif=exif)
rgba = Image.fromarray(rng.integers(0, 256, (H, W, 4)).astype(np.uint8))
rgba.save(here / "lossless_alpha.webp", lossless=True, exact=True)
rgb.save(here / "lossless_exif6.webp", lossless=True, exif=exif)

# Decoders of lossy formats may differ a little: smooth pictures.
smooth = Image.fromarray(np.stack([x * 11, y * 15, (x + y) * 6], -1).astype(np.uint8))
smooth.save(here / "lossy.webp", quality=90)
smooth.save(here / "rgb444.jpg", quality=92, subsampling=0)
smooth.save(here / "rgb420_progressive.jpg", quality=92, subsampling=2, progressive=True)
smooth.convert("L").save(here / "grey.jpg", quality=92)
smooth.convert("CMYK").save(here / "cmyk.jpg", quality=92)

for f in sorted(here.glob("*.*")):
    if f.suffix not in (".png", ".jpg", ".webp"):
        continue
    picture = ImageOps.exif_transpose(Image.open(f)).convert("RGB")
    pixels = np.array(picture)
    if f.name == "grey16.png":
        pixels = np.repeat((grey16 >> 8).astype(np.uint8)[..., None], 3, -1)
    f.with_suffix(f.suffix + ".rgb").write_bytes(f"{picture.width} {picture.height}\n".encode() + pixels.tobytes())
