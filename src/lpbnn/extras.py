"""Optional packages: which extra of lpbnn installs each, for the error when one is missing."""

# As in pyproject.toml, which a test compares with this table; the smallest extra that has the package.
EXTRAS = {
    "torchmetrics": "metrics",
    "scipy": "metrics",
    "matplotlib": "metrics",
    "sklearn": "sklearn",
    "tyro": "train",
    "rich": "train",
    "safetensors": "train",
    "annotated_types": "train",
    "pydantic": "train",
    "jinja2": "report",
    "markupsafe": "report",
}


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error that names the extra with the package that could not be imported.

    Example:
        >>> missing(ModuleNotFoundError("No module named 'tyro'", name="tyro")).msg
        "lpbnn needs 'tyro' for this, which is not installed. Fix: pip install 'lpbnn[train]', or in a ..."
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS or str(error).startswith("lpbnn needs"):  # told already
        return error
    return ModuleNotFoundError(
        f"lpbnn needs {package!r} for this, which is not installed. "
        f"Fix: pip install 'lpbnn[{EXTRAS[package]}]', or in a clone '.[{EXTRAS[package]}]'.",
        name=error.name,
    )
