"""Compares build/41_llama with Hugging Face's transformers, by hand: `pip install torch transformers`, `ninja
build/41_llama`, then `python3 tests/llama_reference.py`. For small models with random weights, of each kind and with
each field that build/41_llama reads, it compares the scores of all tokens after each token of a text. Exit status 1: a
difference above 1e-5 of the largest score from transformers in f64, and above that of transformers in f32.
`python3 tests/llama_reference.py FOLDER "3 1 4"` compares the scores of a model that is there, after these tokens.
`python3 tests/llama_reference.py golden` prints the scores in tests/llama_golden.txt (see there)."""
import subprocess
import sys
import tempfile

import torch
import transformers

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79, 32, 38, 46, 26]
GOLDEN_IDS = [7, 30, 2, 7, 449, 0, 100, 7]
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=96, max_position_embeddings=64, initializer_range=0.3)
CASES = [
    ("llama", "f32", {}),
    ("llama", "f32", dict(num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    ("llama", "f32", dict(num_key_value_heads=1, rope_theta=1e6, rms_norm_eps=1e-5)),
    ("llama", "f32", dict(attention_bias=True, mlp_bias=True, rope_theta=5e5)),
    ("llama", "f32", dict(head_dim=24)),
    ("llama", "f32", dict(num_hidden_layers=1, rms_norm_eps=0.5)),
    ("llama", "bf16", dict(tie_word_embeddings=True, rope_theta=1e5)),
    ("llama", "f16", {}),
    ("qwen2", "f32", {}),
    ("qwen2", "f32", dict(rope_theta=1e6, tie_word_embeddings=True, use_sliding_window=False, sliding_window=4)),
    ("qwen2", "bf16", dict(rope_theta=1e6, rms_norm_eps=1e-6)),
    ("qwen2", "f32", dict(use_sliding_window=True, sliding_window=16, max_window_layers=0)),
    ("qwen2", "f32", dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, vocab_size=1000,
                          rope_theta=1e6, rms_norm_eps=1e-6, initializer_range=0.02, tie_word_embeddings=True)),
    ("llama", "f32", dict(max_position_embeddings=600, repeat=32)),
    ("llama", "f32", dict(max_position_embeddings=600, repeat=32, rope_theta=1e5, initializer_range=0.1)),
    ("mistral", "f32", dict(sliding_window=None, rms_norm_eps=1e-5)),
    ("mistral", "f32", dict(sliding_window=16, head_dim=32)),
    ("mistral", "bf16", dict(sliding_window=None, rope_theta=1e6, shards=True)),
]
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def save(folder, kind, dtype, fields):
    """Saves a model with random weights, biases and scales of norms."""
    config, model = CLASSES[kind]
    fields = {**SMALL, **fields}
    shards = fields.pop("shards", False)
    fields.pop("repeat", 1)
    if "rope_theta" in fields and int(transformers.__version__.split(".")[0]) >= 5:
        fields["rope_parameters"] = dict(rope_type="default", rope_theta=fields.pop("rope_theta"))
    torch.manual_seed(len(str(fields)))
    m = model(config(**fields))
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(0.3 * torch.randn_like(p))
    m.to(TYPES[dtype]).save_pretrained(folder, max_shard_size="40KB" if shards else "5GB")


def ours(folder, ids, count):
    """Returns the scores (tokens, vocabulary) of build/41_llama."""
    out = subprocess.run(["build/41_llama", folder, "--ids", " ".join(map(str, ids)), "--length", "0", "--top",
                          str(count), "--threads", "1"], capture_output=True, encoding="latin-1")
    if out.returncode:
        sys.exit(out.stderr)
    scores = torch.full((len(ids), count), float("nan"), dtype=torch.float64)
    for line in out.stdout.splitlines():
        words = line.split()
        if line.startswith("after"):
            at = int(words[2].rstrip(","))
        elif len(words) >= 4 and line.startswith(" ") and words[3] == "%":
            scores[at, int(words[0])] = float(words[1])
    return scores


def exactly(m, theta):
    """Turns a model into one that computes in f64 all that transformers computes in f32 even if the rest is f64."""
    def norm(module):
        return lambda x: module.weight * x / (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt()

    def rotary(size):
        def angles(x, position_ids):
            rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
            a = position_ids[:, :, None].double() * rates
            return torch.cat([a, a], -1).cos(), torch.cat([a, a], -1).sin()
        return angles

    for module in m.double().modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = norm(module)
        if name.endswith("RotaryEmbedding"):
            module.forward = rotary(2 * len(module.inv_freq))
    return m


def reference(folder, ids, exact=False):
    """Returns the scores (tokens, vocabulary) of transformers in f32, or in f64."""
    m = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if exact:
        rope = getattr(m.config, "rope_parameters", None) or {}
        exactly(m, rope.get("rope_theta") or m.config.rope_theta)
    with torch.no_grad():
        return m.eval()(torch.tensor([ids])).logits[0].double()


def compare(folder, ids):
    """Prints the largest differences relative to the largest score: from transformers in f32, and that of both from
    transformers in f64. Returns false if build/41_llama rounds more than 1e-5, and more than transformers."""
    theirs, exact = reference(folder, ids), reference(folder, ids, exact=True)
    scores = ours(folder, ids, theirs.shape[1])
    largest = exact.abs().max().item()
    apart, our_error, their_error = [(a - b).abs().max().item() / largest
                                     for a, b in ((scores, theirs), (scores, exact), (theirs, exact))]
    print(f"  largest score {largest:.3f}; apart {apart:.1e}; from f64: ours {our_error:.1e}, theirs {their_error:.1e}")
    return our_error < max(1e-5, their_error)


def golden():
    for kind in CLASSES:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["build/llama_files", folder, kind], check=True)
            scores = reference(folder, GOLDEN_IDS)
        for at, row in enumerate(scores):
            for i in row.topk(3).indices.tolist():
                print(kind, at, i, f"{row[i].item():.6f}")


def main():
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:] == ["golden"]:
        return golden()
    print("transformers", transformers.__version__, "torch", torch.__version__)
    if len(sys.argv) == 3:
        return not compare(sys.argv[1], [int(i) for i in sys.argv[2].split()])
    failed = 0
    for kind, dtype, fields in CASES:
        print(kind, dtype, " ".join(f"{k}={v}" for k, v in fields.items()))
        with tempfile.TemporaryDirectory() as folder:
            save(folder, kind, dtype, fields)
            failed += not compare(folder, IDS * fields.get("repeat", 1))
    print("failed:", failed)
    return failed > 0


sys.exit(main())
