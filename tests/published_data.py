"""Small data sets in the published formats of the real ones."""

import gzip
import io
import pickle
import tarfile

import numpy as np


def pictures(count, shape, num_classes, seed=0):
    """Returns random uint8 images and labels that cycle through all classes."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.uint8) % num_classes
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), labels


def write_mnist(folder, *, zipped=True, train=20, test=10):
    """Writes four IDX files with `train` and `test` images; returns the splits."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for seed, (prefix, count) in enumerate({"train": train, "t10k": test}.items()):
        images, labels = splits[prefix] = pictures(count, (28, 28), 10, seed)
        for kind, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            content = header + array.tobytes()
            suffix, content = (".gz", gzip.compress(content)) if zipped else ("", content)
            (folder / f"{prefix}-{kind}{suffix}").write_bytes(content)
    return splits


def write_cifar(folder, num_classes, *, archive=True, per_file=10):
    """Writes CIFAR-10 or CIFAR-100 batches with `per_file` images each; returns the splits."""
    ten = num_classes == 10
    train = [f"data_batch_{i}" for i in range(1, 6)] if ten else ["train"]
    files, splits = {}, {"train": [], "test": []}
    for seed, name in enumerate([*train, "test_batch" if ten else "test"]):
        images, labels = pictures(per_file, (32, 32, 3), num_classes, seed)
        splits["train" if name in train else "test"].append((images, labels))
        planes = images.transpose(0, 3, 1, 2).reshape(per_file, -1)
        batch = {b"data": planes, b"labels" if ten else b"fine_labels": labels.tolist()}
        if not ten:
            batch[b"coarse_labels"] = (labels // 5).tolist()
        files[name] = python2_pickle(batch)
    top = "cifar-10-batches-py" if ten else "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    if archive:
        with tarfile.open(folder / f"cifar-{num_classes}-python.tar.gz", "w:gz") as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(f"{top}/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    else:
        (folder / top).mkdir()
        for name, content in files.items():
            (folder / top / name).write_bytes(content)
    return {
        split: tuple(np.concatenate(column) for column in zip(*parts, strict=True))
        for split, parts in splits.items()
    }


class _Python2Pickler(pickle._Pickler):
    """Writes byte strings and arrays with the opcodes of Python 2 and the NumPy of its time."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value):
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)
        self.memoize(value)

    dispatch[bytes] = save_bytes

    def save_array(self, array):
        self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
        self.write(b"(cnumpy\nndarray\nK\x00\x85")
        self.save_bytes(b"b")
        self.write(b"tR")
        self.write(b"(K\x01")
        self.save(array.shape)
        self.write(b"cnumpy\ndtype\n(")
        self.save_bytes(b"u1")
        self.write(b"K\x00K\x01tR(K\x03")
        self.save_bytes(b"|")
        self.write(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
        self.save_bytes(array.tobytes())
        self.write(b"tb")

    dispatch[np.ndarray] = save_array


def python2_pickle(value):
    """Returns `value` in protocol 2, like the published batches."""
    buffer = io.BytesIO()
    _Python2Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()
