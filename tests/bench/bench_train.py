# The models of bench_train.c in PyTorch: python3 bench_train.py mlp|lenet|cifar|gpt threads prints samples/s.
import sys, time, torch, torch.nn as nn, torch.nn.functional as F
model, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)
    def forward(self, x):
        q, k, v = (t.view(16, 64, 4, 32).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(16, 64, 128)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))

def conv(i, o):
    return [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)]

if model == "mlp":
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    x = torch.rand(64, 784)
elif model == "lenet":
    net = nn.Sequential(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(),
                        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))
    x = torch.rand(64, 1, 28, 28)
elif model == "cifar":
    net = nn.Sequential(*conv(3, 32), *conv(32, 64), *conv(64, 128), nn.Flatten(), nn.Linear(2048, 10))
    x = torch.rand(64, 3, 32, 32)
else:
    net = nn.Sequential(nn.Embedding(65, 128), *[Block() for _ in range(4)], nn.LayerNorm(128), nn.Linear(128, 65),
                        nn.Flatten(0, 1))
    x = torch.zeros(16, 64, dtype=torch.long)
y = torch.zeros(16 * 64 if model == "gpt" else 64, dtype=torch.long)
opt = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

def step():
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()

for _ in range(5): step()
start, n = time.time(), 0
while time.time() - start < 1.5: step(); n += 1
print("%.1f" % (n * len(x) / (time.time() - start)))
