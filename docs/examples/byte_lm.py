# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level language model with every recipe, compiled in one graph.

    python docs/examples/byte_lm.py                      the text of CPython's help topics
    python docs/examples/byte_lm.py --text FILE          any other text
    python docs/examples/byte_lm.py --recipes none,current --steps 50

Each block is ``te.LayerNormLinear`` (norm, then query, key and value), causal attention,
``te.Linear`` (attention output) and ``te.LayerNormMLP``. The same model, started from the same seed
and fed the same batches, is trained once for each recipe. The FP8 runs must end within ``--band``
of the held-out loss of the high-precision run, those in FP4 within twice as much, or the script
exits with status 1.

On the CPU parameters and activations are float32 and low precision is emulated exactly, so it is
slower. On a GPU activations are bfloat16 (torch.autocast), and formats that the hardware has are
multiplied there.
"""

import argparse
import importlib
import json
import math
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from byte_lm_report import Progress, Run, distances, plot, print_table
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo import (
    mxfp8_fwd_nvfp4_bwd_factory,
)

RECIPES = {
    "none": lambda: None,
    "current": Float8CurrentScaling,
    "delayed": partial(DelayedScaling, amax_history_len=16),
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "custom": partial(CustomRecipe, mxfp8_fwd_nvfp4_bwd_factory),
}
FP4 = ("nvfp4", "custom")
VOCABULARY = 256  # a token is a byte
HEAD_SIZE = 64

# What fits 4 minutes on two CPU cores, and what gives a GPU something to do.
DEFAULTS = {
    "cpu": {"steps": 40, "hidden": 128, "layers": 1, "seq": 128, "batch": 4},
    "cuda": {"steps": 150, "hidden": 1024, "layers": 4, "seq": 256, "batch": 64},
}


# ---- model


def rotary_angles(seq, head_size, device):
    """Cosines and sines [seq, head_size / 2] of rotary positions (Su et al., RoFormer, 2021)."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, head_size // 2 + 1, device=device)[:-1]
    angles = torch.arange(seq, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Turn each head of x [batch, heads, seq, head_size] by the angles of its position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """One transformer block on x [batch, seq, hidden]."""

    def __init__(self, hidden, heads, layers, device):
        super().__init__()
        self.heads = heads
        # The two projections that write to the residual stream start smaller (GPT-2's rule).
        to_residual = partial(nn.init.normal_, std=0.023 / math.sqrt(2 * layers))
        self.qkv = te.LayerNormLinear(hidden, 3 * hidden, normalization="RMSNorm", device=device)
        self.proj = te.Linear(hidden, hidden, init_method=to_residual, device=device)
        self.mlp = te.LayerNormMLP(
            hidden,
            4 * hidden,
            normalization="RMSNorm",
            activation="gelu",
            output_layer_init_method=to_residual,
            device=device,
        )

    def forward(self, x, cos, sin):
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, head size]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.mlp(x)


class ByteLM(nn.Module):
    """Bytes [batch, seq] to logits [batch, seq, 256]."""

    def __init__(self, hidden, layers, seq, device):
        super().__init__()
        heads = hidden // HEAD_SIZE
        self.embed = nn.Embedding(VOCABULARY, hidden, device=device)
        self.blocks = nn.ModuleList(Block(hidden, heads, layers, device) for _ in range(layers))
        self.norm = te.RMSNorm(hidden, device=device)
        # Few logits, which decide the loss: the head stays in high precision, as is usual.
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, device=device)
        for weight in (self.embed.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)
        self.cos, self.sin = rotary_angles(seq, HEAD_SIZE, device)

    def forward(self, tokens):
        seq = tokens.shape[1]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        return self.head(self.norm(x))


