"""The ops of model files in PyTorch, for hpml_model.py: run_node computes one node of a file. Constants of nodes have
the names of the table hpmli_attr_fields in hpml.h, section >>model; enums are numbers in the order of hpml.h."""
import torch
import torch.nn.functional as F

ACTIVATIONS = ["none", "relu", "leaky_relu", "gelu", "gelu_erf", "silu", "sigmoid", "tanh", "exp", "log", "sqrt",
               "square", "neg", "abs"]
MAPS = ["minimum", "maximum", "where", "clamp", "pow", "sin", "cos"]
TAKES = ["index", "reverse", "last", "pad", "nearest", "linear"]


def activate(x, kind, slope=0.01):
    name = ACTIVATIONS[kind]
    if name == "none":
        return x
    if name == "leaky_relu":
        return F.leaky_relu(x, slope)
    if name.startswith("gelu"):
        return F.gelu(x, approximate="none" if name == "gelu_erf" else "tanh")
    return getattr(F if name in ("relu", "silu") else torch, name)(x)


def lstm(x, w_x, w_h, bias, h=None, c=None, states=False):
    out = []
    if h is None:
        h = c = torch.zeros(x.shape[0], w_h.shape[1])
    for t in range(x.shape[1]):
        i, f, g, o = (x[:, t] @ w_x.T + h @ w_h.T + bias).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(torch.cat((h, c), 1) if states else h)
    return torch.stack(out, 1)


def gru(x, w_x, w_h, bias_x, bias_h, h=None):
    out = []
    if h is None:
        h = torch.zeros(x.shape[0], w_h.shape[1])
    for t in range(x.shape[1]):
        x_r, x_z, x_n = (x[:, t] @ w_x.T + bias_x).chunk(3, 1)
        h_r, h_z, h_n = (h @ w_h.T + bias_h).chunk(3, 1)
        z = torch.sigmoid(x_z + h_z)
        h = (1 - z) * torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n) + z * h
        out.append(h)
    return torch.stack(out, 1)


