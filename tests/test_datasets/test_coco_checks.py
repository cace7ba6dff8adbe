"""Sets on disk with one fault each, checked, and read by mmdet where it tells."""

import copy
import json
import math

import cv2
import numpy as np
import pytest
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from mmengine.config import Config
from pycocotools import mask as mask_utils

from condtok_mm.datasets import (
    coco_classes,
    coco_file,
    coco_images,
    coco_masks,
    coco_objects,
    config_checks,
)
from condtok_mm.datasets.coco_checks import NO_OBJECTS, NOTHING_LEFT, check_datasets

CLASSES = ('disc', 'square', 'star')
WIDTH, HEIGHT = 60, 40
SQUARE = [[10, 10, 30, 10, 30, 30, 10, 30]]


def rle(height=HEIGHT, width=WIDTH, empty=False):
    mask = np.zeros((height, width), np.uint8)
    mask[10:30, 10:30] = not empty
    code = mask_utils.encode(np.asfortranarray(mask))
    return {'size': [height, width], 'counts': code['counts'].decode()}


def clean_content():
    """Three images with an object of each class."""
    images = [
        dict(id=n, file_name=f'{n}.png', width=WIDTH, height=HEIGHT) for n in (1, 2, 3)
    ]
    annotations = [
        dict(
            id=10 * image_id + category_id,
            image_id=image_id,
            category_id=category_id,
            bbox=[10, 10, 20, 20],
            area=400,
            iscrowd=0,
            segmentation=rle() if category_id == 7 else copy.deepcopy(SQUARE),
        )
        for image_id in (1, 2, 3)
        for category_id in (5, 6, 7)
    ]
    categories = [dict(id=n, name=c) for n, c in zip((5, 6, 7), CLASSES, strict=True)]
    return dict(images=images, annotations=annotations, categories=categories)


@pytest.fixture
def root(tmp_path):
    image = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    for n in (1, 2, 3):
        cv2.imwrite(str(tmp_path / f'{n}.png'), image)
    return tmp_path


def write(root, content, name='train.json'):
    (root / name).write_text(
        content if isinstance(content, str) else json.dumps(content)
    )


def config(root, **dataset):
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    ]
    leaf = dict(
        type='CocoDataset',
        data_root=str(root),
        ann_file='train.json',
        data_prefix=dict(img=''),
        metainfo=dict(classes=CLASSES),
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
        pipeline=pipeline,
    )
    heads = [dict(num_classes=3), dict(num_classes=3)]
    return Config(
        dict(
            model=dict(roi_head=dict(bbox_head=heads, mask_head=dict(num_classes=3))),
            train_dataloader=dict(dataset=leaf | dataset),
        )
    )


def check(cfg, **kwargs):
    reports, unknown = check_datasets(cfg, progress=False, **kwargs)
    assert not unknown
    return reports


def found(reports):
    return {
        kind: names
        for report in reports
        for kind, names in report.findings.names.items()
    }


def test_a_clean_set_has_no_findings(root):
    write(root, clean_content())
    cfg = config(root)
    cfg.val_dataloader = dict(dataset=cfg.train_dataloader.dataset | {'test_mode': 1})
    cfg.val_evaluator = dict(type='CocoMetric', ann_file=str(root / 'train.json'))
    cfg.test_dataloader = cfg.val_dataloader
    cfg.test_evaluator = cfg.val_evaluator
    reports = check(cfg, decode=True)
    assert found(reports) == {}
    train, val = reports
    assert not train.failed
    assert '3 images, 9 annotations, 9 objects of 3 classes' in train.summary
    assert '3 images are trained on' in train.summary
    assert "6 -> 1 'square' (3)" in train.labels
    assert val.title.startswith('val_dataloader.dataset, test_dataloader.dataset: ')


def set_on(kind, index, **values):
    def edit(content):
        content[kind][index].update(values)

    return edit


def drop(kind, index, key):
    return lambda content: content[kind][index].pop(key)


def on_all(kind, **values):
    def edit(content):
        for entry in content[kind]:
            entry.update(values)

    return edit


def repeat(kind, **values):
    return lambda content: content[kind].append(content[kind][-1] | values)


