"""Who computes next and who owns which pages: groups, scheduler, fair queue, preemption, reservation, pages, prefix
cache, deadlines. NO torch, triton, time, asyncio, random, grpc; may import core, common, numpy.
"""