def attention(qkv, n, mask=None):
    heads, kv = n["heads"], n.get("kv_heads", n["heads"])
    all_heads = qkv.unflatten(2, (heads + 2 * kv, -1)).transpose(1, 2)
    q, k, v = all_heads.split([heads, kv, kv], 1)
    scores = q @ k.repeat_interleave(heads // kv, 1).transpose(2, 3) * n["scale"]
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool() if n["causal"] else torch.zeros(scores.shape[-2:]).bool()
    if mask is not None:  # (B, T), or (B, T, T) with a row for each query
        hidden = hidden | (mask == 0).reshape(mask.shape[0], 1, -1, mask.shape[-1])
    p = F.softmax(scores.masked_fill(hidden, float("-inf")), -1).masked_fill(hidden, 0.0)
    return (p @ v.repeat_interleave(heads // kv, 1)).transpose(1, 2).flatten(2)


def rotary(x, n, position=None):
    heads, dims, half = x.unflatten(2, (n["heads"], -1)), n["dims"], n["dims"] // 2
    time = torch.arange(x.shape[1]) + (0 if position is None else position.reshape(-1, 1))
    angle = time.reshape(-1, x.shape[1], 1, 1) * n["base"] ** (-2 * torch.arange(half).double() / dims)
    c, s = torch.cos(angle).float(), torch.sin(angle).float()
    a, b = (heads[..., 0:dims:2], heads[..., 1:dims:2]) if n["adjacent"] else heads[..., :dims].chunk(2, -1)
    pair = (a * c - b * s, b * c + a * s)
    y = torch.stack(pair, -1).flatten(-2) if n["adjacent"] else torch.cat(pair, -1)
    y = torch.cat((y, heads[..., dims:]), -1)
    return torch.cat((y[:, :, :n["rotated"]], heads[:, :, n["rotated"]:]), 2).flatten(2)


def elementwise(n, src):
    name = MAPS[n["kind"]]
    if name == "where":
        return torch.where(src[0] != 0, src[1], src[2])
    return getattr(torch, name)(*src, *{"clamp": (n["p"], n["q"]), "pow": (n["p"],)}.get(name, ()))


def take(n, x, index=None):
    rule, dim, start, size = TAKES[n["rule"]], n["dim"], n["start"], x.shape[n["dim"]]
    if rule == "pad":
        return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [start, n["shape"][dim] - size - start], value=n["value"])
    if rule == "nearest":
        return x.repeat_interleave(start, dim)
    if rule == "linear":
        at = ((torch.arange(size * start) + 0.5) / start - 0.5).clamp(min=0)
        low = at.long()
        weight = (at - low).reshape([-1] + [1] * (x.dim() - 1 - dim))
        high = (low + 1).clamp(max=size - 1)
        return x.index_select(dim, low) * (1 - weight) + x.index_select(dim, high) * weight
    if rule == "index":
        return x.gather(dim, index.long().expand(index.shape[:dim + 1] + x.shape[dim + 1:]))
    if index is None:
        return x.flip(dim) if rule == "reverse" else x.narrow(dim, size - 1, 1)
    at, length = torch.arange(size), index.long().reshape(-1, 1)
    rows = torch.where(at < length, length - 1 - at, at) if rule == "reverse" else length - 1
    rows = rows.reshape([x.shape[0]] + [1] * (dim - 1) + [-1] + [1] * (x.dim() - 1 - dim))
    y = x.gather(dim, rows.clamp(min=0).expand(x.shape[:dim] + rows.shape[dim:dim + 1] + x.shape[dim + 1:]))
    return torch.where(rows >= 0, y, torch.zeros(()))


def conv_transpose(x, w, n, shape):
    """shape: of the result, (B, C, H, W)."""
    options = [[n[key + "_h"], n[key + "_w"]] for key in ("stride", "padding", "dilation")]
    extra = [shape[2 + i] - (x.shape[2 + i] - 1) * s + 2 * p - d * (w.shape[2 + i] - 1) - 1
             for i, (s, p, d) in enumerate(zip(*options))]
    return F.conv_transpose2d(x, w, None, options[0], options[1], extra, n["groups"], options[2])


def loss(n, y, target):
    op = n["op"]
    if op == "cross_entropy":
        return F.cross_entropy(y.flatten(0, -2), target.long().flatten(), ignore_index=n["ignore"],
                               label_smoothing=n["smoothing"])
    if op == "huber":
        return F.huber_loss(y, target, delta=n["delta"]) if n["delta"] > 0 else F.l1_loss(y, target)
    return (F.mse_loss if op == "mse" else F.binary_cross_entropy_with_logits)(y, target)


def run_node(n, src, batch):
    """Computes one node; images are in the layout of the file."""
    op, x = n["op"], src[0]
    nhwc = n["layout"] == 1
    if op in ("add", "sub", "mul", "div"):
        return {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[op](x, src[1])
    if op == "scale":
        return x * n["a"] + n["b"]
    if op == "activation":
        return activate(x, n["act"], n["slope"])
    if op == "matmul":
        a, b = (x.transpose(-1, -2) if n["trans_a"] else x), (src[1].transpose(-1, -2) if n["trans_b"] else src[1])
        return a @ b
    if op == "linear":
        return activate(F.linear(x, src[1], src[2]), n["act"])
    if op in ("conv2d", "conv_transpose2d", "max_pool2d", "avg_pool2d"):
        x = x.permute(0, 3, 1, 2) if nhwc else x
        stride, padding = (n["stride_h"], n.get("stride_w", n["stride_h"])), n["padding_h"]
        if op == "conv2d":
            y = F.conv2d(x, src[1], src[2], stride, (padding, n["padding_w"]), (n["dilation_h"], n["dilation_w"]),
                         n["groups"])
            y = activate(y, n["act"])
        elif op == "conv_transpose2d":
            shape = n["shape"]
            y = conv_transpose(x, src[1], n, [shape[i] for i in (0, 3, 1, 2)] if nhwc else shape)
        elif op == "max_pool2d":
            y = F.max_pool2d(x, (n["kernel_h"], n["kernel_w"]), stride, padding)
        else:
            y = F.avg_pool2d(x, (n["kernel_h"], n["kernel_w"]), stride, padding, count_include_pad=False)
        return y.permute(0, 2, 3, 1) if nhwc else y
    if op == "reshape":
        first = [batch * n["rows"]] if n["rows"] else n["shape"][:1]
        return x.reshape(first + n["shape"][1:])
    if op == "permute":
        return x.permute([n["dim%d" % i] for i in range(len(n["shape"]))])
    if op == "slice":
        return x.narrow(n["dim"], n["start"], n["shape"][n["dim"]])
    if op == "concat":
        return torch.cat(src, n["dim"])
    if op == "sum":
        f = torch.mean if n["mean"] else torch.sum
        return f(x) if n["dim"] < 0 else f(x, n["dim"], keepdim=True)
    if op in ("softmax", "log_softmax"):
        return getattr(F, op)(x, -1)
    if op == "layernorm":
        return F.layer_norm(x, x.shape[-1:], src[1], src[2], n["eps"])
    if op == "rmsnorm":
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + n["eps"])
        return y if src[1] is None else y * src[1]
    if op == "batchnorm":
        y = F.batch_norm(x, src[3], src[4], src[1], src[2], False, n["momentum"], n["eps"])
        return activate(y, n["act"])
    if op == "dropout":
        return x
    if op == "embedding":
        return F.embedding(x.long(), src[1])
    if op == "attention":
        return attention(x, n, src[2] if len(src) > 2 else None)
    if op == "rotary":
        return rotary(x, n, *src[1:])
    if op == "lstm":
        return lstm(*src, states=n["shape"][-1] > src[2].shape[1])
    if op == "gru":
        return gru(*src)
    if op == "map":
        return elementwise(n, src)
    if op == "take":
        return take(n, *src)
    if op == "mask":
        return (torch.arange(n["shape"][1]) < x.reshape(-1, 1)).float()
    if op == "max":
        return x.argmax(n["dim"], keepdim=True).int() if n["index"] else x.amax(n["dim"], keepdim=True)
    if op in ("cross_entropy", "bce_with_logits", "mse", "huber"):
        return loss(n, x, src[1])
    raise ValueError("this reader does not know the op " + op)