FAULTS = [
    (set_on('categories', 1, name='sqare'), coco_classes.MISSING_CLASS, "has 'sqare'"),
    (lambda c: c['categories'].pop(0), coco_classes.MISSING_CLASS, "'disc'"),
    (lambda c: c['categories'].pop(0), coco_classes.ORDER, "0: 'square' as 'disc'"),
    (lambda c: c['categories'].pop(0), coco_objects.NO_CATEGORY, 'annotation 15 of'),
    (lambda c: c['categories'].reverse(), coco_classes.ORDER, "0: 'star' as 'disc'"),
    (on_all('categories', name='x'), coco_classes.NO_CLASS, 'the file: x'),
    (
        repeat('categories', id=8, name='moon'),
        coco_classes.EXTRA_CATEGORY,
        "'moon' (id 8)",
    ),
    (repeat('categories', name='x'), coco_classes.CATEGORY_ID_TWICE, '7 (2 times)'),
    (repeat('categories', id=8), coco_classes.CATEGORY_NAME_TWICE, "'star' (2 times)"),
    (on_all('annotations', category_id=5), coco_classes.UNUSED_CLASS, 'square'),
    (set_on('categories', 0, name=None), coco_file.CATEGORY_NAME, 'category 5'),
    (
        set_on('annotations', 4, id='25'),
        coco_file.ID_TYPE,
        'annotations[4].id: 25 (str)',
    ),
    (set_on('images', 0, id=True), coco_file.ID_TYPE, 'images[0].id: True (bool)'),
    (set_on('images', 0, id=1.0), coco_file.ID_TYPE, 'images[0].id: 1.0 (float)'),
    (
        drop('annotations', 0, 'image_id'),
        coco_file.ID_TYPE,
        '[0].image_id: missing',
    ),
    (set_on('images', 2, width=0), coco_file.IMAGE_FIELDS, "image 3: {'file_name'"),
    (drop('images', 2, 'file_name'), coco_file.IMAGE_FIELDS, 'image 3'),
    (lambda c: c['images'].append('4.png'), coco_file.NO_ENTRY, "images[3]: '4.png'"),
    (repeat('annotations'), coco_objects.ANNOTATION_TWICE, 'annotation 37 of image 3'),
    (
        set_on('annotations', 4, image_id=9),
        coco_objects.NO_IMAGE,
        'annotation 26 of image 9',
    ),
    (set_on('annotations', 4, bbox=[1, 2, 3]), coco_objects.NO_BOX, '26 of image 2 (2'),
    (
        set_on('annotations', 4, bbox=[1, math.nan, 3, 4]),
        coco_objects.NO_BOX,
        '26 of image 2 (2.png): bbox [1, nan, 3, 4]',
    ),
    (drop('annotations', 4, 'area'), coco_objects.NO_BOX, 'area None'),
    (
        set_on('annotations', 4, bbox=[70, 0, 9, 9]),
        coco_objects.OUTSIDE,
        '26 of image 2',
    ),
    (
        set_on('annotations', 4, bbox=[5, 5, 0.5, 9]),
        coco_objects.DEGENERATE,
        '26 of image 2',
    ),
    (set_on('annotations', 4, area=0), coco_objects.DEGENERATE, '26 of image 2'),
    (on_all('annotations', bbox=[40, 20, 60, 40]), coco_objects.MOSTLY_OUT, '15 of'),
    (set_on('annotations', 4, iscrowd=1), coco_objects.CROWD, '26 of image 2'),
    (set_on('annotations', 4, iscrowd='0'), coco_objects.CROWD_VALUE, "'0'"),
    (set_on('annotations', 4, ignore=1), coco_objects.IGNORED, '26 of image 2'),
    (drop('annotations', 4, 'segmentation'), coco_masks.NO_MASK, '26 of image 2'),
    (set_on('annotations', 4, segmentation=[]), coco_masks.NO_MASK, '26 of image 2'),
    (
        set_on('annotations', 4, segmentation=SQUARE[0]),
        coco_masks.NOT_A_MASK,
        '26 of image 2',
    ),
    (
        set_on('annotations', 4, segmentation=[['1'] * 6]),
        coco_masks.NOT_A_MASK,
        '26 of image 2',
    ),
    (
        set_on('annotations', 4, segmentation={'size': [40, 60], 'counts': [7]}),
        coco_masks.NOT_A_MASK,
        '26 of image 2',
    ),
    (
        set_on('annotations', 4, segmentation=rle(60, 40)),
        coco_masks.RLE_SIZE,
        '26 of image 2 (2.png)',
    ),
    (
        set_on('annotations', 4, segmentation=[[1, 1, 9, 9]]),
        coco_masks.EMPTY_MASK,
        '26 of image 2',
    ),
    (
        set_on('annotations', 4, segmentation=[[5, 1, 5, 9, 5, 4]]),
        coco_masks.EMPTY_MASK,
        '26 of image 2',
    ),
    (
        set_on('annotations', 4, segmentation=rle(empty=True)),
        coco_masks.EMPTY_MASK,
        '26 of image 2',
    ),
    (repeat('images'), coco_images.IMAGE_TWICE, 'image 3 (3.png)'),
    (
        repeat('images', id=4),
        coco_images.SHARED_FILE,
        '3.png: images 3 and 4',
    ),
    (set_on('images', 0, file_name='0.png'), coco_images.MISSING, '/0.png'),
    (
        lambda c: c.update(annotations=c['annotations'][:6]),
        coco_images.EMPTY_FILTERED,
        'image 3 (3.png)',
    ),
    (
        lambda c: (c['images'][0].update(height=31), c['annotations'].pop(2)),
        coco_images.SMALL_FILTERED,
        'image 1 (1.png)',
    ),
    (on_all('images', width=31), NOTHING_LEFT, 'train.json'),
    (on_all('annotations', iscrowd=1), NO_OBJECTS, 'train.json'),
]


