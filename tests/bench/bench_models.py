# The peers of bench_models.c: python3 bench_models.py MODEL OPTIMIZER BATCH train|predict THREADS. Answers each line of
# its input with a line of pairs, "params 11173962 mb 384 pytorch 31.2 compiled 35.1": samples/s of each peer, measured
# for TURN seconds. What cannot be measured is said on the standard error. Peers: PyTorch, eager and compiled (unless
# the first compiled step takes more than COMPILE seconds, 0: never compiled), onnxruntime for predictions, and where
# LLMC names a program built from llm.c, that one for gpt2. With several threads, programs are started with
# OMP_WAIT_POLICY unset and PASSIVE, and after the first answer those that are fastest in nothing are ended.
import multiprocessing, os, subprocess, sys, time
from functools import partial

name, optimizer, batch, task, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
turn, compile_limit = float(os.environ.get("TURN", 1)), float(os.environ.get("COMPILE", 90))
predict = task == "predict"

def tell(answers): print(" ".join("%s %s" % (k, round(v, 4)) for k, v in answers.items()), flush=True)
def say(text): print(text.strip().splitlines()[0][:200], file=sys.stderr, flush=True)

# ---- the models: functions of torch and its modules nn and F, which are imported in the program that measures alone

def conv(i, o, k=3, stride=1, dilation=1):
    return [nn.Conv2d(i, o, k, stride, dilation * (k // 2), dilation), nn.ReLU()]

def normed(i, o, k=3, stride=1, groups=1, relu=True):
    return [nn.Conv2d(i, o, k, stride, k // 2, 1, groups, bias=False), nn.BatchNorm2d(o)] + [nn.ReLU()] * relu

def dense(*widths):
    parts = [m for i, o in zip(widths, widths[1:]) for m in (nn.Linear(i, o), nn.ReLU())]
    return parts[:-1]

def classes(width): return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]

def lenet():
    return [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), *dense(800, 500, 10)]

def cifar():
    parts = [[*normed(i, o), nn.MaxPool2d(2)] for i, o in ((3, 32), (32, 64), (64, 128))]
    return sum(parts, []) + [nn.Flatten(), nn.Linear(2048, 10)]

def mobilenet():
    parts, channels = normed(3, 32), 32
    for i in range(7):
        out = 64 << (i + 1) // 2
        parts += normed(channels, channels, 3, 1 + i % 2, channels) + normed(channels, out, 1)
        channels = out
    return parts + classes(channels)

def vgg():
    return [*conv(3, 32, 5), *conv(32, 64, 3, 2), *conv(64, 64, 5), *conv(64, 128, 3, 2), *conv(128, 128),
            *conv(128, 256, 3, 2), nn.Flatten(), *dense(16384, 256, 10)]

def define():
    """The modules with a forward of their own; returns the functions that make the parts of each model."""
    class Residual(nn.Module):
        def __init__(self, i, o, stride):
            super().__init__()
            self.body = nn.Sequential(*normed(i, o, 3, stride), *normed(o, o, relu=False))
            self.short = nn.Sequential(*normed(i, o, 1, 2, relu=False)) if stride == 2 else nn.Identity()
        def forward(self, x): return F.relu(self.body(x) + self.short(x))

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads, self.n1, self.n2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        def forward(self, x):
            B, T, C = x.shape
            q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
            x = x + self.out(a)
            return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(50257, 768), nn.Parameter(torch.randn(1024, 768) * 0.02)
            self.blocks, self.norm = nn.Sequential(*[Block(768, 12) for _ in range(12)]), nn.LayerNorm(768)
            self.wte.weight.data.mul_(0.02)
        def forward(self, x):
            y = self.norm(self.blocks(self.wte(x) + self.wpe[:x.shape[1]]))
            return F.linear(y, self.wte.weight)

    class LSTM(nn.Module):
        """PyTorch adds two biases to each gate; the second one is frozen, because one has the effect of both."""
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(65, 256), nn.Linear(256, 65)
            self.lstm = nn.LSTM(256, 256, 2, batch_first=True)
            for layer in "01": getattr(self.lstm, "bias_hh_l" + layer).requires_grad_(False)
        def forward(self, x): return self.head(self.lstm(self.table(x))[0])

    def letters(width, layers, heads):
        return [nn.Embedding(65, width), *[Block(width, heads) for _ in range(layers)], nn.LayerNorm(width),
                nn.Linear(width, 65)]
    def resnet18():
        parts = normed(3, 64)
        for i in range(8):
            parts.append(Residual(64 << max(i - 1, 0) // 2, 64 << i // 2, 2 if i in (2, 4, 6) else 1))
        return parts + classes(512)
    def recommender():
        return [nn.Embedding(100000, 32, sparse="sparse" in name), nn.Flatten(), *dense(256, 128, 1)]
    def dilated():
        return [m for i, d in ((3, 1), (64, 2), (64, 4), (64, 8)) for m in conv(i, 64, dilation=d)] + classes(64)
    def grouped():
        return normed(3, 128) + sum([normed(128, 128, groups=g) for g in (4, 8, 16, 32)], []) + classes(128)
    return {"mlp": (lambda: dense(784, 512, 256, 10), (784,), 0), "lenet": (lenet, (1, 28, 28), 0),
            "cifar": (cifar, (3, 32, 32), 0), "gpt4": (lambda: letters(128, 4, 4), (64,), 65),
            "resnet18": (resnet18, (3, 32, 32), 0), "mobilenet": (mobilenet, (3, 32, 32), 0),
            "vgg": (vgg, (3, 64, 64), 0), "dilated": (dilated, (3, 32, 32), 0), "grouped": (grouped, (3, 32, 32), 0),
            "lstm": (lambda: [LSTM()], (64,), 65), "gpt6": (lambda: letters(384, 6, 6), (256,), 65),
            "gpt2": (lambda: [GPT2()], (256,), 50257), "tabular": (lambda: dense(64, 256, 256, 1), (64,), 0),
            "rec": (recommender, (8,), 100000)}

# ---- one peer, in a process of its own

def resident(line):
    with open("/proc/self/status") as f: return [int(l.split()[1]) / 1024 for l in f if l.startswith(line)][0]

def optimizers(net):
    """Fused ones, the fastest; sparse gradients need their own."""
    sparse = [net[0].weight] if "sparse" in name else []
    rest = [p for p in net.parameters() if p.requires_grad and not any(p is s for s in sparse)]
    SGD, Adam, AdamW, SparseAdam = (getattr(torch.optim, n) for n in ("SGD", "Adam", "AdamW", "SparseAdam"))
    kind = {"sgd": SGD, "momentum": partial(SGD, momentum=0.9), "adam": Adam, "adamw": AdamW}[optimizer]
    rows = SparseAdam if kind is Adam else SGD
    return [kind(rest, lr=1e-4, fused=True)] + [rows([p], lr=1e-4) for p in sparse]

def training(net, forward, x):
    steps, out = optimizers(net), net(x[:1]).shape
    floats = torch.rand(len(x), *out[1:])
    labels = torch.zeros(floats.numel() // out[-1], dtype=torch.long)
    losses = {"rec": (F.binary_cross_entropy_with_logits, floats), "tab": (F.mse_loss, floats)}
    loss, y = losses.get(name[:3], (lambda o, y: F.cross_entropy(o.flatten(0, -2), y), labels))
    def step():
        for s in steps: s.zero_grad()
        loss(forward(x), y).backward()
        for s in steps: s.step()
    return step

def onnx(net, x):
    import onnxruntime, warnings
    warnings.simplefilter("ignore")
    path, o = "build/%s.onnx" % name, onnxruntime.SessionOptions()
    torch.onnx.export(net, (x,), path, dynamo=False, opset_version=17)
    o.intra_op_num_threads, o.log_severity_level = threads, 3
    session, feed = onnxruntime.InferenceSession(path, o, providers=["CPUExecutionProvider"]), x.numpy()
    os.remove(path)
    return lambda: session.run(None, {session.get_inputs()[0].name: feed})

def prepare(kind):
    """Returns the step of a peer, and its number of parameters."""
    torch.set_num_threads(threads)
    make, shape, vocabulary = define()[name.split("-")[0]]
    net = nn.Sequential(*make()).train(not predict)
    x = torch.randint(vocabulary, (batch, *shape)) if vocabulary else torch.rand(batch, *shape)
    count = sum(p.numel() for p in net.parameters() if p.requires_grad)
    if kind == "onnxruntime": return onnx(net, x), count
    if kind == "compiled" and predict:
        from torch._inductor import config
        config.freezing = True
    forward = torch.compile(net) if kind == "compiled" else net
    if not predict: return training(net, forward, x), count
    def step():
        with torch.no_grad(): forward(x)
    return step, count

def rate(step, seconds):
    start, n = time.perf_counter(), 0
    while n == 0 or time.perf_counter() - start < seconds: step(); n += 1
    return batch * n / (time.perf_counter() - start)

def warm():
    """Runs the libraries once, so that their code and tables are in memory before the model's peak is measured."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(576, 16), nn.LayerNorm(16))
    opt = torch.optim.Adam(net.parameters(), fused=True)
    F.cross_entropy(net(torch.rand(8, 3, 8, 8)), torch.zeros(8, dtype=torch.long)).backward()
    opt.step()

def measure(kind, pipe):
    try:
        if kind == "pytorch": warm()
        idle = resident("VmRSS")
        step, count = prepare(kind)
        step()
        pipe.send("ready")
        rate(step, turn / 2)
        while True:
            pipe.recv()
            answer = {kind: rate(step, turn), "params": count}
            if kind == "pytorch": answer["mb"] = round(resident("VmHWM") - idle, 1)
            pipe.send(answer)
    except EOFError: pass
    except Exception as e: pipe.send("%s: %s" % (kind, str(e) or repr(e)))

def serve():
    """Answers for the peers of this process's OMP_WAIT_POLICY, which take turns, each in a fork of this process."""
    global torch, nn, F
    try: import torch, torch.nn as nn, torch.nn.functional as F
    except ImportError as e: return say("PyTorch: %s" % e)
    fork, peers = multiprocessing.get_context("fork"), {}
    for kind in ["pytorch"] + ["compiled"] * (compile_limit > 0) + ["onnxruntime"] * (predict and not held):
        mine, theirs = fork.Pipe()
        process = fork.Process(target=measure, args=(kind, theirs), daemon=True)
        process.start()
        theirs.close()
        limit = compile_limit if kind == "compiled" else 300
        ready = mine.recv() if mine.poll(limit) else "%s: not ready after %g s" % (kind, limit)
        if ready == "ready": peers[kind] = mine
        else: say(ready), process.kill()
    for line in sys.stdin:
        answers = {}
        for pipe in peers.values():
            pipe.send("go")
            answers.update(pipe.recv())
        tell(answers)

# ---- all peers

def start(command, policy):
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": os.path.abspath("build/inductor")}
    env.pop("OMP_WAIT_POLICY", None)
    if policy: env["OMP_WAIT_POLICY"] = policy
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def ask(program):
    try:
        program.stdin.write("go\n")
        program.stdin.flush()
        words = program.stdout.readline().split()
    except BrokenPipeError: words = []
    return {k: (int if k == "params" else float)(v) for k, v in zip(words[::2], words[1::2])}

def end(program):
    program.stdin.close()
    program.wait()

def main():
    commands, programs = [[sys.executable, *sys.argv, "serve"]], []
    if name == "gpt2" and not predict and not held:
        if "LLMC" in os.environ: commands.append([os.environ["LLMC"]])
        else: say("llm.c: LLMC does not name its source")
    for turns, _ in enumerate(sys.stdin):
        answers = [ask(p) for p in programs]
        if turns == 0: # one after the other, so that the second finds compiled what the first has compiled
            for command in commands:
                for policy in ("", "PASSIVE")[:min(threads, 2)]:
                    programs.append(start(command, policy))
                    answers.append(ask(programs[-1]))
        best = {k: max(a.get(k, 0) for a in answers) for k in set().union(*answers)}
        tell(best)
        fastest = [any(v == best[k] for k, v in a.items() if k not in ("params", "mb")) for a in answers]
        if turns == 0:
            for program, keep in zip(programs, fastest): keep or end(program)
            programs = [p for p, keep in zip(programs, fastest) if keep]
    for program in programs: end(program)

held = "ATEN_CPU_CAPABILITY" in os.environ # to an instruction set, which onnxruntime and llm.c's program are not
serve() if sys.argv[-1] == "serve" else main()
