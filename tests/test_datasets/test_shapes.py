"""The generated set: the same bytes each time, true annotations, no folder harmed."""

import json
import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO

from condtok_mm.datasets import CATEGORIES, draw_image, make_shapes, shapes

REPOSITORY = Path(__file__).parents[2]
SMALL = {'num_train': 3, 'num_val': 2, 'image_size': 96, 'progress': False}


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    # With this seed the 40 images hold crowds, holes and an empty image.
    folder = tmp_path_factory.mktemp('shapes') / 'set'
    return make_shapes(folder, num_train=40, num_val=5, seed=2, progress=False)


@pytest.fixture(scope='module')
def coco(root):
    return COCO(root / 'annotations' / 'instances_train.json')


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob('*')
        if path.is_file()
    }


def edges(bbox):
    x, y, w, h = bbox
    return np.array([x, y, x + w, y + h])


def run_tool(*arguments):
    tool = REPOSITORY / 'tools' / 'dataset_converters' / 'make_shapes.py'
    return subprocess.run(
        [sys.executable, tool, *map(str, arguments)],
        env={**os.environ, 'PYTHONPATH': str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_same_seed_gives_same_bytes(tmp_path):
    first = contents(make_shapes(tmp_path / 'first', **SMALL))
    again = contents(make_shapes(tmp_path / 'again', **SMALL))
    other = contents(make_shapes(tmp_path / 'other', **SMALL, seed=1))
    assert first == again
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first)
    assert first['train/000001.png'] != first['val/000001.png']


def test_image_does_not_depend_on_how_many_are_made(tmp_path):
    few = make_shapes(tmp_path / 'few', **SMALL)
    many = make_shapes(tmp_path / 'many', **{**SMALL, 'num_train': 6})
    few_files, many_files = contents(few), contents(many)
    for name in few_files:
        if name.endswith('.png'):
            assert few_files[name] == many_files[name]
    annotation_sets = [
        json.loads(files['annotations/instances_train.json'])['annotations']
        for files in (few_files, many_files)
    ]
    assert annotation_sets[0] == annotation_sets[1][: len(annotation_sets[0])]
    assert len(annotation_sets[0]) < len(annotation_sets[1])


@pytest.mark.parametrize('split', ['train', 'val'])
def test_ids_and_files(root, split):
    dataset = json.loads((root / f'annotations/instances_{split}.json').read_text())
    assert [c['name'] for c in dataset['categories']] == list(CATEGORIES)
    assert [c['id'] for c in dataset['categories']] == [1, 2, 3, 4, 5]
    image_ids = [image['id'] for image in dataset['images']]
    annotation_ids = [ann['id'] for ann in dataset['annotations']]
    assert len(set(image_ids)) == len(image_ids)
    assert len(set(annotation_ids)) == len(annotation_ids)
    assert {ann['image_id'] for ann in dataset['annotations']} <= set(image_ids)
    for image in dataset['images']:
        pixels = cv2.imread(str(root / split / image['file_name']))
        assert pixels.shape == (image['height'], image['width'], 3)
        assert min(pixels.shape[:2]) >= 160 and max(pixels.shape[:2]) <= 224
        assert pixels.std() > 5
    assert len({(image['height'], image['width']) for image in dataset['images']}) > 1
    assert len(list((root / split).iterdir())) == len(image_ids)


def test_boxes_and_areas_are_those_of_the_masks(coco):
    for ann in coco.anns.values():
        rle = coco.annToRLE(ann)
        assert ann['area'] >= 24
        if isinstance(ann['segmentation'], dict):
            assert isinstance(ann['segmentation']['counts'], str)
            assert ann['area'] == mask_utils.area(rle)
            assert ann['bbox'] == mask_utils.toBbox(rle).tolist()
        else:
            assert mask_utils.area(rle) == pytest.approx(ann['area'], rel=0.1)
            found = edges(mask_utils.toBbox(rle))
            # Polygons may lose the last two pixels of a needle-sharp tip.
            np.testing.assert_allclose(found, edges(ann['bbox']), atol=2)


def test_annotations_are_the_visible_masks(coco):
    for image_id in coco.imgs:
        stream = np.random.SeedSequence(2, spawn_key=(0, image_id))
        _, instances = draw_image(np.random.default_rng(stream), 224)
        annotations = coco.imgToAnns[image_id]
        assert len(annotations) == len(instances)
        for instance, ann in zip(instances, annotations, strict=True):
            assert instance.category_id == ann['category_id']
            decoded = coco.annToMask(ann).astype(bool)
            union = (decoded | instance.mask).sum()
            assert (decoded & instance.mask).sum() >= 0.9 * union
        seen = sum((instance.mask.astype(int) for instance in instances), np.array(0))
        assert seen.max() <= 1


def test_decoded_masks_of_one_image_are_disjoint(coco):
    for annotations in coco.imgToAnns.values():
        masks = [coco.annToMask(ann).astype(bool) for ann in annotations]
        for one, other in combinations(masks, 2):
            assert (one & other).sum() < 0.1 * (one | other).sum()


def test_every_kind_of_annotation_occurs(coco):
    annotations = coco.dataset['annotations']
    crowds = [ann for ann in annotations if ann['iscrowd']]
    objects = [ann for ann in annotations if not ann['iscrowd']]
    polygons = [
        a['segmentation'] for a in objects if isinstance(a['segmentation'], list)
    ]
    assert crowds and all(isinstance(ann['segmentation'], dict) for ann in crowds)
    assert 0 < len(objects) - len(polygons) < len(polygons)
    assert any(len(pieces) > 1 for pieces in polygons)
    assert {ann['category_id'] for ann in objects} == {1, 2, 3, 4, 5}
    assert {ann['image_id'] for ann in annotations} < set(coco.imgs)
    areas = np.array([ann['area'] for ann in objects])
    assert (areas < 32**2).mean() > 0.1
    assert ((areas >= 32**2) & (areas < 96**2)).mean() > 0.2


def test_lone_objects_stand_out(coco, root):
    gaps = []
    for image_id, annotations in coco.imgToAnns.items():
        image = cv2.imread(str(root / 'train' / coco.imgs[image_id]['file_name']))
        covered = sum(coco.annToMask(ann) for ann in annotations)
        for ann in annotations:
            mask = coco.annToMask(ann)
            ring = cv2.dilate(mask, np.ones((9, 9), np.uint8)) - mask
            if not ann['iscrowd'] and not (ring & covered).any():
                inside, outside = (
                    image[part > 0].mean(axis=0) for part in (mask, ring)
                )
                gaps.append(np.linalg.norm(inside - outside))
    assert len(gaps) > 20
    assert min(gaps) > 40


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('num_train', 0),
        ('num_val', -1),
        ('image_size', 63),
        ('seed', -1),
        ('num_train', 2.5),
    ],
)
def test_wrong_argument_is_named(tmp_path, name, value):
    with pytest.raises((TypeError, ValueError), match=rf'{name} must .* got {value}'):
        make_shapes(tmp_path / 'set', **{**SMALL, name: value})
    assert not list(tmp_path.iterdir())


