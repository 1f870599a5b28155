"""Uploads: declared files, their staging on disk, and the packer process that turns them into packs."""
