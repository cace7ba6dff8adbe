"""Files are read without executing anything in them."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub

from condtok_mm.checkpoints import read_checkpoint

USE = """
import sys
from mmengine.runner import load_checkpoint
from condtok_mm.checkpoints import use_safe_reader
import torch
use_safe_reader()
load_checkpoint(torch.nn.Linear(1, 1), sys.argv[1])
"""


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch {self.path}',)


@pytest.fixture
def hostile(tmp_path):
    """A checkpoint whose payload leaves a trace."""
    trace = tmp_path / 'ran'
    path = tmp_path / 'hostile.pth'
    torch.save(dict(state_dict=dict(a=torch.ones(1)), meta=Payload(trace)), path)
    return path, trace


def test_a_payload_does_not_run(hostile):
    path, trace = hostile
    with pytest.raises(ValueError, match=r'needs posix\.system.*refused.*container'):
        read_checkpoint(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()


def test_mmengine_reads_safely_when_it_is_told_to(hostile):
    path, trace = hostile
    ran = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', USE, path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode
    assert 'is refused' in ran.stderr
    assert not trace.exists()


def test_importing_the_package_leaves_mmengines_readers_alone(tmp_path):
    torch.save(dict(a=slice(1, 2)), tmp_path / 'a.pth')
    code = USE.replace('use_safe_reader()', '')
    command = [sys.executable, '-W', 'ignore', '-c', code, tmp_path / 'a.pth']
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    ('needs', 'name'),
    [
        (argparse.Namespace(lr=1), 'argparse.Namespace'),
        (slice(1, 2), r'(builtins\.)?slice'),
        (np.random.default_rng(0), 'numpy.random._pickle.__generator_ctor'),
    ],
)
def test_other_classes_are_refused_by_name(needs, name, tmp_path):
    torch.save(dict(model=dict(a=torch.ones(1)), args=needs), tmp_path / 'a.pth')
    with pytest.raises(
        ValueError, match=r'is refused. If you trust its source'
    ) as error:
        read_checkpoint(tmp_path / 'a.pth')
    assert re.search(f'needs {name};', str(error.value))
    command = shlex.split(str(error.value).split('secrets: ')[1])
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True)
    assert read_checkpoint(tmp_path / 'a.weights.pth')['model']['a'] == 1


def test_getattr_of_a_pickle_reaches_nothing_else(tmp_path):
    class Reach:
        def __reduce__(self):
            return getattr, (HistoryBuffer, '__init__')

    torch.save(dict(a=Reach()), tmp_path / 'a.pth')
    with pytest.raises(ValueError, match='getattr'):
        read_checkpoint(tmp_path / 'a.pth')


class Call:
    """Has a pickle call a function with arguments."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_bytes_are_read_as_they_are_written(tmp_path):
    content = dict(raw=b'\x00\xff', none=b'', history=HistoryBuffer())
    torch.save(content, tmp_path / 'a.pth')
    read = read_checkpoint(tmp_path / 'a.pth')
    assert (read['raw'], read['none']) == (b'\x00\xff', b'')
    assert [len(array) for array in read['history'].data] == [0, 0]


def test_bytes_are_made_of_nothing_else(tmp_path):
    torch.save(dict(a=Call(bytes, 1 << 40)), tmp_path / 'a.pth')
    with pytest.raises(ValueError, match='is refused'):
        read_checkpoint(tmp_path / 'a.pth')


def test_numpy_makes_no_objects_out_of_bytes(tmp_path):
    """Called by a pickle, numpy.ndarray would take these bytes for a pointer."""
    pointer = np.array([0x4141414141414141], dtype='i8')
    objects = Call(np.ndarray, (1,), 'O', pointer)
    for name, content in dict(
        pointer=Call(np.ndarray, objects),
        array=np.array([object], dtype=object),
        record=np.zeros(2, dtype='i4,f8'),
        text=np.array(['a']),
        dtype=Call(np.dtype, 'O'),
    ).items():
        torch.save(dict(a=content), tmp_path / f'{name}.pth')
        with pytest.raises(ValueError, match='is refused'):
            read_checkpoint(tmp_path / f'{name}.pth')


