"""Changes of the requests that schemathesis makes, for scripts/api-check."""

import schemathesis


def without_zero_fractions(value):
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: without_zero_fractions(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_zero_fractions(item) for item in value]
    return value


@schemathesis.hook
def map_body(_context, body):
    """JSON Schema counts 1.0 as an integer; the manager reads integers without a fraction only."""
    return without_zero_fractions(body)
