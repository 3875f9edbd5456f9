"""How near the engine comes to what a model's own forward says, in bf16 and in float32.

The engine decodes greedily: with the fused decoder, and with the module's forward over paged attention. Then the
model's own forward reads what came out, whole, as a trainer does, in its dtype and once more in float32. So errors
don't grow from token to token, as they do where two runs are held side by side: in bf16 the two best logits are often
one rounding apart, and a token that tips leads either run its own way.

In the table: `same` is the share of the engine's tokens that the model's own forward would choose, `same f32` those
that float32 would, `short` by how much the worst of them falls short of float32's best logit; `logprob` is the mean
distance of the engine's logprobs from the model's own forward's, `f32` from float32's, and `own f32` that of the
model's own forward from float32's on the same tokens: what rounding costs anyway. Prints a table, then one JSON line.

    python recipes/agreement.py --model HuggingFaceTB/SmolLM2-135M-Instruct --new 512
    python recipes/agreement.py --model tiny --rows 4 --new 24                       # random weights; a CPU will do
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.bench_decode import SHAPES, command_line, commit, print_report, random_model, table
from rollout import Completion, EngineConfig, RolloutWorker, SamplingParams
from rollout.calls import device_name

QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a story about a lighthouse keeper.",
    "What were the causes of the French Revolution?",
    "Describe the water cycle in detail.",
    "How does a computer add two numbers?",
    "Give me a recipe for vegetable soup, step by step.",
    "Compare democracy and monarchy.",
    "Tell me about the planet Saturn.",
)
COLUMNS = {  # key: (head, format)
    "same": ("same", ".2%"),
    "same_f32": ("same f32", ".2%"),
    "short_f32": ("short", ".3f"),
    "logprob": ("logprob", ".5f"),
    "logprob_f32": ("f32", ".5f"),
    "own_logprob_f32": ("own f32", ".5f"),
}


def load(name: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, list[list[int]]]:
    """A model, by shape with random weights or else by name or folder, and prompts for it."""
    if name in SHAPES:
        model = random_model(name, device).to(dtype)
        generator = torch.Generator().manual_seed(0)
        return model, torch.randint(10, model.config.vocab_size, (len(QUESTIONS), 16), generator=generator).tolist()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.chat_template is None:
        return model, [tokenizer(question)["input_ids"] for question in QUESTIONS]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return model, tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def logits(model: PreTrainedModel, completion: Completion) -> torch.Tensor:
    """What the model's own forward makes of a completion's positions, float32 [tokens, vocabulary]."""
    prompt = list(completion.prompt_ids)
    ids = torch.tensor([prompt + completion.token_ids], device=model.device)
    return model(ids, logits_to_keep=len(completion.token_ids) + 1).logits[0, :-1].float()


def compare(model: PreTrainedModel, exact: PreTrainedModel, completions: list[Completion]) -> dict[str, float]:
    """The figures of one engine's completions."""
    sums = dict.fromkeys(("same", "same_f32", "logprob", "logprob_f32", "own_logprob_f32"), 0.0)
    short, count = 0.0, 0
    for completion in completions:
        own, f32 = logits(model, completion), logits(exact, completion)
        tokens = torch.tensor(completion.token_ids, device=own.device)[:, None]  # [tokens, 1]
        engine = torch.tensor(completion.logprobs, device=own.device)
        own_logprob, f32_logprob = (x.log_softmax(-1).gather(1, tokens)[:, 0] for x in (own, f32))
        sums["same"] += float((own.argmax(-1) == tokens[:, 0]).sum())
        sums["same_f32"] += float((f32.argmax(-1) == tokens[:, 0]).sum())
        sums["logprob"] += float((engine - own_logprob).abs().sum())
        sums["logprob_f32"] += float((engine - f32_logprob).abs().sum())
        sums["own_logprob_f32"] += float((own_logprob - f32_logprob).abs().sum())
        short = max(short, float((f32.max(-1).values - f32.gather(1, tokens)[:, 0]).max()))
        count += len(completion.token_ids)
    return {key: value / count for key, value in sums.items()} | {"short_f32": short, "tokens": count}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--model", default="tiny", help=f"a name or a folder, or, of random weights, {', '.join(SHAPES)}"
    )
    parser.add_argument("--rows", type=int, default=len(QUESTIONS), help="rows; prompts are repeated to fill them")
    parser.add_argument("--new", type=int, default=512, help="tokens in a completion")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if min(args.rows, args.new) < 1:
        parser.error("--rows and --new must be at least 1")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what the line holds."""
    args = parse(argv)
    device = torch.device(args.device)
    model, questions = load(args.model, getattr(torch, args.dtype), device)
    exact = copy.deepcopy(model).float()
    prompts = [questions[i % len(questions)] for i in range(args.rows)]
    longest = max(map(len, prompts)) + args.new
    greedy = SamplingParams(max_tokens=args.new, temperature=0.0, ignore_eos=True)
    results = {}
    for forward in ("fused", "module"):
        config = EngineConfig(max_rows=args.rows, max_model_len=longest, fused_decoder=forward == "fused")
        with RolloutWorker(model, config) as worker:
            groups = worker.generate(prompts, greedy)
        # repeated prompts give one completion over and over
        results[forward] = compare(model, exact, [c for group in groups[: len(questions)] for c in group])

    gpu = device_name(device)
    print(
        f"{gpu}: {args.model} in {args.dtype}, {args.rows} rows, {results['fused']['tokens']:,} greedy tokens\n\n"
        f"{table(results, COLUMNS)}\n"
    )
    return print_report(
        {
            "bench": "agreement",
            "gpu": gpu,
            "torch": str(torch.__version__),
            "commit": commit(),
            "model": args.model,
            "dtype": args.dtype,
            "rows": args.rows,
            "new": args.new,
            "results": results,
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
