"""Tests of fetching published files over HTTP, from a server in this process."""

import dataclasses
import hashlib
import http.server
import socket
import sys
import threading
import zipfile

import pytest

from dpoptax.training import ConfigError
from dpoptax.training.cli.main import main
from experiments.command_line import main as experiment
from experiments.data import PUBLISHED, fetching
from experiments.data.published_data import PublishedSpec
from experiments.data.tokens import Tokens
from tests.published_data import write_cifar, write_mnist
from tests.published_texts import GLUE_FILES, write_glue, write_tokenizer
from tests.training.data_files_test import TRAIN_CONFIG

pooch = pytest.importorskip("pooch")

TRAIN_SIZE = {"cifar10": 50, "cifar100": 10}
"""Numbers of training examples of the small data sets; all others have 20."""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; for paths in `cut`, sends half of the announced length."""

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path not in self.server.cut:
            super().do_GET()
            return
        content = (self.server.folder / self.path[1:]).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves small published files under their true names, with `SOURCES` that list them."""
    folder = tmp_path / "server"
    folder.mkdir()
    publish(folder, tmp_path / "written")
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *args: Handler(*args, directory=folder)
    ) as httpd:
        httpd.folder, httpd.asked, httpd.cut = folder, [], set()
        address = f"http://127.0.0.1:{httpd.server_address[1]}"
        monkeypatch.setattr(fetching, "SOURCES", redirected(folder, address))
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield httpd
        httpd.shutdown()
        thread.join()


