"""Fetches the published files of a data set into the directory of its reader.

TensorFlow Datasets (MNIST, MNLI, QNLI, SST-2) and the data set library of Hugging Face (all data
sets) publish these addresses with these checksums. Only `fetch` downloads anything, and it never
keeps a file whose bytes differ from the published ones.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from dpoptax.training.errors import ConfigError, unknown_name
from experiments.data.formats import MissingFilesError
from experiments.data.published_data import PUBLISHED


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """One published file.

    Attributes:
        path: Path within the data directory where the reader looks for it.
        url: Address of the file.
        checksum: Checksum of its bytes, as ALGORITHM:HEXADECIMAL.
    """

    path: str
    url: str
    checksum: str


_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist/"
_FASHION = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_GLUE = "https://dl.fbaipublicfiles.com/glue/data/"
_IDX = [f"{s}-{k}-ubyte.gz" for s in ("train", "t10k") for k in ("images-idx3", "labels-idx1")]
_CHECKSUMS = {
    "mnist": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion_mnist": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    "cifar10": ("6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",),
    "cifar100": ("85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",),
    "sst2": ("d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",),
    "qnli": ("e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5",),
    "mnli": ("e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633",),
    "qqp": ("40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0",),
}
_ADDRESSES = {
    "mnist": [_MNIST + name for name in _IDX],
    "fashion_mnist": [_FASHION + name for name in _IDX],
    "cifar10": [_CIFAR + "cifar-10-python.tar.gz"],
    "cifar100": [_CIFAR + "cifar-100-python.tar.gz"],
    "sst2": [_GLUE + "SST-2.zip"],
    "qnli": [_GLUE + "QNLIv2.zip"],
    "mnli": [_GLUE + "MNLI.zip"],
    "qqp": [_GLUE + "QQP-clean.zip"],
}


def _file(name: str, url: str, checksum: str) -> RemoteFile:
    """Returns a file. MNIST and Fashion-MNIST have the same names, so each has a folder."""
    folder = f"{name}/" if "mnist" in name else ""
    return RemoteFile(folder + url.rsplit("/", 1)[1], url, f"sha256:{checksum}")


SOURCES: dict[str, tuple[RemoteFile, ...]] = {
    name: tuple(_file(name, *pair) for pair in zip(urls, _CHECKSUMS[name], strict=True))
    for name, urls in _ADDRESSES.items()
}
"""Files of each data set."""


def fetch(name: str, data_dir: str | Path | None, *, progress: bool = True) -> list[Path]:
    """Downloads the published files of a data set into `data_dir`, if any are missing.

    A file gets its name only after it is complete and its checksum is verified. Existing files are
    never replaced.

    Args:
        name: Name of the data set.
        data_dir: Directory for the files. A missing directory is created.
        progress: Whether to show a progress bar for each file.

    Returns:
        The downloaded files. The list is empty if the reader finds all files.

    Raises:
        ConfigError: `data_dir` is missing, pooch is not installed, the network fails, or the bytes
            differ from the published ones. The message gives the file, its address and its folder.
    """
    if name not in PUBLISHED:
        raise unknown_name("dataset", name, PUBLISHED)
    if data_dir is None:
        raise ConfigError(
            f"`data_dir` must be given to fetch dataset={name!r}, got None. Pass --data-dir."
        )
    data_dir = Path(data_dir)
    try:
        PUBLISHED[name].find(data_dir)
    except MissingFilesError:
        pass
    else:
        return []
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Fetching needs {error.name}, which is not installed. Run `uv sync`, or download "
            f"{_by_hand(SOURCES[name], data_dir)} by hand."
        ) from error
    downloader = pooch.HTTPDownloader(progressbar=progress)
    fetched = []
    for file in SOURCES[name]:
        path = data_dir / file.path
        algorithm, checksum = file.checksum.split(":")
        try:
            if path.exists():
                if pooch.file_hash(str(path), alg=algorithm) != checksum:
                    raise ConfigError(
                        f"{path} must be the published file, got bytes with another checksum than "
                        f"{file.checksum}. Move it away and fetch it again."
                    )
                continue
            pooch.retrieve(file.url, file.checksum, path.name, path.parent, downloader=downloader)
        except OSError as error:  # errors of the network or the disk
            raise ConfigError(
                f"{path.name} of dataset={name!r} cannot be fetched ({type(error).__name__}: "
                f"{error}). Download {_by_hand([file], data_dir)} by hand."
            ) from error
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{file.url} must send the published {path.name}, got other bytes, which were "
                f"deleted ({error}). Download {_by_hand([file], data_dir)} by hand."
            ) from error
        fetched.append(path)
    return fetched


def _by_hand(files: Sequence[RemoteFile], data_dir: Path) -> str:
    return ", ".join(f"{file.url} into {(data_dir / file.path).parent}" for file in files)