@pytest.mark.parametrize(('edit', 'kind', 'name'), FAULTS)
def test_each_fault_is_named_and_counted(root, edit, kind, name):
    content = clean_content()
    edit(content)
    write(root, content)
    (report,) = check(config(root))
    assert name in '\n'.join(report.findings.names[kind])
    assert report.failed == bool(report.findings.errors())
    assert ('ERROR' in report.text()) == report.failed
    if kind.error:
        assert report.failed


WARNINGS = [(edit, kind) for edit, kind, _ in FAULTS if not kind.error]


@pytest.mark.parametrize(('edit', 'kind'), WARNINGS)
def test_warnings_alone_do_not_fail_and_mmdet_reads_on(root, edit, kind):
    content = clean_content()
    edit(content)
    write(root, content)
    (report,) = check(config(root))
    assert list(report.findings.counts) == [kind]
    assert not report.failed
    dataset = DATASETS.build(config(root).train_dataloader.dataset)
    assert f'{len(dataset)} images are trained on' in report.summary
    for index in range(len(dataset)):
        assert dataset[index]['gt_masks'].masks.shape[1:] == (HEIGHT, WIDTH)


@pytest.mark.parametrize(
    'edit',
    [
        lambda c: c['categories'].reverse(),
        lambda c: c['categories'].pop(0),
        set_on('categories', 1, name='sqare'),
    ],
)
def test_labels_are_those_of_mmdet(root, edit):
    content = clean_content()
    edit(content)
    write(root, content)
    cfg = config(root)
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    (report,) = check(cfg)
    assert report.failed
    names = {c['id']: c['name'] for c in content['categories']}
    assert len(dataset.cat2label) >= 2
    for category_id, label in dataset.cat2label.items():
        own = f' {names[category_id]!r}' * (names[category_id] != CLASSES[label])
        assert f'{category_id}{own} -> {label} {CLASSES[label]!r} (3)' in report.labels


def fails(dataset):
    try:
        dataset = DATASETS.build(dataset)
        for index in range(len(dataset)):
            dataset[index]
    except Exception:
        return True
    return False


@pytest.mark.parametrize(
    'edit',
    [
        repeat('annotations'),
        drop('annotations', 4, 'area'),
        drop('annotations', 4, 'segmentation'),
        set_on('annotations', 4, segmentation=SQUARE[0]),
        set_on('annotations', 4, segmentation=rle(60, 40)),
        set_on('images', 0, file_name='0.png'),
        drop('images', 2, 'file_name'),
    ],
)
def test_mmdet_fails_over_what_is_called_fatal(root, edit):
    """The sentences say that loading stops; a clean set loads."""
    write(root, clean_content())
    assert not fails(config(root).train_dataloader.dataset)
    content = clean_content()
    edit(content)
    write(root, content)
    assert fails(config(root).train_dataloader.dataset)
    assert check(config(root))[0].failed


def test_a_few_boxes_may_reach_out(root):
    content = clean_content()
    content['annotations'] = [
        content['annotations'][0] | {'id': n, 'category_id': 5 + n % 3}
        for n in range(1, 22)
    ]
    content['annotations'][3]['bbox'] = [50, 10, 20, 20]
    content['images'] = content['images'][:1]
    write(root, content)
    (report,) = check(config(root))
    assert list(report.findings.names) == [coco_objects.REACHING_OUT]
    assert not report.failed


