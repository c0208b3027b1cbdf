"""Goldens: `preprocess.npz` holds patches of the released image processor before normalisation."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from k3jax.chat.encoder import encode_chat, expand_media_pads
from k3jax.chat.image import Background, ImageProcessor, image_prompt
from k3jax.chat.image_source import open_image
from k3jax.chat.tokenizer import Tokenizer
from tests.chat.inputs import GOLDEN, golden_json

SPEC = golden_json("preprocess/preprocess.json")
RELEASE = ImageProcessor.from_config(SPEC["release_media_proc_cfg"])


def test_the_defaults_are_the_release():
    assert ImageProcessor() == RELEASE


@pytest.mark.parametrize("case", SPEC["images"], ids=lambda case: case["name"])
def test_patches_match_the_goldens_bit_for_bit(case):
    with np.load(GOLDEN / "preprocess" / "preprocess.npz") as arrays:
        pixels, grid, patches = (
            arrays[f"{case['name']}_{part}"] for part in ("image", "grid", "pixels_u8")
        )
    processor = ImageProcessor.from_config(SPEC[f"{case['media_proc_cfg']}_media_proc_cfg"])
    np.testing.assert_array_equal(processor.patches(Image.fromarray(pixels))[0], patches)
    processed = processor.process(pixels)
    assert processed.pixel_values.dtype == np.float32
    np.testing.assert_array_equal(
        processed.pixel_values, (patches / 255.0).astype(np.float32) * np.float32(2) - 1
    )
    assert processed.grid == tuple(grid[0])
    assert processed.num_tokens == case["resize"]["num_tokens"]
    assert processed.prompt == case["prompt"]


@pytest.mark.parametrize("row", SPEC["resize_table"], ids=lambda row: f"{row[0]}x{row[1]}")
def test_sizes_match_the_goldens(row):
    width, height, expected = row
    expected = {key: value for key, value in expected.items() if key != "sampled_nframes"}
    assert RELEASE.resize_plan(width, height)._asdict() == expected


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_any_size_fits_the_grid_and_the_side_limit(width, height):
    plan = RELEASE.resize_plan(width, height)
    full = (plan.new_width + plan.pad_width, plan.new_height + plan.pad_height)
    assert full[0] % 28 == full[1] % 28 == 0 and max(full) <= 512 * 14
    assert plan.num_tokens == full[0] * full[1] // 784
    assert 1 <= plan.new_width <= width and 1 <= plan.new_height <= height


@settings(max_examples=20)
@given(st.integers(1, 61), st.integers(1, 61), st.sampled_from([3, 4]), st.integers(0, 99))
def test_patches_tile_the_padded_image(width, height, channels, seed):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
    if channels == 4:
        pixels[..., 3] = 255
    patches, (_, rows, columns) = ImageProcessor().patches(Image.fromarray(pixels))
    image = patches.reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2)
    image = image.reshape(rows * 14, columns * 14, 3)
    np.testing.assert_array_equal(image[:height, :width], pixels[..., :3])
    assert not image[height:].any() and not image[:, width:].any()


def test_transparent_pixels_show_the_chessboard():
    clear = np.zeros((19, 17, 4), np.uint8)
    image = ImageProcessor().patches(Image.fromarray(clear))[0][:1, 0]
    assert (image[0, :8, :8] == 255).all() and (image[0, :8, 8:] == 180).all()
    assert (image[0, 8:, :8] == 180).all() and (image[0, 8:, 8:] == 255).all()
    flipped = replace(ImageProcessor(), background=Background(white_first=False))
    assert (flipped.patches(Image.fromarray(clear))[0][0, 0, :8, :8] == 180).all()
    for pattern, level in (("white", 255), ("black", 0), ("gray", 128)):
        config = {"transparent_bg_config": {"pattern": pattern}}
        plain = ImageProcessor.from_config(config)
        assert (plain.patches(Image.fromarray(clear))[0][0, 0, :17, :14] == level).all()
    dropped = replace(ImageProcessor(), background=None)
    assert not dropped.patches(Image.fromarray(clear))[0].any()


def test_filling_before_resizing_changes_a_shrunk_image():
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (40, 300, 4), np.uint8))
    after = ImageProcessor.from_config(SPEC["small_media_proc_cfg"])
    before = replace(after, fill_before_resize=True)
    assert (after.patches(image)[0] != before.patches(image)[0]).any()


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_bytes_paths_arrays_and_images_agree(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (9, 31, 3), np.uint8)
    image = Image.fromarray(pixels)
    (tmp_path / "image.png").write_bytes(encoded(image))
    expected = ImageProcessor().process(pixels).pixel_values
    for source in (image, encoded(image), tmp_path / "image.png", str(tmp_path / "image.png")):
        processed = ImageProcessor().process(source)
        np.testing.assert_array_equal(processed.pixel_values, expected)
        assert (processed.width, processed.height) == (31, 9)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "I;16", "F"])
def test_other_modes_become_three_channels(mode):
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("RGBA")
    image = image.convert("L").convert(mode) if mode in ("I;16", "F") else image.convert(mode)
    assert ImageProcessor().process(image).pixel_values.shape == (4, 3, 14, 14)


def test_a_palette_colour_can_be_transparent():
    image = Image.new("P", (8, 8), 0)
    image.putpalette([10, 20, 30] * 256)
    opaque = ImageProcessor().patches(image)[0][0, :, 0, 0]
    image.info["transparency"] = 0
    assert opaque.tolist() == [10, 20, 30]
    assert ImageProcessor().patches(image)[0][0, :, 0, 0].tolist() == [255, 255, 255]


NOISE = np.random.default_rng(2).integers(0, 256, (64, 64, 3), np.uint8)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (b"", "image of 0 bytes is in no known image format"),
        (b"GIF89a nonsense", "cannot be read|no known image format"),
        (encoded(Image.fromarray(NOISE))[:2000], "image of 2000 bytes cannot be read"),
        (encoded(Image.fromarray(NOISE), "JPEG")[:900], "image of 900 bytes cannot be read"),
        ("no/such/image.png", "image no/such/image.png does not exist"),
        (np.zeros((4, 4, 3), np.float32), r"must be uint8 .*, not float32 \[4, 4, 3\]"),
        (np.zeros((4, 4, 2), np.uint8), r"not uint8 \[4, 4, 2\]"),
        (np.zeros((0, 4, 3), np.uint8), r"not empty, not uint8 \[0, 4, 3\]"),
        (Image.new("RGB", (0, 3)), "image is empty: 0x3 pixels"),
    ],
)
def test_a_broken_image_is_named(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        ImageProcessor().process(source)


def test_a_folder_is_no_image(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        open_image(tmp_path)


def test_a_checkpoint_folder_configures_the_processor(tmp_path):
    assert ImageProcessor.from_dir(tmp_path) == ImageProcessor()
    vision = {"patch_size": 7, "merge_kernel_size": [2, 2]}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": vision}))
    assert ImageProcessor.from_dir(tmp_path) == ImageProcessor(patch_size=7)
    config = tmp_path / "preprocessor_config.json"
    config.write_text(json.dumps({"media_proc_cfg": SPEC["small_media_proc_cfg"]}))
    assert ImageProcessor.from_dir(tmp_path).in_patch_limit == 30
    config.write_text(json.dumps({"media_proc_cfg": {}}))
    bare = ImageProcessor.from_dir(tmp_path)
    assert bare.background is None and bare.fill_before_resize


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"patch_size": 0}, "patch_size must be a positive integer, not 0"),
        ({"merge_kernel_size": [2, 3]}, r"merge_kernel_size must be .*, not \[2, 3\]"),
        ({"image_std": [1, 0, 1]}, "image_std must be three numbers"),
        ({"image_mean": "half"}, "image_mean must be three numbers"),
        ({"fixed_output_tokens": 9}, "fixed_output_tokens is set"),
        ({"transparent_bg_fill_stage": "never"}, "transparent_bg_fill_stage 'never' is unknown"),
        ({"transparent_bg_config": {"pattern": "dots"}}, "pattern 'dots' is unknown"),
    ],
)
def test_a_bad_config_names_the_field_and_file(tmp_path, config, complaint):
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"media_proc_cfg": config}))
    with pytest.raises(ValueError, match=rf"preprocessor_config\.json: .*{complaint}"):
        ImageProcessor.from_dir(tmp_path)


def test_a_config_without_its_block_is_named(tmp_path):
    for text in ("{}", "[]", "{"):
        (tmp_path / "preprocessor_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
            ImageProcessor.from_dir(tmp_path)


def test_a_prompt_has_one_id_per_image_feature():
    tokenizer = Tokenizer.from_dir(GOLDEN / "chat")
    images = [ImageProcessor().process(np.zeros(shape, np.uint8)) for shape in ((29, 57), (1, 1))]
    content = [{"type": "image"}, {"type": "text", "text": "<|media_pad|>"}, {"type": "image_url"}]
    ids = encode_chat(
        tokenizer,
        [{"role": "user", "content": content}],
        image_prompts=[image.prompt for image in images],
    )
    ids = expand_media_pads(tokenizer, ids, [image.num_tokens for image in images])
    assert ids.count(tokenizer.special_ids["<|media_pad|>"]) == 6 + 1
    assert image_prompt(57, 29) in tokenizer.decode(ids).replace(
        "<|media_pad|>" * 6, "<|media_pad|>"
    )
