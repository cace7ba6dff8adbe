"""Condition number of attention, layer by layer, and Proposition 4.2 put to the test.

For one head of a layer with the normed input X (N tokens, D channels), the attention
matrix is S = softmax(Q K^T / sqrt(d) + B), with the layer's biases of Q and K and its
positions and masks B, and the attention output is S V. Proposition 4.2 of Saratchandran
and Lucey, arXiv 2505.12789, bounds matrices without biases:

    softmax   kappa(S X Wv) <= kappa(S) kappa(X) kappa(Wv)
    linear    kappa(X Wq Wk^T X^T X Wv) <= kappa(Wq) kappa(Wk) kappa(Wv) kappa(X)^3

The first holds whatever S is made of, so S is the layer's own, head by head. Linear
attention is not what the layer computes; it is formed from the D x D weights of all
heads.

Everything is formed and decomposed in float64 from X as the model computes it, and a
condition number is s_1 / s_r with r the rank over the numerical range of float64,
8.9e-16: the range of fp32 would cut matrices off at different ranks with and without
conditioning, and compare what is left. A value above 2e6 is a statement about the
matrix; fp32 arithmetic does not feel the directions that it is about.

Both bounds rest on s_min(F G) >= s_min(F) s_min(G), which needs F without a null space,
or G square of full rank. So they are proven in softmax attention for S of rank N with X
of rank D and Wv of rank d, or with X of rank N and a square Wv of rank D; in linear
attention for X of rank D and square weights of full rank. Elsewhere, as in a window of
fewer tokens than channels with several heads, X maps some of what Wv lets through to
nearly zero. No s_r of a single factor knows of that, and the bound may fail: such a
violation is counted under the first condition that is not met.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..conditioning import TokenConditioner, attach_conditioner, condition_number
from ..models.backbones.any import find_embedding
from .attention_reading import AttentionLayer

SLACK = 1e-6
"""Relative excess over a bound that may be rounding."""
WIDE = 'fewer tokens than channels'
DEFICIENT = 'tokens of lower rank'
WEIGHTS = 'weights of lower rank'
SINGULAR = 'attention matrix of lower rank'
UNEXPLAINED = 'none of these'


@dataclass
class BoundCheck:
    """A bound of Proposition 4.2 in K cases.

    Attributes:
        kappa (Tensor): Left side. Has shape (K,).
        rank (Tensor): Rank of the matrix on the left. Has shape (K,).
        terms (dict[str, Tensor]): Condition numbers on the right, each (K,).
        bound (Tensor): Right side. Has shape (K,).
        unmet (dict[str, Tensor]): Conditions of the proof, and where each is not met,
            boolean (K,).
    """

    kappa: Tensor
    rank: Tensor
    terms: dict[str, Tensor]
    bound: Tensor
    unmet: dict[str, Tensor]

    @property
    def violated(self) -> Tensor:
        """Where the left side is larger, boolean (K,)."""
        return self.kappa > self.bound * (1 + SLACK)

    @property
    def proven(self) -> Tensor:
        """Where every condition of the proof is met, boolean (K,)."""
        return ~torch.stack(list(self.unmet.values())).any(0)

    def explain(self) -> dict[str, int]:
        """Count the violations by the first condition that is not met.

        Returns:
            dict[str, int]: Counts; those of ``UNEXPLAINED`` would refute the bound.
        """
        left, counts = self.violated, {}
        for condition, unmet in self.unmet.items():
            counts[condition] = int((left & unmet).sum())
            left = left & ~unmet
        return {**counts, UNEXPLAINED: int(left.sum())}


@dataclass
class LayerReport:
    """Condition numbers of one layer for one image.

    Attributes:
        name (str): Dotted name of the layer.
        num_tokens (int): Tokens N in a window, or of the whole map.
        channels (int): Channels D.
        num_heads (int): Heads.
        attention (tuple[Tensor, Tensor]): kappa and rank of S, each (windows * heads,).
        output (tuple[Tensor, Tensor]): The same of S V, with the bias of V.
        softmax (BoundCheck): The bound for softmax attention, (windows * heads,).
        linear (BoundCheck): The bound for linear attention, (windows,).
    """

    name: str
    num_tokens: int
    channels: int
    num_heads: int
    attention: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor]
    softmax: BoundCheck
    linear: BoundCheck


@torch.no_grad()
def measure_layer(layer: AttentionLayer) -> LayerReport:
    """Measure one layer, and put both bounds to the test.

    Args:
        layer (AttentionLayer): What :func:`read_attention` yields.

    Returns:
        LayerReport: The report.
    """
    _, num_tokens, channels = layer.tokens.shape
    num_heads = layer.weights.shape[1]
    attention, output, product = [], [], []
    for head in range(num_heads):
        S = layer.matrix(head)
        attention.append(condition_number(S))
        output.append(condition_number(S @ layer.value[:, head]))
        product.append(condition_number(S @ (layer.tokens @ layer.weights[2, head])))
    attention, output, product = map(_by_window, (attention, output, product))
    tokens = condition_number(layer.tokens)
    return LayerReport(
        name=layer.name,
        num_tokens=num_tokens,
        channels=channels,
        num_heads=num_heads,
        attention=attention,
        output=output,
        softmax=_softmax_check(layer, product, attention, tokens),
        linear=_linear_check(layer, tokens),
    )


def ensure_conditioner(backbone: nn.Module) -> None:
    """Give a stock backbone a conditioner of strength 0, for its tokens to be read.

    Args:
        backbone (nn.Module): The backbone. It is changed in place if it has none.

    Raises:
        ValueError: If its patch embedding is not found.
    """
    if not hasattr(backbone, 'conditioner'):
        conditioner = TokenConditioner()
        conditioner.strength = 0
        attach_conditioner(backbone, conditioner, find_embedding(backbone))


def summarise_layer(reports: Sequence[LayerReport]) -> dict:
    """Average one layer over images, windows and heads.

    Args:
        reports (Sequence[LayerReport]): The layer, once for each image.

    Returns:
        dict: For ``attention`` and ``output`` the mean of kappa, as in the paper, its
        geometric mean, which no single head decides, and the mean rank; for
        ``softmax`` and ``linear`` geometric means of both sides and of each term, and
        how many cases there are, in how many the bound is proven, in how many it is
        violated, and by which unmet condition.
    """
    first = reports[0]
    return dict(
        layer=first.name,
        num_tokens=sorted({report.num_tokens for report in reports}),
        channels=first.channels,
        num_heads=first.num_heads,
        attention=summarise_kappa(*_joined([r.attention for r in reports])),
        output=summarise_kappa(*_joined([r.output for r in reports])),
        softmax=_summarise_check([report.softmax for report in reports]),
        linear=_summarise_check([report.linear for report in reports]),
    )


def summarise_kappa(kappa: Tensor, rank: Tensor) -> dict[str, float]:
    """Average condition numbers.

    Args:
        kappa (Tensor): Condition numbers. Has shape (K,).
        rank (Tensor): The ranks. Has shape (K,).

    Returns:
        dict[str, float]: ``mean`` and ``geometric`` mean of kappa, and mean ``rank``.
    """
    return dict(
        mean=kappa.mean().item(),
        geometric=_geometric(kappa),
        rank=rank.double().mean().item(),
    )


def summarise_layers(layers: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Average over all layers, each with the same weight.

    Args:
        layers (Sequence[dict]): What :func:`summarise_layer` returns for them.

    Returns:
        dict[str, dict[str, float]]: ``mean`` and ``geometric`` mean of kappa, for
        ``attention`` and ``output``.
    """
    result = {}
    for matrix in ('attention', 'output'):
        columns = {
            key: torch.tensor([layer[matrix][key] for layer in layers]).double()
            for key in ('mean', 'geometric')
        }
        result[matrix] = dict(
            mean=columns['mean'].mean().item(),
            geometric=_geometric(columns['geometric']),
        )
    return result