def test_rle_is_lost_without_poly2mask(root):
    write(root, clean_content())
    cfg = config(root)
    cfg.train_dataloader.dataset.pipeline[1].poly2mask = False
    names = found(check(cfg))
    assert set(names) == {coco_masks.LOST_RLE, coco_classes.UNUSED_CLASS}
    assert 'annotation 17 of image 1' in names[coco_masks.LOST_RLE][0]
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    assert dataset[0]['gt_ignore_flags'].tolist() == [False, False, True]
    cfg.train_dataloader.dataset.pipeline[1].with_mask = False
    assert found(check(cfg)) == {}


def test_images_without_objects_are_background_unless_filtered(root):
    content = clean_content()
    content['annotations'] = content['annotations'][:6]
    write(root, content)
    (report,) = check(config(root, filter_cfg=None))
    assert report.findings.names == {coco_images.EMPTY_KEPT: ['image 3 (3.png)']}
    assert '3 images are trained on' in report.summary
    (root / '3.png').unlink()
    assert coco_images.MISSING in found(check(config(root, filter_cfg=None)))
    assert set(found(check(config(root)))) == {coco_images.EMPTY_FILTERED}


def test_decoding_finds_broken_images_and_other_sizes(root):
    write(root, clean_content())
    (root / '1.png').write_bytes((root / '1.png').read_bytes()[:40])
    cv2.imwrite(str(root / '2.png'), np.zeros((WIDTH, HEIGHT, 3), np.uint8))
    assert found(check(config(root))) == {}
    names = found(check(config(root), decode=True))
    assert set(names) == {coco_images.UNREADABLE, coco_images.SIZE}
    assert names[coco_images.UNREADABLE][0].startswith(f'image 1: {root / "1.png"}')
    assert '2.png is 40 x 60, not 60 x 40' in names[coco_images.SIZE][0]


def test_only_the_first_of_many_are_named(root):
    content = clean_content()
    on_all('annotations', image_id=9)(content)
    write(root, content)
    (report,) = check(config(root))
    assert report.findings.counts[coco_objects.NO_IMAGE] == 9
    text = report.text()
    assert 'annotation 17 of image 9' in text
    assert 'annotation 25' not in text
    assert 'and 6 more' in text


@pytest.mark.parametrize(
    ('classes', 'kind'),
    [
        ('disc', coco_classes.NO_NAMES),
        (None, coco_classes.NO_NAMES),
        (('disc', 'square', 'star', 'star'), coco_classes.CLASS_TWICE),
    ],
)
def test_classes_that_cannot_be_meant(root, classes, kind):
    write(root, clean_content())
    assert kind in found(check(config(root, metainfo=dict(classes=classes))))


def test_classes_default_to_those_of_coco(root):
    write(root, clean_content())
    names = found(check(config(root, metainfo=None)))
    assert 'CocoDataset, the default' in names[coco_classes.NO_CLASS][0]
    heads = names[config_checks.NUM_CLASSES]
    assert len(heads) == 3
    assert 'model.roi_head.bbox_head.1.num_classes=3' in heads[1]
    assert 'has 80 classes, the default of CocoDataset' in heads[1]


def test_heads_of_other_things_than_objects_are_left_alone(root):
    write(root, clean_content())
    cfg = config(root)
    cfg.model.backbone = dict(num_classes=1000)
    cfg.model.rpn_head = dict(num_classes=1)
    cfg.model.roi_head.semantic_head = dict(num_classes=183)
    assert found(check(cfg)) == {}
    cfg.model.roi_head.mask_head.num_classes = 80
    (name,) = found(check(cfg))[config_checks.NUM_CLASSES]
    assert name.startswith('model.roi_head.mask_head.num_classes=80, but')


def test_data_sets_inside_others(root):
    write(root, clean_content())
    cfg = config(root)
    leaf = cfg.train_dataloader.dataset
    bad = leaf | {'ann_file': 'absent.json'}
    cfg.train_dataloader.dataset = dict(
        type='RepeatDataset',
        dataset=dict(
            type='MultiImageMixDataset',
            dataset=dict(
                type='ConcatDataset',
                datasets=[dict(type='ClassBalancedDataset', dataset=leaf), bad],
            ),
        ),
    )
    good, absent = check(cfg)
    assert not good.failed
    assert absent.failed
    key = 'train_dataloader.dataset.dataset.dataset.datasets.1'
    assert f'{key}.ann_file and data_root=' in absent.failure
    assert f'{root}/absent.json does not exist' in absent.failure


