"""hpml in Python, by ctypes alone: the library is compiled once, no Python package is needed.

Copy this file and hpml.h.

    python3 examples/hpml.py          trains the exclusive or, saves the parameters, loads them, predicts

Descs are keyword arguments with the names of the C fields (dots for structs in structs): ctx.trainer(input=x, output=y,
lr=0.1, **{"schedule.warmup_steps": 10}). Where fields lie is not written here a second time: the compiled library
reports the size of each struct and the offset and size of each field, and a field of another size is an error. Batches
are anything with the buffer protocol (array, bytes, numpy arrays): f32 inputs and i32 labels, in one piece. Errors of
the library are raised as hpml.Error, with its text."""
import array
import ctypes
import os
import struct
import subprocess
import sys
import tempfile

# The fields that Python sets or reads: i int32, f float, d double, q int64, P pointer, ? bool, in struct's letters.
FIELDS = {
    "hpml_ctx_desc": {"threads": "i", "seed": "q", "cpu": "P", "activation_dtype": "i"},
    "hpml_linear_desc": {"name": "P", "no_bias": "?", "init": "i", "init_scale": "f"},
    "hpml_conv2d_desc": {"name": "P", "kernel_h": "i", "kernel_w": "i", "stride_h": "i", "stride_w": "i",
                         "padding_h": "i", "padding_w": "i", "groups": "i", "activation": "i", "no_bias": "?"},
    "hpml_trainer_desc": {"input": "P", "output": "P", "loss": "i", "loss_tensor": "P", "target": "P",
                          "label_smoothing": "f", "optimizer": "i", "lr": "f", "momentum": "f", "nesterov": "?",
                          "beta1": "f", "beta2": "f", "eps": "f", "weight_decay": "f", "clip_norm": "f",
                          "accumulate": "i", "schedule.kind": "i", "schedule.warmup_steps": "q",
                          "schedule.total_steps": "q"},
    "hpml_step_info": {"step": "q", "loss": "f", "accuracy": "f", "lr": "f", "samples": "q"},
}
# Results and arguments: T tensor or other pointer, s status, i int32, q int64, f float, x text, b buffer, v nothing.
CALLS = {
    "hpml_ctx_create": "TT", "hpml_ctx_free": "vT", "hpml_ctx_status": "iT", "hpml_ctx_error": "xT",
    "hpml_ctx_clear_error": "vT", "hpml_input_2d": "TTqq", "hpml_input_3d": "TTqqq", "hpml_input_4d": "TTqqqq",
    "hpml_linear": "TTqT", "hpml_conv2d": "TTqT", "hpml_max_pool2d": "TTiii", "hpml_flatten": "TT", "hpml_relu": "TT",
    "hpml_tanh": "TT", "hpml_gelu": "TT", "hpml_sigmoid": "TT", "hpml_softmax": "TT", "hpml_add": "TTT",
    "hpml_trainer_create": "TTT", "hpml_trainer_step": "iTbbqT", "hpml_trainer_predict": "iTbqb",
    "hpml_params_save": "iTxi", "hpml_params_load": "iTx", "hpml_param_total": "qT",
    "hpml_checkpoint_save": "iTx", "hpml_checkpoint_load": "iTx", "hpml_tensor_count": "qT",
}
CTYPES = {"T": ctypes.c_void_p, "s": ctypes.c_int, "i": ctypes.c_int, "q": ctypes.c_int64, "f": ctypes.c_float,
          "x": ctypes.c_char_p, "b": ctypes.c_void_p, "v": None}


class Error(RuntimeError):
    """An error of the library: which object, what was expected, what came."""


