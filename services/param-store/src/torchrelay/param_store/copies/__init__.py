"""copies of packs in the arena: download from peers/remote, pins, recovery; may import remote and transfer; not disk"""
