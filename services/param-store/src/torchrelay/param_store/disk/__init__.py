"""disk tier: cached packs, its writer, RemoteStore decorator; may import remote, durable_files"""
