"""Mean IoU and pixel detection against restatements image by image."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, jaccard_score, roc_auc_score
from torch import Tensor

from lpbnn.metrics import (
    ImageDetectionMetrics,
    MeanIoU,
    PooledDetectionMetrics,
    miou,
    pixel_detection,
)

maps = st.tuples(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))


def class_maps(seed: int, n: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    predictions = torch.randint(classes, (n, side, 3), generator=rng)
    labels = torch.randint(classes, (n, side, 3), generator=rng)
    labels[torch.rand(labels.shape, generator=rng) < 0.3] = 255
    labels[0, 0, 0] = 0
    return predictions, labels


@settings(max_examples=60, deadline=None)
@given(maps)
def test_miou_equals_scikit_learn_over_the_classes_that_occur(
    shape: tuple[int, int, int, int],
) -> None:
    predictions, labels = class_maps(*shape)
    p, y = predictions[labels != 255].numpy(), labels[labels != 255].numpy()
    expected = jaccard_score(y, p, labels=np.union1d(p, y), average="macro")
    assert miou(predictions, labels, shape[3]) == pytest.approx(expected)


def test_miou_takes_probabilities_and_names_classes() -> None:
    predictions, labels = class_maps(0, 2, 5, 4)
    probs = torch.eye(5)[predictions].movedim(-1, 1)
    metric = MeanIoU(5)
    metric.update(probs, labels)
    assert float(metric.compute()) == miou(predictions, labels, 5)
    assert metric.per_class().isnan().tolist() == [False] * 4 + [True]
    assert miou(predictions.to(torch.uint8), labels.to(torch.uint8), 5) == float(metric.compute())


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (
            torch.tensor([[[0, 2]]]),
            torch.tensor([[[0, 1]]]),
            r"1 predicted classes are NaN or outside 0..1",
        ),
        (
            torch.tensor([[[0, 1]]]),
            torch.tensor([[[0, 13]]]),
            r"1 labels lie outside 0..1; .*=\(255, 13\)",
        ),
        (
            torch.full((1, 2, 1, 1), torch.nan),
            torch.zeros(1, 1, 1).long(),
            r"1 predicted classes are NaN",
        ),
        (
            torch.ones(1, 3, 1, 1),
            torch.zeros(1, 1, 1).long(),
            r"shape \(1, 3, 1, 1\); expected 2 classes",
        ),
        (
            torch.tensor([[[0, 1]]]),
            torch.tensor([[0, 1]]),
            r"predictions has shape \(1, 1, 2\) while labels",
        ),
        (torch.tensor([[[0]]]), torch.tensor([[[255]]]), r"MeanIoU has seen no labelled pixels"),
    ],
)
def test_miou_names_bad_input(predictions: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        miou(predictions, labels, 2)


def test_class_255_is_left_out_of_the_mean_by_nobody_but_the_user() -> None:
    labels = torch.arange(300).view(1, 1, 300)
    predictions = labels.clone()
    predictions[labels == 255] = 0  # class 255 is never found, and class 0 half right
    with pytest.raises(ValueError, match=r"MeanIoU of 300 classes .*; pass ignore_index=None"):
        miou(predictions, labels, 300)
    assert miou(predictions, labels, 300, ignore_index=None) == pytest.approx(298.5 / 300)
    assert miou(predictions, labels, 300, ignore_index=(255,)) == 1
    assert miou(predictions, labels.where(labels != 255, -1), 300, ignore_index=-1) == 1
    MeanIoU(255)  # classes 0 to 254


def test_void_labels_of_another_number_are_told_not_counted() -> None:
    """-100, the default of build and of torch's cross-entropy, is void for the loss alone."""
    labels = torch.tensor([[[0, 1, -100]]])
    with pytest.raises(ValueError, match="1 labels lie outside 0..1; .* ignore_index="):
        miou(labels.clamp_min(0), labels, 2)
    assert miou(labels.clamp_min(0), labels, 2, ignore_index=-100) == 1


