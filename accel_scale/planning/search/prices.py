"""Price tables: cards, how many are rented together, and the price of one per hour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.facts import hardware

# Numbers of GPUs in one server to try if the table gives none.
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Price:
    """One machine for rent.

    Attributes:
        card: Its name in the catalogue of cards.
        num_gpus: Total number of GPUs.
        per_gpu_hour: Price of one GPU per hour, in any currency.
    """

    card: str
    num_gpus: int
    per_gpu_hour: float


def read_prices(path: str, *, place: str = "--price") -> list[Price]:
    """The machines in a YAML file that maps names of cards to a price, or to ``price`` and ``num_gpus``.

        H100: 2.40
        A100 80GB SXM: {price: 1.35, num_gpus: [8, 16]}

    Raises:
        ConfigError: for a file that cannot be read, an unknown card or an invalid price.
    """
    import yaml

    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no YAML"
        raise ConfigError(f"{path} cannot be read: {reason}.", place=place, fix="name a YAML file.") from None
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f"{path} has no prices.", place=place, fix="write lines like `H100: 2.40`.")
    return [price for name, entry in table.items() for price in prices_of(str(name), entry, place=place)]


def prices_of(name: str, entry: object, *, place: str = "--price") -> Iterator[Price]:
    """The machines of one line of a table.

    Raises:
        ConfigError: for an unknown card or an invalid price.
    """
    card = hardware.find_gpu(name, place=place).name
    given = entry if isinstance(entry, Mapping) else {"price": entry}
    if unknown := set(given) - {"price", "num_gpus"}:
        raise ConfigError(f"{name} has {sorted(unknown)[0]!r}.", place=place, fix="use price and num_gpus.")
    price, counts = given.get("price"), given.get("num_gpus", COUNTS)
    if isinstance(price, bool) or not isinstance(price, (int, float)) or not price > 0:
        raise ConfigError(f"{price!r} is no price of a {name}.", place=place, fix="write a number above 0.")
    for count in counts if isinstance(counts, (list, tuple)) else [counts]:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{count!r} is no number of {name} cards.", place=place, fix="write it like 8.")
        yield Price(card, count, float(price))
