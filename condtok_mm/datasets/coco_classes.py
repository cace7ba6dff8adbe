"""What a data set calls its objects, and what the detector would call them.

mmdet numbers the categories that ``metainfo`` names in the order of the file, not of
``metainfo``: label i is the i-th of them, and it is called ``metainfo['classes'][i]``.
"""

from collections import Counter
from difflib import get_close_matches

from rich.columns import Columns

from ..printing import as_text
from .coco_sources import CocoSource
from .findings import Findings, Kind

NO_NAMES = Kind(
    'metainfo.classes that is no list of names',
    "A single name needs a comma: classes=('name', ). Without, its letters would be "
    'the classes',
)
CLASS_TWICE = Kind(
    'classes that metainfo names twice', 'Later labels would shift. Name each once'
)
NO_CLASS = Kind(
    'metainfo.classes of which the file has none',
    'Nothing would be learnt. Set metainfo=dict(classes=(...)) of the data set to the '
    'names in the file, in its order (mmdet 2 wrote CLASSES, which is not read)',
)
MISSING_CLASS = Kind(
    'classes of metainfo that the file lacks',
    'mmdet drops them silently: all later labels shift by one and get the wrong names. '
    'Write them as the file does, or remove them from metainfo.classes and num_classes',
)
ORDER = Kind(
    'labels that get the name of another category',
    'mmdet numbers categories in the order of the file. Put metainfo.classes in this '
    'order',
)
EXTRA_CATEGORY = Kind(
    'categories that metainfo.classes does not name',
    'Their objects are left out. If they should be learnt, add the names',
    error=False,
)
CATEGORY_ID_TWICE = Kind(
    'category ids that two categories share', 'Labels would be mixed. Give each its own'
)
CATEGORY_NAME_TWICE = Kind(
    'names that several categories have',
    'mmdet makes a label of each, more than there are classes. Merge them in the file',
)
UNUSED_CLASS = Kind(
    'classes without a single object',
    'They cannot be learnt. Is the file the right one?',
    error=False,
)


def check_classes(
    source: CocoSource, categories: list[dict], findings: Findings
) -> list[dict]:
    """Compare the categories of a file with the classes of ``metainfo``.

    Args:
        source (CocoSource): How the file is read.
        categories (list[dict]): Of the file.
        findings (Findings): Where faults are noted.

    Returns:
        list[dict]: Categories that are trained on, in the order of their labels.
    """
    classes = source.classes
    if not isinstance(classes, list | tuple):
        findings.add(NO_NAMES, repr(classes))
        return []
    _note_repeated(CLASS_TWICE, classes, findings)
    _note_repeated(CATEGORY_ID_TWICE, [c['id'] for c in categories], findings)
    _note_repeated(CATEGORY_NAME_TWICE, [c['name'] for c in categories], findings)
    kept = [category for category in categories if category['name'] in classes]
    found = {category['name'] for category in kept}
    extra = [c for c in categories if c['name'] not in found]
    if not kept:
        whose = f' ({source.dataset}, the default)' if source.default_classes else ''
        names = ', '.join(c['name'] for c in categories[:5]) or 'no categories'
        findings.add(NO_CLASS, f'{", ".join(classes[:5])}{whose}; the file: {names}')
        return kept
    spare = {c['name'].strip().casefold(): c['name'] for c in extra}
    for name in dict.fromkeys(classes):
        if name not in found:
            close = get_close_matches(name.strip().casefold(), spare, n=1)
            hint = f' (the file has {spare[close[0]]!r})' if close else ''
            findings.add(MISSING_CLASS, f'{name!r}{hint}')
    for label, (category, name) in enumerate(zip(kept, classes, strict=False)):
        if category['name'] != name:
            findings.add(ORDER, f'label {label}: {category["name"]!r} as {name!r}')
    for category in extra:
        findings.add(EXTRA_CATEGORY, f'{category["name"]!r} (id {category["id"]})')
    return kept


def describe_labels(kept: list[dict], classes: tuple[str, ...], counts: Counter) -> str:
    """Say what becomes of each category.

    Args:
        kept (list[dict]): Categories, in the order of their labels.
        classes (tuple[str, ...]): Names of the labels.
        counts (Counter): Category ids to the number of their objects.

    Returns:
        str: Category id, label, name and number of objects, in columns.
    """
    cells = []
    for label, category in enumerate(kept):
        name = classes[label] if label < len(classes) else '(no class)'
        own = '' if category['name'] == name else f' {category["name"]!r}'
        objects = counts[category['id']]
        cells.append(f'{category["id"]}{own} -> {label} {name!r} ({objects})')
    cells.insert(0, 'id -> label (objects)')
    return as_text(Columns(cells, column_first=True))


def _note_repeated(kind: Kind, values: list, findings: Findings) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            findings.add(kind, f'{value!r} ({count} times)')
