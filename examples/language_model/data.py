"""The Python standard library's own source code, as bytes."""

import functools
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

# Files that every supported Python has; the validation files are never trained on.
TRAIN_FILES = (
    "_pydecimal.py", "argparse.py", "ast.py", "asyncio/base_events.py", "asyncio/streams.py", "asyncio/tasks.py",
    "base64.py", "bdb.py", "calendar.py", "codecs.py", "collections/__init__.py", "configparser.py", "contextlib.py",
    "copy.py", "dataclasses.py", "difflib.py", "dis.py", "doctest.py", "email/message.py", "enum.py", "fileinput.py",
    "fractions.py", "ftplib.py", "functools.py", "gettext.py", "gzip.py", "html/parser.py", "http/client.py",
    "http/cookiejar.py", "http/server.py", "imaplib.py", "inspect.py", "ipaddress.py", "json/decoder.py",
    "json/encoder.py", "locale.py", "logging/__init__.py", "logging/handlers.py", "mailbox.py", "mimetypes.py",
    "optparse.py", "os.py", "pdb.py", "pickle.py", "pickletools.py", "platform.py", "plistlib.py", "poplib.py",
    "pstats.py", "pydoc.py", "queue.py", "random.py", "runpy.py", "selectors.py", "shutil.py", "smtplib.py",
    "socket.py", "socketserver.py", "ssl.py", "subprocess.py", "tarfile.py", "tempfile.py", "threading.py",
    "timeit.py", "tokenize.py", "traceback.py", "types.py", "typing.py", "unittest/case.py", "unittest/mock.py",
    "urllib/parse.py", "urllib/request.py", "uuid.py", "warnings.py", "weakref.py",
)  # fmt: skip
VALIDATION_FILES = ("csv.py", "heapq.py", "pprint.py", "shlex.py", "statistics.py", "textwrap.py", "zipapp.py")


@functools.cache
def read_bytes(names: tuple[str, ...]) -> Tensor:
    library = Path(sysconfig.get_path("stdlib"))
    source = b"\n".join((library / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


class StandardLibrarySource(LightningDataModule):
    """Windows of ``context`` bytes and, as targets, the same windows one byte further on."""

    vocabulary_size = 256

    def __init__(self, context: int = 64, batch_size: int = 16, seed: int = 0) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str) -> None:
        self.train_set = self._windows(TRAIN_FILES)
        self.validation_set = self._windows(VALIDATION_FILES)

    def train_dataloader(self) -> DataLoader:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True, generator=order)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_set, self.batch_size, drop_last=True)

    def _windows(self, names: tuple[str, ...]) -> TensorDataset:
        text = read_bytes(names)
        length = (len(text) - 1) // self.context * self.context
        return TensorDataset(text[:length].view(-1, self.context), text[1 : length + 1].view(-1, self.context))