def forward_logits(model, recipe, tokens):
    """Logits in float32. The autocasts are part of the compiled graph."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=tokens.is_cuda):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return model(tokens).float()


def forward_loss(model, recipe, tokens, targets):
    """Mean cross entropy in nats per byte."""
    logits = forward_logits(model, recipe, tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- text


def load_text(path):
    """Bytes of the file, or of the help topics that CPython ships."""
    if path is not None:
        return Path(path).read_bytes()
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(f"{name}\n{topics[name]}" for name in sorted(topics)).encode()


class Corpus:
    """Training batches drawn from the first 90% of a text, fixed held-out windows from the rest."""

    def __init__(self, text, seq, batch, device):
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        split = len(data) * 9 // 10
        if len(data) - split < 2 * (seq + 1):
            raise SystemExit(
                f"The text has {len(data)} bytes; its last tenth must hold two windows of --seq"
                f" {seq} + 1 bytes. Give a longer text or a smaller --seq."
            )
        self.train, self.held_out = data[:split], data[split:]
        self.seq, self.batch, self.device = seq, batch, device

    def windows(self, data, starts):
        """Tokens and targets, int64 [len(starts), seq] each, the targets one byte further on."""
        rows = torch.stack([data[s : s + self.seq + 1] for s in starts]).long().to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def train_batches(self, steps, seed):
        """The same batches for the same seed, whatever else draws random numbers."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.train) - self.seq - 1
        for _ in range(steps):
            starts = torch.randint(last, (self.batch,), generator=generator).tolist()
            yield self.windows(self.train, starts)

    def held_out_batches(self, count):
        """``count`` batches of windows spread evenly over the held-out text."""
        last = len(self.held_out) - self.seq - 1
        starts = torch.linspace(0, last, count * self.batch).long().split(self.batch)
        for chunk in starts:
            yield self.windows(self.held_out, chunk.tolist())


# ---- training


def choose_backend(device):
    """``"inductor"``, or ``"aot_eager"`` with a message where Inductor cannot build its code."""
    try:
        probe = torch.compile(lambda x: (x * 2 + 1).sum(), fullgraph=True)
        probe(torch.ones(64, device=device))
    except Exception as error:  # pylint: disable=broad-exception-caught
        # Whatever the tool chain lacks: a compiler, its headers, Triton.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"Inductor cannot compile here ({lines[0][:120]}). It needs a C++ compiler.")
        print("Using the backend aot_eager: the same single graph, run op by op.")
        return "aot_eager"
    return "inductor"