def publish(folder, scratch):
    """Publishes small data sets, one folder each, under their published file names."""
    for name in ("mnist", "fashion_mnist"):
        write_mnist(folder / name)
    for classes in (10, 100):
        write_cifar(folder / f"cifar{classes}", classes)
    for task, top in GLUE_FILES.items():
        write_glue(scratch, task)
        archive = fetching.SOURCES[task][0].path
        (folder / task).mkdir()
        with zipfile.ZipFile(folder / task / archive, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr(f"{top}/original/train.tsv", "another table\n")
            for path in sorted((scratch / top).iterdir()):
                packed.write(path, f"{top}/{path.name}")


def redirected(folder, address):
    """Returns the true table with the addresses and checksums of the small files."""
    sources = {}
    for name, files in fetching.SOURCES.items():
        sources[name] = []
        for file in files:
            place = f"{name}/{file.url.rsplit('/', 1)[1]}"
            checksum = hashlib.sha256((folder / place).read_bytes()).hexdigest()
            changed = {"url": f"{address}/{place}", "checksum": f"sha256:{checksum}"}
            sources[name].append(dataclasses.replace(file, **changed))
    return {name: tuple(files) for name, files in sources.items()}


def contents(folder):
    """Returns the contents of all files below `folder`, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def tokens(name, folder):
    """Returns the `tokens` option of a data set; writes a tokenizer if it has texts."""
    if PUBLISHED[name].kind == "images":
        return Tokens(None, 16)
    write_tokenizer(folder)
    return Tokens(folder, 16)


def test_every_published_file_has_address_and_checksum():
    assert set(fetching.SOURCES) == set(PUBLISHED)
    files = [file for files in fetching.SOURCES.values() for file in files]
    assert len({file.path for file in files}) == len({file.checksum for file in files})
    for file in files:
        assert file.url.startswith("https://")
        assert file.url.endswith("/" + file.path.rsplit("/", 1)[-1])
        algorithm, checksum = file.checksum.split(":")
        assert len(bytes.fromhex(checksum)) == hashlib.new(algorithm).digest_size


@pytest.mark.parametrize("name", sorted(fetching.SOURCES))
def test_reader_finds_fetched_files(server, tmp_path, name):
    if PUBLISHED[name].kind != "images":
        pytest.importorskip("tokenizers")
    data = tmp_path / "made" / "data"
    fetched = fetching.fetch(name, data, progress=False)
    assert [path.relative_to(data).as_posix() for path in fetched] == [
        file.path for file in fetching.SOURCES[name]
    ]
    size = PublishedSpec(name, data, tokens(name, tmp_path / "model")).load().train_size
    assert size == TRAIN_SIZE.get(name, 20)
    asked = len(server.asked)
    assert asked == len(fetched)
    assert fetching.fetch(name, data, progress=False) == []
    assert len(server.asked) == asked


def test_does_not_fetch_data_present_in_another_form(server, tmp_path):
    write_mnist(tmp_path / "MNIST" / "raw", zipped=False)
    write_cifar(tmp_path, 10, archive=False)
    write_glue(tmp_path, "sst2")
    before = contents(tmp_path)
    for name in ("mnist", "cifar10", "sst2"):
        assert fetching.fetch(name, tmp_path, progress=False) == []
    assert (server.asked, contents(tmp_path)) == ([], before)


def test_discards_files_with_wrong_checksum(server, tmp_path):
    path = server.folder / "cifar10" / "cifar-10-python.tar.gz"
    path.write_bytes(path.read_bytes() + b"\0")
    data = tmp_path / "data"
    with pytest.raises(
        ConfigError, match=r"(?s)http\S+/cifar-10-python.tar.gz must send the published"
    ) as found:
        fetching.fetch("cifar10", data, progress=False)
    assert str(found.value).endswith(f"/cifar-10-python.tar.gz into {data} by hand.")
    assert contents(data) == {}


def test_interrupted_download_leaves_no_file(server, tmp_path):
    server.cut = {"/mnist/train-labels-idx1-ubyte.gz"}
    data = tmp_path / "data"
    with pytest.raises(ConfigError, match=r"train-labels-idx1-ubyte.gz of .* cannot be fetched"):
        fetching.fetch("mnist", data, progress=False)
    assert list(contents(data)) == ["mnist/train-images-idx3-ubyte.gz"]
    with pytest.raises(ConfigError, match=r"mnist.* needs train-labels"):
        PublishedSpec("mnist", data).load()
    server.cut = set()
    assert len(fetching.fetch("mnist", data, progress=False)) == 3
    assert PublishedSpec("mnist", data).load().train_size == 20


def test_network_failure_names_file_address_and_folder(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    file = fetching.RemoteFile("mnist/x.gz", f"http://127.0.0.1:{port}/x.gz", "sha256:00")
    monkeypatch.setitem(fetching.SOURCES, "mnist", (file,))
    message = rf"x.gz of .* cannot be fetched .*{file.url} into {tmp_path}/mnist"
    with pytest.raises(ConfigError, match=message):
        fetching.fetch("mnist", tmp_path, progress=False)
    assert contents(tmp_path) == {}


def test_does_not_replace_existing_file(server, tmp_path):
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.parent.mkdir()
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"train-images.* must be the published file.*Move it"):
        fetching.fetch("mnist", tmp_path, progress=False)
    assert (path.read_bytes(), server.asked) == (b"something else", [])


def test_missing_library_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ConfigError, match=r"needs pooch.*uv sync.*SST-2.zip into"):
        fetching.fetch("sst2", tmp_path)


def test_requires_data_dir():
    with pytest.raises(ConfigError, match=r"`data_dir` must be given.*mnist.*--data-dir"):
        fetching.fetch("mnist", None)


def test_reads_archive_placed_by_hand(server, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "data").mkdir()
    content = (server.folder / "sst2" / "SST-2.zip").read_bytes()
    archive = tmp_path / "data" / "SST-2.zip"
    archive.write_bytes(content)
    reader = tokens("sst2", tmp_path / "model")
    assert PublishedSpec("sst2", tmp_path / "data", reader).load().train_size == 20
    archive.write_bytes(content[:-30])
    with pytest.raises(
        ConfigError, match=r"SST-2.zip cannot be read: it is not a complete archive"
    ):
        PublishedSpec("sst2", tmp_path / "data", reader).load()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("SST-2/train.tsv", "sentence\tlabel\ngood\t1\n")
    with pytest.raises(ConfigError, match=r"SST-2.zip cannot be read: it lacks .*dev.tsv"):
        PublishedSpec("sst2", tmp_path / "data", reader).load()


@pytest.mark.slow
def test_command_line_fetches_only_on_request(server, tmp_path, capsys):
    config, data = tmp_path / "config.py", tmp_path / "data"
    config.write_text(TRAIN_CONFIG)
    data.mkdir()
    options = ["--data-dir", str(data), "--delta", "1e-3"]
    arguments = ["train", str(config), "--workdir", str(tmp_path / "run"), *options]
    assert main(arguments) == 2
    assert f"python -m experiments fetch mnist --data-dir {data}" in capsys.readouterr().err
    assert server.asked == []
    fetch = ["fetch", "mnist", "--data-dir", str(data)]
    assert experiment(fetch) == 0
    assert len(server.asked) == 4
    assert experiment(fetch) == 0
    assert "mnist: all files are there" in capsys.readouterr().out
    assert main(arguments) == 0
    assert len(server.asked) == 4


def test_unknown_data_set_suggests_a_name(tmp_path, capsys):
    assert experiment(["fetch", "mnits", "--data-dir", str(tmp_path)]) == 2
    assert "Did you mean 'mnist'" in capsys.readouterr().err
