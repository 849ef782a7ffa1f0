#!/usr/bin/env python3
"""Reads model files of hpml_model_save: prints their structure, runs them in PyTorch, exports them to ONNX.

    python3 hpml_model.py house.safetensors                   # layers and parameters; needs Python alone
    python3 hpml_model.py house.safetensors --onnx house.onnx # needs torch (and onnx)

    from hpml_model import Model, to_torch
    net = to_torch(Model("house.safetensors"))                # a torch.nn.Module in evaluation mode
    y = net(torch.tensor([[120.0, 35.0, 2.5]]))               # any batch size

The format is described in hpml.h, section >>model. Section numbers of values: inputs, constants, parameters, nodes.
"""
import array
import json
import struct
import sys

ACTIVATIONS = ["none", "relu", "leaky_relu", "gelu", "gelu_erf", "silu", "sigmoid", "tanh", "exp", "log", "sqrt",
               "square", "neg", "abs"]


class Model:
    """A model file: .inputs, .constants, .parameters, .nodes, .outputs as in the file, .meta, and numbers(name)."""

    def __init__(self, path):
        with open(path, "rb") as f:
            length, = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
            self.data = f.read()
        self.meta = header.pop("__metadata__", {})
        self.tensors = header
        structure = json.loads(self.meta.pop("hpml.model", "null"))
        if structure is None:
            raise ValueError(path + " has parameters only, no structure; save it with hpml_model_save")
        if structure["version"] > 1:
            raise ValueError("%s has format version %d, this reader knows 1" % (path, structure["version"]))
        self.inputs, self.constants = structure["inputs"], structure["constants"]
        self.parameters, self.nodes, self.outputs = structure["parameters"], structure["nodes"], structure["outputs"]
        self.meta = {k: v for k, v in self.meta.items() if not k.startswith("hpml.")}

    def numbers(self, name):
        """The shape of a tensor and its numbers, an array of floats."""
        entry = self.tensors[name]
        begin, end = entry["data_offsets"]
        raw = self.data[begin:end]
        if entry["dtype"] == "BF16":
            return entry["shape"], array.array("f", b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2)))
        if entry["dtype"] == "F16":
            return entry["shape"], array.array("f", struct.unpack("<%de" % (len(raw) // 2), raw))
        return entry["shape"], array.array("f", raw)


def activate(F, torch, x, kind, slope=0.01):
    name = ACTIVATIONS[kind]
    if name == "none":
        return x
    if name == "leaky_relu":
        return F.leaky_relu(x, slope)
    if name.startswith("gelu"):
        return F.gelu(x, approximate="none" if name == "gelu_erf" else "tanh")
    return getattr(F, name)(x) if name in ("relu", "silu") else getattr(torch, name)(x)


def lstm(torch, x, w_x, w_h, bias):
    hidden, h, out = w_h.shape[1], None, []
    h = c = torch.zeros(x.shape[0], hidden)
    for t in range(x.shape[1]):
        i, f, g, o = (x[:, t] @ w_x.T + h @ w_h.T + bias).split(hidden, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return torch.stack(out, 1)


def attention(torch, F, qkv, n):
    parts = [p.unflatten(2, (n["heads"], -1)).transpose(1, 2) for p in qkv.chunk(3, 2)]
    scores = parts[0] @ parts[1].transpose(2, 3) * n["scale"]
    if n["causal"]:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return (F.softmax(scores, -1) @ parts[2]).transpose(1, 2).flatten(2)


def run_node(torch, F, n, src, batch):
    """Computes one node; images are in the layout of the file."""
    op, x = n["op"], src[0]
    nhwc = n["layout"] == 1
    if op in ("add", "sub", "mul", "div"):
        return {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[op](x, src[1])
    if op == "scale":
        return x * n["a"] + n["b"]
    if op == "activation":
        return activate(F, torch, x, n["act"], n["slope"])
    if op == "matmul":
        a, b = (x.transpose(-1, -2) if n["trans_a"] else x), (src[1].transpose(-1, -2) if n["trans_b"] else src[1])
        return a @ b
    if op == "linear":
        return activate(F, torch, F.linear(x, src[1], src[2]), n["act"])
    if op in ("conv2d", "max_pool2d", "avg_pool2d"):
        x = x.permute(0, 3, 1, 2) if nhwc else x
        stride, padding = (n["stride_h"], n.get("stride_w", n["stride_h"])), n["padding_h"]
        if op == "conv2d":
            y = F.conv2d(x, src[1], src[2], stride, (padding, n["padding_w"]), (n["dilation_h"], n["dilation_w"]),
                         n["groups"])
            y = activate(F, torch, y, n["act"])
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
        return activate(F, torch, y, n["act"])
    if op == "dropout":
        return x
    if op == "embedding":
        return F.embedding(x.long(), src[1])
    if op == "attention":
        return attention(torch, F, x, n)
    if op == "lstm":
        return lstm(torch, x, src[1], src[2], src[3])
    raise ValueError("this reader does not know the op " + op)


def to_torch(model):
    """A torch.nn.Module that computes the outputs of the model from its inputs."""
    import torch
    import torch.nn.functional as F

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.names = []
            for entry in model.constants + model.parameters:
                shape, numbers = model.numbers(entry["name"])
                value, name = torch.tensor(numbers).reshape(shape), entry["name"].replace(".", "/")
                trained = entry in model.parameters and not entry["buffer"]
                if trained:
                    self.register_parameter(name, torch.nn.Parameter(value))
                else:
                    self.register_buffer(name, value)
                self.names.append(name)

        def forward(self, *inputs):
            values = list(inputs) + [getattr(self, name) for name in self.names]
            for n in model.nodes:
                src = [values[i] if i >= 0 else None for i in n["src"]]
                values.append(run_node(torch, F, n, src, inputs[0].shape[0]))
            outputs = tuple(values[i] for i in model.outputs)
            return outputs if len(outputs) > 1 else outputs[0]

    return Net().eval()


def main():
    if len(sys.argv) not in (2, 4) or (len(sys.argv) == 4 and sys.argv[2] != "--onnx"):
        sys.exit(__doc__)
    model = Model(sys.argv[1])
    for n in model.inputs:
        print("input     %-20s %s %s" % (n["name"], n["dtype"], "x".join(map(str, n["shape"]))))
    for n in model.nodes:
        print("%-9s %-20s %s" % (n["op"], n["name"], "x".join(map(str, n["shape"])) or "scalar"))
    count = sum(len(model.numbers(p["name"])[1]) for p in model.parameters)
    print("%d parameters in %d tensors; metadata: %s" % (count, len(model.parameters), model.meta))
    if len(sys.argv) == 4:
        import torch
        kinds = {"f32": torch.float32, "i32": torch.int32}
        example = tuple(torch.zeros(n["shape"], dtype=kinds[n["dtype"]]) for n in model.inputs)
        torch.onnx.export(to_torch(model), example, sys.argv[3])


if __name__ == "__main__":
    main()
