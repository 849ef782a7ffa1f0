#!/usr/bin/env python3
"""Reads model files of hpml_model_save: prints their structure, runs them in PyTorch, exports them to ONNX.

    python3 hpml_model.py house.safetensors                   # layers and parameters; needs Python alone
    python3 hpml_model.py house.safetensors --onnx house.onnx # needs torch (and onnx)

    from hpml_model import Model, to_torch
    net = to_torch(Model("house.safetensors"))                # a torch.nn.Module in evaluation mode
    y = net(torch.tensor([[120.0, 35.0, 2.5]]))               # any batch size

The format is described in hpml.h, section >>model. Section numbers of values: inputs, constants, parameters, nodes.
The ops are in hpml_model_ops.py, which lies beside this file.
"""
import array
import json
import math
import struct
import sys


def number(text):
    """A number of the structure, in which 1e39 and more stand for infinity."""
    x = float(text)
    return x if abs(x) < 1e39 else math.copysign(math.inf, x)


class Model:
    """A model file: .inputs, .constants, .parameters, .nodes, .outputs as in the file, .meta, and numbers(name)."""

    def __init__(self, path):
        with open(path, "rb") as f:
            length, = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
            self.data = f.read()
        self.meta = header.pop("__metadata__", {})
        self.tensors = header
        structure = json.loads(self.meta.pop("hpml.model", "null"), parse_float=number)
        if structure is None:
            raise ValueError(path + " has parameters only, no structure; save it with hpml_model_save")
        if structure["version"] > 1:
            raise ValueError("%s has format version %d, this reader knows 1" % (path, structure["version"]))
        self.inputs, self.constants = structure["inputs"], structure["constants"]
        self.parameters, self.nodes, self.outputs = structure["parameters"], structure["nodes"], structure["outputs"]
        self.nodes = [{k: math.nan if v is None else v for k, v in n.items()} for n in self.nodes]
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


def to_torch(model):
    """A torch.nn.Module that computes the outputs of the model from its inputs."""
    import torch
    from hpml_model_ops import run_node

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
                values.append(run_node(n, src, inputs[0].shape[0]))
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
