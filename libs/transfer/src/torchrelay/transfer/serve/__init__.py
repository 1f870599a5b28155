"""The holder's side: ``HolderServer``, with one ``Downstream`` per follower."""