def test_names_of_files_are_quoted(tmp_path):
    name = 'a$(touch ran)".pth'
    torch.save(dict(state_dict=dict(a=torch.ones(1)), b=slice(1)), tmp_path / name)
    with pytest.raises(ValueError, match='is refused') as error:
        read_checkpoint(tmp_path / name)
    command = str(error.value).split('secrets: ')[1]
    command = shlex.quote(sys.executable) + command.removeprefix('python')
    subprocess.run(['bash', '-c', command], cwd=tmp_path, check=True)
    assert not (tmp_path / 'ran').exists()


def test_what_mmengines_training_checkpoints_hold(tmp_path):
    hub = MessageHub('test_reading')
    for step in range(5):
        hub.update_scalar('train/loss', torch.tensor(step / 2))
    hub.update_info('count', np.float32(3))
    content = dict(
        meta=dict(epoch=2, seed=np.int64(7)),
        state_dict=OrderedDict(a=torch.ones(2)),
        message_hub=hub.state_dict(),
        arrays=[np.arange(2).astype(code) for code in '?bhilqBHILQefd'],
    )
    torch.save(content, tmp_path / 'epoch_2.pth')
    read = read_checkpoint(tmp_path / 'epoch_2.pth')
    buffer = read['message_hub']['log_scalars']['train/loss']
    assert buffer.mean(5) == 1.0
    assert buffer.statistics('max', 5) == 2.0
    assert read['meta'] == dict(epoch=2, seed=7)
    torch.save(read, tmp_path / 'again.pth')
    code = f'import torch; print(torch.load({str(tmp_path / "again.pth")!r}, '
    code += 'weights_only=False)["arrays"][1].dtype)'
    assert subprocess.check_output([sys.executable, '-c', code], text=True) == 'int8\n'
    pairs = zip(content['arrays'], read['arrays'], strict=True)
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def test_safetensors(tmp_path):
    from safetensors.torch import save_file

    save_file(dict(a=torch.arange(3.0)), tmp_path / 'a.safetensors')
    (tmp_path / 'a.pth').write_bytes((tmp_path / 'a.safetensors').read_bytes())
    for name in ('a.safetensors', 'a.pth'):
        assert read_checkpoint(tmp_path / name)['a'].tolist() == [0, 1, 2]
    (tmp_path / 'b.safetensors').write_bytes(b'nonsense' * 9)
    with pytest.raises(ValueError, match=r'b\.safetensors cannot be read'):
        read_checkpoint(tmp_path / 'b.safetensors')


def test_files_that_are_no_checkpoints(tmp_path):
    torch.save(dict(a=torch.ones(9)), tmp_path / 'whole.pth')
    whole = (tmp_path / 'whole.pth').read_bytes()
    contents = dict(cut=whole[:-200], text=b'# a readme', empty=b'')
    for name, content in contents.items():
        (tmp_path / f'{name}.pth').write_bytes(content)
        with pytest.raises(ValueError, match=rf'{name}\.pth cannot be read'):
            read_checkpoint(tmp_path / f'{name}.pth')
    torch.save([1, 2], tmp_path / 'list.pth')
    with pytest.raises(ValueError, match=r'list\.pth holds a list'):
        read_checkpoint(tmp_path / 'list.pth')
    with pytest.raises(FileNotFoundError, match=r'none\.pth does not exist'):
        read_checkpoint(tmp_path / 'none.pth')


@pytest.mark.parametrize('name', ['torchvision://resnet51', 'openmmlab://nothing'])
def test_unknown_names_of_a_model_zoo(name):
    with pytest.raises(FileNotFoundError, match='has no checkpoint named'):
        read_checkpoint(name)


def test_clients_that_execute_pickles_are_not_used():
    with pytest.raises(ValueError, match='download it'):
        read_checkpoint('s3://bucket/a.pth')
