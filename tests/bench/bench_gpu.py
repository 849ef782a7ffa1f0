# The training steps and attentions of bench_gpu.cu in PyTorch, eager and compiled: python3 bench_gpu.py [seconds], each
# result a line {"case": ..., "peer": ..., "value": ...}. Nothing new is compiled when the seconds are over. Attention
# by FlashAttention-2 and by cuDNN, which is the faster one on Hopper. GPT-2 also by llm.c: LLMC names its binary
# train_gpt2cu, beside which its data lie; without, its published figure, which is of an A100, is quoted.
import os, re, subprocess, sys, time
try:
    import torch, torch.nn as nn, torch.nn.functional as F
except ImportError:
    sys.exit("PyTorch is not installed: no peer for training steps and attention")
if not torch.cuda.is_available(): sys.exit("this PyTorch sees no GPU: no peer for training steps and attention")
limit = time.time() + float(sys.argv[1] if len(sys.argv) > 1 else 1e9)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
bf16 = torch.bfloat16

def say(case, peer, value):
    print('{"case": "%s", "peer": "%s", "value": %.6g}' % (case, peer, value), flush=True)

def tried(case, peer, f):
    try: say(case, peer, f())
    except Exception as e:
        print("%s, %s: %s" % (case, peer, str(e).splitlines()[0] if str(e) else repr(e)), file=sys.stderr, flush=True)
    finally: torch.cuda.empty_cache()

def seconds_of(f, least):
    """Median of five rounds of at least `least` seconds, by the host's clock, all work done."""
    for _ in range(5): f()
    torch.cuda.synchronize(); start = time.perf_counter(); f(); torch.cuda.synchronize()
    n, rounds = max(1, min(2000, int(least / (time.perf_counter() - start)) + 1)), []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(n): f()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / n)
    return sorted(rounds)[2]

def attention(B, T, H, D, causal):
    name = "attention %dx%dx%dx%d%s " % (B, T, H, D, " causal" if causal else "")
    qkv = torch.randn(B, T, 3 * H * D, device="cuda", dtype=bf16, requires_grad=True)
    flops = 4 * B * H * D * T * T * (0.5 if causal else 1)
    q, k, v = (t.view(B, T, H, D).transpose(1, 2).detach().requires_grad_() for t in qkv.chunk(3, -1))
    from torch.nn.attention import SDPBackend, sdpa_kernel
    for peer, kernel in (("pytorch flash2", SDPBackend.FLASH_ATTENTION), ("pytorch cudnn", SDPBackend.CUDNN_ATTENTION)):
        def run():
            with sdpa_kernel(kernel): return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        def backward():
            y = run(); dy = torch.randn_like(y)
            return seconds_of(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), 0.02)
        tried(name + "forward", peer, lambda: 1e-12 * flops / seconds_of(run, 0.02))
        tried(name + "backward", peer, lambda: 2.5e-12 * flops / backward())

class Residual(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                                  nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o))
        self.short = nn.Identity()
        if stride == 2: self.short = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
    def forward(self, x): return F.relu(self.body(x) + self.short(x))

class Block(nn.Module):
    def __init__(self, C):
        super().__init__()
        self.n1, self.n2, self.qkv, self.out = nn.LayerNorm(C), nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, 12, C // 12).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))

class GPT2(nn.Module):
    def __init__(self, T=1024, C=768, V=50304):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Parameter(torch.randn(T, C) * 0.02)
        self.blocks, self.norm = nn.Sequential(*[Block(C) for _ in range(12)]), nn.LayerNorm(C)
        self.head = nn.Linear(C, V, bias=False)
        self.wte.weight.data.mul_(0.02)
        self.head.weight = self.wte.weight
    def forward(self, t): return self.head(self.norm(self.blocks(self.wte(t) + self.wpe)))

def mlp(): return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
def resnet():
    parts, i = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)], 64
    for b in range(6): o = 64 << b // 2; parts.append(Residual(i, o, 2 if b in (2, 4) else 1)); i = o
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))

def training(case, make, batch, shape, precision, mode):
    """Batches come from pinned host memory in every step, as hpml's do from host memory."""
    tokens = make is GPT2
    x = torch.randint(50257, (batch, *shape)) if tokens else torch.randn(batch, *shape)
    y = torch.randint(50257 if tokens else 10, (batch * shape[0] if tokens else batch,))
    x, y = x.pin_memory(), y.pin_memory()
    for peer in ("pytorch eager", "pytorch compiled"):
        def measure():
            net = make().cuda()
            if make is resnet: net = net.to(memory_format=torch.channels_last)
            opt = (torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1, fused=True) if tokens else
                   torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, fused=True))
            if peer == "pytorch compiled": torch._dynamo.reset(); net = torch.compile(net, mode=mode)
            def step():
                a, b = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
                if make is resnet: a = a.contiguous(memory_format=torch.channels_last)
                with torch.autocast("cuda", bf16, enabled=precision == "bf16"):
                    loss = F.cross_entropy(net(a).flatten(0, -2), b)
                opt.zero_grad(set_to_none=True)
                loss.backward()
                opt.step()
            return len(y) / seconds_of(step, 0.33)
        if peer == "pytorch compiled" and time.time() > limit:
            print("%s: no time left to compile" % case, file=sys.stderr)
        else: tried(case, peer, measure)

def llmc(batch):
    """Tokens a second at this batch, the median over the steps after the first five."""
    case = "gpt2 124M batch %dx1024 bf16" % batch
    binary = os.environ.get("LLMC")
    if not binary: # 10 billion tokens in about 90 minutes on 8 A100 80GB (github.com/karpathy/llm.c/discussions/481)
        return say(case, "llm.c A100, quoted", 10e9 / (90 * 60) / 8)
    def measure():
        where = os.path.abspath(binary)
        out = subprocess.run([where, "-e", "d12", "-b", str(batch), "-t", "1024", "-d", str(batch * 1024), "-x", "30",
                              "-v", "0", "-s", "0", "-h", "0"], timeout=60, cwd=os.path.dirname(where),
                             capture_output=True, text=True).stdout
        speeds = sorted(float(x) for x in re.findall(r"([0-9.]+) tok/s", out)[5:])
        if not speeds: raise RuntimeError("train_gpt2cu printed no tok/s: " + out[-200:])
        return speeds[len(speeds) // 2]
    tried(case, "llm.c", measure)

for batch in (8, 16): llmc(batch)
for shape in ((8, 1024, 12, 64), (4, 2048, 16, 128), (2, 8192, 12, 64)):
    for causal in (True, False): attention(*shape, causal)
training("mlp 784-512-256-10 batch 64 tf32", mlp, 64, (784,), "tf32", "reduce-overhead")
training("mlp 784-512-256-10 batch 4096 tf32", mlp, 4096, (784,), "tf32", "reduce-overhead")
training("gpt2 124M batch 8x1024 bf16", GPT2, 8, (1024,), "bf16", "default")
training("gpt2 124M batch 16x1024 bf16", GPT2, 16, (1024,), "bf16", "default")
training("resnet cifar batch 256 bf16", resnet, 256, (3, 32, 32), "bf16", "reduce-overhead")