def test_same_set_is_kept(tmp_path, capsys):
    root = make_shapes(tmp_path / 'set', **SMALL)
    (root / 'preview.png').write_bytes(b'')
    before = {path: path.stat().st_mtime_ns for path in root.rglob('*')}
    assert make_shapes(root, **{**SMALL, 'progress': True}) == root
    assert {path: path.stat().st_mtime_ns for path in root.rglob('*')} == before
    assert 'kept' in capsys.readouterr().out


def test_other_set_is_replaced_only_on_demand(tmp_path):
    root = make_shapes(tmp_path / 'set', **SMALL)
    before = contents(root)
    with pytest.raises(FileExistsError, match=r'num_train 3.*overwrite=True'):
        make_shapes(root, **{**SMALL, 'num_train': 1})
    assert contents(root) == before
    make_shapes(root, **{**SMALL, 'num_train': 1}, overwrite=True)
    assert len(list((root / 'train').iterdir())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ['set']


def test_set_of_an_older_generator_is_not_kept(tmp_path, monkeypatch):
    root = make_shapes(tmp_path / 'set', **SMALL)
    monkeypatch.setattr(shapes, '_GENERATOR_VERSION', shapes._GENERATOR_VERSION + 1)
    with pytest.raises(FileExistsError, match='made with version'):
        make_shapes(root, **SMALL)


def test_damaged_set_is_not_kept(tmp_path):
    root = make_shapes(tmp_path / 'set', **SMALL)
    (root / 'val' / '000002.png').unlink()
    with pytest.raises(FileExistsError, match='images are missing'):
        make_shapes(root, **SMALL)
    make_shapes(root, **SMALL, overwrite=True)
    assert (root / 'val' / '000002.png').is_file()


@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize('kind', ['foreign', 'coco', 'shared', 'file'])
def test_foreign_folder_is_refused_and_left_alone(tmp_path, overwrite, kind):
    root = tmp_path / 'set'
    if kind == 'shared':
        make_shapes(root, **SMALL)
        (root / 'train' / 'notes.txt').write_text('mine')
    elif kind == 'coco':
        (root / 'annotations').mkdir(parents=True)
        for split in ('train', 'val'):
            path = root / 'annotations' / f'instances_{split}.json'
            path.write_text('{"info": {"version": "1.0"}}')
    elif kind == 'foreign':
        root.mkdir()
        (root / 'notes.txt').write_text('mine')
    else:
        root.write_text('mine')
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match='name another folder'):
        make_shapes(root, **SMALL, overwrite=overwrite)
    assert contents(tmp_path) == before


