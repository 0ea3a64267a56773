"""Muon, SOAP and KL-Shampoo beside Adam on a GPT of 124M: ``python scripts/bench/gpu.py evidence --text FILE``.

The protocol, written before any run:

- Model: ``gpu_training.GPT``, 12 layers of 768, in Megatron with Transformer Engine, bf16, the distributed optimizer.
- Text: a UTF-8 file of the user's of at least 100 MB. Its first 98 % train; the rest is held out and read at the end.
- Tokenizer: byte-level BPE of 50,256 tokens, made of the training text.
- Training: 1,000 steps of 64 sequences of 1,024 tokens; 5 % warm-up, cosine to a tenth, weight decay 0.1; one seed.
- Runs: Adam at three rates, Muon at two, SOAP and KL-Shampoo at one each; their other settings are the defaults.
- Kept of each run: training losses, held-out loss, seconds of an iteration and memory at its peak.
- Said of it: the held-out loss of each optimizer at its best rate of these. Adam has more tries than the others. Of one
  seed nothing below 0.02 is a difference, and a best rate at the end of its range is no best rate.

A run whose results are there is not made again: the next call goes on with the next run. Results lie in the folder of
``--out``; those to be kept are moved to ``scripts/bench/results/evidence``.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import demo
import numpy as np
from gpu_training import DISTRIBUTED, MUON, command, launch
from gpu_verdicts import ROOT, Run, machine, needs
from training import read_held_out, read_times

KEPT = ROOT / "scripts" / "bench" / "results" / "evidence"
BYTES, VOCABULARY, PIECE = 100e6, 50256, 2**20  # of a text, of a tokenizer, and bytes of a document
STEPS, HELD_OUT_BATCHES, WARM_UP = 1000, 8, 10
SETTINGS = "--split 98,2,0 --weight-decay 0.1 --lr-warmup-fraction 0.05 --seed 1"
SILENT = "--optimizer-metrics-interval 0"
RUNS = {
    **{f"adam-{rate:g}": ("--optimizer adam", rate) for rate in (6e-4, 1.2e-3, 3e-4)},
    **{f"muon-{rate:g}": (MUON, rate) for rate in (6e-4, 1.2e-3)},
    "soap-0.0006": (f"--optimizer soap --soap-precondition-frequency 1 {SILENT}", 6e-4),
    "kl_shampoo-0.0006": (f"--optimizer kl_shampoo {SILENT}", 6e-4),
}
_PEAK = re.compile(r"max allocated: ([\d.]+)")  # in MB


def evidence(run: Run) -> None:
    """Held-out loss of 124M on a text of yours by Adam, Muon, SOAP and KL-Shampoo; only by name, with --text."""
    needs("megatron", "tokenizers")
    if run.on_gpu:
        needs("transformer_engine")
    mark = write_data(run)
    longest = 0.0
    for name, (flags, rate) in RUNS.items():
        found = results_of(name, run)
        if found is None and not run.has_time(name, longest):
            continue
        with run.check(name):
            found = found or train(name, flags, rate, mark, run)
            longest = max(longest, found["seconds"])
            run.figures[name] = found
            reason = f"rate {rate:g}, one seed, {found['ms']:.3g} ms an iteration, {found['GiB']} GiB at the peak"
            run.tell(name, found["held out"], "nats", reason)


def results_of(name: str, run: Run) -> dict[str, Any] | None:
    """What an earlier call found."""
    for folder in (KEPT, run.out / "evidence"):
        path = folder / f"{name}.json"
        if path.exists() and not (run.tiny and folder == KEPT):
            found: dict[str, Any] = json.loads(path.read_text())
            return found
    return None


def train(name: str, flags: str, rate: float, mark: str, run: Run) -> dict[str, Any]:
    """Make a run, and write its results."""
    steps = 4 if run.tiny else STEPS
    folder = run.out / "evidence"
    start = time.monotonic()
    data = f"--data-path {folder}/text --data-cache-path {folder}/cache"
    held_out = f"--eval-iters {1 if run.tiny else HELD_OUT_BATCHES} --eval-interval {steps}"
    rates = f"--lr {rate} --min-lr {rate / 10}"
    given = command(run, f"{DISTRIBUTED} {SETTINGS} {data} {held_out} {rates} {flags}", steps)
    lines = launch(run, name, given, CUDA_DEVICE_MAX_CONNECTIONS="1").splitlines()
    peaks = [float(found) for line in lines for found in _PEAK.findall(line)]
    results = {
        "flags": given,
        "text": mark,
        "losses": demo.read_losses(lines, 1, steps),
        "held out": read_held_out(lines),
        "ms": 1e3 * median(read_times(lines)[1 if run.tiny else WARM_UP :]),
        "GiB": max(peaks, default=0) / 1024 or None,
        "seconds": time.monotonic() - start,
        "machine": machine(run.device),
    }
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    return results


def write_data(run: Run) -> str:
    """Write the tokens of the text as Megatron reads them, unless they are there; the hash of the text.

    Raises:
        ValueError: there is no text, or it is too short.
    """
    if run.text is None and not run.tiny:
        raise ValueError("evidence needs --text FILE, of at least 100 MB")
    pages = [run.text] if run.text else sorted(Path(ROOT, "docs").glob("*.md"))
    text = b"".join(path.read_bytes() for path in pages)
    if len(text) < BYTES and not run.tiny:
        raise ValueError(f"evidence needs a text of {BYTES / 1e6:.0f} MB, got {len(text) / 1e6:.1f} MB of {run.text}")
    folder = run.out / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    mark = hashlib.sha256(text).hexdigest()
    stamp = folder / "mark"
    if not stamp.exists() or stamp.read_text() != mark:
        _write_tokens(list(documents(text, PIECE // 256 if run.tiny else PIECE)), folder / "text", run.tiny)
        stamp.write_text(mark)
    return mark


def documents(text: bytes, size: int) -> Iterator[str]:
    """Whole lines of about so many bytes."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + size) + 1 or len(text)
        yield text[start:end].decode(errors="replace")
        start = end


def _write_tokens(texts: list[str], prefix: Path, tiny: bool) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size = 256 if tiny else VOCABULARY
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts[: len(texts) * 98 // 100], trainer)
    tokenizer.save(f"{prefix}-tokenizer.json")
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.uint16)
    for encoded in tokenizer.encode_batch(texts):
        builder.add_document(np.array(encoded.ids, dtype=np.uint16), lengths=[len(encoded.ids)])
    builder.finalize(get_idx_path(str(prefix)))