def score_maps(seed: int, n: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maps of which some have no out-of-distribution pixel, some nothing else; void pixels."""
    rng = torch.Generator().manual_seed(seed)
    scores = (torch.rand(n, side, side, generator=rng) * 20).round() / 20
    share = torch.tensor([0.0, 0.2, 1.0])[torch.randint(3, (n, 1, 1), generator=rng)]
    is_ood = torch.rand(scores.shape, generator=rng) < share
    valid = torch.rand(scores.shape, generator=rng) < 0.8
    scores[0, 0, :2], is_ood[0, 0, :2] = 0.5, torch.tensor([True, False])
    valid[0, 0, :2] = True
    return scores, is_ood, valid


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 6))
def test_per_image_detection_averages_images_that_have_both(seed: int, n: int, side: int) -> None:
    scores, is_ood, valid = score_maps(seed, n, side)
    values = []
    for image in range(n):
        y, s = is_ood[image][valid[image]].numpy(), scores[image][valid[image]].numpy()
        if 0 < y.sum() < len(y):
            values.append((roc_auc_score(y, s), average_precision_score(y, s)))
    auroc, aupr = np.mean(values, axis=0)
    metric = ImageDetectionMetrics()
    # Void pixels are not looked at: their scores may be anything.
    metric.update(scores.where(valid, torch.nan), is_ood, valid)
    measured = metric.compute()
    assert measured["auroc"] == pytest.approx(auroc)
    assert measured["aupr"] == pytest.approx(aupr)
    assert int(metric.images) == len(values)
    assert pixel_detection(scores, is_ood, valid) == measured


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 6))
def test_pooled_detection_ranks_all_pixels_together(seed: int, n: int, side: int) -> None:
    scores, is_ood, valid = score_maps(seed, n, side)
    y, s = is_ood[valid].numpy(), scores[valid].numpy()
    measured = pixel_detection(scores.where(valid, torch.nan), is_ood, valid, pooled=True)
    assert measured["auroc"] == pytest.approx(roc_auc_score(y, s))
    assert measured["aupr"] == pytest.approx(average_precision_score(y, s))


def test_detection_without_any_anomaly_says_so() -> None:
    scores = torch.rand(2, 3, 3)
    nothing = torch.zeros(2, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="no image with both kinds of pixels"):
        pixel_detection(scores, nothing)
    with pytest.raises(ValueError, match="0 out-of-distribution and 18 in-distribution"):
        pixel_detection(scores, nothing, pooled=True)


def test_a_single_map_is_not_mistaken_for_a_batch_of_rows() -> None:
    scores, is_ood = torch.rand(3, 3), torch.eye(3).bool()
    with pytest.raises(ValueError, match=r"shape \(3, 3\); expected maps .* scores\[None\]"):
        ImageDetectionMetrics().update(scores, is_ood)
    PooledDetectionMetrics().update(scores, is_ood)  # any shape: pixels are pixels


def test_nan_scores_are_reported() -> None:
    scores, is_ood = torch.full((1, 2, 2), torch.nan), torch.eye(2).bool()[None]
    for pooled in (False, True):
        with pytest.raises(ValueError, match="^[^-]*4 scores are NaN"):
            pixel_detection(scores, is_ood, pooled=pooled)
    with pytest.raises(ValueError, match=r"valid has shape \(1, 1, 2\)"):
        pixel_detection(torch.rand(1, 2, 2), is_ood, is_ood[:, :1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pooled", [False, True])
def test_scores_of_any_precision(dtype: torch.dtype, pooled: bool) -> None:
    scores, is_ood, valid = score_maps(0, 3, 6)
    measured = pixel_detection(scores.to(dtype), is_ood, valid, pooled=pooled)
    expected = pixel_detection(scores.to(dtype).float(), is_ood, valid, pooled=pooled)
    assert measured == expected


def test_a_tracker_of_torchmetrics_keeps_the_largest_miou() -> None:
    assert MeanIoU(2).higher_is_better