def learning_rate(step, steps, peak):
    """Linear warm-up over the first tenth, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def held_out_loss(model, recipe, corpus, batches):
    """Mean loss over the held-out windows. Eager: compiled and eager give the same bits."""
    losses = [forward_loss(model, recipe, *pair) for pair in corpus.held_out_batches(batches)]
    return torch.stack(losses).mean().item()


def train(name, corpus, args):
    """Train one model with one recipe. Returns (Run, model, recipe)."""
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.compiler.reset()  # each run compiles its own graph, and counts it
    recipe = RECIPES[name]()
    model = ByteLM(args.hidden, args.layers, args.seq, args.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    loss_of = forward_loss
    if args.backend is not None:
        loss_of = torch.compile(forward_loss, fullgraph=True, backend=args.backend)

    counters = torch._dynamo.utils.counters["stats"]
    graphs_before = counters["unique_graphs"]
    run, progress = Run(name), Progress(name, args.steps)
    evaluate_every = max(1, args.steps // 6)
    timed = 0.0  # seconds of training steps after the first; evaluation is left out
    for step, (tokens, targets) in enumerate(corpus.train_batches(args.steps, args.seed)):
        step_start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = loss_of(model, recipe, tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.train_losses.append(loss.item())  # waits for the device, so the times are right
        seconds = time.perf_counter() - step_start
        if step == 0:
            run.first_step_seconds = seconds
        else:
            timed += seconds
        progress.step(run.train_losses[-1])
        if (step + 1) % evaluate_every == 0 or step + 1 == args.steps:
            loss = held_out_loss(model, recipe, corpus, args.eval_batches)
            run.held_out.append((step + 1, loss))
    progress.close()
    run.graphs = counters["unique_graphs"] - graphs_before
    run.tokens_per_second = (args.steps - 1) * args.batch * args.seq / timed if timed else 0.0
    run.total_seconds = time.perf_counter() - start
    return run, model, recipe


@torch.no_grad()
def sample(model, recipe, prompt, length, seq, device):
    """Continue ``prompt`` (bytes) by ``length`` bytes drawn at temperature 0.7."""
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt)
    for _ in range(length):
        window = torch.tensor([tokens[-seq:]], device=device)
        logits = forward_logits(model, recipe, window)[0, -1].cpu()
        choice = torch.multinomial(torch.softmax(logits / 0.7, 0), 1, generator=generator)
        tokens.append(int(choice))
    return bytes(tokens).decode("utf-8", errors="replace")


# ---- command line


def parse_args():
    """Command line; sizes that are not given depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", maxsplit=1)[0],
        epilog="Sizes default to what fits the device: "
        + "; ".join(f"{device}: {sizes}" for device, sizes in DEFAULTS.items()),
    )
    parser.add_argument("--text", metavar="FILE", help="text to learn (CPython's help topics)")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="comma-separated list")
    for name in DEFAULTS["cpu"]:
        parser.add_argument(f"--{name}", type=int, help="see below")
    parser.add_argument(
        "--lr", type=float, help="peak learning rate (2e-3 on the CPU, 6e-4 on a GPU)"
    )
    parser.add_argument("--eval-batches", type=int, default=8, help="held-out batches")
    parser.add_argument("--band", type=float, default=0.05, help="FP8 against none, held-out loss")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    parser.add_argument(
        "--out", type=Path, default=Path("demo_out"), help="folder for PNG and JSON"
    )
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.device(args.device).type
    for name, value in DEFAULTS[kind].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1.")
    args.lr = args.lr or (2e-3 if kind == "cpu" else 6e-4)
    args.recipes = args.recipes.split(",")
    unknown = [name for name in args.recipes if name not in RECIPES]
    if unknown:
        parser.error(f"--recipes {unknown[0]!r} is not one of {', '.join(RECIPES)}.")
    if args.hidden % HEAD_SIZE:
        parser.error(f"--hidden {args.hidden} must be a multiple of the head size, {HEAD_SIZE}.")
    if args.text is not None and not Path(args.text).is_file():
        parser.error(f"--text {args.text}: there is no such file.")
    return args


def main():
    """Train once for each recipe, report, and check the band. Returns the exit status."""
    start = time.perf_counter()
    args = parse_args()
    corpus = Corpus(load_text(args.text), args.seq, args.batch, args.device)
    args.backend = None if args.no_compile else choose_backend(args.device)
    on_gpu = torch.device(args.device).type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    title = (
        f"{args.layers} layers of {args.hidden}, {args.batch} x {args.seq} bytes a step, {where},"
        f" {args.backend or 'eager'}"
    )
    print(f"{title}; {len(corpus.train):,} bytes to learn, {len(corpus.held_out):,} held out")

    runs, trained = [], []
    for name in args.recipes:
        trained.append(train(name, corpus, args))
        runs.append(trained[-1][0])
    print_table(runs)

    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "byte_lm.png"
    if plot(runs, picture, title):
        print(f"\nLoss curves: {picture}")
    record = {"title": title, "torch": torch.__version__, "runs": [asdict(run) for run in runs]}
    (args.out / "byte_lm.json").write_text(json.dumps(record, indent=1), encoding="utf-8")

    run, model, recipe = trained[min(1, len(trained) - 1)]
    text = sample(model, recipe, b"The ", 160, args.seq, args.device)
    print(f"\nWritten by the model trained with recipe {run.recipe}:\n{text}\n")

    bands = {name: args.band * (2 if name in FP4 else 1) for name in RECIPES}
    outside = {k: v for k, v in distances(runs).items() if k != "none" and not v <= bands[k]}
    print(f"{time.perf_counter() - start:.0f} s in all.", end=" ")
    if len(distances(runs)) < 2:
        print("Nothing to compare: --recipes needs none and an FP8 recipe.")
    elif outside:
        worst = ", ".join(f"{name} {distance:+.2%}" for name, distance in outside.items())
        print(f"FAILED: held-out loss too far above high precision: {worst}.")
    else:
        print(
            f"OK: held-out loss is within {args.band:.0%} (FP4: {2 * args.band:.0%}) of high"
            " precision."
        )
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
