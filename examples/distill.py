"""Heal a model that has lost a layer: the original is its teacher, and text that every Python has is all it reads.

A stored teacher comes first: it is asked once and read from disk, and need not be there while the student learns.
"""

import copy
import sys
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfkv_distill import DistillationConfig, DistillationTrainer, store_teacher_logits

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20
tokenizer = AutoTokenizer.from_pretrained(name)
teacher = AutoModelForCausalLM.from_pretrained(name, dtype="float32")

student = copy.deepcopy(teacher)
lost = student.config.num_hidden_layers // 2
del student.model.layers[lost]
student.config.num_hidden_layers -= 1
for index, layer in enumerate(student.model.layers):
    layer.self_attn.layer_idx = index

ids = torch.tensor(tokenizer("\n".join(topics[key] for key in sorted(topics))[:60_000]).input_ids)
examples = [{"input_ids": part} for part in ids[: len(ids) // 128 * 128].split(128)]
train, held_out = examples[:-8], examples[-8:]

with tempfile.TemporaryDirectory() as folder:
    stored = store_teacher_logits(
        teacher, train[: 4 * steps], f"{folder}/teacher", processing_class=tokenizer, top_k=64
    )
    arguments = DistillationConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=5e-4,
        warmup_steps=2,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    # held-out text is measured with the teacher itself, all outcomes of it
    measured = DistillationTrainer(student, teacher, arguments, eval_dataset=held_out, processing_class=tokenizer)
    before = measured.evaluate()
    DistillationTrainer(student, None, arguments, train_dataset=stored, processing_class=tokenizer).train()
    after = measured.evaluate()

for when, found in {"before": before, "after": after}.items():
    kl, top1, perplexity = (found[f"eval_{key}"] for key in ("kl", "top1", "perplexity"))
    print(f"{when:6}  KL {kl:.4f}  top 1 {top1:.1%}  perplexity {perplexity:.2f}")