def test_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    root = tmp_path / 'set'
    root.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shapes.json, 'dumps', interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_shapes(root, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ['set']
    assert not list(root.iterdir())

    leftover = tmp_path / '.set-killed' / 'made' / 'train'
    leftover.mkdir(parents=True)
    make_shapes(root, **SMALL)
    assert len(list((root / 'train').iterdir())) == 3


def test_module_is_light():
    code = (
        'import sys, types; '
        'package = types.ModuleType("condtok_mm"); '
        'package.__path__ = ["condtok_mm"]; '
        'sys.modules["condtok_mm"] = package; '
        'import condtok_mm.datasets; '
        'assert not {"torch", "mmengine", "mmdet"} & sys.modules.keys()'
    )
    subprocess.run([sys.executable, '-c', code], cwd=REPOSITORY, check=True)


def test_tool_makes_the_set_and_a_preview(tmp_path):
    root = tmp_path / 'data' / 'set'
    arguments = (root, '--num-train', 3, '--num-val', 2, '--image-size', 96)
    run = run_tool(*arguments)
    assert run.returncode == 0, run.stderr
    assert 'train: 3 images' in run.stdout and 'val: 2 images' in run.stdout
    assert cv2.imread(str(root / 'preview.png')).std() > 5
    made = contents(root)
    made.pop('preview.png')
    assert made == contents(make_shapes(tmp_path / 'api', **SMALL))

    assert 'kept' in run_tool(*arguments).stdout
    refused = run_tool(*arguments, '--seed', 1)
    assert refused.returncode == 1 and '--overwrite' in refused.stderr
    assert run_tool(*arguments, '--seed', 1, '--overwrite').returncode == 0


def test_tool_refuses_in_one_sentence(tmp_path):
    (tmp_path / 'notes.txt').write_text('mine')
    for run in (run_tool(tmp_path), run_tool(tmp_path / 'set', '--num-val', 0)):
        assert run.returncode == 1
        # torch 2.4 warns, with its line of code, when mmengine is imported.
        said = re.sub(r'.*DeprecationWarning.*\n  .*\n', '', run.stderr)
        assert len(said.splitlines()) == 1
        assert 'Traceback' not in run.stderr
    assert contents(tmp_path) == {'notes.txt': b'mine'}


def test_the_working_directory_itself_can_be_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_shapes('.', num_train=1, num_val=1, progress=False)
    make_shapes('.', num_train=2, num_val=1, overwrite=True, progress=False)
    assert len(list(Path('train').iterdir())) == 2
    assert Path.cwd() == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'annotations',
        'train',
        'val',
    ]
