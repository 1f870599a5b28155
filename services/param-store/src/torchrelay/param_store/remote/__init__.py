"""the remote store: interface + registry, folder and object backends, keys and published versions; may import packer
(file names), durable_files
"""
