"""Train the small ViT that side_by_side.py compares image classifiers with, in some minutes on one core, and say how many of the
test images it classifies correctly.

    python benchmarks/peers/train_vit.py data/mnist runs/vit
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from see import scaled
from torch.optim.lr_scheduler import OneCycleLR
from transformers import ViTConfig, ViTForImageClassification

from hf_freeze.lab.data.idx import read_images

EPOCHS, BATCH, RATE = 4, 64, 1e-3
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}


def mnist(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, (N, 28, 28), and their classes; `name` is train or t10k."""
    return read_images(folder / f"{name}-images-idx3-ubyte.gz", folder / f"{name}-labels-idx1-ubyte.gz")


def main(data: Path, folder: Path) -> None:
    torch.manual_seed(0)
    images, classes = mnist(data, "train")
    model = ViTForImageClassification(ViTConfig(**SIZES, image_size=28, patch_size=7, num_channels=1, num_labels=10))
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    drawn = torch.cat([torch.randperm(len(images)) for _ in range(EPOCHS + 1)])
    for some in drawn[: steps * BATCH].view(steps, BATCH).numpy():
        labels = torch.tensor(classes[some].astype(int))
        model(pixel_values=torch.from_numpy(scaled(images[some])), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval().save_pretrained(folder)
    images, classes = mnist(data, "t10k")
    with torch.no_grad():
        found = model(pixel_values=torch.from_numpy(scaled(images))).logits.argmax(1).numpy()
    print(f"{(found == classes).mean():.4f} of {len(classes):,} images are classified correctly")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="MNIST", type=Path, help="the folder with its four files")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="for the model")
    options = parser.parse_args()
    main(options.data, options.folder)