def build(folder=None, header=None, flags=None):
    """Compiles hpml.h and a table of offsets as a shared library, unless a newer one is there; returns its path."""
    here = os.path.dirname(os.path.abspath(__file__))
    header = header or next(p for p in (os.path.join(here, "hpml.h"), os.path.join(here, "..", "hpml.h"))
                            if os.path.exists(p))
    folder = folder or os.path.join(tempfile.gettempdir(), "hpml-%d" % os.getuid())
    os.makedirs(folder, mode=0o700, exist_ok=True)
    library, source = os.path.join(folder, "libhpml.so"), os.path.join(folder, "hpml_python.c")
    if os.path.exists(library) and os.path.getmtime(library) > max(map(os.path.getmtime, (header, __file__))):
        return library
    rows = []
    for name, fields in FIELDS.items():
        rows.append("sizeof(%s), 0" % name)
        rows += ["offsetof(%s, %s), sizeof(((%s *)0)->%s)" % (name, field, name, field) for field in fields]
    with open(source, "w") as f:
        f.write('#define HPML_IMPLEMENTATION\n#include "%s"\nconst int64_t hpml_python_table[] = {\n%s };\n'
                % (os.path.abspath(header), ",\n".join(rows)))
    flags = (flags or os.environ.get("HPML_PYTHON_FLAGS") or "-O2").split()
    subprocess.check_call([os.environ.get("CC", "cc"), *flags, "-shared", "-fPIC", source, "-o", library + ".new",
                           "-lm", "-lpthread"])
    os.replace(library + ".new", library)
    return library


def _load():
    lib, table = ctypes.CDLL(build()), {}
    numbers = (ctypes.c_int64 * (2 * sum(1 + len(f) for f in FIELDS.values()))).in_dll(lib, "hpml_python_table")
    place = iter(range(0, len(numbers), 2))
    for name, fields in FIELDS.items():
        table[name] = {"": numbers[next(place)]}
        for field, letter in fields.items():
            i = next(place)
            if numbers[i + 1] != struct.calcsize(letter):
                raise Error("%s.%s has %d bytes in the library, %d here"
                            % (name, field, numbers[i + 1], struct.calcsize(letter)))
            table[name][field] = numbers[i]
    for name, letters in CALLS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = CTYPES[letters[0]], [CTYPES[c] for c in letters[1:]]
    return lib, table


_lib, _table = _load()


class Struct:
    """A struct of the library in memory of Python: a desc to fill in, or a result to read."""

    def __init__(self, struct_name, **fields):
        self.name, self.kept = struct_name, []
        self.memory = ctypes.create_string_buffer(_table[struct_name][""])
        for field, value in fields.items():
            if field not in FIELDS[struct_name]:
                raise Error("%s has no field %s here; it has %s"
                            % (struct_name, field, ", ".join(FIELDS[struct_name])))
            if isinstance(value, str):
                self.kept.append(ctypes.create_string_buffer(value.encode()))
                value = ctypes.addressof(self.kept[-1])
            if isinstance(value, Tensor):
                value = value.pointer
            struct.pack_into(FIELDS[struct_name][field], self.memory, _table[struct_name][field], value)

    def __getitem__(self, field):
        return struct.unpack_from(FIELDS[self.name][field], self.memory, _table[self.name][field])[0]


class Tensor:
    """A tensor of a model that is being recorded; layers are its methods: x.linear(128).relu()."""

    def __init__(self, ctx, pointer):
        self.ctx, self.pointer = ctx, pointer

    def op(self, name, *args):
        return Tensor(self.ctx, self.ctx.call("hpml_" + name, self.pointer, *args))

    def __getattr__(self, name):  # relu, tanh, gelu, sigmoid, softmax, flatten
        if CALLS.get("hpml_" + name) != "TT":
            raise AttributeError(name)
        return lambda: self.op(name)

    def __add__(self, other):
        return self.op("add", other.pointer)

    def linear(self, out, **desc):
        return self.op("linear", out, Struct("hpml_linear_desc", **desc).memory)

    def conv2d(self, out, **desc):
        return self.op("conv2d", out, Struct("hpml_conv2d_desc", **desc).memory)

    def max_pool2d(self, kernel, stride=0, padding=0):
        return self.op("max_pool2d", kernel, stride, padding)


