"""The paper's numbers for a data set and a network, with what they were measured in, in words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lpbnn.report import PaperTable


def published(data: str, backbone: str) -> "PaperTable | None":
    """What stands beside our numbers; None where the paper has none."""
    from lpbnn.experiments import diversity, stability, table1, table2
    from lpbnn.report import PaperTable

    if data in table2.PAPER and backbone.startswith("deeplab"):
        return table2.paper(data)
    if data.startswith("cifar") and backbone.startswith("wrn"):
        found = table1.paper(data)
        if data != "cifar10":
            return found
        diverse = diversity.paper().rows
        rows = {method: {**row, **diverse.get(method, {})} for method, row in found.rows.items()}
        return PaperTable(found.source, rows)
    return stability.paper() if backbone == "lenet" and data == "cifar10" else None
