"""Train the demo model, a Llama of 1.2 million parameters, and its tokenizer on a plain text.

    python train_demo.py bible.txt FOLDER

Blank lines of the text separate its documents. Every twentieth document is held out: neither the
tokenizer nor the model is trained on it. rope_server/demo/README.md names the text
of the demo model.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"  # between documents
TOKENS = 2048
CONTEXT = 512
HELD_OUT = 10  # of every twenty documents
BATCH = 4
STEPS = 3000
PEAK_RATE = 4e-3
REPORT_EVERY = 250
# A chat is a document whose lines are the messages; the reply is the lines that follow.
CHAT = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, chat_template=CHAT
    )


def encode(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the tokens of all documents in one row, an END after each."""
    return torch.tensor(tokenizer.encode("".join(text + END for text in documents)))


def new_model() -> LlamaForCausalLM:
    """Return an untrained Llama whose two heads of keys serve four of queries."""
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def perplexity(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Return the perplexity of the tokens in windows side by side."""
    windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, 1, CONTEXT)
    with torch.no_grad():
        losses = [model(input_ids=window, labels=window).loss for window in windows]
    return torch.stack(losses).mean().exp().item()


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> None:
    """Update the weights by the gradient of one batch of random windows."""
    starts = torch.randint(len(tokens) - CONTEXT, (BATCH,))
    batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
    with torch.autocast("cpu", torch.bfloat16):  # a third faster than float32
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(training: torch.Tensor, held_out: torch.Tensor, folder: Path) -> None:
    """Train a new model, and save its weights in bfloat16 after each report."""
    model = new_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, STEPS, pct_start=0.05, cycle_momentum=False
    )
    for step in range(1, STEPS + 1):
        train_step(model, optimizer, training)
        schedule.step()
        if step % REPORT_EVERY == 0:
            print(f"step {step}: perplexity {perplexity(model, held_out):.2f}", flush=True)
            copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    """Train, save, and print the perplexity of the held-out documents and a sample."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path, help="documents between blank lines")
    parser.add_argument("folder", type=Path, help="where the model is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order: the same weights again on the same machine
    torch.manual_seed(0)

    documents = arguments.text.read_text().strip().split("\n\n")
    training = [text for index, text in enumerate(documents) if index % 20 != HELD_OUT]
    tokenizer = train_tokenizer(training)
    tokenizer.save_pretrained(arguments.folder, save_jinja_files=False)
    held_out = encode(documents[HELD_OUT::20], tokenizer)
    train(encode(training, tokenizer), held_out, arguments.folder)

    saved = LlamaForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32)
    print(f"perplexity of the saved weights: {perplexity(saved, held_out):.2f}")
    prompt = tokenizer("And it came to pass", return_tensors="pt")
    sample = saved.generate(**prompt, do_sample=True, temperature=0.8, max_new_tokens=200)
    print(tokenizer.decode(sample[0]))


if __name__ == "__main__":
    main()