def plot_attention(summaries: dict[str, dict], path: str | Path) -> None:
    """Plot kappa by layer, one line for each model.

    Args:
        summaries (dict[str, dict]): By the name of the model, a dict whose ``layers``
            are what :func:`summarise_layer` returns.
        path (str | Path): Where to write the picture.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4.5), layout='constrained')
    panels = dict(attention='attention matrix S', output='attention output S V')
    for axes, (matrix, title) in zip(
        figure.subplots(1, 2), panels.items(), strict=True
    ):
        for color, (name, summary) in zip(
            ('tab:gray', 'tab:blue'), summaries.items(), strict=True
        ):
            places = range(1, len(summary['layers']) + 1)
            for key, style in (('mean', '-'), ('geometric', '--')):
                values = [layer[matrix][key] for layer in summary['layers']]
                label = f'{name}, {key}' + (' mean' if key == 'geometric' else '')
                axes.semilogy(places, values, f'o{style}', color=color, label=label)
        axes.set(xlabel='layer', ylabel='condition number', title=title)
        axes.xaxis.get_major_locator().set_params(integer=True)
    lines, labels = axes.get_legend_handles_labels()
    figure.legend(lines, labels, loc='outside lower center', ncols=len(labels))
    figure.savefig(path, dpi=120)


def _by_window(heads: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """From (windows,) for each head to (windows * heads,)."""
    kappa, rank = zip(*heads, strict=True)
    return torch.stack(kappa, 1).flatten(), torch.stack(rank, 1).flatten()


def _softmax_check(
    layer: AttentionLayer,
    product: tuple[Tensor, Tensor],
    attention: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor],
) -> BoundCheck:
    """The bound for S X Wv, from kappa and rank of S X Wv, of S and of X."""
    windows, num_tokens, channels = layer.tokens.shape
    _, num_heads, _, head_dims = layer.weights.shape
    kappa_S, rank_S = attention
    kappa_X, rank_X = (part.repeat_interleave(num_heads) for part in tokens)
    kappa_W, rank_W = (
        part.repeat(windows) for part in condition_number(layer.weights[2])
    )
    wide = num_tokens < channels and head_dims < channels
    return BoundCheck(
        *product,
        terms=dict(S=kappa_S, X=kappa_X, Wv=kappa_W),
        bound=kappa_S * kappa_X * kappa_W,
        unmet={
            WIDE: torch.full_like(rank_X, wide, dtype=torch.bool),
            DEFICIENT: rank_X < min(num_tokens, channels),
            WEIGHTS: rank_W < head_dims,
            SINGULAR: rank_S < num_tokens,
        },
    )


def _linear_check(layer: AttentionLayer, tokens: tuple[Tensor, Tensor]) -> BoundCheck:
    """The bound for X Wq Wk^T X^T X Wv, from kappa and rank of X."""
    X = layer.tokens
    windows, num_tokens, channels = X.shape
    Wq, Wk, Wv = weights = layer.weights.transpose(1, 2).flatten(2)
    kappas, ranks = condition_number(weights)
    kappa_X, rank_X = tokens
    terms = zip(('Wq', 'Wk', 'Wv'), kappas.expand(windows, 3).T, strict=True)
    return BoundCheck(
        *condition_number(X @ Wq @ (Wk.mT @ (X.mT @ X) @ Wv)),
        terms=dict(terms, X=kappa_X),
        bound=kappas.prod() * kappa_X**3,
        unmet={
            WIDE: torch.full_like(rank_X, num_tokens < channels, dtype=torch.bool),
            DEFICIENT: rank_X < min(num_tokens, channels),
            WEIGHTS: (ranks < channels).any().expand(windows),
        },
    )


def _joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(*pairs, strict=True)))


def _geometric(kappa: Tensor) -> float:
    return kappa.log().mean().exp().item()


def _summarise_check(checks: Sequence[BoundCheck]) -> dict:
    explained = [check.explain() for check in checks]
    return dict(
        kappa=_geometric(torch.cat([check.kappa for check in checks])),
        rank=torch.cat([check.rank for check in checks]).double().mean().item(),
        terms={
            term: _geometric(torch.cat([check.terms[term] for check in checks]))
            for term in checks[0].terms
        },
        bound=_geometric(torch.cat([check.bound for check in checks])),
        cases=sum(len(check.kappa) for check in checks),
        proven=sum(int(check.proven.sum()) for check in checks),
        violations=sum(int(check.violated.sum()) for check in checks),
        violations_by_unmet={
            condition: sum(counts[condition] for counts in explained)
            for condition in explained[0]
        },
    )
