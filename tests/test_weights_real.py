"""Real models with quantized weights: saved in shards, moved, and loaded in a process that imports nothing of hfkv."""

from __future__ import annotations

import shutil
import subprocess
import sys

import torch

import hfkv
from hfkv.cli.models import load_model
from hfkv.cli.weights import parse_weights

MODELS = {"smollm2": "rtn-int4", "gemma3-270m": "rtn-int3:group_size=64,symmetric=False"}
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
torch.set_grad_enabled(False)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = torch.load(f"{folder}/given.pt")
    found = [model(given["ids"]).logits, model(given["ids"][:, :1]).logits]
    print(model.config.tie_word_embeddings, *((a - b).abs().max().item() for a, b in zip(found, given["logits"])))
"""


def test_logits_are_equal_in_another_process(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, weights in MODELS.items():
            model, tokenizer = load_model(name, "bfloat16")
            hfkv.quantize_weights(model, parse_weights(weights).config())
            ids = tokenizer("Attention is all you need, they say. " * 12, return_tensors="pt").input_ids
            with torch.no_grad():
                # the decoded weight for a prompt of many rows, a product for one token
                logits = [model(ids).logits, model(ids[:, :1]).logits]
            model.save_pretrained(tmp_path / name, max_shard_size="20MB")
            assert len(list((tmp_path / name).glob("*.safetensors"))) > 3
            torch.save({"ids": ids, "logits": logits}, tmp_path / name / "given.pt")
            shutil.move(tmp_path / name, tmp_path / f"{name}-moved")
    finally:
        torch.set_num_threads(threads)
    folders = [str(tmp_path / f"{name}-moved") for name in MODELS]
    done = subprocess.run([sys.executable, "-c", LOAD, *folders], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    # both models tie their heads to the embeddings, and the logits differ by nothing
    assert done.stdout.split("\n")[:2] == ["True 0.0 0.0"] * 2
