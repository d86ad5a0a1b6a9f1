"""Real images of handwritten digits, 8 by 8, shipped with scikit-learn.

Reference: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository, 1998.
"""

import numpy as np

from tfdist.data.source import ArraySource

NUM_CLASSES = 10
_SPLIT_SEED = 20
_TEST_FRACTION = 0.2


def load_digits(*, batch_size: int, seed: "int | None" = None) -> tuple[ArraySource, ArraySource]:
    """Returns (train, test): images float32 of shape (8, 8, 1) in 0..1, and int32 labels.

    The split is always the same, and has the same part of each class in both.

    Args:
        batch_size: global batch size.
        seed: seed of the order in which the training images come.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    parts = train_test_split(
        images, labels.astype(np.int32), test_size=_TEST_FRACTION, random_state=_SPLIT_SEED, stratify=labels
    )
    train_x, test_x, train_y, test_y = parts
    train = ArraySource((train_x, train_y), batch_size=batch_size, seed=seed, num_classes=NUM_CLASSES)
    test = ArraySource((test_x, test_y), batch_size=batch_size, shuffle=False, num_classes=NUM_CLASSES)
    return train, test
