"""Images for measurements: found, and prepared as a detector is tested."""

from pathlib import Path

from mmcv.transforms import Compose
from mmdet.registry import DATASETS
from mmdet.utils import get_test_pipeline_cfg
from mmengine.config import Config
from mmengine.utils import scandir
from torch import Tensor, nn

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff')


def find_images(names: list[str] | None, cfg: Config) -> list[Path]:
    """Find images.

    Args:
        names (list[str] | None): Files and folders; None takes the test set.
        cfg (Config): Config of the detector.

    Returns:
        list[Path]: At least one file.

    Raises:
        FileNotFoundError: If a name does not exist, or there is no image.
    """
    paths = []
    if names is None:
        dataset = DATASETS.build(cfg.test_dataloader.dataset)
        for index in range(len(dataset)):
            paths.append(Path(dataset.get_data_info(index)['img_path']))
    for path in map(Path, names or ()):
        if path.is_dir():
            found = scandir(path, SUFFIXES, recursive=True, case_sensitive=False)
            paths += sorted(path / name for name in found)
        elif path.is_file():
            paths.append(path)
        else:
            raise FileNotFoundError(f'image {path} does not exist.')
    if not paths:
        raise FileNotFoundError(
            f'no image found in {names or cfg.test_dataloader.dataset}.'
        )
    return paths


def image_pipeline(cfg: Config) -> Compose:
    """Test pipeline of a detector, without annotations.

    Args:
        cfg (Config): Config of the detector.

    Returns:
        Compose: The pipeline.
    """
    steps = get_test_pipeline_cfg(cfg)
    return Compose([s for s in steps if not s['type'].endswith('LoadAnnotations')])


def load_image(detector: nn.Module, pipeline: Compose, path: Path) -> Tensor:
    """Load one image as the detector sees it.

    Args:
        detector (nn.Module): The detector, whose preprocessor normalises.
        pipeline (Compose): See :func:`image_pipeline`.
        path (Path): The file.

    Returns:
        Tensor: Normalised image (1, C, H, W) on the detector's device.
    """
    data = pipeline(dict(img_path=str(path), img_id=0))
    batch = dict(inputs=[data['inputs']], data_samples=[data['data_samples']])
    return detector.data_preprocessor(batch, training=False)['inputs']
