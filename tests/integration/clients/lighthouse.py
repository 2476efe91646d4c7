"""A class that even a small model fills in, because there is nothing to write."""

from typing import Literal

import pydantic


class Lighthouse(pydantic.BaseModel):
    """Structured output."""

    lit: bool
    age: Literal["old", "new"]
