"""Other people's tools driven by our cache, one file each; every one needs an extra."""
