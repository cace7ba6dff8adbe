"""Package condtok_mm with its configs and tools inside, as MIM lays them out."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSION = re.search(
    r"^__version__ = '(.+)'$", (ROOT / 'condtok_mm/__init__.py').read_text(), re.M
).group(1)


class BuildWithConfigs(build_py):
    """Copy configs and tools to condtok_mm/.mim, where CONFIGS looks for them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        mim = Path(self.build_lib) / 'condtok_mm' / '.mim'
        for folder in ('configs', 'tools'):
            shutil.copytree(
                ROOT / folder,
                mim / folder,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns('__pycache__'),
            )


setup(
    name='condtok_mm',
    version=VERSION,
    description='Conditioned embedded tokens for ViT and Swin detectors of OpenMMLab',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.10',
    packages=find_packages(include=['condtok_mm', 'condtok_mm.*']),
    install_requires=['numpy'],
    extras_require={
        'onedl': [
            'onedl-mmengine>=0.10.12',
            'onedl-mmcv>=2.3.6',
            'onedl-mmdetection>=3.5.1',
            'onedl-mmpretrain>=1.3.6',
        ],
        'openmmlab': [
            'mmengine>=0.10.7,<1',
            'mmcv>=2.0.1,<2.2',
            'mmdet>=3.3,<4',
            'mmpretrain>=1.2,<2',
        ],
        'onnx': ['onnx', 'onnxruntime', 'onnxscript'],
        'safetensors': ['safetensors'],
        'tests': [
            'hypothesis',
            'onnx',
            'onnxruntime',
            'onnxscript',
            'pytest',
            'ruff',
            'safetensors',
            'timm',
        ],
    },
    cmdclass={'build_py': BuildWithConfigs},
)
