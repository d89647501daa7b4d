"""The chunk store behind vLLM: a connector on its public interface, and all of it that needs no vLLM.

vLLM loads `connector.KVFoundryConnector` itself, by name and module path; nothing here imports vLLM but that file, the
metrics and what reads the layout of its blocks.
"""

CONNECTOR = "KVFoundryConnector"
MODULE_PATH = "kvfoundry.integrations.vllm.connector"
