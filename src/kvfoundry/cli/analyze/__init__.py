"""`kvfoundry analyze ...`: measurements and pictures of a model, of its attention, and of what caches cost."""

import typer

from kvfoundry.cli.analyze.heads import heads
from kvfoundry.cli.analyze.sizes import cache_benchmark, cache_sizes, passage_lengths
from kvfoundry.cli.analyze.traced import attention, coverage, drift, sparsity

analyze_app = typer.Typer(help="Measure a model.", no_args_is_help=True)


@analyze_app.callback()
def _group() -> None:
    pass


for _command in (heads, attention, coverage, sparsity, drift):
    analyze_app.command()(_command)
analyze_app.command("passages")(passage_lengths)
analyze_app.command("cache-size")(cache_sizes)
analyze_app.command("cache-bench")(cache_benchmark)
