"""Other people's tools over our cache or our store; every one needs an extra."""
