"""How kept rows are written down: each codec is a pair of pure functions on tensors, apart from who stores the result.

`Codec` writes one tensor (keys or values), `KVCodec` names the two of a method. `layouts.coded.CodedRows` stores.
"""

from kvfoundry.codecs.base import Codec, Encoded, KVCodec, Parts, Site
from kvfoundry.codecs.plain import Plain

__all__ = ["Codec", "Encoded", "KVCodec", "Parts", "Plain", "Site"]