def test_data_sets_of_another_kind_are_said_to_be_unchecked(root):
    write(root, clean_content())
    cfg = config(root)
    cfg.val_dataloader = dict(dataset=dict(type='VOCDataset'))

    @DATASETS.register_module(name='Derived', force=True)
    class Derived(CocoDataset):
        METAINFO = dict(classes=CLASSES)  # noqa: RUF012

    @DATASETS.register_module(name='Other', force=True)
    class Other(CocoDataset):
        def load_data_list(self):
            return []

    cfg.train_dataloader.dataset.update(type='Derived', metainfo=None)
    cfg.test_dataloader = dict(dataset=cfg.train_dataloader.dataset | {'type': 'Other'})
    reports, unknown = check_datasets(cfg, progress=False)
    assert found(reports) == {}
    assert unknown == [
        'val_dataloader.dataset (VOCDataset)',
        'test_dataloader.dataset (Other)',
    ]


def test_the_folder_of_the_images_must_be_said(root):
    write(root, clean_content())
    cfg = config(root, data_prefix=dict(img_path=''))
    assert set(found(check(cfg))) == {coco_images.NO_FOLDER}
    assert fails(cfg.train_dataloader.dataset)


@pytest.fixture
def validated(root):
    """A config with a validation set that its evaluator reads too."""
    write(root, clean_content())
    write(root, clean_content(), 'val.json')
    cfg = config(root)
    val = cfg.train_dataloader.dataset | {'ann_file': 'val.json', 'test_mode': True}
    cfg.val_dataloader = dict(dataset=val)
    cfg.val_evaluator = [dict(type='CocoMetric', ann_file=str(root / 'val.json'))]
    return cfg


def test_evaluators_read_the_file_of_their_loader(root, validated):
    assert found(check(validated)) == {}
    validated.val_evaluator[0].ann_file = str(root / 'train.json')
    (name,) = found(check(validated))[config_checks.OTHER_FILE]
    assert 'train.json, but val_dataloader.dataset: ' in name
    validated.val_evaluator[0].ann_file = 'absent.json'
    (name,) = found(check(validated))[config_checks.NO_EVALUATOR_FILE]
    assert name == 'val_evaluator.ann_file=absent.json'


def test_what_only_the_evaluation_minds(root, validated):
    content = clean_content()
    content['annotations'][0]['id'] = 0
    content['annotations'][1].pop('iscrowd')
    write(root, content)
    assert found(check(validated)) == {}
    write(root, content, 'val.json')
    assert found(check(validated)) == {
        coco_objects.ID_ZERO: ['annotation 0 of image 1'],
        coco_objects.NO_CROWD_FLAG: ['annotation 16 of image 1'],
    }


def test_a_test_set_without_annotations(root, validated):
    content = clean_content()
    content.pop('annotations')
    write(root, content, 'val.json')
    assert found(check(validated)) == {}
    write(root, content)
    train, _ = check(validated)
    assert "holds nothing instead of a list under 'annotations'" in train.failure


def test_missing_shapes_come_with_the_command_that_makes_them(tmp_path):
    root = tmp_path / 'data/shapes'
    (report,) = check(config(f'{root}/'))
    assert f'{root}/train.json does not exist' in report.failure
    assert f'make_shapes.py {root}' in report.failure


@pytest.mark.parametrize(
    ('content', 'words'),
    [
        ('', 'cannot be read as JSON'),
        (json.dumps(clean_content())[:-200], 'Is it whole?'),
        ([clean_content()], 'a JSON list instead of the object'),
        ('null', 'a JSON NoneType instead of the object'),
        (clean_content() | {'images': None}, "NoneType instead of a list under 'im"),
        (clean_content() | {'annotations': {}}, "dict instead of a list under 'ann"),
        ({'images': []}, "nothing instead of a list under 'annotations'"),
        ('[' * 100000, 'RecursionError'),
    ],
)
def test_files_that_are_not_of_coco(root, content, words):
    write(root, content)
    (report,) = check(config(root))
    assert report.failed
    assert words in report.failure
    assert str(root / 'train.json') in report.failure
    assert 'train_dataloader.dataset.ann_file' in report.failure


def places(node):
    """Every container below a node with a key of it."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


@pytest.mark.parametrize(
    'value',
    [None, True, -1, 1.5, math.nan, 10**400, '', 'é', [], [[]], {}, {'id': 1}],
    ids=lambda value: repr(value)[:9],
)
def test_any_value_anywhere_is_survived(root, value):
    content = clean_content()
    for part in ('images', 'annotations', 'categories'):
        content[part] = content[part][:3]
    content['annotations'][0]['segmentation'] = dict(size=[40, 60], counts=[1200, 1200])
    cfg = config(root)
    for node, key in list(places(content)):
        kept, node[key] = node[key], value
        write(root, content)
        (report,) = check(cfg)
        assert report.text()
        node[key] = kept