def _address(values, letter, count):
    """The address of a buffer of `count` numbers of this type; the buffer, which must live as long."""
    view = memoryview(values).cast("B")
    if view.nbytes != count * struct.calcsize(letter) or not view.contiguous:
        raise Error("%d bytes in one piece are needed (%d numbers of type %s), %d came"
                    % (count * struct.calcsize(letter), count, letter, view.nbytes))
    kept = bytes(view)
    return kept, ctypes.cast(ctypes.c_char_p(kept), ctypes.c_void_p)


class Trainer:
    def __init__(self, ctx, **desc):
        self.ctx = ctx
        self.sizes = [_lib.hpml_tensor_count(desc[k].pointer) for k in ("input", "output")]
        self.batch = desc.pop("batch")
        self.pointer = ctx.call("hpml_trainer_create", ctx.pointer, Struct("hpml_trainer_desc", **desc).memory)

    def step(self, x, y, samples=None, labels="i"):
        """One step on a batch; y: int32 labels ("i") or f32 targets ("f"). Returns the step's Struct: ["loss"], ..."""
        samples, info = samples or self.batch, Struct("hpml_step_info")
        kept_x, at_x = _address(x, "f", samples * self.sizes[0] // self.batch)
        count = samples if labels == "i" else samples * self.sizes[1] // self.batch
        kept_y, at_y = _address(y, labels, count)
        self.ctx.call("hpml_trainer_step", self.pointer, at_x, at_y, samples, info.memory)
        return info

    def predict(self, x, samples=None):
        """The outputs for `samples` samples, as an array of floats, sample after sample."""
        samples = samples or self.batch
        kept, at = _address(x, "f", samples * self.sizes[0] // self.batch)
        out = array.array("f", bytes(4 * (samples * self.sizes[1] // self.batch)))
        self.ctx.call("hpml_trainer_predict", self.pointer, at, samples, out.buffer_info()[0])
        return out


class Context:
    """Owns everything made from it; `with hpml.Context(seed=1) as ctx:` frees it at the end."""

    def __init__(self, **desc):
        self.pointer = _lib.hpml_ctx_create(Struct("hpml_ctx_desc", **desc).memory)
        self.check()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        _lib.hpml_ctx_free(self.pointer)
        self.pointer = None

    def check(self):
        if _lib.hpml_ctx_status(self.pointer) != 0:
            text = _lib.hpml_ctx_error(self.pointer).decode()
            _lib.hpml_ctx_clear_error(self.pointer)
            raise Error(text)

    def call(self, name, *args):
        args = [a.encode() if isinstance(a, str) else a for a in args]
        result = getattr(_lib, name)(*args)
        self.check()
        return result

    def input(self, *shape):
        return Tensor(self, self.call("hpml_input_%dd" % len(shape), self.pointer, *shape))

    def trainer(self, batch, **desc):
        return Trainer(self, batch=batch, **desc)

    def save(self, path, dtype=0):
        self.call("hpml_params_save", self.pointer, path, dtype)

    def load(self, path):
        self.call("hpml_params_load", self.pointer, path)


def main():
    cases, answers = array.array("f", [0, 0, 0, 1, 1, 0, 1, 1]), array.array("i", [0, 1, 1, 0])

    def model(ctx):
        x = ctx.input(4, 2)
        return ctx.trainer(4, input=x, output=x.linear(8, name="hidden").tanh().linear(2, name="out"), lr=0.5)

    path = os.path.join(tempfile.mkdtemp(), "xor.safetensors")
    with Context(seed=1) as ctx:
        trainer = model(ctx)
        for _ in range(500):
            info = trainer.step(cases, answers)
        print("step %d: loss %.4f, accuracy %.2f" % (info["step"], info["loss"], info["accuracy"]))
        ctx.save(path)
    with Context(seed=2) as ctx:
        trainer = model(ctx)
        ctx.load(path)
        scores = trainer.predict(cases)
        print("answers:", *(int(scores[2 * i + 1] > scores[2 * i]) for i in range(4)))
        try:
            ctx.input(4, 3) + ctx.input(4, 2)
        except Error as e:
            print("an error:", e)
    return 0


if __name__ == "__main__":
    sys.exit(main())
