"""uploads under way: declared files, staging, file digests, the packer process; may import packer, durable_files"""
