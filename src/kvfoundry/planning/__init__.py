"""What fits before anything is loaded: bytes of any method on any model, and what a device has room for.

`plan` answers for a model by its name; `meter` predicts what a cache will hold; `geometry` reads off a model's own code
what a layer stores for a token; `memory` knows how large devices are.
"""

from kvfoundry.planning.geometry import LayerGeometry, geometry
from kvfoundry.planning.memory import Memory, memory_at_hand
from kvfoundry.planning.meter import Meter, Size
from kvfoundry.planning.plan import MethodPlan, Plan, plan

__all__ = ["LayerGeometry", "Memory", "Meter", "MethodPlan", "Plan", "Size", "geometry", "memory_at_hand", "plan"]
